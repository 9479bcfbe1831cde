"""Full checkpoints that the agents of two ranks make from the log, under DDP (where each has its
share of the parameters) and FSDP2 (where each has its shards)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from exact.compaction_ranks import EVERY, FULLS, LAST
from exact.logged_ranks import SCENES, STORED, TRAINED, complete
from exact.test_deltas_ranks import COMPUTES_WITH_WHOLE_PARAMETERS
from exact.test_ranks import DEADLINE_S, SIZE, Reports, run_jobs
from zygote import Zygote


@pytest.fixture(scope="module")
def reports(zygote: Zygote, runs_dir: Path) -> Reports:
    return run_jobs(zygote, "exact.compaction_ranks.main", runs_dir)


@pytest.mark.parametrize("scene", SCENES)
def test_steps_around_what_the_agents_have_made(scene: str, reports: Reports) -> None:
    assert len(reports) == SIZE
    looks = ["restored 2", "restored 5", f"restored {STORED}"]
    looks += [f"trained on {STORED + 1}", f"trained on {TRAINED}"]
    looks += [f"restored again {TRAINED}", "restored again 4"]
    every = scene in COMPUTES_WITH_WHOLE_PARAMETERS
    first = [*range(1, STORED + 1)] if every else [1, EVERY, 2 * EVERY]
    more = [STORED + 1, TRAINED] if every else [STORED + 1]
    for report in reports:
        assert report[scene] == {
            "fulls": first, **dict.fromkeys(looks), "fulls afterwards": [*first, *more],
        }  # fmt: skip


def test_one_rank_without_a_copy(zygote: Zygote, run_dir: Path) -> None:
    """Its training takes full checkpoints of the same steps as the other one's agent makes, and no
    step is lost."""
    run_dir.mkdir()
    for phase in ("train", "resume"):
        zygote.run_ranks("exact.compaction_ranks.alone", run_dir, SIZE, DEADLINE_S, phase=phase)
    for rank in range(SIZE):
        first, second = (
            json.loads((run_dir / f"{phase}-{rank}.json").read_text())
            for phase in ("train", "resume")
        )
        assert second == first
        assert len(first) == LAST
    assert sorted(ref.step for ref in complete(run_dir / "run") if ref.step <= LAST) == [*FULLS]
    said = (run_dir / "log-1").read_text()
    assert "the agent makes no full checkpoints any more, training takes them: " in said
    assert "there is no room" in said
    assert "ERROR" not in (run_dir / "log-0").read_text()
