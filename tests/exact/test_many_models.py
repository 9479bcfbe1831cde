"""Every optimizer and number format over models with more than plain parameters, and over two."""

from __future__ import annotations

from pathlib import Path

import pytest

from exact.matrix import Case, cases, inexact, refused
from exact.proof import prove, prove_refused
from exact.scenes import FORMATS
from exact.zoo import OPTIMIZERS

ALL = cases("batchnorm", "complex", "gan", "compiled")


@pytest.mark.parametrize("case", [case for case in ALL if not refused(case)], ids=str)
def test_restored_goes_on_exactly(case: Case, run_dir: Path) -> None:
    prove(case, run_dir)


@pytest.mark.parametrize("case", [case for case in ALL if refused(case)], ids=str)
def test_torch_refuses(case: Case) -> None:
    prove_refused(case)


def test_the_product_is_whole() -> None:
    assert len(ALL) == 4 * len(FORMATS) * len(OPTIMIZERS) == len(set(ALL))
    out = [case for case in ALL if refused(case)]
    assert len(out) == len(FORMATS) * (4 + 11 + ("Muon" in OPTIMIZERS))
    assert sum(map(inexact, ALL)) - sum(map(inexact, out)) == 6
