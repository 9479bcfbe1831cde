"""A power cut between any two system calls of a replica's images, each of which refers to files of
earlier ones: the newest that was told is had bit for bit, and the next session goes on from it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from agent.scenes import stored_steps
from agent.test_persist import damages, persisting
from byte_runs import NoSync, Tensor, begin, new_run, read_back, tensor
from crash.recording import Recorder, lay_out, power_cuts
from crash.test_power_cut import _Inline
from everystep.agent.image import Image
from everystep.errors import EverystepError
from everystep.store import increments, reading, retention
from everystep.store.local import LocalBackend
from everystep.store.references import references_of
from everystep.store.retention import Retention
from everystep.store.run import Run
from everystep.types import StepRef

SEED = 20261130
UNIT = 64
UNITS = 6
LAST = 8
"""Of the recorded images: two whole ones, and more than one that refers to each."""


class Told(NamedTuple):
    """What must be true if the power fails now."""

    newest: frozenset[int]
    """One of these is the newest image; 0: there is none."""


def state(step: int) -> list[Tensor]:
    """A few units of the large tensor change at each step, and all of the small one."""
    data = bytearray(UNITS * UNIT)
    for unit in range(UNITS):  # a unit is what it was made at the newest step of its turn
        changed = step - (step - unit) % 3
        data[unit * UNIT : (unit + 1) * UNIT] = bytes([unit, max(0, changed)]) * (UNIT // 2)
    return [
        Tensor("/models/model/weight", "uint8", (UNITS * UNIT,), bytes(data)),
        tensor("/optimizers/optimizer/state/count", "int64", seed=step),
    ]


@pytest.fixture(autouse=True)
def _small_and_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(increments, "UNIT_BYTES", UNIT)
    monkeypatch.setattr(reading, "ThreadPoolExecutor", _Inline)
    monkeypatch.setattr(retention, "ThreadPoolExecutor", _Inline)


class Careless(Recorder):
    """Leaves out one kind of fsync, once the run is made."""

    omitted = ""

    def sync(self, fd: int) -> None:
        if self.omitted != "sync":
            super().sync(fd)

    def sync_directory(self, path: Path) -> None:
        if self.omitted != "sync_directory":
            super().sync_directory(path)


def recorded(root: Path, omitted: str = "") -> tuple[Recorder, int]:
    """An agent writes images and removes those that nothing needs; the calls, and how many of them
    made the run."""
    root.mkdir()
    calls = Careless(root)
    run = new_run(root, calls=calls)
    start = len(calls.log)
    calls.omitted = omitted
    keeps = Retention(keep_last=1)
    with persisting(run, LocalBackend(root, calls), retention=keeps) as replica:
        for step in range(1, LAST + 1):
            calls.note(Told(frozenset([step - 1, step])))
            replica.persist(step, state(step))
            calls.note(Told(frozenset([step])))
    return calls, start


def complaints(root: Path, told: Told) -> Iterator[str]:
    """What is wrong with a run that a power cut has left; goes on with it to find out."""
    run = Run.open_or_create(LocalBackend(root, NoSync()))
    steps = stored_steps(run)
    if max(steps, default=0) not in told.newest:
        yield f"the newest of {steps} is none of {sorted(told.newest)}"
    yield from wrong(run, steps)
    yield from (line for line in damages(run) if "no record names" not in line)
    LocalBackend(root, NoSync()).sweep()
    session = run.clean_up()
    begin(run, session)
    following = max(steps, default=0) + 1
    with persisting(run, session=session, retention=Retention(keep_last=None)) as replica:
        replica.persist(following, state(following))
    if stored_steps(run) != [*steps, following]:
        yield f"{stored_steps(run)} when going on from {steps}"
    yield from wrong(run, [following])
    yield from damages(run)


def wrong(run: Run, steps: list[int]) -> Iterator[str]:
    """The steps that are listed as complete and are not what they were."""
    for step in steps:
        try:
            found = read_back(run, StepRef("main", step), 0)
        except EverystepError as error:
            yield f"step {step}: {error.headline()}"
            continue
        if found != {one.key: one.data for one in state(step)}:
            yield f"step {step} has other bytes"


def try_all(
    calls: Recorder, start: int, where: Path, *, first_only: bool = False
) -> tuple[int, list[str]]:
    """Every state that a power cut may leave: their number, and what is wrong in them."""
    known: set[int] = set()
    found: list[str] = []
    for cut in power_cuts(calls.log, start, random.Random(SEED)):
        told = [note for note in cut.notes if isinstance(note, Told)]
        expected = told[-1] if told else Told(frozenset([0]))
        state_of = hash((frozenset(cut.tree.items()), expected))
        if state_of not in known:
            known.add(state_of)
            lay_out(cut.tree, where)
            last = calls.log[cut.after - 1]
            found += [f"after {last.name} {last.path}: {c}" for c in complaints(where, expected)]
        if found and first_only:
            break
    return len(known), found


def test_the_newest_image_is_had_whatever_it_refers_to(tmp_path: Path, quick_path: Path) -> None:
    calls, start = recorded(tmp_path / "recorded")
    run = Run.open(tmp_path / "recorded")
    assert references_of(run, run.listing().steps), "the last image refers to others"
    removed = {call.path.split("/")[2] for call in calls.log if call.name == "unlink"}
    assert len(removed) >= 3, "images that were referred to have gone"
    states, found = try_all(calls, start, quick_path / "after")
    assert found == []
    assert states > 120


@pytest.mark.parametrize("omitted", ["sync", "sync_directory"])
def test_the_enumerator_finds_an_fsync_that_is_left_out(
    tmp_path: Path, quick_path: Path, omitted: str
) -> None:
    calls, start = recorded(tmp_path / "recorded", omitted)
    _, found = try_all(calls, start, quick_path / "after", first_only=True)
    assert found != []


def test_the_enumerator_finds_files_that_are_removed_too_early(
    tmp_path: Path, quick_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Image, "refers_to", property(lambda self: []))
        calls, start = recorded(tmp_path / "recorded")
    _, found = try_all(calls, start, quick_path / "after", first_only=True)
    assert found != []
