"""A power cut between any two system calls: whatever of them reached the disk, nothing is lost but
the step in flight, and nothing wrong is read."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from byte_runs import noise
from crash.recording import Call, Died, Recorder, lay_out, power_cuts
from crash.scene import Expected, Session, Skipped, complaints
from crash.training import Training, is_whole, leftovers
from everystep.errors import EverystepError
from everystep.store import durable, reading, retention
from everystep.store.backend import NewFile
from everystep.store.local import LocalBackend
from everystep.store.retention import Retention
from everystep.types import Buffer, StepRef
from faults import installed
from waiting import until

SEED = 20260611


class Outcome(NamedTuple):
    """What trying the states of one recording has shown."""

    states: int
    violations: list[str]


def try_all(
    recorder: Recorder, where: Path, start: int = 1, *, first_only: bool = False
) -> Outcome:
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

    def submit(
        self, act: Callable[..., object], /, *args: object, **kwargs: object
    ) -> Future[object]:
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
def after(quick_path: Path) -> Path:
    """Where states are laid out."""
    return quick_path / "after"


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


@pytest.mark.parametrize(("world_size", "states"), [(1, 100), (2, 180)])
def test_first_steps_and_retention(scene: Scene, after: Path, world_size: int, states: int) -> None:
    run_of_a_few_steps(scene, world_size)
    assert any(call.name == "unlink" for call in scene.calls.log)
    outcome = try_all(scene.calls, after)
    assert outcome.violations == []
    assert outcome.states > states


def test_direct_writes(scene: Scene, after: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "DIRECT_FROM_BYTES", 1)
    session = scene.begin()
    scene.step(session)
    session.close()
    assert any(call.name == "truncate" for call in scene.calls.log)
    outcome = try_all(scene.calls, after)
    assert outcome.violations == []
    assert outcome.states > 40


def dies(scene: Scene, calls: int, act: Callable[[], object]) -> bool:
    """Let the process die after so many more calls of `act`; whether it came to that."""
    scene.calls.dies_after = len(scene.calls.log) + calls
    try:
        act()
    except Died:
        return True
    finally:
        scene.calls.dies_after = None
    return False


def test_start_after_a_crash(scene: Scene, after: Path) -> None:
    """Cleaning up is cut off too: a torn step, data without a record and temporary files."""
    session = scene.begin(world_size=2)
    scene.step(session)
    scene.step(session)
    session.store(3, rank=1)
    assert dies(scene, 8, lambda: session.store(3, rank=0))
    session.close()
    left = sorted(path.name for path in (scene.root / "steps/main/000000000003").iterdir())
    assert sum(name.endswith(".tmp") for name in left) == 1
    assert sum("-r00000of" in name for name in left) == 2  # one with its name, one without
    start = len(scene.calls.log)
    session = scene.begin(world_size=2)
    assert session.restored == StepRef("main", 2)
    scene.step(session, gone=[1])
    session.close()
    outcome = try_all(scene.calls, after, start)
    assert outcome.violations == []
    assert outcome.states > 50


def test_the_process_dies_and_then_the_power_fails(tmp_path: Path, after: Path) -> None:
    """What a dead process has left undone must not be taken for durable by the next one."""
    tried, calls, died = 0, 0, True
    while died:
        scene = Scene(tmp_path / f"recorded{calls}")

        def first_life(scene: Scene = scene) -> None:
            session = scene.begin()
            try:
                scene.step(session)
            finally:
                session.close()

        died = dies(scene, calls, first_life)
        scene.expected = Expected(None, frozenset(), frozenset([None]))
        session = scene.begin()
        scene.step(session)
        session.close()
        outcome = try_all(scene.calls, after, len(scene.calls.log))
        assert outcome.violations == [], f"dead after {calls} calls"
        tried += outcome.states
        calls += 1
    assert calls > 40
    assert tried >= calls


def test_set_aside(scene: Scene, after: Path) -> None:
    """The newest step is damaged, and the power fails while it is moved out of the way."""
    session = scene.begin()
    for _ in range(2):
        scene.step(session)
    session.close()
    start = len(scene.calls.log)
    damaged = session.run.entries(StepRef("main", 2))[0]
    kept = frozenset(e for e in scene.expected.complete if e[0].step == 1)
    scene.expect(complete=kept, newest=frozenset([*kept, (StepRef("main", 2), 1)]))
    session.run.set_aside(damaged)
    scene.expect(newest=kept)
    session = scene.begin()
    assert session.restored == StepRef("main", 1)
    scene.step(session)
    session.close()
    assert sum(call.name == "rename" and "damaged/" in call.target for call in scene.calls.log) == 3
    outcome = try_all(scene.calls, after, start)
    assert outcome.violations == []
    assert outcome.states > 30


def test_fork(scene: Scene, after: Path) -> None:
    session = scene.begin(retention=Retention(keep_last=None))
    for _ in range(3):
        scene.step(session)
    session.close()
    start = len(scene.calls.log)
    session = scene.begin(step=2)
    assert session.timeline == "main@2"
    scene.step(session)
    scene.step(session)
    session.close()
    outcome = try_all(scene.calls, after, start)
    assert outcome.violations == []
    assert outcome.states > 50


@contextlib.contextmanager
def recycling() -> Iterator[None]:
    """All files count as large, and all that are deleted are kept to be written over."""
    delete = LocalBackend.delete

    def kept(self: LocalBackend, name: str, *, reuse: bool = False) -> None:
        delete(self, name, reuse=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(durable, "DIRECT_FROM_BYTES", 1)
        patch.setattr(LocalBackend, "delete", kept)
        yield


def test_files_that_are_written_over(scene: Scene, after: Path) -> None:
    with recycling():
        run_of_a_few_steps(scene)
    assert sum(call.name == "reopen" for call in scene.calls.log) == 2
    outcome = try_all(scene.calls, after)
    assert outcome.violations == []
    assert outcome.states > 150


class Files(NamedTuple):
    """Which names must be there if the power fails now, and which must not."""

    there: frozenset[str]
    gone: frozenset[str]


def puts_and_deletes(calls: Recorder, root: Path, sizes: Sequence[int], puts: int) -> set[str]:
    """A put of so many files for each step, and of one that stays, so that its directory does;
    after each, the files of the step before are deleted for reuse. Tries all states, and returns
    what is wrong in any of them."""
    backend = LocalBackend(root, calls)
    files = Files(frozenset(), frozenset())
    held: dict[str, bytes] = {}
    before: list[str] = []
    calls.note(files)
    with recycling():
        for step in range(puts):
            names = [f"{step}/{index}" for index in range(len(sizes))]
            held |= {
                name: noise(size - step, name) for name, size in zip(names, sizes, strict=True)
            }
            held[f"{step}/stays"] = b"small"
            new = [*names, f"{step}/stays"]
            backend.put([NewFile(name, len(held[name]), [held[name]]) for name in new])
            files = files._replace(there=files.there.union(new))
            calls.note(files)
            for name in before:
                files = files._replace(there=files.there - {name})
                calls.note(files)
                backend.delete(name, reuse=True)
                files = files._replace(gone=files.gone | {name})
                calls.note(files)
            before = names
    wrong = set()
    for cut in power_cuts(calls.log, 1, random.Random(SEED)):
        found = {n: data for n, data in cut.tree.items() if data and not durable.is_temporary(n)}
        expected = cut.notes[-1]
        assert isinstance(expected, Files)
        wrong |= {f"{name} is lost" for name in expected.there - found.keys()}
        wrong |= {f"{name} is back" for name in expected.gone & found.keys()}
        wrong |= {f"{name} holds other bytes" for name in found if found[name] != held[name]}
    return wrong


@pytest.mark.parametrize(
    ("sizes", "puts", "reused"), [([40], 3, 1), ([5000], 3, 1), ([40, 9000, 300], 5, 9)]
)
def test_no_file_shares_the_space_of_another(
    tmp_path: Path, sizes: list[int], puts: int, reused: int
) -> None:
    calls = Recorder(tmp_path)
    assert puts_and_deletes(calls, tmp_path, sizes, puts) == set()
    assert sum(call.name == "reopen" for call in calls.log) == reused


class ForgetsTheOldName(Recorder):
    """Does not make it durable that a spare has left its directory."""

    left: Path | None = None

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self.left = source.parent if durable.is_temporary(target.name) else None

    def sync_directory(self, path: Path) -> None:
        if path != self.left:
            super().sync_directory(path)


def test_the_enumerator_finds_space_that_is_reused_too_early(tmp_path: Path) -> None:
    wrong = puts_and_deletes(ForgetsTheOldName(tmp_path), tmp_path, [40], 3)
    assert wrong >= {"0/0 is back", "0/0 holds other bytes"}


def test_the_process_dies_while_a_file_is_written_over(tmp_path: Path) -> None:
    """The next owner finds every file whole, and nothing else."""
    calls, died = 0, 0
    while died == calls:
        root = tmp_path / str(calls)
        root.mkdir()
        recorder = Recorder(root)
        backend = LocalBackend(root, recorder)
        held = {name: noise(9000, name) for name in ("a/a", "b/b", "c/c")}
        with recycling():
            for name in ("a/a", "b/b"):
                backend.put([NewFile(name, 9000, [held[name]])])
            recorder.dies_after = len(recorder.log) + calls
            try:
                backend.delete("a/a", reuse=True)
                backend.put([NewFile("c/c", 9000, [held["c/c"]])])
            except Died:
                died += 1
        calls += 1
        LocalBackend(root).sweep()
        found = {p.relative_to(root).as_posix(): p for p in root.rglob("*") if p.is_file()}
        assert all(path.read_bytes() == held[name] for name, path in found.items())
        assert "b/b" in found
        assert len(found) <= 2
    assert any(call.name == "reopen" for call in recorder.log)
    assert died > 10


class Life(NamedTuple):
    """What a training of numbered weights must come back to."""

    newest: frozenset[int]


def test_the_checkpointer_itself(tmp_path: Path, after: Path) -> None:
    """All of it together, from the directory above the run on, over two sessions."""
    place = tmp_path / "recorded"
    place.mkdir()
    calls = Recorder(place)
    calls.note(Life(frozenset([0])))
    with installed(calls):
        for life in range(2):
            with Training(place / "runs" / "run") as training:
                assert training.steps == 3 * life
                for step in range(3 * life + 1, 3 * life + 4):
                    calls.note(Life(frozenset([step - 1, step])))
                    training.step()
                    calls.note(Life(frozenset([step])))
    known: set[int] = set()
    for cut in power_cuts(calls.log, 1, random.Random(SEED)):
        (expected,) = cut.notes[-1:]
        assert isinstance(expected, Life)
        state = hash((frozenset(cut.tree.items()), expected))
        if state not in known:
            known.add(state)
            lay_out(cut.tree, after)
            come_back(after / "runs" / "run", expected)
    assert len(known) > 150


def come_back(run: Path, expected: Life) -> None:
    """Restore, train on for a step, and look at what is left."""
    with installed(Skipped()), Training(run) as training:
        assert training.steps in expected.newest
        if training.steps:
            assert torch.equal(
                training.model.weight, torch.full_like(training.model.weight, training.steps)
            )
        training.step()
        assert training.ck.stats[-1].durable
        assert is_whole(run, training.steps)
    assert leftovers(run) == []


class Slow(Recorder):
    """A rank that shares the log of another, and stands still before one of its calls."""

    def __init__(self, shared: Recorder, root: Path, calls: int) -> None:
        super().__init__(root)
        self._shared, self._left = shared, calls
        self._numbers = itertools.count(1000)
        self.reached, self.released = threading.Event(), threading.Event()

    def _add(self, call: Call) -> None:
        self._shared.log.append(call)

    def _alive(self) -> None:
        if self._left == 0:
            self.reached.set()
            assert self.released.wait(60)
        self._left -= 1


def test_what_another_rank_has_not_made_durable_is_no_reason_to_delete(
    tmp_path: Path, after: Path
) -> None:
    """Rank 1 has renamed its record and not yet fsynced the directory: rank 0 sees the step as
    complete. If it then removed the step before, the power cut could take both."""
    states = 0
    for calls in range(100):
        scene = Scene(tmp_path / f"recorded{calls}")
        session = scene.begin(world_size=2, retention=Retention(keep_last=1))
        scene.step(session)
        scene.step(session)
        slow = Slow(scene.calls, scene.root, calls)
        before, now = (StepRef("main", 2), 1), (StepRef("main", 3), 1)
        scene.expect(newest=frozenset([before, now]), complete=frozenset())
        session.backends[1]._calls = slow
        session.store(3, rank=0)
        writing = threading.Thread(target=session.store, args=(3, 1))
        writing.start()
        until(lambda: slow.reached.is_set() or not writing.is_alive(), 60, "rank 1 to stand still")  # noqa: B023
        stood_still = slow.reached.is_set()
        start = len(scene.calls.log)
        session.look_after(3, rank=0)
        outcome = try_all(scene.calls, after, start)
        slow.released.set()
        writing.join()
        session.close()
        assert outcome.violations == [], f"rank 1 stood before its call {calls}"
        states += outcome.states
        if not stood_still:
            break
    assert calls > 10
    assert states > 30


class NoFileSync(Recorder):
    def sync(self, fd: int) -> None:
        pass


class NoDirectorySync(Recorder):
    def sync_directory(self, path: Path) -> None:
        pass


class RenameFirst(Recorder):
    """Writes and fsyncs a file only when it has its last name."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._late: dict[str, list[Callable[[], object]]] = {}
        self._paths: dict[int, str] = {}

    def create(self, path: Path, flags: int) -> int:
        fd = super().create(path, flags)
        self._paths[fd] = str(path)
        return fd

    def write_at(self, fd: int, data: Buffer, offset: int) -> int:
        kept, write = bytes(data), super().write_at
        self._later(fd, lambda: write(fd, kept, offset))
        return len(kept)

    def _later(self, fd: int, act: Callable[[], object]) -> None:
        self._late.setdefault(self._paths[fd], []).append(act)

    def sync(self, fd: int) -> None:
        sync = super().sync
        self._later(fd, lambda: sync(fd))

    def close(self, fd: int) -> None:
        close = super().close
        self._later(fd, lambda: close(fd))

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        for act in self._late.pop(str(source), []):
            act()


