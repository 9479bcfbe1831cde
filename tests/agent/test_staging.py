"""What staging memory holds, as the agent tells a restart of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.scenes import begin_of, run_at
from everystep.agent import protocol as p
from everystep.agent.image import Image
from everystep.agent.staging import Staging
from everystep.types import Piece, TensorSpec

SPEC = TensorSpec(key="/models/model/w", dtype="float32", shape=(2000,))


@pytest.fixture
def staging(tmp_path: Path) -> Iterator[Staging]:
    found = Staging(threading.Condition())
    found.begin(begin_of(run_at(tmp_path), policy="skip"))
    found.pending = p.Describe(
        layout=1, specs=[SPEC], pieces=[Piece(SPEC.key, 0, SPEC.elements)], rest_bytes=4096
    )
    assert found.place(is_idle=True) is not None
    yield found
    found.close()


def stage(staging: Staging, step: int, rest: int = 3) -> int:
    """Seal a step; returns its slot."""
    assert staging.slots is not None
    granted = staging.slots.grant()
    assert granted is not None
    specs = [TensorSpec(key="/extras/x", dtype="uint8", shape=(rest,))]
    image, slots = staging.image(
        p.Seal(
            slot=granted[0], layout=1, step=step, created="", hashes={}, whole={}, rest=specs,
            still=False, tree=b"{}", metrics={},
        )
    )  # fmt: skip
    slots.seal(granted[0], image, wanted=False)
    return granted[0]


def save(staging: Staging, slot: int) -> None:
    """Note that a step is durable."""
    assert staging.slots is not None
    staging.slots.written(staging.slots.all[slot], saved=True)


def listed(staging: Staging) -> list[int]:
    """The steps whose records are listed."""
    files, _ = staging.files()
    names = [file.name for file in files.files if file.name.endswith(".json")]
    return sorted(int(name.split("/")[2]) for name in names)


def test_without_a_step_there_is_no_file(staging: Staging) -> None:
    assert listed(staging) == []


def test_only_the_newest_step_and_unsaved_ones_are_listed(staging: Staging) -> None:
    first, second = stage(staging, 1), stage(staging, 2)
    assert listed(staging) == [1, 2]
    save(staging, first)
    assert listed(staging) == [2]
    save(staging, second)
    assert listed(staging) == [2]  # durable, and the newest
    stage(staging, 3)
    assert listed(staging) == [3]


def test_each_step_has_the_rest_that_it_was_staged_with(staging: Staging) -> None:
    stage(staging, 1, rest=3)
    stage(staging, 2, rest=5)
    files, _ = staging.files()
    rests = {file.name.split("/")[2]: file for file in files.files if ".rest." in file.name}
    assert [len(rests[name].data or b"") % 64 for name in sorted(rests)] == [3, 5]


def test_a_durable_step_is_described_when_the_trainer_is_gone(
    staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the one that comes back asks for is at hand, and the same."""
    described: list[int] = []
    real = Image._described

    def noted(image: Image, slot_offset: int) -> list[p.InMemory]:
        described.append(image.ref.step)
        return real(image, slot_offset)

    monkeypatch.setattr(Image, "_described", noted)
    save(staging, stage(staging, 1))
    staging.drain(on=True, is_alone=False)
    assert described == []
    staging.drain(on=True, is_alone=True)
    assert described == [1]
    assert listed(staging) == [1] and described == [1]
    staging.drain(on=False, is_alone=False)
    stage(staging, 2)
    staging.drain(on=True, is_alone=True)
    assert described == [1]  # hashes may be missing: writing comes first
    assert listed(staging) == [2]
