"""The replica: what it folds, in which order, when it is written, and what it does where it cannot
go on."""

from __future__ import annotations

import contextlib
import errno
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.log_scenes import Quick
from agent.replica_scenes import (
    Agents,
    ByteMirror,
    Mirrored,
    agents_in_threads,
    byte_mirrors,
    replica_of,
)
from agent.scenes import DEADLINE_S, Held, assert_stored, begin_of, run_at, state, stored_steps
from everystep.agent import protocol as p
from everystep.agent.slots import State
from everystep.engine.meter import Cost
from everystep.errors import CannotRestore
from everystep.pace import Persisting
from everystep.recovery.classes import imported
from everystep.store.durable import SystemCalls
from everystep.store.run import SET_ASIDE, Run
from everystep.types import StepRef
from faults import Faults
from waiting import until


class Scene:
    """A run, agents in threads, and trainers."""

    def __init__(self, path: Path, agents: Agents) -> None:
        self.path, self.agents = path, agents
        self.run = run_at(path)
        self._trainers: list[Mirrored] = []

    def trainer(self, **changes: Any) -> Mirrored:
        self._trainers.append(Mirrored(self.path, self.run, **changes))
        return self._trainers[-1]

    def end(self, trainer: Mirrored) -> None:
        self._trainers.remove(trainer)
        trainer.agent.close()

    def die(self, trainer: Mirrored) -> None:
        self._trainers.remove(trainer)
        trainer.die()
        # the end of a process is seen at once; here there is that of a connection only
        until(lambda: self.agents.servers[-1]._owner is None, DEADLINE_S, "it to be noticed")

    def close(self) -> None:
        for trainer in self._trainers:
            trainer.agent.close()


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


def refusing(scene: Scene, faults: Faults, times: int = 1000) -> None:
    """No record of a step can be written from now on."""
    faults.at("rename", 1, errno.ENOSPC, times, within=scene.path / "steps")


# ------------------------------------------------------------ in order


def test_each_step_is_folded_and_some_are_written(begin: Begin, mirror: type[ByteMirror]) -> None:
    scene = begin()
    trainer = scene.trainer()
    trainer.log.persist_every(3)
    trainer.stage(1)
    trainer.open(1)
    trainer.record(*range(2, 9))
    trainer.until_folded(8)
    assert trainer.agent.settle() == []
    assert mirror.folded == trainer.folds() == list(range(2, 9))
    assert stored_steps(scene.run) == [1, 3, 6, 8]
    for step in (1, 3, 6, 8):
        assert_stored(scene.run, step)
    assert trainer.log.unsaved() == []


def test_records_wait_for_their_base(begin: Begin, mirror: type[ByteMirror]) -> None:
    """It is folded in only when it is durable."""
    held = Held()
    scene = begin(held)
    trainer = scene.trainer()
    held.hold()
    trainer.stage(1)
    assert held.waits.wait(DEADLINE_S)
    trainer.open(1)
    trainer.record(2, 3, 4)
    replica = replica_of(scene.agents)
    until(lambda: len(replica._waiting) == 3, DEADLINE_S, "the records")
    assert not replica.idle
    assert replica._held is None
    assert [ref.step for ref in replica.unsaved()] == [2, 3, 4]
    assert mirror.folded == []
    held.go_on()
    trainer.until_folded(4)
    assert_stored(scene.run, 1)


def test_what_is_yet_to_be_logged_is_waited_for_in_a_hurry(begin: Begin) -> None:
    """The state before it is not written as well."""
    store = Quick()
    scene = begin(store)
    trainer = scene.trainer(logs=True)
    trainer.stage(1)
    trainer.open(1)
    trainer.record(2)
    trainer.until_folded(2)
    store.go.clear()
    trainer.record(3)
    assert store.waits.wait(DEADLINE_S)
    settled: list[object] = []
    thread = threading.Thread(target=lambda: settled.append(trainer.agent.settle()))
    thread.start()
    replica = replica_of(scene.agents)
    until(lambda: replica._hurry, DEADLINE_S, "the agent to hurry")
    store.go.set()
    thread.join()
    assert settled == [[]]
    assert stored_steps(scene.run) == [1, 3]


