"""What a sample of gradients tells of all of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from everystep.deltas.encodings import encode
from everystep.engine.sampling import Gradients, Sampler


def trained(*gradients: torch.Tensor) -> torch.optim.Optimizer:
    parameters = [nn.Parameter(torch.zeros_like(g)) for g in gradients]
    return torch.optim.SGD(parameters, lr=0.1)


def give(optimizer: torch.optim.Optimizer, *gradients: torch.Tensor) -> None:
    for p, gradient in zip(optimizer.param_groups[0]["params"], gradients, strict=True):
        p.grad = gradient


def seen(*gradients: torch.Tensor) -> Gradients:
    """Of steps that all have gradients like these."""
    optimizer = trained(*gradients)
    sampler = Sampler([optimizer])
    sampler.ask()
    for _ in range(2):
        assert sampler.answer() is None
        give(optimizer, *(g.clone() for g in gradients))
        optimizer.step()
    found = sampler.answer()
    sampler.close()
    assert found is not None
    return found


def exactly(*gradients: torch.Tensor) -> int:
    coded = [encode(g, 0, g.numel()) for g in gradients]
    return sum(len(one.gaps) + len(one.values) for one in coded)


def sparse(*shape: int, density: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(shape, generator=generator)
    kept = torch.rand(shape, generator=generator) < density
    return torch.where(kept, values, 0.0)  # a product would hold -0.0, which counts


def test_dense_gradients_take_what_they_have() -> None:
    gradients = [torch.randn(300, 700), torch.randn(50)]
    nbytes = sum(g.nbytes for g in gradients)
    assert seen(*gradients) == Gradients(nbytes, nbytes, True)


@pytest.mark.parametrize("density", [0.001, 0.01, 0.1])
def test_sparse_ones_take_less(density: float) -> None:
    gradients = [sparse(900, 1100, density=density), torch.zeros(400_000)]
    found = seen(*gradients)
    assert found.nbytes == sum(g.nbytes for g in gradients)
    # of 64 blocks of 4,096: about a sixth of all, each with a few places at the least density
    assert abs(found.coded_bytes / exactly(*gradients) - 1) < (0.25 if density < 0.01 else 0.1)


def test_few_elements_are_all_looked_at() -> None:
    found = seen(sparse(8, 5, density=0.5))
    assert 0 < found.coded_bytes <= found.nbytes == 160


def test_layouts_and_types() -> None:
    turned = sparse(4, 40, 30, 20, density=0.01).to(memory_format=torch.channels_last)
    halves = torch.zeros(5000, dtype=torch.bfloat16)
    apart = torch.sparse_coo_tensor(
        torch.tensor([[1, 5]]), torch.ones(2, 8), (9, 8), check_invariants=True
    )
    assert seen(turned).coded_bytes < turned.nbytes / 5
    assert seen(halves).nbytes == 10_000
    optimizer = trained(torch.zeros(9, 8), torch.zeros(3))
    sampler = Sampler([optimizer])
    sampler.ask()
    for _ in range(2):
        give(optimizer, apart.clone(), torch.randn(3))
        optimizer.step()
    assert sampler.answer() == Gradients(2 * 8 + 16 * 4 + 12, 2 * 8 + 16 * 4 + 12, True)


def test_gradients_that_are_kept_do_not_last() -> None:
    gradient = torch.ones(10)
    optimizer = trained(gradient)
    sampler = Sampler([optimizer])
    sampler.ask()
    give(optimizer, gradient)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    gradient += 1.0
    optimizer.step()
    found = sampler.answer()
    assert found is not None and not found.lasting


def test_it_looks_when_it_is_asked_and_only_then() -> None:
    optimizer = trained(torch.ones(10))
    sampler = Sampler([optimizer])
    for _ in range(3):
        give(optimizer, torch.ones(10))
        optimizer.step()
        assert sampler.answer() is None
    sampler.ask()
    optimizer.zero_grad()
    for _ in range(3):
        optimizer.step()  # with nothing
    assert sampler.answer() is None
    sampler.close()
    assert not optimizer._optimizer_step_pre_hooks
