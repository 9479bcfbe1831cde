"""The log under failures: every call that can fail, every prefix that a power cut leaves."""

from __future__ import annotations

import contextlib
import errno
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from byte_logs import LAYOUT, RUN, new_log, payload, record
from crash.recording import Died, Recorder, Tree, lay_out, power_cuts
from everystep.errors import Damaged, StoreError
from everystep.store.local import LocalBackend
from everystep.store.log import Log
from everystep.store.segments import read, scan
from faults import NAMES, Faults

SEED = 20260612


class Durable(NamedTuple):
    """Which deltas must be there, and which may."""

    must: frozenset[int]
    may: frozenset[int]


def batches(log: Log) -> Iterator[Durable]:
    """Two segments, the first of them sealed; yields before each append what it may add."""
    done: frozenset[int] = frozenset()
    for base, steps in [(0, [[1], [2, 3], [4, 5]]), (5, [[6, 7], [8]])]:
        log.begin(base, LAYOUT)
        for batch in steps:
            yield Durable(done, done | set(batch))
            log.append([record(step) for step in batch])
            done |= set(batch)
            yield Durable(done, done)
        if base == 0:
            log.seal()


def read_all(root: Path) -> dict[int, bytes]:
    """Every delta that is proved, as recovery would take it: of each segment those before the first
    that is damaged."""
    backend = LocalBackend(root)
    found: dict[int, bytes] = {}
    for entry in backend.list("logs"):
        scanned = scan(backend, entry.name, RUN)
        with contextlib.suppress(Damaged):
            for place in scanned.records:
                found[place.step] = bytes(read(backend, entry.name, place))
    return found


def complaints(root: Path, expected: Durable) -> list[str]:
    found = read_all(root)
    wrong = [f"step {n} is lost" for n in expected.must - found.keys()]
    wrong += [f"step {n} was never appended" for n in found.keys() - expected.may]
    wrong += [f"step {n} holds other bytes" for n, data in found.items() if data != payload(n)]
    numbers = sorted(found)
    if numbers != list(range(1, len(numbers) + 1)):
        wrong.append(f"there is a hole: {numbers}")
    return wrong


def record_run(root: Path, recorder: Recorder) -> None:
    log = new_log(LocalBackend(root, recorder))
    for state in batches(log):
        recorder.note(state)


def try_all(recorder: Recorder, where: Path) -> tuple[int, list[str]]:
    known: set[int] = set()
    wrong: list[str] = []
    for cut in power_cuts(recorder.log, 1, random.Random(SEED)):
        expected = cut.notes[-1] if cut.notes else Durable(frozenset(), frozenset())
        assert isinstance(expected, Durable)
        state = hash((frozenset(cut.tree.items()), expected))
        if state not in known:
            known.add(state)
            lay_out(cut.tree, where)
            wrong += [f"after call {cut.after}: {text}" for text in complaints(where, expected)]
    return len(known), wrong


def test_a_power_cut_takes_only_what_was_not_yet_durable(tmp_path: Path) -> None:
    root = tmp_path / "run"
    root.mkdir()
    recorder = Recorder(root)
    record_run(root, recorder)
    assert sum(call.name == "sync" for call in recorder.log) == 6, "one for each append"
    assert sum(call.name == "write" for call in recorder.log) == 6
    states, wrong = try_all(recorder, tmp_path / "after")
    assert wrong == []
    assert states > 40


class NoFileSync(Recorder):
    def sync(self, fd: int) -> None:
        pass


class NoDirectorySync(Recorder):
    def sync_directory(self, path: Path) -> None:
        pass


@pytest.mark.parametrize("broken", [NoFileSync, NoDirectorySync])
def test_the_enumerator_finds_broken_system_calls(tmp_path: Path, broken: type[Recorder]) -> None:
    root = tmp_path / "run"
    root.mkdir()
    recorder = broken(root)
    record_run(root, recorder)
    assert any("is lost" in text for text in try_all(recorder, tmp_path / "after")[1])


