"""Ranks of real gloo process groups, whose traffic is recorded; started by the zygote."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from everystep.engine.bucket_layout import last_collective, layout
from everystep.state.names import names_of
from exact.ranks import leave
from peers.hosts import enter


def _join(rank: int, world_size: int, folder: str, network: str) -> None:
    enter(network)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(Path(folder) / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


def all_reduces(
    rank: int, world_size: int, folder: str, counts: list[int], together: bool, network: str
) -> None:
    """All-reduce float32 tensors of `counts` elements, one after the other or all at a time; rank 0
    leaves what it got."""
    _join(rank, world_size, folder, network)
    made = torch.Generator().manual_seed(rank)
    tensors = [torch.randn(count, generator=made) for count in counts]
    works = []
    for tensor in tensors:
        work = dist.all_reduce(tensor, async_op=True)
        works.append(work)
        if not together:
            work.wait()
    for work in works:
        work.wait()
    if rank == 0:
        for i, tensor in enumerate(tensors):
            np.save(Path(folder) / f"reduced-{i}.npy", tensor.numpy())
    dist.barrier()
    leave()


def train(rank: int, world_size: int, folder: str, iterations: int, network: str) -> None:
    """A small model under DDP, with several buckets; rank 0 leaves every gradient, by parameter."""
    _join(rank, world_size, folder, network)
    _train(rank, folder, iterations)
    dist.barrier()
    leave()


def _train(rank: int, folder: str, iterations: int) -> None:
    torch.manual_seed(7)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 300),
        torch.nn.Tanh(),
        torch.nn.Linear(300, 300),
        torch.nn.Linear(300, 9),
    )
    wrapped = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.2)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(rank)
    for iteration in range(iterations):
        optimizer.zero_grad()
        wrapped(torch.randn(8, 64, generator=data)).square().mean().backward()
        if rank == 0:
            gradients = [parameter.grad.flatten().numpy() for parameter in model.parameters()]
            np.savez(Path(folder) / f"gradients-{iteration}.npz", *gradients)
        optimizer.step()


WAYS: dict[str, dict[str, bool]] = {
    "plain": {},
    "loss": {},
    "no_sync": {},
    "accumulated": {},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "views": {"gradient_as_bucket_view": True},
}
"""How `train_and_tell` trains, and what DDP is told for that."""


class _Net(torch.nn.Module):
    """Four layers, of which one is not used at every second call."""

    def __init__(self, *, skips: bool) -> None:
        super().__init__()
        self.first = torch.nn.Linear(64, 300)
        self.second = torch.nn.Linear(300, 300)
        self.side = torch.nn.Linear(300, 300)
        self.last = torch.nn.Linear(300, 9)
        self._skips, self._calls = skips, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._calls += 1
        x = self.second(self.first(x).tanh())
        if not self._skips or self._calls % 2:
            x = x + self.side(x)
        last: torch.Tensor = self.last(x)
        return last


def train_and_tell(
    rank: int, world_size: int, folder: str, iterations: int, way: str, network: str
) -> None:
    """Train in one of `WAYS`; rank 0 leaves every gradient by name, and what a trainer would tell:
    for each step the buckets of each backward that reduced, and the last collective's number."""
    _join(rank, world_size, folder, network)
    told = _train_and_tell(rank, Path(folder), iterations, way)
    if rank == 0:
        (Path(folder) / "told.json").write_text(json.dumps(told))
    dist.barrier()
    leave()


def _train_and_tell(rank: int, folder: Path, iterations: int, way: str) -> list[object]:
    torch.manual_seed(7)
    net = _Net(skips=way == "unused")
    ddp = torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.3, **WAYS[way])
    names = names_of(ddp, dist.get_world_size())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(rank)
    told: list[object] = []
    for iteration in range(iterations):
        optimizer.zero_grad()
        backwards = []
        passes = 2 if way in ("no_sync", "accumulated") else 1
        for i in range(passes):
            is_local = way == "no_sync" and i + 1 < passes
            with ddp.no_sync() if is_local else contextlib.nullcontext():
                loss = ddp(torch.randn(8, 64, generator=data)).square().mean()
                loss.backward()
            if not is_local:
                backwards.append(layout(ddp, names))
            if way == "loss":
                dist.all_reduce(loss.detach().clone())
        told.append([backwards, last_collective(ddp)])
        if rank == 0:
            gradients = {
                name: parameter.grad.flatten().numpy()
                for name, parameter in net.named_parameters()
                if parameter.grad is not None
            }
            np.savez(folder / f"gradients-{iteration}.npz", **gradients)
        optimizer.step()
        if way == "loss":
            dist.broadcast(torch.zeros(3), 0)
            dist.all_reduce(torch.ones(sum(told[-1][0][0][0].sizes)))  # as large as a bucket
    return told