def test_a_gap_gives_the_slot_back_and_begins_anew(begin: Begin) -> None:
    """What was folded before is written first."""
    scene = begin()
    trainer = scene.trainer()
    trainer.stage(1)
    trainer.open(1)
    trainer.record(2, 3)
    trainer.log.rebase(5)
    trainer.stage(5)
    trainer.open(5)
    trainer.record(6)
    assert trainer.agent.settle() == []
    assert stored_steps(scene.run) == [1, 3, 5, 6]
    assert_stored(scene.run, 3)
    assert_stored(scene.run, 6)


def test_a_step_on_its_way_when_a_later_one_comes_whole_is_not_begun_from(begin: Begin) -> None:
    """Its slot is needed for that one."""
    scene = begin()
    trainer = scene.trainer()
    trainer.stage(1)
    trainer.log.rebase(2)
    room = trainer.acquire()
    trainer.fill(room, state(2))
    trainer.log.rebase(3)
    trainer.seal(room, 2)
    trainer.stage(3)
    trainer.open(3)
    trainer.record(4)
    assert trainer.agent.settle() == []
    assert stored_steps(scene.run) == [1, 2, 3, 4]
    assert_stored(scene.run, 4)


def test_a_gap_before_the_first_one_is_begun_from(begin: Begin, mirror: type[ByteMirror]) -> None:
    """The records in between are folded all the same, and that is written, before it goes."""
    held = Held()
    scene = begin(held)
    trainer = scene.trainer()
    held.hold()
    trainer.stage(1)
    assert held.waits.wait(DEADLINE_S)
    trainer.open(1)
    trainer.record(2)
    trainer.log.rebase(3)
    held.go_on()
    trainer.stage(3)
    trainer.open(3)
    trainer.record(4)
    assert trainer.agent.settle() == []
    assert mirror.folded == [2, 4]
    assert trainer.log.unsaved() == []
    assert stored_steps(scene.run) == [1, 2, 3, 4]
    assert_stored(scene.run, 4)


def test_records_of_an_agent_that_is_gone_are_dropped(
    begin: Begin, mirror: type[ByteMirror]
) -> None:
    scene = begin()
    trainer = scene.trainer()
    trainer.agent._send(p.OpenLog(base=4, layout=b"A", stale=True))
    trainer.log._opened = p.OpenLog(base=4, layout=b"A", stale=True)
    trainer.record(5, 6)
    trainer.until_folded(6)
    assert trainer.log.unsaved() == []
    trainer.stage(7)
    trainer.open(7)
    trainer.record(8)
    trainer.until_folded(8)
    assert mirror.folded == [8]


def test_records_that_their_base_covers_are_dropped(begin: Begin, mirror: type[ByteMirror]) -> None:
    scene = begin()
    trainer = scene.trainer()
    trainer.open(1)
    trainer.record(2, 3)
    trainer.stage(3)
    trainer.record(4)
    trainer.until_folded(4)
    assert trainer.folds() == [2, 3, 4]
    assert mirror.folded == [4]


def test_two_layouts_in_a_row(begin: Begin, mirror: type[ByteMirror]) -> None:
    scene = begin()
    trainer = scene.trainer()
    trainer.stage(1)
    mirror.gate.clear()
    trainer.open(1)
    trainer.record(2)
    trainer.open(2, b"B")
    trainer.record(3)
    trainer.open(3, b"C")
    trainer.record(4)
    mirror.gate.set()
    trainer.until_folded(4)
    assert mirror.folded == [2, 3, 4]


def test_rings_are_freed_and_replaced(begin: Begin) -> None:
    """Larger records take another one; nothing but the newest stays, on either side."""
    scene = begin()
    trainer = scene.trainer()
    trainer.stage(1)
    trainer.open(1)
    step = 2
    for nbytes in (10, 3 << 20, 30 << 20, 100):
        for _ in range(12):
            trainer.record(step, nbytes=nbytes)
            step += 1
    trainer.until_folded(step - 1)
    records = scene.agents.servers[0]._records
    assert records is not None
    until(lambda: len(records._rings._arenas) == 1, DEADLINE_S, "the agent to unmap")
    assert len(trainer.log._rings) == 1
    assert sum(records._rings._records.values()) == 0


