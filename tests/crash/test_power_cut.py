"""A power cut between any two system calls: whatever of them reached the disk, nothing is lost but
the step in flight, and nothing wrong is read."""

from __future__ import annotations

import random
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import NamedTuple

import pytest

from crash.recording import Call, Recorder, lay_out, power_cuts
from crash.scene import Expected, Session, complaints
from everystep.errors import EverystepError
from everystep.store import durable, reading, retention
from everystep.store.backend import NewFile
from everystep.store.local import LocalBackend
from everystep.store.retention import Retention
from everystep.types import Buffer, StepRef

SEED = 20260611


class Outcome(NamedTuple):
    """What trying the states of one recording has shown."""

    states: int
    violations: list[str]


def try_all(recorder: Recorder, where: Path, start: int = 1, *, first_only: bool = False) -> Outcome:
    """Try every state of a recording from its entry `start` on."""
    known: set[int] = set()
    violations: list[str] = []
    for cut in power_cuts(recorder.log, start, random.Random(SEED)):
        expected = [note for note in cut.notes if isinstance(note, Expected)][-1]
        state = hash((frozenset(cut.tree.items()), expected))
        if state in known:
            continue
        known.add(state)
        lay_out(cut.tree, where)
        for complaint in complaints(where, expected):
            last = recorder.log[cut.after - 1]
            violations.append(f"after call {cut.after} ({last.name} {last.path}): {complaint}")
        if violations and first_only:
            break
    return Outcome(len(known), violations)


class _Inline(Executor):
    """Does at once what a pool's threads would do: thousands of states start no threads."""

    def __init__(self, workers: int, thread_name_prefix: str) -> None:
        pass

    def submit(self, act: Callable[..., object], /, *args: object, **kwargs: object) -> Future[object]:
        done: Future[object] = Future()
        try:
            done.set_result(act(*args, **kwargs))
        except EverystepError as error:
            done.set_exception(error)
        return done


@pytest.fixture(autouse=True)
def _no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "ThreadPoolExecutor", _Inline)
    monkeypatch.setattr(retention, "ThreadPoolExecutor", _Inline)


@pytest.fixture
def after(tmp_path: Path) -> Iterator[Path]:
    """Where states are laid out: in memory, where there is such a place."""
    memory = Path("/dev/shm")
    if not memory.is_dir():
        yield tmp_path / "after"
        return
    with tempfile.TemporaryDirectory(dir=memory) as place:
        yield Path(place, "after")


class Scene:
    """A recorded training: notes what must survive as it goes."""

    def __init__(self, root: Path, calls: Recorder | None = None) -> None:
        root.mkdir()
        self.root = root
        self.calls = calls or Recorder(root)
        self.expected = Expected(None, frozenset(), frozenset([None]))
        self.calls.note(self.expected)

    def expect(self, **changes: object) -> None:
        self.expected = self.expected._replace(**changes)
        self.calls.note(self.expected)

    def begin(self, **options: object) -> Session:
        """Start a session; `step=` forks."""
        before = self.expected.newest
        main = options.get("step")
        if main is not None:
            taken = {e for e in self.expected.complete if e[0].step == main}
            self.expect(newest=before | taken)
        session = Session(self.root, self.calls, **options)  # type: ignore[arg-type]
        self.expect(run=session.run.id)
        if main is not None:
            self.expect(newest=frozenset(taken))
        return session

    def step(self, session: Session, gone: Sequence[int] = ()) -> None:
        """One step on all ranks, after which retention removes the steps `gone`."""
        step = session.done = session.done + 1
        new = (StepRef(session.timeline, step), session.number)
        self.expect(newest=self.expected.newest | {new})
        for rank in range(session.world_size):
            session.store(step, rank)
        removed = {e for e in self.expected.complete if e[0].step in gone}
        assert len(removed) == len(gone)
        self.expect(newest=frozenset([new]), complete=(self.expected.complete | {new}) - removed)
        for rank in range(session.world_size):
            session.look_after(step, rank)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path / "recorded")


def run_of_a_few_steps(scene: Scene, world_size: int = 1) -> None:
    session = scene.begin(world_size=world_size)
    try:
        scene.step(session)
        scene.step(session)
        scene.step(session, gone=[1])
        scene.step(session, gone=[2])
    finally:
        session.close()


@pytest.mark.parametrize("world_size", [1, 2])
def test_first_steps_and_retention(scene: Scene, after: Path, world_size: int) -> None:
    run_of_a_few_steps(scene, world_size)
    assert any(call.name == "unlink" for call in scene.calls.log)
    outcome = try_all(scene.calls, after)
    assert outcome.violations == []
    assert outcome.states > 300 * world_size
