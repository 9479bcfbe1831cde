"""Every optimizer and number format over models of several kinds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from exact.matrix import MODELS, Case, cases, inexact, refused
from exact.proof import prove, prove_refused
from exact.scenes import FORMATS, build
from exact.zoo import OPTIMIZERS

ALL = cases("plain", "tied", "frozen", "sparse")


@pytest.mark.parametrize("case", [case for case in ALL if not refused(case)], ids=str)
def test_restored_goes_on_exactly(case: Case, run_dir: Path) -> None:
    prove(case, run_dir)


@pytest.mark.parametrize("case", [case for case in ALL if refused(case)], ids=str)
def test_torch_refuses(case: Case) -> None:
    prove_refused(case)


def test_the_product_is_whole() -> None:
    kinds = {kind.make for kind in OPTIMIZERS.values()}
    known = [thing for thing in vars(torch.optim).values() if isinstance(thing, type)]
    optimizers = {kind for kind in known if issubclass(kind, torch.optim.Optimizer)}
    assert optimizers - kinds == {torch.optim.Optimizer}
    muon = hasattr(torch.optim, "Muon")
    assert len(OPTIMIZERS) == 48 + muon
    assert len(ALL) == 4 * 4 * (48 + muon) == len(set(ALL))
    out = [case for case in ALL if refused(case)]
    assert len(out) == len(FORMATS) * (3 + 39 + muon)
    assert sum(map(inexact, ALL)) - sum(map(inexact, out)) == 6


@pytest.mark.parametrize("model", [*MODELS, "ddp"])
def test_fresh_objects_are_others(model: str) -> None:
    """Nothing would be proved by restoring what is there already."""
    name = "SparseAdam" if model == "sparse" else "AdamW/loop"
    ones, twos = (build(name, "fp32", model, seed).models.values() for seed in (1, 2))
    for one, two in zip(ones, twos, strict=True):
        for a, b in zip(one.parameters(), two.parameters(), strict=True):
            constant = bool((a == a.flatten()[0]).all())  # the weight of a norm
            assert constant or not bool((a == b).any())
