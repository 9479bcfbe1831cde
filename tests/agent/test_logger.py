"""The thread that appends records: in batches, again where the store refused, after another agent's
death, and at the end."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.log_scenes import Pair, Quick
from agent.scenes import DEADLINE_S, begin_of, run_at
from byte_logs import LAYOUT
from byte_runs import NoSync
from everystep.agent import logger, tail
from everystep.agent import protocol as p
from everystep.agent.logger import Logger
from everystep.agent.records import Records
from everystep.agent.ring import Ring
from everystep.agent.rings import Rings
from everystep.errors import StoreFailed
from everystep.store.local import LocalBackend
from everystep.store.run import Run
from everystep.store.verify import verify_run
from faults import NAMES
from waiting import until


@pytest.fixture(autouse=True)
def _retries_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logger, "RETRY_S", 0.02)


@pytest.fixture
def quick() -> Quick:
    return Quick()


@pytest.fixture
def pair(run_dir: Path, quick: Quick) -> Iterator[Pair]:
    made = Pair(run_at(run_dir), quick)
    yield made
    quick.go.set()
    made.close()


def settle(pair: Pair) -> list[int]:
    """What an agent does when it is told to; the steps that are in memory only."""
    with pair.guard:
        pair.logger.drain(on=True)
    until(lambda: pair.logger.idle, DEADLINE_S, "the log to be idle")
    with pair.guard:
        unsaved = [ref.step for ref in pair.logger.unsaved()]
        pair.logger.drain(on=False)
    return unsaved


# ---------------------------------------------------------------- batches


def test_so_many_records_make_one_append(pair: Pair, quick: Quick) -> None:
    pair.open(batch=3)
    pair.log(2, 3)
    assert pair.logger.unsaved() != []
    assert not pair.logger.idle
    assert quick.calls == []
    pair.log(4)
    pair.until_logged(4)
    pair.log(5, 6)
    assert pair.appends() == [4]
    assert quick.calls.count("sync") == quick.calls.count("write_parts_at") == 1
    assert settle(pair) == []
    assert pair.appends() == [4, 6]
    assert pair.offered() == [1, 2, 3, 4, 5, 6]


def test_what_came_meanwhile_goes_together(pair: Pair, quick: Quick) -> None:
    quick.go.clear()
    pair.open(batch=1)
    pair.log(2)
    assert quick.waits.wait(DEADLINE_S)
    pair.log(3, 4, 5, 6)
    quick.go.set()
    pair.until_logged(6)
    assert pair.appends() == [2, 6]


def test_not_more_than_so_many_bytes_at_once(
    pair: Pair, quick: Quick, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logger, "_MOST_BYTES", 1000)
    pair.open(batch=100)
    pair.log(*range(2, 7), nbytes=400)
    pair.log(7, nbytes=3000)
    assert settle(pair) == []
    assert pair.appends() == [3, 5, 6, 7]
    assert pair.offered() == list(range(1, 8))


def test_a_flush_does_not_wait_for_the_batch(pair: Pair) -> None:
    pair.open(batch=50)
    pair.log(2, 3)
    with pair.guard:
        pair._send(p.Flush(), None)
    pair.until_logged(3)
    pair.log(4)
    assert pair.appends() == [3]


def test_each_layout_has_its_segment(pair: Pair) -> None:
    pair.open(batch=10)
    pair.log(2, 3)
    pair.tail.open_log(3, b"other layout")
    pair.until_logged(3)  # a batch ends with its layout
    pair.log(4)
    pair.tail.open_log(4, LAYOUT)
    pair.tail.open_log(4, b"third")
    pair.log(5, 6)
    assert settle(pair) == []
    assert pair.segments() == [[2, 3], [4], [5, 6]]
    run = Run.open(pair.path)
    scans = sorted(run.segments(run.listing()), key=lambda s: s.segment.number)
    assert [s.layout for s in scans] == [LAYOUT, b"other layout", b"third"]
    assert [s.sealed for s in scans] == [True, True, False]
    assert [s.segment.base for s in scans] == [1, 3, 4]
    pair.close()
    run = Run.open(pair.path)
    assert all(scanned.sealed for scanned in run.segments(run.listing()))
    assert pair.offered() == list(range(1, 7))


def test_the_end_makes_all_of_it_durable(pair: Pair) -> None:
    pair.open(batch=100)
    pair.log(2, 3, 4)
    pair.close()
    assert pair.appends() == [4]
    assert pair.offered() == [1, 2, 3, 4]
    run = Run.open(pair.path)
    assert [f.what for f in verify_run(run, run.listing()) if f.level == "damage"] == []


def test_a_log_that_nothing_was_put_into_is_no_file(pair: Pair) -> None:
    pair.open()
    pair.close()
    assert pair.segments() == []


# ---------------------------------------------------------------- a store that refuses


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith(("create", "write_p", "sync"))])
def test_a_refused_batch_is_told_and_tried_again(
    pair: Pair, quick: Quick, name: str, number: int
) -> None:
    pair.open(batch=2)
    pair.log(2, 3)
    pair.until_logged(3)
    quick.at(name, 1, number, times=3)
    if name.endswith(("create", "directory")):
        pair.tail.open_log(3, b"another file")
    pair.log(4, 5)
    pair.until_logged(5)
    assert quick.fired == 3
    assert pair.told_of(p.NotLogged) == [4, 4, 4]
    told = next(m for m in pair.told if isinstance(m, p.NotLogged))
    assert told.error[0] == ("StoreFull" if number == errno.ENOSPC else "StoreFailed")
    pair.log(6, 7)
    pair.until_logged(7)
    assert pair.offered() == list(range(1, 8))


def test_what_was_refused_needs_no_whole_batch(pair: Pair, quick: Quick) -> None:
    """A flush or the end of a batch was asked for once, and is not forgotten."""
    quick.at("any", 1, errno.ENOSPC, times=1 << 30)
    pair.open(batch=50)
    pair.log(2, 3)
    assert settle(pair) == [2, 3]
    quick.watch()
    pair.until_logged(3)
    assert settle(pair) == []


def test_settling_tries_again_however_often_it_was_refused(pair: Pair, quick: Quick) -> None:
    quick.at("any", 1, errno.EIO, times=1 << 30)
    pair.open(batch=50)
    pair.log(2)
    for _ in range(3):
        before = len(pair.told_of(p.NotLogged))
        assert settle(pair) == [2]
        assert len(pair.told_of(p.NotLogged)) >= before + 3
    quick.watch()
    assert settle(pair) == []
    assert pair.offered() == [1, 2]


def test_an_agent_whose_trainer_is_gone_goes_on_trying(pair: Pair, quick: Quick) -> None:
    quick.at("any", 1, errno.ENOSPC, times=1 << 30)
    pair.open(batch=50)
    pair.log(2)
    with pair.guard:
        pair.logger.drain(on=True)
    pair.until_refused(6)
    quick.watch()
    pair.until_logged(2)


def test_the_end_gives_up_after_some_tries(pair: Pair, quick: Quick) -> None:
    quick.at("any", 1, errno.EROFS, times=1 << 30)
    pair.open(batch=50)
    pair.log(2, 3)
    pair.close()
    assert pair.told_of(p.NotLogged) == [2, 2, 2]
    assert pair.segments() == []


def test_a_disk_that_fills_up_in_the_middle_of_a_batch(pair: Pair, quick: Quick) -> None:
    pair.open(batch=3)
    pair.log(2, 3, 4)
    pair.until_logged(4)
    quick.full_after(200)
    pair.log(5, 6, 7)
    pair.until_refused(2)
    assert pair.offered() == [1, 2, 3, 4]
    quick.watch()
    pair.until_logged(7)
    assert pair.offered() == list(range(1, 8))


def test_a_seal_that_fails_costs_nothing(pair: Pair, quick: Quick) -> None:
    pair.open()
    pair.log(2)
    pair.until_logged(2)
    quick.at("write_parts_at", 1, errno.EIO)
    pair.tail.open_log(2, b"another")
    pair.log(3)
    pair.until_logged(3)
    quick.at("write_parts_at", 1, errno.EIO)
    pair.close()
    assert quick.fired == 2
    assert any("was not sealed" in m.text for m in pair.told if isinstance(m, p.Notice))
    assert pair.offered() == [1, 2, 3]


# ---------------------------------------------------------------- after another agent


def test_unsaved_records_are_appended_by_the_next_agent(pair: Pair) -> None:
    pair.open(batch=4)
    pair.log(2, 3, 4, 5)
    pair.until_logged(5)
    pair.log(6, 7)
    pair.kill()
    pair.until_logged(7)  # at once, however large a batch is
    pair.log(8, 9, 10, 11)
    pair.until_logged(11)
    assert pair.segments() == [[2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    assert pair.offered() == list(range(1, 12))
    assert [g for g in pair.chains().gaps] == []


def test_what_an_agent_has_appended_and_not_told_is_appended_again(pair: Pair) -> None:
    """It may have died before the fsync; nothing is doubled in what can be had."""
    pair.open(batch=2)
    pair.log(2, 3)
    pair.until_logged(3)
    pair.deaf = True
    pair.log(4, 5)
    pair.until_logged(5)
    assert pair.tail.unsaved() == [4, 5]
    pair.kill()
    until(lambda: pair.tail.unsaved() == [], DEADLINE_S, "the new agent to append")
    pair.log(6, 7)
    pair.until_logged(7)
    assert pair.segments() == [[2, 3, 4, 5], [4, 5, 6, 7]]
    assert pair.offered() == list(range(1, 8))
    run = Run.open(pair.path)
    assert [f.what for f in verify_run(run, run.listing()) if f.level == "damage"] == []
    old, new = sorted(pair.path.rglob("*.log"), key=lambda path: path.name)
    old.write_bytes(old.read_bytes()[: old.stat().st_size - 150])  # as if the fsync had failed
    assert pair.offered() == list(range(1, 8))
    new.unlink()
    assert 6 not in pair.offered()


def test_agents_that_die_again_and_again(pair: Pair, quick: Quick) -> None:
    rng = random.Random(20261130)
    pair.open(batch=3)
    step = 1
    for _ in range(30):
        for _ in range(rng.randrange(5)):
            pair.log(step := step + 1)
        if rng.random() < 0.3:
            pair.tail.open_log(step, b"layout of %d" % step)
        pair.deaf = rng.random() < 0.5
        pair.kill(quick)
    assert settle(pair) == []
    assert pair.offered() == list(range(1, step + 1))
    assert step > 20


def test_a_torn_tail_of_the_agent_before_is_left_behind(pair: Pair) -> None:
    pair.open(batch=1)
    pair.log(2, 3)
    pair.until_logged(3)
    pair.deaf = True
    pair.log(4)
    pair.until_logged(4)
    (path,) = pair.path.rglob("*.log")
    path.write_bytes(path.read_bytes()[:-9])
    assert pair.offered() == [1, 2, 3]
    pair.kill()
    until(lambda: pair.tail.unsaved() == [], DEADLINE_S, "the new agent to append")
    assert pair.offered() == [1, 2, 3, 4]


def test_segments_of_other_ranks_and_sessions_are_not_gone_on_from(run_dir: Path) -> None:
    made = [Pair(run_at(run_dir))]
    made[0].open(batch=1)
    made[0].log(2, 3)
    made[0].until_logged(3)
    run = Run.open(run_dir)
    for facts in ({"session": 2}, {"rank": 1, "world_size": 2}):
        told: list[object] = []
        guard = threading.Condition()
        begin = begin_of(run, **facts)
        backend = LocalBackend(run_dir, NoSync())
        other = Logger(backend, begin, guard, told.append, Rings(), lambda queued: None)
        assert other._before(9, 5) == (5, None)
        other.close()
    with made[0].guard:
        step, digest = made[0].logger._before(9, 1)
    assert step == 3
    assert digest is not None
    assert made[0].logger._before(3, 1)[0] == 2
    assert made[0].logger._before(2, 1) == (1, None)
    made[0].close()


# ---------------------------------------------------------------- what makes no sense


def test_a_record_outside_of_its_memory_is_refused_and_nothing_is_believed(
    run_dir: Path,
) -> None:
    run = run_at(run_dir)
    guard, told = threading.Condition(), list[object]()
    backend = LocalBackend(run_dir, NoSync())
    made = Records(backend, begin_of(run, logs=True), guard, told.append, lambda: None)
    ring = Ring(1, 100, 8192)
    with guard:
        made.take(p.OpenRing(1, ring.facts), os.dup(ring.arena.fd))
        with pytest.raises(StoreFailed, match="of no layout"):
            made.take(p.Record(number=1, step=2, ring=1, offset=0, nbytes=8), None)
        made.take(p.OpenLog(base=1, layout=LAYOUT), None)
        made.take(p.Record(number=1, step=2, ring=1, offset=len(ring.arena) - 7, nbytes=8), None)
    until(lambda: len(told) >= 2, DEADLINE_S, "a refusal")
    assert all(isinstance(m, p.NotLogged) and "outside" in m.error[1] for m in told)
    made.close()
    assert [path for path in run_dir.rglob("*.log")] == []
    ring.close()


def test_descriptors_that_nobody_asked_for_are_closed(pair: Pair) -> None:
    before = len(os.listdir("/proc/self/fd"))
    fd = os.memfd_create("test")
    ring = Ring(1, 100, 8192)
    with pair.guard:
        with pytest.raises(StoreFailed, match="cannot be mapped"):
            pair.records.take(p.OpenRing(5, (1, 1 << 20)), os.dup(fd))
        pair.records.take(p.OpenRing(6, ring.facts), os.dup(ring.arena.fd))
        with pytest.raises(StoreFailed, match="that is none"):
            pair.records.take(p.OpenRing(6, ring.facts), os.dup(ring.arena.fd))
        with pytest.raises(StoreFailed, match="that is none"):
            pair.records.take(p.OpenRing(7, ring.facts), None)
    ring.close()
    os.close(fd)
    assert len(os.listdir("/proc/self/fd")) == before + 1, "the one ring"


def test_memory_that_is_not_used_any_more_is_given_back(
    pair: Pair, quick: Quick, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail, "LEAST_RING_BYTES", 8192)
    quick.go.clear()
    pair.open(batch=1)
    pair.log(2, nbytes=10)
    pair.log(3, 4, 5, nbytes=80_000)
    assert pair.rings == 2
    quick.go.set()
    pair.until_logged(5)
    until(lambda: pair.rings == 1, DEADLINE_S, "the old memory to go")
    assert pair.offered() == [1, 2, 3, 4, 5]


def test_a_thread_that_fails_is_dead_and_says_so(
    pair: Pair, quick: Quick, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the agent ends, and another takes its place."""
    seen: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(args.exc_value))
    monkeypatch.setattr(pair.logger._log, "append", lambda records: 1 / 0)
    pair.open()
    pair.log(2)
    until(lambda: not pair.logger.alive, DEADLINE_S, "the thread to end")
    assert isinstance(seen[0], ZeroDivisionError)
    pair.kill()
    pair.until_logged(2)
    assert pair.offered() == [1, 2]
