"""DDP's buckets as they are told: the same parameters as a communication hook sees them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from everystep.engine.bucket_layout import last_collective, layout
from everystep.errors import Unsupported
from everystep.state.names import names_of
from exact.ranks import leave

Seen = list[tuple[tuple[str, ...], tuple[int, ...], str]]

SMALL_MB = 0.0003


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    leave()


class Net(nn.Module):
    """Some layers; one that is not always used, two that share a weight, some that are frozen."""

    def __init__(self, *, frozen: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.side = nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)
        if frozen:
            self.first.requires_grad_(False)
        if tied:
            self.last.weight = self.first.weight
        self.uses_side = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x))
        if self.uses_side:
            x = self.side(x)
        last: torch.Tensor = self.last(x)
        return last


def follow(ddp: DistributedDataParallel) -> Seen:
    """What each all-reduce holds from now on, in the order of launch, by a hook."""
    names = {id(p): name for name, p in ddp.module.named_parameters()}
    seen: Seen = []

    def hook(bucket: Any) -> torch.futures.Future[torch.Tensor]:
        parameters = bucket.parameters()
        gradients = [gradient.flatten() for gradient in bucket.gradients()]
        assert torch.equal(torch.cat(gradients), bucket.buffer())  # nothing lies between
        seen.append(
            (
                tuple(names[id(p)] for p in parameters),
                tuple(len(gradient) for gradient in gradients),
                str(bucket.buffer().dtype).removeprefix("torch."),
            )
        )
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp.register_comm_hook(None, lambda _, bucket: hook(bucket))  # annotations must not be text
    return seen


@pytest.mark.parametrize(
    ("told", "of_net"),
    [
        ({}, {}),
        ({"bucket_cap_mb": SMALL_MB}, {}),
        ({"bucket_cap_mb": SMALL_MB, "find_unused_parameters": True}, {}),
        ({"bucket_cap_mb": SMALL_MB, "static_graph": True}, {}),
        ({"bucket_cap_mb": SMALL_MB, "gradient_as_bucket_view": True}, {}),
        ({"bucket_cap_mb": SMALL_MB}, {"frozen": True}),
        ({"bucket_cap_mb": SMALL_MB}, {"tied": True}),
    ],
    ids=["one", "many", "unused", "static", "views", "frozen", "tied"],
)
def test_the_layout_is_that_of_the_backward_before(
    group: None, told: dict[str, Any], of_net: dict[str, bool]
) -> None:
    net = Net(**of_net)
    ddp = DistributedDataParallel(net, **told)
    names = names_of(ddp, 1)
    seen = follow(ddp)
    layouts = set()
    for step in range(5):
        net.uses_side = step % 2 == 0 or "find_unused_parameters" not in told
        seen.clear()
        if "static_graph" not in told:
            with ddp.no_sync():
                ddp(torch.randn(4, 8)).sum().backward()
        assert not seen
        ddp(torch.randn(4, 8)).sum().backward()
        before = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
        found = layout(ddp, names)
        assert [*found] == seen
        layouts.add(found)
        for parameter, gradient in zip(net.parameters(), before, strict=True):
            assert (gradient is None) == (parameter.grad is None)
            assert gradient is None or torch.equal(gradient, parameter.grad)
        assert {name for bucket in found for name in bucket.names} == {
            name for name, p in net.named_parameters() if p.requires_grad
        }
    assert (len(layouts) == 1) == ("find_unused_parameters" in told)
    assert (len(found) == 1) == (not told)
    del ddp, seen


def test_the_layout_is_known_before_the_first_backward(group: None) -> None:
    net = Net()
    ddp = DistributedDataParallel(net, bucket_cap_mb=SMALL_MB, find_unused_parameters=True)
    told = layout(ddp, names_of(ddp, 1))
    seen = follow(ddp)
    ddp(torch.randn(4, 8)).sum().backward()
    assert [*told] == seen
    del ddp, seen


def test_collectives_are_counted_as_gloo_numbers_them(group: None) -> None:
    ddp = DistributedDataParallel(nn.Linear(8, 8))
    before = last_collective(ddp)
    assert before is not None
    dist.all_reduce(torch.zeros(1))
    dist.barrier()
    assert last_collective(ddp) == before + 2
    ddp(torch.randn(4, 8)).sum().backward()
    assert last_collective(ddp) == before + 3  # one bucket, at first
    del ddp


def test_what_cannot_be_told_is_refused(group: None) -> None:
    net = Net()
    ddp = DistributedDataParallel(net)
    with pytest.raises(Unsupported, match="does not hold"):
        layout(ddp, names_of(Net(), 1))
    shared = nn.ParameterList([nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))])
    shared[1].data = shared[0].data
    twins = DistributedDataParallel(shared)
    with pytest.raises(Unsupported, match="share their memory"):
        layout(twins, names_of(twins, 1))
    del ddp, twins


def test_sparse_gradients_are_refused(group: None) -> None:
    ddp = DistributedDataParallel(nn.Embedding(10, 3, sparse=True))
    names = names_of(ddp, 1)
    with pytest.raises(Unsupported, match="does not tell"):
        layout(ddp, names)
    ddp(torch.arange(4)).sum().backward()
    with pytest.raises(Unsupported, match="sparse"):
        layout(ddp, names)
    del ddp
