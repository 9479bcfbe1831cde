"""Restoring for real: what is proved is used, what is not is said, and nothing good is touched."""

from __future__ import annotations

import errno
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everystep
from byte_logs import write_log
from byte_runs import NoSync, files_of, forged, framed, new_run, small_state, write_part, write_step
from everystep.errors import (
    CannotRestore,
    Damaged,
    EverystepError,
    LayoutMismatch,
    Missing,
    NotARun,
    NothingToRestore,
    NotRestored,
    RanksDisagree,
    StoreError,
    StoreFailed,
)
from everystep.recovery import restore as restoring
from everystep.recovery.part import read_part
from everystep.state.objects import Objects
from everystep.state.ranks import Ranks
from everystep.store.chains import Excluded
from everystep.store.format import FORMAT, RunRecord
from everystep.store.local import LocalBackend
from everystep.store.run import Run
from everystep.types import Json, StepRef
from trips import BLOCKING

KEEP_ALL = everystep.Retention(keep_last=None)


class Counter:
    """An extra without torch."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


class Job:
    """A model whose only parameter is the step."""

    def __init__(self, path: Path, features: int = 2, **options: Any) -> None:
        self.model = nn.Linear(features, 1, bias=False)
        self.counter = Counter()
        self.ck = everystep.Checkpointer(
            path,
            model=self.model,
            extras={"counter": self.counter},
            strategy=BLOCKING,
            retention=KEEP_ALL,
            **options,
        )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exc: object) -> None:
        self.ck.close()

    def train(self, upto: int) -> None:
        for step in range(self.ck.restore() + 1, upto + 1):
            self.step(step)

    def step(self, step: int) -> None:
        with torch.no_grad():
            self.model.weight.fill_(step)
        self.counter.value = step
        self.ck.step()

    @property
    def seen(self) -> tuple[float, int]:
        """What is in the live objects."""
        return float(self.model.weight.detach()[0, 0]), self.counter.value


@pytest.fixture
def trained(run_dir: Path) -> Path:
    """A run with steps 1, 2 and 3."""
    with Job(run_dir) as job:
        job.train(3)
    return run_dir


def file_of(root: Path, step: int, pattern: str) -> Path:
    (path,) = root.glob(f"steps/main/{step:012d}/{pattern}")
    return path


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def steps_of(root: Path) -> dict[str, bytes]:
    return {n: data for n, data in files_of(root).items() if n.startswith(("steps", "damaged"))}


# ---------------------------------------------------------------- damage


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("harm", [flip, truncate, empty, Path.unlink])
@pytest.mark.parametrize("pattern", ["*.json", "*.model.safetensors", "*.rest.safetensors"])
def test_a_damaged_newest_step_is_set_aside_and_the_one_before_is_taken(
    trained: Path, harm: Callable[[Path], object], pattern: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A13, A15, C02."""
    path = file_of(trained, 3, pattern)
    harm(path)
    before = steps_of(trained)
    with Job(trained) as job:
        assert job.ck.restore() == 2
        assert job.seen == (2.0, 2)
        gone = harm is Path.unlink and pattern == "*.json"
        if gone:  # without its record it is no step: it never became one, for all that is known
            assert "set aside" not in caplog.text
        else:
            assert "step main:3 is set aside in damaged/main/000000000003" in caplog.text
            moved = {
                name.replace("steps/main/000000000003", "damaged/main/000000000003"): data
                for name, data in before.items()
            }
            assert steps_of(trained) == moved
        job.step(3)
    with Job(trained) as job:  # and at the next start nothing is wrong any more
        caplog.clear()
        assert job.ck.restore() == 3
        assert "cannot be used" not in caplog.text


def test_several_damaged_steps_are_passed_over(trained: Path) -> None:
    for step in (2, 3):
        flip(file_of(trained, step, "*.model.safetensors"))
    with Job(trained) as job:
        assert job.ck.restore() == 1
        assert job.seen == (1.0, 1)
    assert {name.split("/")[2] for name in steps_of(trained) if name.startswith("damaged")} == {
        "000000000002",
        "000000000003",
    }


def test_where_nothing_can_be_proved_no_file_is_moved_and_it_stays_an_error(trained: Path) -> None:
    """A15, X02: never a fresh start in silence, at the second attempt neither."""
    for step in (1, 2, 3):
        flip(file_of(trained, step, "*.model.safetensors"))
    before = steps_of(trained)
    for _ in range(2):
        with Job(trained) as job:
            with pytest.raises(CannotRestore, match="every complete step failed") as raised:
                job.ck.restore()
            assert all(f"main:{step}" in str(raised.value) for step in (1, 2, 3))
            assert job.seen[1] == 0, "nothing live is changed"
            with pytest.raises(NotRestored):
                job.ck.step()
        assert steps_of(trained) == before


