"""The number by which gradients were multiplied, from a few of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from everystep.deltas.factors import factors

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def bits(value: torch.Tensor) -> int:
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return int(value.view(kinds[value.element_size()]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=150)
@given(seed=st.integers(0, 2**32), c=st.floats(1e-4, 8), size=st.integers(1, 300))
def test_the_factor_is_among_those_found(
    dtype: torch.dtype, seed: int, c: float, size: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    reduced = torch.randn(size, generator=draw, dtype=torch.float64).to(dtype)
    factor = torch.tensor(c, dtype=dtype)
    assume(bool(((reduced * factor).abs() >= torch.finfo(dtype).tiny).any()))
    found = factors(reduced, reduced * factor)
    assert bits(factor) in {bits(one) for one in found}
    for one in found:
        assert torch.equal(reduced * one, reduced * factor)


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32), c=st.floats(1e-4, 8))
def test_there_is_no_other_with_many_elements(seed: int, c: float) -> None:
    draw = torch.Generator().manual_seed(seed)
    reduced = torch.randn(256, generator=draw)
    factor = torch.tensor(c)
    assert [bits(one) for one in factors(reduced, reduced * factor)] == [bits(factor)]


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("norm", [1e-3, 0.5, 1e9])
def test_clipping(norm: float, foreach: bool) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 3))
    model(torch.randn(5, 30)).square().sum().backward()
    gradients = [p.grad for p in model.parameters()]
    before = torch.cat([g.flatten() for g in gradients if g is not None])
    nn.utils.clip_grad_norm_(model.parameters(), norm, foreach=foreach)
    after = torch.cat([g.flatten() for g in gradients if g is not None])
    (found,) = factors(before[::3], after[::3])
    assert torch.equal(before * found, after)
    assert (found.item() == 1.0) == (norm == 1e9)


def test_zeros_and_tiny_numbers_do_not_mislead() -> None:
    reduced = torch.tensor([0.0, -0.0, 1e-45, 3e-39, 0.7, -1.3])
    factor = torch.tensor(0.3)
    (found,) = [c for c in factors(reduced, reduced * factor) if c == factor]
    assert bits(found) == bits(factor)
    assert [c.item() for c in factors(torch.zeros(4), torch.zeros(4))] == [1.0]


@pytest.mark.parametrize(
    "change",
    [
        lambda g: g + 1e-4 * torch.randn_like(g),
        lambda g: g.clamp(-0.5, 0.5),
        lambda g: torch.cat([g[:128] * 0.3, g[128:] * 0.4]),
        torch.sign,
        torch.zeros_like,
        lambda g: g * 0.3 * 0.7,
    ],
    ids=["noise", "clamped", "two factors", "sign", "zeros", "twice"],
)
def test_what_is_no_multiplication(change: object) -> None:
    torch.manual_seed(0)
    reduced = torch.randn(256)
    consumed = change(reduced)  # type: ignore[operator]
    assert factors(reduced, consumed) == []
