"""`Replica(layerwise=True)` over trainings that do with gradients what real ones do: gradients that
are copied during backward are those that the optimizer consumes, bit for bit, or are taken
again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.replica_scenes import agents_in_threads
from everystep import Replica
from everystep.engine import layerwise
from exact.logged import ALL, STORED, prove
from exact.matrix import LOGGED
from exact.scenes import Scene, build
from exact.test_deltas_stories import (
    AddsNoise,
    Adversarial,
    Clips,
    CompressesAndScalesInPlace,
    IsOld,
    LeavesOut,
    Script,
    StepsTwice,
    Unscales,
    ZeroesAfterwards,
    made,
)
from patience import until_copied

EACH: Any = Replica(persist_every=1, slices=1, layerwise=True)
"""Every step is proved whole, and written."""


@pytest.fixture(autouse=True)
def _early(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every gradient is large enough, and copied during backward from the third step on."""
    monkeypatch.setattr(layerwise, "LEAST_BYTES", 1)
    monkeypatch.setattr(layerwise, "_SEEN_FIRST", 1)
    with agents_in_threads():
        yield


class Stays(Script):
    """Gradients that are zeroed in place, and nothing else."""

    def step(self, t: int) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        self.backward(t)
        self.optimizer.step()


class Accumulates(Script):
    """So many passes as the step says."""

    def step(self, t: int) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        for part in range(1 + t // 3):
            self.backward(t, part)
        self.optimizer.step()


class ClipsLater(Stays):
    """Clipped from the fifth step on, as a schedule might say."""

    def backward(self, t: int, part: int = 0) -> None:
        super().backward(t, part)
        if t >= 4:
            for p in self.net.parameters():
                assert p.grad is not None
                p.grad.mul_(0.5)


KINDS = [
    Stays, Accumulates, ClipsLater, AddsNoise, Clips, ZeroesAfterwards, StepsTwice, LeavesOut,
    Adversarial, CompressesAndScalesInPlace, Unscales, IsOld,
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_step_is_exact(
    kind: type[Script], run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    every = range(1, STORED + 1)
    prove(made(kind), run_dir, kind.__name__, strategy=EACH, expected_fulls=every)
    for record in caplog.records:
        assert record.getMessage().startswith("no gradients are copied during backward: ")


SPARSE = [
    case for case in LOGGED if case.model == "sparse" and case.optimizer.startswith("SparseAdam")
]


@pytest.mark.parametrize("case", SPARSE[:1], ids=str)
def test_sparse_gradients(case: Any, run_dir: Path) -> None:
    def make(seed: int) -> Scene:
        return build(*case, seed=seed)

    prove(make, run_dir, "sparse", strategy=EACH, expected_fulls=range(1, STORED + 1))


def test_copies_are_used_and_why_they_are_not_is_told(
    run_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the log and in the statistics, once."""
    monkeypatch.setattr(layerwise.Early, "settle", until_copied)
    scene = ClipsLater(1).scene()
    with scene.checkpointer(run_dir, strategy=EACH, retention=ALL) as ck:
        ck.restore()
        for t in range(9):
            scene.step(t)
            ck.step()
            session: Any = ck._session
            (copies,) = session._recorder._copies.values()
            if t == 3:
                assert copies.early.used_bytes > 0
                assert copies.early.given_up is None
        told = [stats.deviation for stats in ck.stats]
    what = f"no gradients are copied during backward: {layerwise.WRITTEN}"
    assert [record.getMessage() for record in caplog.records] == [what]
    assert told.count(what) == 1
    assert told[6] == what, "after three steps that it was for nothing"
