"""Compaction: what the agent folds from the log, when it writes the state, and what it does where
it cannot go on. Training waits for none of it."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.replica_scenes import Agents, ByteMirror, Mirrored, agents_in_threads, byte_mirrors
from agent.scenes import DEADLINE_S, Held, assert_stored, run_at, state, stored_steps
from everystep.agent import compaction
from everystep.agent import protocol as p
from everystep.agent.compaction import Compaction
from everystep.store.durable import SystemCalls
from everystep.store.run import SET_ASIDE
from faults import Faults
from waiting import until


class Scene:
    """A run, agents in threads, and trainers that log."""

    def __init__(self, path: Path, agents: Agents) -> None:
        self.path, self.agents = path, agents
        self.run = run_at(path)
        self._trainers: list[Mirrored] = []

    def trainer(self, every: int = 1000, **changes: Any) -> Mirrored:
        made = Mirrored(self.path, self.run, **{"logs": True, "compacts": True} | changes)
        made.log.persist_every(every)
        self._trainers.append(made)
        return made

    def training(self, every: int = 1000) -> Mirrored:
        """One whose first step has been staged, and is the agent's copy."""
        trainer = self.trainer(every)
        trainer.stage(1)
        trainer.open(1)
        trainer.until_told(p.Mirrored, 1)
        return trainer

    @property
    def compaction(self) -> Compaction:
        records = self.agents.servers[-1]._records
        assert records is not None
        assert records.compaction is not None
        return records.compaction

    def segments(self) -> list[list[int]]:
        """The steps in each segment of the log."""
        found = self.run.segments(self.run.listing())
        ordered = sorted(found, key=lambda scanned: scanned.segment.number)
        return [[one.step for one in scanned.records] for scanned in ordered]

    def close(self) -> None:
        for trainer in self._trainers:
            trainer.agent.close()


def until_durable(trainer: Mirrored) -> None:
    """All that was handed over; settling would wait for the step that is being folded."""
    until(lambda: not trainer.log.unsaved(), DEADLINE_S, "the log to be durable")


Begin = Callable[..., Scene]


@pytest.fixture
def mirror() -> Iterator[type[ByteMirror]]:
    with byte_mirrors() as mirror:
        yield mirror


@pytest.fixture
def begin(run_dir: Path, mirror: type[ByteMirror]) -> Iterator[Begin]:
    with contextlib.ExitStack() as stack:

        def begin(calls: SystemCalls | None = None) -> Scene:
            scene = Scene(run_dir, stack.enter_context(agents_in_threads(calls)))
            stack.callback(scene.close)
            stack.callback(mirror.gate.set)
            return scene

        yield begin


# ------------------------------------------------------------ in order


def test_a_full_and_a_segment_end_at_every_so_many_steps(
    begin: Begin, mirror: type[ByteMirror]
) -> None:
    scene = begin()
    trainer = scene.training(every=4)
    trainer.log.set_batch(3)
    trainer.record(*range(2, 11))
    trainer.until_told(p.Stored, 8)
    assert mirror.folded[:7] == list(range(2, 9))
    assert stored_steps(scene.run) == [1, 4, 8]
    for step in (4, 8):
        assert_stored(scene.run, step)
    assert trainer.agent.settle() == []
    assert scene.segments() == [[2, 3, 4], [5, 6, 7, 8], [9, 10]]
    logged = [message.step for message in trainer.heard if isinstance(message, p.Logged)]
    assert {4, 8, 10} <= set(logged), "a batch ends with a segment"


def test_training_waits_for_nothing_while_a_step_is_folded(
    begin: Begin, mirror: type[ByteMirror]
) -> None:
    """Far more is logged than there is memory for: what is durable is read back from the log."""
    scene = begin()
    trainer = scene.training()
    mirror.gate.clear()
    trainer.record(*range(2, 60), nbytes=1 << 20)
    until_durable(trainer)
    assert sum(len(ring.arena) for ring in trainer.log._rings) <= 16 << 20
    assert mirror.folded == []
    mirror.gate.set()
    trainer.until_folded(59)
    assert mirror.folded == list(range(2, 60))


def test_what_is_not_durable_is_not_folded(begin: Begin, mirror: type[ByteMirror]) -> None:
    scene = begin()
    trainer = scene.training()
    trainer.log.set_batch(4)
    trainer.record(2, 3, 4)
    assert mirror.folded == []
    assert not scene.compaction._waiting
    trainer.record(5)
    trainer.until_folded(5)


def test_several_layouts(begin: Begin, mirror: type[ByteMirror]) -> None:
    scene = begin()
    trainer = scene.training(every=3)
    trainer.record(2)
    trainer.open(2, b"B")
    trainer.record(3, 4)
    trainer.open(4, b"C")
    trainer.record(5, 6, 7)
    trainer.until_folded(7)
    assert trainer.agent.settle() == []
    assert stored_steps(scene.run) == [1, 3, 6]
    assert scene.segments() == [[2], [3], [4], [5, 6], [7]]


