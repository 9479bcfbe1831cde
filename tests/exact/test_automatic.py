"""Runs whose strategy changes while they go on: every step that is there is the one that was, bit
for bit, and a run goes on from it as if nothing had changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import everystep
from agent.replica_scenes import agents_in_threads
from exact.automatic_ranks import AFTER, CHANGES, LATE, LATE_STEPS, SCENES
from exact.matrix import Case
from exact.scenes import Scene, build
from exact.test_ranks import DEADLINE_S, SIZE
from planted import after_steps
from states import assert_same_state
from zygote import Zygote

PLAN = {3: "deltas", 7: "replica", 11: "full", 14: "deltas", 17: "replica", 20: "deltas"}
LAST = 24


@pytest.mark.parametrize(
    "case",
    [
        Case("AdamW/foreach", "fp32", "batchnorm"),
        Case("Adam+amsgrad+weight_decay/loop", "bf16", "tied"),
        Case("SGD+momentum/loop", "mixed", "plain"),
    ],
    ids=str,
)
def test_every_step_is_exact_across_changes(
    case: Case, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(seed: int) -> Scene:
        return build(*case, seed=seed)

    states = [make(1).state()]
    bare = make(1)
    for t in range(LAST):
        bare.step(t)
        states.append(bare.state())
    after_steps(monkeypatch, PLAN)  # type: ignore[arg-type]
    keep_all = everystep.Retention(keep_last=None)
    scene, used = make(1), []
    with agents_in_threads():
        with scene.checkpointer(run_dir, strategy="auto", retention=keep_all) as ck:
            assert ck.restore() == 0
            for t in range(LAST - 2):
                scene.step(t)
                ck.step()
                used.append(type(ck.strategy).__name__)
                assert_same_state(states[t + 1], scene.state())
            stats = list(ck.stats)
        expected = ["Full"] * 3
        for step in range(4, LAST - 1):
            expected.append(PLAN[max(at for at in PLAN if at < step)].title())
        assert used == expected
        assert [s.error for s in stats] == [None] * len(stats)
        with make(2).checkpointer(run_dir, strategy="auto") as ck:
            found = ck.steps()
        # those before a change, which are flushed; those after, which begin a chain; all deltas
        assert {*PLAN, *(at + 1 for at in PLAN), *range(4, 8), *range(15, 18), *range(21, 23)} <= {
            *found
        }
        for step in found:
            again = make(3)
            with again.checkpointer(run_dir, retention=keep_all) as ck:
                assert ck.restore(everystep.types.StepRef("main", step)) == step
                assert_same_state(states[step], again.state())
    assert_same_state(states[LAST], again.steps(LAST - 2, LAST).state())


@pytest.mark.parametrize("scene", SCENES)
def test_ranks_change_together(scene: str, zygote: Zygote, run_dir: Path) -> None:
    """Each decides for itself, and all come to the same, at the same step."""
    run_dir.mkdir()
    for phase in ("train", "resume"):
        zygote.run_ranks(
            "exact.automatic_ranks.main", run_dir, SIZE, DEADLINE_S, phase=phase, scene=scene
        )
    told = [
        [json.loads((run_dir / f"{phase}-{rank}.json").read_text()) for rank in range(SIZE)]
        for phase in ("train", "resume")
    ]
    (first, other), resumed = told
    assert first["changes"] == other["changes"]
    assert [name for _, name in first["changes"]] == CHANGES
    at = [step for step, _ in first["changes"][1:]]
    for report in resumed:
        assert report["done"] == at[-1] + AFTER
        assert set(report["differences"].values()) == {None}
        # before each change, and after it
        assert {str(s) for step in at for s in (step - 1, step)} <= report["differences"].keys()
        assert report["strategy"] == "Full"


def test_a_rank_that_changes_late_costs_few_steps(zygote: Zygote, run_dir: Path) -> None:
    """Those from the change of the one to the next full checkpoint that both take."""
    run_dir.mkdir()
    for phase in ("train", "resume"):
        zygote.run_ranks("exact.automatic_ranks.late", run_dir, SIZE, DEADLINE_S, phase=phase)
    first, other, *resumed = (
        json.loads((run_dir / f"{phase}-{rank}.json").read_text())
        for phase in ("train", "resume")
        for rank in range(SIZE)
    )
    (early,), (late,) = first["changes"], other["changes"]
    assert late == early + LATE
    again = 32 * -(-late // 32)  # the first interval of fulls among deltas
    assert again < LATE_STEPS
    missing = set(range(early, LATE_STEPS + 1)) - {*first["steps"]}
    assert missing and max(missing) < again
    for before, after in zip((first, other), resumed, strict=True):
        assert after["done"] == LATE_STEPS
        assert after["first"] == before["last"]
