"""Compressed gradients in one process, and what `compress` refuses."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from deltas.compression import ALL, Reference
from everystep.checkpointer import Checkpointer
from everystep.deltas import hooks
from everystep.deltas.compressors import Quantize8, RandomK, TopK
from everystep.deltas.hooks import CompressionHook, compress
from everystep.errors import LayoutMismatch, Unsupported, UsageError
from everystep.strategies import Full


def made(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 4))


def backward(model: nn.Module, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    out: torch.Tensor = model(torch.randn(5, 6, generator=generator))
    out.square().mean().backward()  # type: ignore[no-untyped-call]


def flat_grads(model: nn.Module) -> list[np.ndarray[Any, Any]]:
    found = []
    for parameter in model.parameters():
        assert parameter.grad is not None
        found.append(parameter.grad.detach().clone().view(-1).numpy())
    return found


def step(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter -= 0.1 * parameter.grad


@pytest.mark.parametrize("options", ALL, ids=str)
def test_gradients_are_what_the_formulas_say(options: Any) -> None:
    model, plain = made(), made()
    hook, reference = compress(model, options), Reference(options)
    for number in range(4):
        for each in (model, plain):
            each.zero_grad()
        with hook.no_sync():
            backward(model, 2 * number)
        backward(model, 2 * number + 1)
        backward(plain, 2 * number)
        backward(plain, 2 * number + 1)
        means = [reference.mean(n, [own]) for n, own in enumerate(flat_grads(plain))]
        reference.steps += 1
        for found, mean in zip(flat_grads(model), means, strict=True):
            assert found.tobytes() == mean.tobytes()
        known = hook.known()
        assert bool(known) == (not isinstance(reference.options, type(ALL[6]) | type(ALL[8])))
        for parameter, its in known.items():
            assert its.holds(parameter.grad)
            dense = torch.zeros(parameter.numel())
            dense[its.indices.long()] = its.values
            assert parameter.grad is not None
            assert dense.numpy().tobytes() == parameter.grad.view(-1).numpy().tobytes()
        step(model)
        plain.load_state_dict(model.state_dict())


def test_error_feedback_loses_nothing_over_several_passes() -> None:
    """Without no_sync every pass compresses the sum; the residual keeps the rest."""
    model, plain = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    hook = compress(model, TopK(density=0.1))
    integers = torch.Generator().manual_seed(0)
    for _ in range(3):
        x = torch.randint(-8, 8, (3, 8), generator=integers).float()
        for each in (model, plain):
            each(x).sum().backward()
    grad, residual = model.weight.grad, hook.state_dict()["residuals"]["weight"]
    assert grad is not None and plain.weight.grad is not None
    assert torch.count_nonzero(grad) <= 7
    assert torch.equal(grad + residual, plain.weight.grad)  # whole numbers: sums are exact


def test_clipping_comes_after_compression() -> None:
    model = made()
    hook = compress(model, TopK(density=0.1))
    backward(model, 0)
    known = hook.known()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    assert known and not any(its.holds(p.grad) for p, its in known.items())


def test_a_pass_that_fails_does_not_stop_compression() -> None:
    model = made()
    hook = compress(model, TopK(density=0.1))

    def fail(_: torch.Tensor) -> None:
        raise UsageError("this pass fails")

    handle = model[0].weight.register_hook(fail)  # type: ignore[index, union-attr]
    with pytest.raises(UsageError, match="this pass fails"):
        backward(model, 0)
    handle.remove()
    model.zero_grad()
    backward(model, 1)
    assert len(hook.known()) == 4


def test_an_error_in_the_hook_comes_out_of_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made()
    compress(model, TopK())

    def broken(*_: object) -> None:
        raise UsageError("this hook is broken")

    monkeypatch.setattr(hooks, "start", broken)
    with pytest.raises(UsageError, match="this hook is broken"):
        backward(model, 0)


def test_what_nobody_takes_does_not_pile_up() -> None:
    model = made()
    hook = compress(model, TopK(density=0.1))
    backward(model, 0)
    first = [weakref.ref(its.values) for its in hook._known.values()]
    assert len(first) == 4
    backward(model, 1)
    gc.collect()
    assert [ref() for ref in first] == [None] * 4


def test_what_was_taken_is_never_overwritten() -> None:
    model = made()
    hook = compress(model, TopK(density=0.1))
    backward(model, 0)
    taken = hook.known()
    copies = {p: (its.indices.clone(), its.values.clone()) for p, its in taken.items()}
    for number in range(1, 4):
        model.zero_grad()
        backward(model, number)
    for parameter, (indices, values) in copies.items():
        assert torch.equal(taken[parameter].indices, indices)
        assert torch.equal(taken[parameter].values, values)


def test_another_gradient_at_the_same_address_is_not_taken_for_the_known_one() -> None:
    model = nn.Linear(64, 64, bias=False)
    hook = compress(model, TopK(density=0.1))
    model(torch.randn(2, 64)).sum().backward()
    known = hook.known()[model.weight]
    assert model.weight.grad is not None
    version = model.weight.grad._version
    for _ in range(20):
        model.weight.grad = None
        model.weight.grad = torch.zeros(64, 64)
        while model.weight.grad._version < version:
            model.weight.grad.add_(0)
        assert not known.holds(model.weight.grad)


@pytest.mark.parametrize("options", [TopK(density=0.1), RandomK(density=0.1), Quantize8()], ids=str)
def test_a_restored_hook_goes_on_exactly(options: Any) -> None:
    model, other = made(), made(1)
    hook = compress(model, options)
    for number in range(3):
        model.zero_grad()
        backward(model, number)
        step(model)
    other.load_state_dict(model.state_dict())
    second = compress(other, options)
    second.load_state_dict(hook.state_dict())
    for number in range(3, 6):
        for each in (model, other):
            each.zero_grad()
            backward(each, number)
            step(each)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_hook_is_an_extra_of_a_run(run_dir: Path) -> None:
    def life(model: nn.Module, until: int, ends: int) -> CompressionHook:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        hook = compress(model, TopK(density=0.1))
        strategy = Full(blocking=True)
        extras = {"compressor": hook}
        with Checkpointer(
            run_dir, model=model, optimizer=optimizer, extras=extras, strategy=strategy
        ) as ck:
            for number in range(ck.restore(), ends):
                optimizer.zero_grad()
                backward(model, number)
                optimizer.step()
                if number < until:
                    ck.step()
        return hook

    first, second = made(), made(1)
    one = life(first, 3, 6)
    two = life(second, 6, 6)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    for name, residual in one.state_dict()["residuals"].items():
        assert torch.equal(residual, two.state_dict()["residuals"][name])


def test_a_state_of_something_else_is_refused() -> None:
    hook = compress(made(), TopK())
    state = hook.state_dict()
    with pytest.raises(LayoutMismatch, match="another compressor"):
        compress(made(), TopK(density=0.5)).load_state_dict(state)
    with pytest.raises(LayoutMismatch, match="no parameter"):
        hook.load_state_dict({**state, "residuals": {"9.weight": torch.zeros(1)}})
    with pytest.raises(LayoutMismatch, match="another form"):
        hook.load_state_dict({**state, "residuals": {"0.weight": torch.zeros(1)}})


def test_what_compress_refuses() -> None:
    with pytest.raises(UsageError, match="is not a compressor"):
        compress(made(), "topk")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="requires a gradient"):
        compress(made().requires_grad_(False), TopK())
    with pytest.raises(Unsupported, match="complex64"):
        compress(nn.Linear(2, 2, dtype=torch.complex64), TopK())
    sparse = nn.Embedding(4, 2, sparse=True)
    compress(sparse, TopK())
    with pytest.raises(Unsupported, match="sparse"):
        sparse(torch.tensor([1])).sum().backward()


def test_frozen_and_tied_parameters() -> None:
    model = made()
    model[0].weight.requires_grad_(False)  # type: ignore[index, union-attr]
    model.add_module("tied", nn.Linear(4, 4))
    model.add_module("again", nn.Linear(4, 4))
    model.again.weight = model.tied.weight  # type: ignore[union-attr, assignment]
    hook = compress(model, TopK(density=1.0))
    backward(model, 0)
    assert len(hook.known()) == 6
    assert "again.weight" not in hook.state_dict()["residuals"]
    assert "0.weight" not in hook.state_dict()["residuals"]