# ------------------------------------------------------------ steps that come whole


def test_a_step_that_comes_whole_is_begun_from(begin: Begin, mirror: type[ByteMirror]) -> None:
    """At once: what was folded before is in the log, and need not be written."""
    scene = begin()
    trainer = scene.training()
    trainer.record(2, 3)
    trainer.until_folded(3)
    trainer.log.rebase(4)
    trainer.stage(4)
    trainer.open(4)
    trainer.record(5)
    trainer.until_folded(5)
    assert stored_steps(scene.run) == [1, 4]
    assert mirror.folded == [2, 3, 5]


def test_the_log_goes_on_while_a_step_comes_whole(begin: Begin, mirror: type[ByteMirror]) -> None:
    """Steps up to that one are logged, and not folded."""
    held = Held()
    scene = begin(held)
    trainer = scene.training()
    trainer.record(2)
    trainer.until_folded(2)
    held.hold()
    trainer.log.rebase(4)
    trainer.stage(4)
    trainer.record(3, 4)
    trainer.open(4)
    trainer.record(5, 6)
    assert held.waits.wait(DEADLINE_S)
    held.go_on()
    trainer.until_folded(6)
    assert mirror.folded == [2, 5, 6]
    assert scene.segments() == [[2, 3, 4], [5, 6]]


def test_a_step_on_its_way_when_a_later_one_comes_whole_is_not_begun_from(
    begin: Begin, mirror: type[ByteMirror]
) -> None:
    scene = begin()
    trainer = scene.training()
    trainer.log.rebase(2)
    room = trainer.acquire()
    trainer.fill(room, state(2))
    trainer.log.rebase(3)
    trainer.seal(room, 2)
    trainer.stage(3)
    trainer.open(3)
    trainer.record(4)
    trainer.until_folded(4)
    assert stored_steps(scene.run) == [1, 2, 3]
    assert mirror.folded == [4]


def test_a_larger_layout_while_the_slot_is_lent(begin: Begin, mirror: type[ByteMirror]) -> None:
    scene = begin()
    trainer = scene.training()
    trainer.record(2)
    trainer.until_folded(2)
    trainer.log.rebase(3)
    mirror.nbytes = 3_000_000
    larger = state(3, mirror.nbytes)
    trainer.describe(larger)
    room = trainer.acquire()
    trainer.fill(room, larger)
    trainer.seal(room, 3)
    trainer.until_told(p.Mirrored, 3)
    assert_stored(scene.run, 3, larger)


def test_a_slot_that_a_dead_agent_has_left_is_not_begun_from(
    begin: Begin, mirror: type[ByteMirror]
) -> None:
    """That one may have folded in it. It is written, as the trainer has no other copy of it."""
    scene = begin()
    trainer = scene.trainer(again=True)
    trainer.stage(1)
    trainer.open(1)
    trainer.record(2, 3)
    trainer.until_told(p.Stored, 1)
    trainer.stage(4)  # the slot is given back, but nobody has said that it is a new beginning
    trainer.until_told(p.Stored, 4)
    trainer.log.rebase(6)
    trainer.stage(6)
    trainer.record(4, 5, 6)
    trainer.open(6)
    trainer.record(7)
    trainer.until_folded(7)
    assert stored_steps(scene.run) == [1, 4, 6]
    assert mirror.folded == [7]
    assert [m.step for m in trainer.heard if isinstance(m, p.Mirrored)] == [6]


# ------------------------------------------------------------ the end


def test_settling_does_not_wait_for_folding(begin: Begin, mirror: type[ByteMirror]) -> None:
    """What is folded is durable already."""
    scene = begin()
    trainer = scene.training(every=3)
    mirror.gate.clear()
    trainer.record(2, 3, 4, 5, 6)
    assert mirror.begins.wait(DEADLINE_S)
    assert trainer.agent.settle() == []
    assert mirror.folded == []
    assert stored_steps(scene.run) == [1]


def test_nothing_is_written_after_a_session_has_said_that_it_ends(
    begin: Begin, mirror: type[ByteMirror]
) -> None:
    """The next one cleans up what this one has left."""
    scene = begin()
    trainer = scene.training(every=3)
    mirror.gate.clear()
    trainer.record(2, 3, 4, 5, 6)
    assert mirror.begins.wait(DEADLINE_S)
    trainer.log.persist_every(0)
    assert trainer.agent.settle() == []
    mirror.gate.set()
    trainer.until_folded(6)
    assert trainer.agent.settle() == []
    assert stored_steps(scene.run) == [1]


