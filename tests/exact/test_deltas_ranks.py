"""Steps logged by two ranks, under DDP (with and without compression) and FSDP2, and had again by
new processes: every rank restores its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from exact.logged_ranks import SCENES, STORED, TRAINED
from exact.test_ranks import SIZE, Reports, run_jobs
from zygote import Zygote

COMPUTES_WITH_WHOLE_PARAMETERS = ("fsdp2-fp32-Muon",)
"""Of which a rank's deltas hold a shard: refused, and stored in full."""


@pytest.fixture(scope="module")
def reports(zygote: Zygote, runs_dir: Path) -> Reports:
    return run_jobs(zygote, "exact.logged_ranks.main", runs_dir)


@pytest.mark.parametrize("scene", SCENES)
def test_any_step_can_be_had_again_on_every_rank(scene: str, reports: Reports) -> None:
    assert len(reports) == SIZE
    looks = ["restored 2", "restored 5", f"restored {STORED}"]
    looks += [f"trained on {STORED + 1}", f"trained on {TRAINED}"]
    looks += [f"restored again {TRAINED}", "restored again 4"]
    every = scene in COMPUTES_WITH_WHOLE_PARAMETERS
    first, second = ([1, 2, 3, 4, 5, 6], [*range(1, 9)]) if every else ([1], [1, STORED + 1])
    for report in reports:
        assert report[scene] == {
            "fulls": first, **dict.fromkeys(looks), "fulls afterwards": second,
        }  # fmt: skip