def test_a_step_that_was_asked_for_has_no_substitute(trained: Path) -> None:
    flip(file_of(trained, 2, "*.model.safetensors"))
    before = steps_of(trained)
    with Job(trained) as job, pytest.raises(CannotRestore, match="the step failed"):
        job.ck.restore(2)
    assert steps_of(trained) == before


def test_the_older_step_is_proved_before_the_newer_is_moved(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(file_of(trained, 3, "*.model.safetensors"))
    seen: list[tuple[float, int]] = []
    real = Run.set_aside
    with Job(trained) as job:

        def watched(run: Run, entry: Any) -> str:
            seen.append(job.seen)
            return real(run, entry)

        monkeypatch.setattr(Run, "set_aside", watched)
        job.ck.restore()
    assert seen == [(2.0, 2)]


def test_damage_that_is_only_in_a_value_is_found_before_anything_changes(trained: Path) -> None:
    """A tag that makes no sense in an extra of the newest step, with a hash that is right."""
    path = file_of(trained, 3, "*.json")
    record = Run.open(trained).record(Run.open(trained).entries(StepRef("main", 3))[0], 0)
    forged(path, tree={**record.tree, "extras": {"counter": {"value": {"$int": "x"}}}})
    with Job(trained) as job:
        assert job.ck.restore() == 2
        assert job.seen == (2.0, 2)


# ---------------------------------------------------------------- what is no damage


def test_a_layout_that_does_not_fit_sets_nothing_aside(trained: Path) -> None:
    """E17: only damage is a reason to take an older step."""
    before = steps_of(trained)
    with Job(trained, features=3) as job, pytest.raises(LayoutMismatch):
        job.ck.restore()
    assert steps_of(trained) == before


def test_another_number_of_ranks_sets_nothing_aside(run_dir: Path) -> None:
    run = new_run(run_dir, 2, NoSync())
    write_step(run, StepRef("main", 1), 2)
    before = steps_of(run_dir)
    with Job(run_dir) as job, pytest.raises(LayoutMismatch, match="start 2 processes"):
        job.ck.restore()
    assert steps_of(run_dir) == before


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.EMFILE, errno.ESTALE])
def test_a_store_that_does_not_answer_sets_nothing_aside(
    trained: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    before = steps_of(trained)
    real = LocalBackend.read

    def refuse(backend: LocalBackend, name: str, into: memoryview, offset: int) -> None:
        if name.endswith(".model.safetensors"):
            raise StoreFailed("no answer") from OSError(number, "")
        real(backend, name, into, offset)

    with Job(trained) as job:
        monkeypatch.setattr(LocalBackend, "read", refuse)
        with pytest.raises(StoreFailed):
            job.ck.restore()
        monkeypatch.undo()
    assert steps_of(trained) == before


def test_a_newer_version_sets_nothing_aside(trained: Path) -> None:
    """After a downgrade, what the newer version wrote is not damage."""
    file_of(trained, 3, "*.json").write_bytes(framed({"format": FORMAT + 1}))
    before = steps_of(trained)
    with Job(trained) as job, pytest.raises(StoreError, match="newer everystep"):
        job.ck.restore()
    assert steps_of(trained) == before


def test_what_fails_after_the_first_change_is_no_success(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Damage that is seen only while objects are being changed must not pass for a restore."""

    def fail(*args: object) -> None:
        raise Damaged("half-way")

    monkeypatch.setattr(restoring.capture, "apply", fail)
    before = steps_of(trained)
    with Job(trained) as job, pytest.raises(Damaged, match="half-way"):
        job.ck.restore()
    assert steps_of(trained) == before


# ---------------------------------------------------------------- nothing there


def test_an_empty_directory_is_a_fresh_run(run_dir: Path) -> None:
    with Job(run_dir) as job:
        assert job.ck.restore() == 0
        job.step(1)
    run_dir.with_name("made").mkdir()
    with Job(run_dir.with_name("made")) as job:
        assert job.ck.restore() == 0


def test_required_where_there_is_nothing(run_dir: Path) -> None:
    """X02."""
    with Job(run_dir) as job, pytest.raises(NothingToRestore, match="required"):
        job.ck.restore(required=True)
    with Job(run_dir) as job, pytest.raises(NothingToRestore):
        job.ck.restore(7)


def test_a_wrong_path_is_an_error(tmp_path: Path) -> None:
    """E17."""
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(StoreFailed):
        Job(tmp_path / "file")
    with pytest.raises(StoreFailed):
        Job(tmp_path / "file" / "inside")
    (tmp_path / "things").mkdir()
    (tmp_path / "things" / "results.csv").write_bytes(b"x")
    with pytest.raises(NotARun, match=r"results\.csv"):
        Job(tmp_path / "things")
    assert [path.name for path in (tmp_path / "things").iterdir()] == ["results.csv"]
    for path in (tmp_path / "nothing", tmp_path / "things"):
        with pytest.raises(NotARun):
            everystep.load(path)
    assert not (tmp_path / "nothing").exists()


def test_only_incomplete_steps_are_an_error(run_dir: Path) -> None:
    """A10: and stay one."""
    run = new_run(run_dir, 2, NoSync())
    for step in (1, 2):
        write_part(run, StepRef("main", step), small_state(), world_size=2)
    before = steps_of(run_dir)
    for _ in range(2):
        with Job(run_dir) as job, pytest.raises(CannotRestore, match="nothing of rank 1"):
            job.ck.restore()
        assert steps_of(run_dir) == before
    with pytest.raises(NothingToRestore, match="no complete step"):
        everystep.load(run_dir)


def test_a_first_step_that_was_cut_off_is_begun_again(run_dir: Path) -> None:
    """A01, A02: leftovers are cleaned, and never taken for a step."""
    run = new_run(run_dir, 2, NoSync())
    write_part(run, StepRef("main", 1), small_state(), world_size=2)
    (run_dir / "steps/main/000000000001/.x.json.1-2.tmp").write_bytes(b"half")
    with Job(run_dir) as job:
        assert job.ck.restore() == 0
        assert steps_of(run_dir) == {}
        job.step(1)
    assert everystep.load(run_dir).step == 1


def test_a_lost_identity_or_pointer_never_starts_anew(trained: Path) -> None:
    """A10: whatever small file is lost or damaged, the steps are found."""
    for name in ("run.json", "timelines/main.json", "sessions/000001.json"):
        data = (trained / name).read_bytes()
        for harm in (Path.unlink, flip):
            harm(trained / name)
            with Job(trained) as job:
                assert job.ck.restore() == 3
            (trained / name).write_bytes(data)


def test_all_steps_deleted_by_hand_is_an_error_where_it_can_be_known(trained: Path) -> None:
    with Job(trained) as job:
        job.ck.restore()
    for path in (trained / "steps").rglob("*"):
        if path.is_file():
            path.unlink()
    for _ in range(2):
        with Job(trained) as job, pytest.raises(CannotRestore, match="has had step main:3"):
            job.ck.restore()


def test_a_log_whose_full_checkpoint_is_gone_is_no_fresh_run(run_dir: Path) -> None:
    run = new_run(run_dir, calls=NoSync())
    write_log(run.backend, range(2, 9), base=1, run=run.id)
    before = files_of(run_dir)
    for _ in range(2):
        with Job(run_dir) as job, pytest.raises(CannotRestore, match="steps up to main:2"):
            job.ck.restore()
        with Job(run_dir) as job, pytest.raises(CannotRestore, match="steps up to main:2"):
            job.step(1)
    assert {n: d for n, d in files_of(run_dir).items() if n in before} == before


@pytest.mark.parametrize(
    "left",
    [
        "s000001-r00000of00001.model.safetensors",
        ".s000001-r00000of00001.model.safetensors.1-2.tmp",
    ],
)
def test_a_log_that_began_before_the_first_full_checkpoint_was_whole_is_begun_again(
    left: str, run_dir: Path
) -> None:
    """Also if that start is cut off before it stores anything: it has found the log worthless."""
    run = new_run(run_dir, calls=NoSync())
    write_log(run.backend, range(2, 4), base=1, run=run.id)
    path = run_dir / "steps/main/000000000001" / left
    path.parent.mkdir(parents=True)
    path.write_bytes(b"half")
    with Job(run_dir) as job:
        assert job.ck.restore() == 0
    assert not path.exists()
    with Job(run_dir) as job:
        assert job.ck.restore() == 0
        job.step(1)
    assert everystep.load(run_dir).step == 1


@pytest.mark.parametrize("proved", [False, True])
def test_a_state_that_has_failed_is_given_up_before_the_next_is_read(
    proved: bool, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it came to nothing while it was read, or other ranks could not prove theirs."""
    alive: list[bool] = []
    states: list[weakref.ref[torch.Tensor]] = []

    def read(*args: Any) -> Any:
        alive.append(any(state() is not None for state in states))
        found = really(*args)
        if len(alive) > 1:
            return found
        states.extend(map(weakref.ref, found.tensors.values()))
        if not proved:
            raise Damaged("a test wants it", step=StepRef("main", 3), rank=0)
        return found

    def agree(ranks: Ranks, error: Any, guilty: Any) -> Any:
        if proved and len(alive) == 1:
            full = (StepRef("main", 3), 1)
            return [(["Damaged", "by another rank"], Excluded((), {full}))]
        return real(ranks, error, guilty)

    real, really = restoring._agree, restoring.read_chain
    monkeypatch.setattr(restoring, "read_chain", read)
    monkeypatch.setattr(restoring, "_agree", agree)
    with Job(trained) as job:
        assert job.ck.restore() == 2
    assert alive == [False, False]
    assert states


def test_a_background_write_that_is_not_finished_is_not_a_failed_one(trained: Path) -> None:
    """A11: whoever only looks removes nothing."""
    loose = trained / "steps/main/000000000004/s000001-r00000of00001.model.safetensors"
    loose.parent.mkdir()
    loose.write_bytes(b"being written")
    before = files_of(trained)
    assert everystep.load(trained).step == 3
    run = Run.open(trained)
    assert run.listing().loose
    assert files_of(trained) == before


# ---------------------------------------------------------------- going back


def test_going_back_forks_and_all_steps_stay(trained: Path) -> None:
    """G03, A17."""
    with Job(trained) as job:
        assert job.ck.restore(2) == 2
        job.step(3)
        assert job.ck.steps() == [1, 2, 3]
    with Job(trained) as job:
        assert job.ck.restore() == 3
        assert job.ck.restore(StepRef("main", 3)) == 3
    refs = {str(entry.ref) for entry in Run.open(trained).listing().steps}
    assert refs == {"main:1", "main:2", "main:3", "main@2:3"}


def test_the_step_that_a_run_was_restored_from_survives_retention(run_dir: Path) -> None:
    """G03."""
    with Job(run_dir) as job:
        job.train(3)
    model = nn.Linear(2, 1, bias=False)
    counter = Counter()
    with everystep.Checkpointer(
        run_dir,
        model=model,
        extras={"counter": counter},
        strategy=BLOCKING,
        retention=everystep.Retention(keep_last=1),
    ) as ck:
        assert ck.restore(2) == 2
        for _ in range(3):
            ck.step()
    left = {str(entry.ref) for entry in Run.open(run_dir).listing().steps}
    assert left == {"main:1", "main:2", "main:3", "main@2:5"}


# ---------------------------------------------------------------- several ranks


class ThreadRanks(Ranks):
    """Ranks that are threads of this process."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        super().__init__(rank, meeting.barrier.parties)
        object.__setattr__(self, "meeting", meeting)

    def gather(self, value: Json) -> Sequence[Json]:
        meeting: Meeting = self.meeting  # type: ignore[attr-defined]
        meeting.values[self.rank] = value
        meeting.barrier.wait()
        told = [meeting.values[rank] for rank in range(self.world_size)]
        meeting.barrier.wait()
        return told


class Meeting:
    """Where they meet; a rank that does not come breaks it, for all."""

    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count, timeout=20)
        self.values: dict[int, Json] = {}

    def all(self, act: Callable[[Ranks], object]) -> list[object]:
        """What each rank returns or raises."""
        results: list[object] = [None] * self.barrier.parties

        def run(rank: int) -> None:
            try:
                results[rank] = act(ThreadRanks(rank, self))
            except (EverystepError, threading.BrokenBarrierError) as error:
                results[rank] = error

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(results))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


def model_of(rank: int) -> nn.Module:
    model = nn.Module()
    model.register_parameter("weight", nn.Parameter(torch.zeros(3, 5)))
    model.register_parameter("bias", nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)))
    model.register_buffer("mean", torch.full((2,), -rank))
    return model


@pytest.fixture
def two_ranks(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two steps of two ranks; no random numbers, which threads would set for each other."""
    monkeypatch.setattr(restoring.capture.rng, "set_global_state", lambda state: None)
    run = new_run(run_dir, 2, NoSync())
    for step in (1, 2):
        for rank in (0, 1):
            state = small_state(rank, step)
            write_part(run, StepRef("main", step), state, rank=rank, world_size=2)
    return run_dir


def restore_all(root: Path, models: Sequence[nn.Module], run: Run | None = None) -> list[object]:
    def act(ranks: Ranks) -> str:
        here = run or Run.open(root)
        objects = Objects({"model": models[ranks.rank]}, {}, {})
        chain = restoring.restore(here, None, objects, ranks).chain
        return str(chain.ref) if chain else "fresh"

    return Meeting(2).all(act)


def means(models: Sequence[nn.Module]) -> Iterator[bytes]:
    for model in models:
        buffer = model.get_buffer("mean")
        yield buffer.numpy().tobytes()


def test_every_rank_gets_its_own(two_ranks: Path) -> None:
    models = [model_of(rank) for rank in (0, 1)]
    assert restore_all(two_ranks, models) == ["main:2", "main:2"]
    assert list(means(models)) == [small_state(rank, 2)[2].data for rank in (0, 1)]


@pytest.mark.parametrize("pattern", ["*r00001*.model.safetensors", "*r00001*.json"])
def test_damage_of_one_rank_makes_all_take_the_older_step(
    two_ranks: Path, pattern: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    flip(file_of(two_ranks, 2, pattern))
    models = [model_of(rank) for rank in (0, 1)]
    assert restore_all(two_ranks, models) == ["main:1", "main:1"]
    assert list(means(models)) == [small_state(rank, 1)[2].data for rank in (0, 1)]
    assert caplog.text.count("is set aside") == 1
    assert len([n for n in steps_of(two_ranks) if n.startswith("damaged")]) == 6


def test_a_misfit_of_one_rank_is_told_to_all_and_changes_none(two_ranks: Path) -> None:
    models = [model_of(0), nn.Linear(2, 2)]
    results = restore_all(two_ranks, models)
    assert [type(result) for result in results] == [LayoutMismatch, LayoutMismatch]
    assert "on rank 1" in str(results[0])
    assert next(means(models[:1])) == torch.zeros(2, dtype=torch.int64).numpy().tobytes()


def test_a_step_that_cannot_be_set_aside_is_told_to_all(two_ranks: Path) -> None:
    """Rank 0 moves; the others must not wait for it for ever."""
    flip(file_of(two_ranks, 2, "*r00001*.model.safetensors"))

    class Stuck(NoSync):
        def rename(self, source: Path, target: Path) -> None:
            raise OSError(errno.EROFS, "")

    record = RunRecord(run=Run.open(two_ranks).id, created="")
    run = Run(LocalBackend(two_ranks, Stuck()), record)
    results = restore_all(two_ranks, [model_of(rank) for rank in (0, 1)], run)
    assert [type(result) for result in results] == [StoreFailed, StoreFailed]
    assert "on rank 0" in str(results[1])


def test_a_failure_while_applying_is_told_to_all(
    two_ranks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = restoring.capture.apply

    def fail(objects: Objects, *rest: Any) -> None:
        if float(objects.models["model"].get_buffer("mean")[0]) < 0:
            raise Damaged("half-way")
        real(objects, *rest)

    monkeypatch.setattr(restoring.capture, "apply", fail)
    results = restore_all(two_ranks, [model_of(rank) for rank in (0, 1)])
    assert [type(result) for result in results] == [Damaged, Damaged]
    assert "on rank 1: half-way" in str(results[0])


def test_ranks_that_do_not_share_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both hear of it; neither waits for the other for ever."""
    here = threading.local()
    monkeypatch.setattr(Ranks, "here", staticmethod(lambda: here.ranks))

    def act(ranks: Ranks) -> object:
        here.ranks = ranks
        with everystep.Checkpointer(
            tmp_path / str(ranks.rank), model=nn.Linear(2, 1), strategy=BLOCKING
        ) as ck:
            return ck.restore()

    results = Meeting(2).all(act)
    assert [type(result) for result in results] == [RanksDisagree, RanksDisagree]


# ---------------------------------------------------------------- reading a part


def test_a_rank_that_there_is_not(two_ranks: Path) -> None:
    run = Run.open(two_ranks)
    entry = run.listing().steps[0]
    with pytest.raises(LayoutMismatch, match="no rank 5"):
        read_part(run, entry, 5)


def test_a_missing_record_of_another_rank(two_ranks: Path) -> None:
    run = Run.open(two_ranks)
    entry = run.listing().steps[0]
    file_of(two_ranks, 1, "*r00001*.json").unlink()
    with pytest.raises(Missing):
        read_part(run, entry, 0)