# ------------------------------------------------------------ the end, and what is said of it


def test_settling_waits_for_what_can_be_folded(begin: Begin, mirror: type[ByteMirror]) -> None:
    scene = begin()
    trainer = scene.trainer()
    trainer.stage(1)
    trainer.until_told(p.Mirrored, 1)
    mirror.gate.clear()
    trainer.open(1)
    trainer.record(2, 3)
    assert mirror.begins.wait(DEADLINE_S)
    replica = replica_of(scene.agents)
    until(lambda: len(replica._waiting) == 2, DEADLINE_S, "the records")
    with replica._guard:
        assert not replica.idle
        assert [ref.step for ref in replica.unsaved()] == [2, 3]
    settled: list[list[StepRef]] = []
    thread = threading.Thread(target=lambda: settled.append(trainer.agent.settle()))
    thread.start()
    until(lambda: replica._hurry, DEADLINE_S, "the agent to hurry")
    assert not settled
    mirror.gate.set()
    thread.join(DEADLINE_S)
    assert settled == [[]]
    assert stored_steps(scene.run) == [1, 3]


def test_a_trainer_that_dies_leaves_its_last_step(begin: Begin, mirror: type[ByteMirror]) -> None:
    """Another one finds it in memory, or written."""
    scene = begin()
    trainer = scene.trainer(linger_s=60.0)
    trainer.stage(1)
    mirror.gate.clear()
    trainer.open(1)
    trainer.record(2, 3, 4)
    scene.die(trainer)
    mirror.gate.set()
    again = scene.trainer()  # a new session waits for what is under way
    assert len(scene.agents.servers) == 1
    again.describe(state(1))
    assert_stored(scene.run, 4)


def test_a_new_session_while_the_last_one_folds(begin: Begin, mirror: type[ByteMirror]) -> None:
    scene = begin()
    trainer = scene.trainer()
    trainer.stage(1)
    trainer.until_told(p.Mirrored, 1)
    mirror.gate.clear()
    trainer.open(1)
    trainer.record(2, 3)
    assert mirror.begins.wait(DEADLINE_S)
    last = replica_of(scene.agents)
    trainer.agent.begin(begin_of(scene.run, replica=True))
    mirror.gate.set()
    trainer._place = None
    trainer.stage(5)
    trainer.until_told(p.Stored, 5)
    assert not last.alive
    assert mirror.folded[:2] == [2, 3]
    assert replica_of(scene.agents) is not last
    assert_stored(scene.run, 5)


def test_how_often_is_told_again_in_a_new_session(begin: Begin) -> None:
    """As often as before."""
    scene = begin()
    trainer = scene.trainer()
    for base in (1, 11):
        trainer.agent.begin(begin_of(scene.run, replica=True))
        trainer.log.persist_every(2)
        trainer._place = None
        trainer.stage(base)
        trainer.open(base)
        trainer.record(base + 1)
        trainer.until_told(p.Stored, base + 1)
        trainer.record(base + 2)
        trainer.until_folded(base + 2)


def test_a_larger_layout_while_the_slot_is_lent(begin: Begin, mirror: type[ByteMirror]) -> None:
    scene = begin()
    trainer = scene.trainer()
    trainer.stage(1)
    trainer.open(1)
    trainer.record(2)
    trainer.until_folded(2)
    trainer.log.rebase(3)
    mirror.nbytes = 3_000_000
    larger = state(3, mirror.nbytes)
    trainer.describe(larger)
    room = trainer.acquire()
    trainer.fill(room, larger)
    trainer.seal(room, 3)
    trainer.until_told(p.Stored, 3)
    assert_stored(scene.run, 2)
    assert_stored(scene.run, 3, larger)


# ------------------------------------------------------------ a store that refuses


def test_a_base_that_is_refused_is_written_in_the_end(begin: Begin) -> None:
    faults = Faults()
    scene = begin(faults)
    trainer = scene.trainer()
    refusing(scene, faults)
    trainer.stage(1)
    trainer.until_told(p.NotStored, 1)
    trainer.until_told(p.Mirrored, 1)
    assert [ref.step for ref in replica_of(scene.agents).unsaved()] == [1]
    faults.watch()
    assert trainer.agent.settle() == []
    assert_stored(scene.run, 1)