def test_a_trainer_that_dies_ends_it(begin: Begin, mirror: type[ByteMirror]) -> None:
    """What it has logged becomes durable; no new full comes while another trainer cleans up."""
    scene = begin()
    trainer = scene.trainer(every=2, linger_s=60.0)
    trainer.stage(1)
    trainer.open(1)
    trainer.until_told(p.Mirrored, 1)
    mirror.gate.clear()
    trainer.log.set_batch(100)
    trainer.record(2, 3, 4)
    scene._trainers.remove(trainer)
    trainer.die()
    mirror.gate.set()
    again = scene.trainer()
    assert len(scene.agents.servers) == 1
    again.describe(state(1))
    assert stored_steps(scene.run) in ([1], [1, 2])
    assert [step for steps in scene.segments() for step in steps] == [2, 3, 4]


# ------------------------------------------------------------ what cannot be done


def test_a_full_that_is_refused_is_made_up_for_by_the_next(
    begin: Begin, mirror: type[ByteMirror]
) -> None:
    faults = Faults()
    scene = begin(faults)
    trainer = scene.training(every=2)
    faults.at("rename", 1, errno.ENOSPC, 1, within=scene.path / "steps")
    trainer.record(2)
    trainer.until_told(p.NotStored, 2)
    trainer.record(3, 4)
    trainer.until_told(p.Stored, 4)
    assert faults.fired == 1
    assert mirror.folded == [2, 3, 4]
    assert_stored(scene.run, 4)


def test_a_beginning_that_is_refused_is_not_begun_from_before_it_is_stored(begin: Begin) -> None:
    """It would be changed, and the log has nothing to begin from without it."""
    faults = Faults()
    scene = begin(faults)
    trainer = scene.trainer()
    faults.at("rename", 1, errno.ENOSPC, 1000, within=scene.path / "steps")
    trainer.stage(1)
    trainer.open(1)
    trainer.record(2)
    trainer.until_told(p.NotStored, 1)
    until(lambda: len(scene.compaction._waiting) == 1, DEADLINE_S, "the record")
    assert scene.compaction._held is None
    faults.watch()
    trainer.until_folded(2)
    assert_stored(scene.run, 1)


def test_a_step_that_gives_something_else_is_told_and_kept(begin: Begin) -> None:
    scene = begin()
    trainer = scene.training()
    trainer.record(2)
    trainer.record(3, what="wrong")
    trainer.record(4)
    told = trainer.until_told(p.NotFolded, 3)
    assert told.differs
    assert "model.weight is not what it was" in told.reason
    kept = sorted(path.name for path in (scene.path / SET_ASIDE / "main/000000000003").iterdir())
    assert kept == ["delta-r00000.safetensors", "delta-r00000.txt"]
    assert trainer.acquire() is not None, "the slot is the trainer's again"


def test_an_optimizer_that_is_not_to_be_had(begin: Begin, mirror: type[ByteMirror]) -> None:
    """Nothing is wrong with the log then."""
    scene = begin()
    mirror.unfit = "no such class"
    trainer = scene.trainer()
    trainer.stage(1)
    told = trainer.until_told(p.NotFolded, 1)
    assert (told.differs, told.reason) == (False, "no such class")


def test_a_record_that_cannot_be_read_back(begin: Begin, mirror: type[ByteMirror]) -> None:
    scene = begin()
    trainer = scene.training()
    mirror.gate.clear()
    trainer.record(2)
    assert mirror.begins.wait(DEADLINE_S)
    trainer.record(3, nbytes=1000)
    until_durable(trainer)
    (segment,) = (scene.path / "logs/main").iterdir()
    data = bytearray(segment.read_bytes())
    data[-500] ^= 1
    segment.write_bytes(data)
    mirror.gate.set()
    told = trainer.until_told(p.NotFolded, 3)
    assert not told.differs
    assert "delta of step 3: hash of bytes" in told.reason


def test_an_agent_that_cannot_keep_up(
    begin: Begin, mirror: type[ByteMirror], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "LEAST_BEHIND", 10)
    scene = begin()
    trainer = scene.training(every=4)
    until(lambda: scene.compaction._allowed == 10, DEADLINE_S, "the copy to be there")
    mirror.gate.clear()
    trainer.record(2)
    assert mirror.begins.wait(DEADLINE_S)
    trainer.record(*range(3, 30))
    until_durable(trainer)
    mirror.gate.set()
    told = trainer.until_told(p.NotFolded, 3)
    assert (told.differs, told.reason) == (False, "the agent is 27 steps behind")
    trainer.record(30)
    assert trainer.agent.settle() == []
    assert scene.segments()[-1][-1] == 30
    assert not scene.compaction._waiting
