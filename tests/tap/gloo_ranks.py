"""Ranks of real gloo process groups, whose traffic is recorded; started by the zygote."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from exact.ranks import leave


def _join(rank: int, world_size: int, folder: str, interface: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    store = dist.FileStore(str(Path(folder) / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


def all_reduces(
    rank: int, world_size: int, folder: str, counts: list[int], together: bool, interface: str
) -> None:
    """All-reduce float32 tensors of `counts` elements, one after the other or all at a time; rank 0
    leaves what it got."""
    _join(rank, world_size, folder, interface)
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


def train(rank: int, world_size: int, folder: str, iterations: int, interface: str) -> None:
    """A small model under DDP, with several buckets; rank 0 leaves every gradient, by parameter."""
    _join(rank, world_size, folder, interface)
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
