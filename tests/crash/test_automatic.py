"""The trainer is killed right before and right after a change of strategy: no step is lost that
`step()` had returned from before, and a restart goes on with `auto`."""

from __future__ import annotations

from pathlib import Path

import pytest

from crash.automatic_scenes import LAST, PLAN
from crash.staged_scenes import agents_of
from crash.test_deltas import reference  # noqa: F401 - a fixture
from waiting import until
from zygote import Zygote

CHANGES = list(PLAN)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("change", range(len(CHANGES)), ids=list(PLAN.values()))
def test_killed_beside_a_change(
    change: int,
    after: bool,
    zygote: Zygote,
    quick_path: Path,
    reference: list[str],  # noqa: F811
) -> None:
    run = str(quick_path / "run")
    # a session's first word to its agent; the first session is before any change
    killed = zygote.start(
        "crash.automatic_scenes.train", quick_path / "first", run=run,
        die=["Agent.begin", change + 2, after],
    )  # fmt: skip
    assert killed.wait() == -9, killed.said()
    said = zygote.run("crash.automatic_scenes.train", quick_path / "second", run=run)
    assert "ERROR" not in said, said
    told = [line.split() for line in said.splitlines() if line.startswith("at ")]
    steps = [(int(step), digest) for _, step, digest in told]
    assert [step for step, _ in steps] == list(range(CHANGES[change], LAST + 1)), said
    for step, digest in steps:
        assert digest == reference[step]
    until(lambda: not agents_of(run), 60, "the agents to end")
