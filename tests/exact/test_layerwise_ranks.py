"""Gradients that are copied the moment DDP has reduced them: bit for bit, on two ranks; and DDP's
reduction itself, which a hook of ours does then, on one to three."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from exact.layerwise_ranks import CHOSEN, WAYS
from exact.logged_ranks import STORED, TRAINED
from exact.test_ranks import DEADLINE_S, SIZE, run_jobs
from zygote import Zygote


def test_every_step_can_be_had_on_every_rank(zygote: Zygote, run_dir: Path) -> None:
    run_dir.mkdir()
    looks = ["restored 2", "restored 5", f"restored {STORED}"]
    looks += [f"trained on {STORED + 1}", f"trained on {TRAINED}"]
    looks += [f"restored again {TRAINED}", "restored again 4"]
    reports = run_jobs(zygote, "exact.layerwise_ranks.main", run_dir)
    assert len(reports) == SIZE
    for report in reports:
        assert report.keys() == CHOSEN.keys()
        for scene in CHOSEN:
            assert report[scene] == {
                "fulls": list(range(1, STORED + 1)), **dict.fromkeys(looks),
                "fulls afterwards": list(range(1, TRAINED + 1)),
            }, scene  # fmt: skip


def test_copies_are_used(zygote: Zygote, run_dir: Path) -> None:
    run_dir.mkdir()
    zygote.run_ranks("exact.layerwise_ranks.order", run_dir, SIZE, DEADLINE_S, phase="train")
    for rank in range(SIZE):
        told = json.loads((run_dir / f"train-{rank}.json").read_text())
        assert told["given up"] is None
        assert told["bytes"] > 0


@pytest.mark.parametrize("size", [1, 2, 3])
def test_our_reduction_is_that_of_ddp(size: int, zygote: Zygote, run_dir: Path) -> None:
    run_dir.mkdir()
    zygote.run_ranks("exact.layerwise_ranks.hooked", run_dir, size, DEADLINE_S, phase="train")
    for rank in range(size):
        told = json.loads((run_dir / f"train-{rank}.json").read_text())
        assert len(told) == 2 * len(WAYS)
        for way, (problem, differs) in told.items():
            refused = size == 3 and not way.startswith("copied")
            assert (problem is not None) == refused, way
            assert differs is None, way