def test_a_writing_that_fails_is_made_up_for_by_the_next(begin: Begin) -> None:
    faults = Faults()
    scene = begin(faults)
    trainer = scene.trainer()
    trainer.log.persist_every(2)
    trainer.stage(1)
    trainer.until_told(p.Stored, 1)
    refusing(scene, faults, times=1)
    trainer.open(1)
    trainer.record(2)
    trainer.until_told(p.NotStored, 2)
    trainer.record(3, 4)
    trainer.until_told(p.Stored, 4)
    assert faults.fired == 1
    assert_stored(scene.run, 4)


def test_a_store_that_refuses_for_long_is_asked_again_in_the_end(begin: Begin) -> None:
    """However often it has refused before."""
    faults = Faults()
    scene = begin(faults)
    trainer = scene.trainer()
    trainer.log.persist_every(1)
    trainer.stage(1)
    trainer.until_told(p.Stored, 1)
    refusing(scene, faults)
    trainer.open(1)
    for step in range(2, 7):
        trainer.record(step)
        trainer.until_told(p.NotStored, step)
    trainer.log.persist_every(1000)
    trainer.record(7)
    trainer.until_folded(7)
    faults.watch()
    assert trainer.agent.settle() == []
    assert_stored(scene.run, 7)


def test_a_store_that_refuses_to_the_end(begin: Begin) -> None:
    """Training is not held up, and what is lost is said."""
    faults = Faults()
    scene = begin(faults)
    trainer = scene.trainer()
    trainer.stage(1)
    trainer.until_told(p.Stored, 1)
    refusing(scene, faults)
    trainer.open(1)
    trainer.record(*range(2, 40))
    assert trainer.agent.settle() == [StepRef("main", 39)]
    faults.watch()
    assert stored_steps(scene.run) == [1]


def test_a_slot_that_is_written_again_is_not_folded_in(
    begin: Begin, mirror: type[ByteMirror]
) -> None:
    """The writer tries again what has failed, at any moment."""
    faults = Faults()
    scene = begin(faults)
    trainer = scene.trainer()
    trainer.log.persist_every(2)
    trainer.stage(1)
    trainer.until_told(p.Mirrored, 1)
    refusing(scene, faults)
    trainer.open(1)
    trainer.record(2)
    trainer.until_told(p.NotStored, 2)
    replica = replica_of(scene.agents)
    with replica._guard:
        held = replica._held
        assert held is not None
        slot = held.slots.all[held.slot]
        slot.state = State.WRITING
        image = slot.content
    trainer.record(3)
    until(lambda: len(replica._waiting) == 1, DEADLINE_S, "the record")
    replica._fold()
    replica._give_up_slot()
    with replica._guard:
        assert (slot.state, slot.content) == (State.WRITING, image)
        assert held.slots.all[held.slot] is slot
        assert mirror.folded == [2]
        slot.state = State.SEALED
    faults.watch()
    trainer.until_folded(3)


# ------------------------------------------------------------ what cannot be folded


def test_a_record_that_gives_another_state(begin: Begin) -> None:
    """It is kept, with what was wrong; all that wait behind it are freed, and their memory, too,
    whatever layout they have."""
    scene = begin()
    trainer = scene.trainer()
    trainer.stage(1)
    trainer.open(1)
    trainer.record(2)
    trainer.record(3, what="wrong")
    trainer.record(4)
    trainer.open(4, b"B")
    trainer.record(5)
    trainer.until_folded(5)
    (told,) = [m for m in trainer.heard if isinstance(m, p.NotFolded)]
    assert told.step == 3
    assert "model.weight is not what it was" in told.reason
    assert trainer.log.unsaved() == []
    kept = sorted(path.name for path in (scene.path / SET_ASIDE).rglob("delta*"))
    assert kept == ["delta-r00000.safetensors", "delta-r00000.txt"]
    (delta,) = (scene.path / SET_ASIDE).rglob("*.safetensors")
    assert delta.read_bytes() == b"3 A wrong"
    (words,) = (scene.path / SET_ASIDE).rglob("*.txt")
    assert "model.weight is not what it was" in words.read_text()
    trainer.stage(6)  # the slot is there again, and what it gets is written
    trainer.until_told(p.Stored, 6)
    assert stored_steps(scene.run) == [1, 6]


