"""Logs of a real training that were cut, edited or flipped: what is restored is a step that can be
proved, and training goes on from it as if nothing had happened."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from agent.log_scenes import Pair
from agent.scenes import run_at
from crash.recording import Recorder, lay_out, power_cuts
from crash.test_deltas import plan
from crash.trainer import Job
from everystep import Deltas, Retention
from everystep.agent import protocol as p
from everystep.errors import EverystepError
from everystep.store import logformat as lf
from everystep.store.run import Run
from everystep.store.segments import Found, Scanned
from everystep.store.verify import verify_run
from everystep.types import StepRef
from trips import BLOCKING

KEEP_ALL = Retention(keep_last=None)
UPTO, END = 7, 9


class Trained(NamedTuple):
    path: Path
    digests: list[str]
    """Of every step of a training without this library."""
    scanned: Scanned
    """Of its one segment, which is sealed: step 1 has a full checkpoint, 2 to 7 are deltas."""

    @property
    def segment(self) -> str:
        return self.scanned.segment.name

    def record(self, step: int) -> Found:
        return next(found for found in self.scanned.records if found.step == step)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    path = tmp_path_factory.mktemp("trained") / "run"
    job = Job()
    digests = [job.digest()]
    for _ in range(END):
        job.step(1)
        digests.append(job.digest())
    job = Job()
    strategy = Deltas(full_every=1000, batch=3, check=False)
    with job.checkpointer(str(path), strategy=strategy, retention=KEEP_ALL) as ck:
        ck.restore()
        for _ in range(UPTO):
            job.step(1)
            ck.step()
    run = Run.open(path)
    (scanned,) = run.segments(run.listing())
    assert scanned.sealed
    assert [found.step for found in scanned.records] == [2, 3, 4, 5, 6, 7]
    return Trained(path, digests, scanned)


@pytest.fixture
def copy(trained: Trained, tmp_path: Path) -> Iterator[Callable[[bytes], Path]]:
    """The run with other bytes in its log."""
    path = tmp_path / "copy"

    def made(data: bytes) -> Path:
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(trained.path, path)
        (path / trained.segment).write_bytes(data)
        return path

    yield made


def restored(trained: Trained, path: Path, step: int | None = None) -> int:
    """The step that restore takes, which is as it was; training on gives the same end."""
    job = Job()
    with job.checkpointer(str(path), strategy=BLOCKING, retention=KEEP_ALL) as ck:
        done = ck.restore(None if step is None else StepRef("main", step), required=True)
        assert job.digest() == trained.digests[done]
        for _ in range(done, END):
            job.step(1)
    assert job.digest() == trained.digests[END]
    return done


def refused(trained: Trained, path: Path, step: int) -> str:
    """Why a step cannot be had; nothing else is given in its place."""
    job = Job()
    with job.checkpointer(str(path), strategy=BLOCKING, retention=KEEP_ALL) as ck:
        before = job.digest()
        with pytest.raises(EverystepError) as caught:
            ck.restore(StepRef("main", step))
        assert job.digest() == before
    return str(caught.value)


def test_a_torn_tail_costs_the_steps_that_are_torn(
    trained: Trained, copy: Callable[[bytes], Path]
) -> None:
    """At every boundary of records, and some bytes before and behind it."""
    data = (trained.path / trained.segment).read_bytes()
    edges = {found.offset: found.step - 1 for found in trained.scanned.records}
    end = trained.record(UPTO).payload_offset + lf.padded(trained.record(UPTO).nbytes)
    edges[end] = UPTO
    for edge, step in edges.items():
        for cut in (-9, -1, 0, 1, lf.HEAD_BYTES - 1, lf.HEAD_BYTES, lf.HEAD_BYTES + 8):
            path = copy(data[: edge + cut])
            expected = max(1, step if cut >= 0 else step - 1)
            assert plan(path) == list(range(1, expected + 1)), (step, cut)
            if cut in (-1, lf.HEAD_BYTES):
                assert restored(trained, path) == expected, (step, cut)
    for nbytes in (0, 1, 50):
        assert plan(copy(data[:nbytes])) == [1]


HEAD = {
    "magic": 0, "version": 8, "kind": 10, "rank": 12, "step": 16, "session": 24, "zero": 28,
    "length": 32, "hash of the payload": 40, "record before": 56, "hash of the head": 72,
}  # fmt: skip


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]


@pytest.mark.parametrize("sealed", [True, False])
def test_a_flipped_byte_costs_only_what_it_must(
    trained: Trained, copy: Callable[[bytes], Path], sealed: bool
) -> None:
    """Of a sealed segment the heads are there twice; of a crashed one each counts."""
    assert HEAD["hash of the head"] + 16 == lf.HEAD_BYTES
    data = (trained.path / trained.segment).read_bytes()
    end = trained.record(UPTO).payload_offset + lf.padded(trained.record(UPTO).nbytes)
    data = data if sealed else data[:end]
    for step in (2, 5):
        found = trained.record(step)
        for what, at in HEAD.items():
            path = copy(flipped(data, found.offset + at))
            expected = UPTO if sealed else step - 1
            assert plan(path)[-1] == expected, (what, step)
            if what in ("length", "record before"):
                assert restored(trained, path) == expected, (what, step)
            run = Run.open(path)
            findings = [f for f in verify_run(run, run.listing()) if f.path == trained.segment]
            assert findings != [], (what, step)
            assert all(f.level == "note" for f in findings) or not sealed
        for at in (0, found.nbytes // 2, lf.padded(found.nbytes) - 1):
            path = copy(flipped(data, found.payload_offset + at))
            assert restored(trained, path) == step - 1, (at, step)
    for at in (0, lf.HEAD_BYTES, lf.HEAD_BYTES + 20, trained.record(2).offset - 1):
        assert plan(copy(flipped(data, at))) == [1], "whose segment it is"
    if sealed:
        for at in range(end, len(data), 37):
            assert plan(copy(flipped(data, at)))[-1] == UPTO, "the index"


def test_a_delta_missing_in_the_middle_is_never_bridged(
    trained: Trained, copy: Callable[[bytes], Path]
) -> None:
    data = (trained.path / trained.segment).read_bytes()
    gone, after = trained.record(4), trained.record(5)
    path = copy(data[: gone.offset] + data[after.offset :])
    assert plan(path) == [1, 2, 3]
    run = Run.open(path)
    (finding,) = [f for f in verify_run(run, run.listing()) if f.level == "damage"]
    assert (finding.path, finding.at) == (trained.segment, gone.offset)
    assert "a record does not follow the one before it" in finding.what
    assert finding.step == StepRef("main", 4)
    assert "main:5" in refused(trained, path, 5)
    assert restored(trained, path, 3) == 3
    assert restored(trained, path) == 3


def test_a_delta_in_the_place_of_another_is_not_taken(
    trained: Trained, copy: Callable[[bytes], Path]
) -> None:
    """Two records change their places, and one is there twice."""
    data = (trained.path / trained.segment).read_bytes()
    a, b, c = (trained.record(step).offset for step in (4, 5, 6))
    assert restored(trained, copy(data[:a] + data[b:c] + data[a:b] + data[c:])) == 3
    assert restored(trained, copy(data[:b] + data[a:b] + data[b:])) == 4


@pytest.mark.usefixtures("patience")
def test_a_later_full_checkpoint_begins_anew(trained: Trained, tmp_path: Path) -> None:
    """What is lost before it is lost, and no more; the steps between are not offered."""
    path, job = tmp_path / "run", Job()
    strategy = Deltas(full_every=4, batch=2, check=False)
    with job.checkpointer(str(path), strategy=strategy, retention=KEEP_ALL) as ck:
        ck.restore()
        for _ in range(UPTO):
            job.step(1)
            ck.step()
    assert plan(path) == [1, 2, 3, 4, 5, 6, 7]
    first = min(path.rglob("*.log"))
    run = Run.open(path)
    scanned = next(s for s in run.segments(run.listing()) if s.segment.name.endswith(first.name))
    at = next(f for f in scanned.records if f.step == 2).payload_offset
    first.write_bytes(flipped(first.read_bytes(), at))
    assert restored(trained, path) == 7
    assert restored(trained, path, 5) == 5
    for step in (2, 3):
        assert str(step) in refused(trained, path, step)
    assert restored(trained, path, 1) == 1


def test_a_power_cut_takes_only_the_batch_that_was_not_told(tmp_path: Path) -> None:
    """Every state that a cut may leave of what an agent's logger did, in batches of three."""

    pair = Pair(run_at(tmp_path / "run"))
    recorder = Recorder(tmp_path / "run")
    pair.kill(recorder)
    recorder.note(1)
    tell = pair.logger._tell

    def noted(message: object) -> None:
        if isinstance(message, p.Logged):
            recorder.note(message.step)
        tell(message)  # type: ignore[arg-type]

    pair.logger._tell = noted
    pair.open(batch=3)
    for step in range(2, 12):
        pair.log(step)
        if step % 3 == 1:
            pair.until_logged(step)
        if step == 7:
            pair.tail.open_log(7, b"another layout")
    pair.close()
    assert pair.offered() == list(range(1, 12))
    before = {
        str(path.relative_to(pair.path)): path.read_bytes() if path.is_file() else None
        for path in sorted(pair.path.rglob("*"))
        if "logs" not in path.parts
    }
    states, seen = 0, set()
    for cut in power_cuts(recorder.log, 1, random.Random(20261130)):
        told = cut.notes[-1] if cut.notes else 1
        assert isinstance(told, int)
        key = hash((frozenset(cut.tree.items()), told))
        if key in seen:
            continue
        seen.add(key)
        states += 1
        lay_out({**before, **cut.tree}, tmp_path / "after")
        found = plan(tmp_path / "after")
        assert found == list(range(1, found[-1] + 1))
        assert told <= found[-1] <= told + 3, cut.after
    assert states > 30