def test_the_process_dies_at_any_call_and_another_goes_on(tmp_path: Path) -> None:
    """As an agent that is killed: what was durable stays, and the next one takes another number."""
    calls, died = 0, 0
    while died == calls:
        root = tmp_path / str(calls)
        root.mkdir()
        recorder = Recorder(root)
        recorder.dies_after = calls
        states = [Durable(frozenset(), frozenset())]
        try:
            states.extend(batches(new_log(LocalBackend(root, recorder))))
        except Died:
            died += 1
        calls += 1
        assert complaints(root, states[-1]) == []
        have = max(read_all(root), default=0)
        after = new_log(LocalBackend(root))
        after.begin(have, LAYOUT)
        after.append([record(have + 1), record(have + 2)])
        assert sorted(read_all(root)) == list(range(1, have + 3))
    assert died > 15


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("name", NAMES)
def test_any_call_fails_and_the_records_are_given_again(
    tmp_path: Path, name: str, number: int
) -> None:
    """Each call of each name, once: no durable record is lost, and after a second try all are
    there."""
    fired = 0
    for nth in range(1, 20):
        root = tmp_path / f"{nth}"
        root.mkdir()
        faults = Faults()
        log = new_log(LocalBackend(root, faults))
        faults.at(name, nth, number)
        failed = append_with_retries(log, root)
        assert complaints(root, Durable(frozenset(range(1, 9)), frozenset(range(1, 9)))) == []
        assert failed == faults.fired
        if not faults.fired:
            break
        fired += 1
    unused = ("reopen", "write_at", "truncate", "rename", "unlink", "remove_directory")
    assert (fired == 0) == (name in unused)


def append_with_retries(log: Log, root: Path) -> int:
    failed = 0
    for base, steps in [(0, [[1], [2, 3], [4, 5]]), (5, [[6, 7], [8]])]:
        log.begin(base, LAYOUT)
        for batch in steps:
            records = [record(step) for step in batch]
            try:
                log.append(records)
            except StoreError:
                failed += 1
                before = frozenset(range(1, batch[0]))
                assert complaints(root, Durable(before, before | set(batch))) == []
                log.append(records)
        try:
            log.seal()
        except StoreError:
            failed += 1
    return failed


def test_a_disk_that_fills_up(tmp_path: Path) -> None:
    """It takes what still fits; what is there stays, and no file is left for each try."""
    whole = 0
    for room in range(0, 1500, 37):
        root = tmp_path / f"{room}"
        root.mkdir()
        faults = Faults()
        log = new_log(LocalBackend(root, faults))
        log.begin(0, LAYOUT)
        faults.full_after(room)
        done = 0
        for step in [*range(1, 9), 9, 9, 9]:
            with contextlib.suppress(StoreError):
                log.append([record(step)])
                assert done == step - 1 or step == 9
                done = step
            if done < step:
                break
        if done == 9:
            whole += 1
            continue
        for _ in range(3):
            with pytest.raises(StoreError):
                log.append([record(done + 1)])
        assert sorted(read_all(root)) == list(range(1, done + 1))
        assert len([p for p in root.rglob("*") if p.is_file()]) == min(done, 1)
        faults.watch()
        log.append([record(done + 1)])
        assert sorted(read_all(root)) == list(range(1, done + 2))
    assert whole < 20


def test_the_model_of_a_cut_leaves_torn_tails(tmp_path: Path) -> None:
    """Of the model itself: an append that was not fsynced may be cut, zero or noise."""
    root = tmp_path / "run"
    root.mkdir()
    recorder = Recorder(root)
    log = new_log(LocalBackend(root, recorder))
    log.begin(0, LAYOUT)
    log.append([record(1, nbytes=300)])
    log.append([record(2, nbytes=900)])
    at = max(n for n, call in enumerate(recorder.log, 1) if call.name == "write")
    trees = [cut.tree for cut in power_cuts(recorder.log[:at], at, random.Random(SEED))]
    assert len(trees) > 3
    torn = [why for tree in trees if (why := torn_by(tree, tmp_path / "after"))]
    assert any("ends inside" in why for why in torn) and any("zeros" in why for why in torn)


def torn_by(tree: Tree, where: Path) -> str:
    lay_out(tree, where)
    backend = LocalBackend(where)
    (entry,) = backend.list("logs")
    return str(scan(backend, entry.name, RUN).torn or "")