def test_an_optimizer_that_cannot_be_had(begin: Begin, mirror: type[ByteMirror]) -> None:
    """No record keeps its memory, so that training does not wait for ever."""
    scene = begin()
    trainer = scene.trainer()
    mirror.unfit = "own.Optimizer cannot be imported"
    trainer.open(1)
    trainer.record(2, 3)
    trainer.stage(1)
    trainer.until_folded(3)
    trainer.record(4)
    trainer.until_folded(4)
    (told,) = [m for m in trainer.heard if isinstance(m, p.NotFolded)]
    assert told.step == 1
    assert "cannot be imported" in told.reason
    assert trainer.agent.settle() == []
    assert stored_steps(scene.run) == [1]


def test_another_agent_is_not_handed_a_slot_that_was_folded_in(begin: Begin) -> None:
    """The trainer cannot know, where the store has refused its step."""
    faults = Faults()
    scene = begin(faults)
    trainer = scene.trainer()
    refusing(scene, faults)
    trainer.stage(1)
    trainer.until_told(p.Mirrored, 1)
    trainer.open(1)
    trainer.record(2)
    trainer.until_folded(2)
    assert trainer.agent._kept
    told: list[Any] = []

    class Channel:
        def send(self, message: object, fd: int | None = None) -> None:
            told.append(message)

    with trainer.agent._changed:
        trainer.agent._hand_over(Channel())  # type: ignore[arg-type]
    assert any(isinstance(message, p.Describe) for message in told)
    assert not any(isinstance(message, p.Seal) for message in told)
    faults.watch()


def test_the_store_opens(begin: Begin) -> None:
    """Nothing that is written here is a stranger to the run."""
    scene = begin()
    trainer = scene.trainer()
    trainer.stage(1)
    trainer.open(1)
    trainer.record(2, 3)
    scene.end(trainer)
    listing = Run.open(scene.path).listing()
    assert not listing.strangers
    assert [entry.ref.step for entry in listing.steps if entry.complete] == [1, 3]


# ------------------------------------------------------------ optimizers that are not torch's


def test_an_optimizer_is_found_where_the_trainer_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "own_for_replica.py").write_text("class Own:\n    class Inner: pass\n")
    names = {"own_for_replica.Own.Inner": ("own_for_replica", "Own.Inner")}
    with pytest.raises(CannotRestore, match="cannot be imported by another process"):
        imported(names)
    found = imported(names, [str(tmp_path)])
    assert [kind.__name__ for kind in found.values()] == ["Inner"]
    sys.modules.pop("own_for_replica")


@pytest.mark.parametrize(
    "text", ["raise SystemExit(3)", "raise ValueError('no')", "1 / 0", "Own = 3 +", ""]
)
def test_a_module_that_cannot_be_imported(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it does, the agent goes on."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "odd_for_replica.py").write_text(text)
    with pytest.raises(CannotRestore, match=r"odd_for_replica\.Own cannot be imported"):
        imported({"odd_for_replica.Own": ("odd_for_replica", "Own")}, [str(tmp_path)])
    sys.modules.pop("odd_for_replica", None)


# ------------------------------------------------------------ how often


@given(
    st.lists(st.floats(1e-3, 10.0), min_size=2, max_size=4),
    st.floats(1e-3, 100.0),
    st.floats(1e-4, 10.0),
)
def test_ranks_that_choose_on_their_own_meet(
    steps_s: list[float], write_s: float, fold_s: float
) -> None:
    """However different what they measure: whoever writes less often does so at steps at which all
    write."""
    chosen = []
    for step_s in steps_s:
        pace = Persisting("auto", None, alike=True)
        pace.steps.extend(Cost(step=n, begun_s=0.0, ended_s=step_s) for n in range(20))
        pace.writes.append(write_s)
        pace.folds.append(fold_s)
        chosen.append(pace.choose())
    longest = max(chosen)
    assert all(longest % every == 0 for every in chosen)
