"""Steps of two ranks that their agents do again, under DDP (where each has its share of the
parameters) and FSDP2 (where each has its shards), written, and had again by new processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from exact.logged_ranks import SCENES, STORED, TRAINED
from exact.replica_ranks import LAST
from exact.test_ranks import DEADLINE_S, SIZE, Reports, run_jobs
from zygote import Zygote


@pytest.fixture(scope="module")
def reports(zygote: Zygote, runs_dir: Path) -> Reports:
    return run_jobs(zygote, "exact.replica_ranks.main", runs_dir)


@pytest.mark.parametrize("scene", SCENES)
def test_every_step_can_be_had_on_every_rank(scene: str, reports: Reports) -> None:
    assert len(reports) == SIZE
    looks = ["restored 2", "restored 5", f"restored {STORED}"]
    looks += [f"trained on {STORED + 1}", f"trained on {TRAINED}"]
    looks += [f"restored again {TRAINED}", "restored again 4"]
    for report in reports:
        assert report[scene] == {
            "fulls": list(range(1, STORED + 1)), **dict.fromkeys(looks),
            "fulls afterwards": list(range(1, TRAINED + 1)),
        }  # fmt: skip


def test_one_rank_without_a_copy(zygote: Zygote, run_dir: Path) -> None:
    """It stores in full what is its own share, so that the ranks' parts still make one state."""
    run_dir.mkdir()
    for phase in ("train", "resume"):
        zygote.run_ranks("exact.replica_ranks.alone", run_dir, SIZE, DEADLINE_S, phase=phase)
    for rank in range(SIZE):
        first, second = (
            json.loads((run_dir / f"{phase}-{rank}.json").read_text())
            for phase in ("train", "resume")
        )
        assert first["done"] == 0
        assert second["done"] == LAST
        assert second["restored"] == first["last"]
