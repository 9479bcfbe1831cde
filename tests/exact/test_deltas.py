"""The matrix over `Deltas`: every optimizer, in all formats and over all models, logged and had
again at steps between full checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from exact.logged import prove
from exact.matrix import LOGGED, MODELS, Case, inexact
from exact.scenes import FORMATS, build
from exact.zoo import OPTIMIZERS

pytestmark = pytest.mark.usefixtures("in_threads")

ALWAYS_FULL = ("LBFGS", "LBFGS+wolfe")
"""Their gradients are computed within their steps."""


def full_steps(case: Case) -> list[int] | None:
    """Of which steps of a case there is a full checkpoint; None: of all that the store can take."""
    if case.optimizer in ALWAYS_FULL or inexact(case):
        return None
    return [1, 2] if case.model == "frozen" else [1]


@pytest.mark.parametrize("case", LOGGED, ids=str)
def test_any_step_can_be_had_again(
    case: Case, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prove(
        lambda seed: build(*case, seed=seed),
        run_dir,
        str(case),
        expected_fulls=full_steps(case),
        ends_alike=not inexact(case),
    )
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    reason = "torch's fused SGD with momentum" if inexact(case) else "step() was given a closure"
    assert len(errors) == (full_steps(case) is None)
    assert all("Deltas cannot record this run" in line and reason in line for line in errors)


def test_all_there_is_takes_part() -> None:
    assert {case.optimizer for case in LOGGED} == set(OPTIMIZERS)
    assert {case.format for case in LOGGED} == set(FORMATS)
    assert {case.model for case in LOGGED} == set(MODELS)
    assert len(LOGGED) == len(set(LOGGED)) >= 60