class DeletesFirst(Recorder):
    """Removes the data of a step before its record."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._records: list[Path] = []

    def unlink(self, path: Path) -> None:
        if path.name.endswith(".json"):
            self._records.append(path)
        else:
            super().unlink(path)

    def remove_directory(self, path: Path) -> None:
        while self._records:
            super().unlink(self._records.pop())
        super().remove_directory(path)


@pytest.mark.parametrize("broken", [NoFileSync, NoDirectorySync, RenameFirst, DeletesFirst])
def test_the_enumerator_finds_broken_system_calls(
    tmp_path: Path, after: Path, broken: type[Recorder]
) -> None:
    root = tmp_path / "recorded"
    scene = Scene(root, broken(root))
    run_of_a_few_steps(scene)
    outcome = try_all(scene.calls, after, first_only=True)
    assert outcome.violations != []


def test_the_enumerator_finds_a_marker_that_comes_before_the_data(
    scene: Scene, after: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = LocalBackend.put
    late: list[NewFile] = []

    def marker_first(self: LocalBackend, files: Sequence[NewFile]) -> None:
        if any(file.name.endswith(".safetensors") for file in files):
            late.extend(file._replace(parts=[bytes(p) for p in file.parts]) for file in files)
            return
        put(self, files)
        put(self, late)
        late.clear()

    monkeypatch.setattr(LocalBackend, "put", marker_first)
    run_of_a_few_steps(scene)
    outcome = try_all(scene.calls, after, first_only=True)
    assert "is listed as complete" in outcome.violations[0]


def test_a_file_that_is_written_over_may_hold_a_mixture(tmp_path: Path) -> None:
    """The model itself: eight durable bytes, and eight others on their way."""
    calls = Recorder(tmp_path)
    fd = calls.create(tmp_path / "x", 0)
    calls.write_at(fd, b"12345678", 0)
    calls.sync(fd)
    calls.close(fd)
    calls.sync_directory(tmp_path)
    fd = calls.reopen(tmp_path / "x")
    durable.SystemCalls.write_through_cache(calls, fd)
    calls.write_at(fd, b"abcdefgh", 0)
    calls.close(fd)
    trees = [cut.tree for cut in power_cuts(calls.log, len(calls.log), random.Random(SEED))]
    whole, torn = {b"12345678", b"abcdefgh"}, {b"abcd5678", b"1234efgh", b"abcd", bytes(8)}
    assert whole | torn < {tree["x"] for tree in trees}


def test_a_file_that_was_not_fsynced_may_hold_anything(tmp_path: Path) -> None:
    """The model itself: what may be found of a file of eight bytes under its last name."""
    calls = Recorder(tmp_path)
    fd = calls.create(tmp_path / "x.tmp", 0)
    calls.write_at(fd, b"12345678", 0)
    calls.close(fd)
    calls.rename(tmp_path / "x.tmp", tmp_path / "x")
    trees = [cut.tree for cut in power_cuts(calls.log, len(calls.log), random.Random(SEED))]
    found = [tree["x"] for tree in trees if "x" in tree]
    assert {b"", b"1234", bytes(8), b"1234" + bytes(4), b"12345678"} < set(found)
    assert {} in trees
    calls.sync_directory(tmp_path)
    trees = [cut.tree for cut in power_cuts(calls.log, len(calls.log), random.Random(SEED))]
    assert all("x" in tree and "x.tmp" not in tree for tree in trees)
    calls._files[fd] = 1
    calls.sync(fd)
    assert [cut.tree for cut in power_cuts(calls.log, len(calls.log), random.Random(SEED))] == [
        {"x": b"12345678"}
    ]
