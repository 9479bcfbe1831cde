"""One rank of a job of several hosts: a program, which tells the digest of its state at each
step."""

from __future__ import annotations

import datetime
import hashlib
import logging
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from everystep import Checkpointer, Peers, Replica, Retention


def tensors(value: Any) -> list[torch.Tensor]:
    """All tensors in a state, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else value
    if isinstance(value, dict | list | tuple):
        return [tensor for one in inner for tensor in tensors(one)]
    return []


class Job:
    """A model that is trained under DDP, on data that are drawn from torch's generator."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(7)
        layers = [nn.Linear(48, 96), nn.Tanh(), nn.Linear(96, 64), nn.Tanh(), nn.Linear(64, 8)]
        self.model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.model(torch.zeros(16, 48)).sum().backward()  # DDP arranges its buckets now
        torch.manual_seed(100 + rank)

    def step(self) -> None:
        loss = self.model(torch.randn(16, 48)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def digest(self) -> str:
        """Of everything that a restore must bring back."""
        state = [self.model.state_dict(), self.optimizer.state_dict(), torch.get_rng_state()]
        found = hashlib.sha256()
        for tensor in tensors(state):
            found.update(tensor.contiguous().numpy().tobytes())
        return found.hexdigest()[:16]


def main() -> None:
    run, rank, world_size, master, port, steps, kind = sys.argv[1:]
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{master}:{port}",
        rank=int(rank),
        world_size=int(world_size),
        timeout=datetime.timedelta(seconds=15),
    )
    job = Job(int(rank))
    if kind == "plain":
        for step in range(1, int(steps) + 1):
            job.step()
            print(f"step {step} {job.digest()}", flush=True)
        return
    peers = None if kind == "alone" else Peers(copies=2)
    strategy = Replica(persist_every=100_000, peers=peers)
    ck = Checkpointer(
        run, model=job.model, optimizer=job.optimizer, strategy=strategy,
        retention=Retention(keep_last=None),
    )  # fmt: skip
    done = ck.restore()
    print(f"restored {done} {job.digest()}", flush=True)
    for step in range(done + 1, int(steps) + 1):
        job.step()
        ck.step()
        print(f"step {step} {job.digest()}", flush=True)
    ck.close()
    print("closed", flush=True)


if __name__ == "__main__":
    main()
