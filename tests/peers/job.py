"""What each rank of a job of several hosts does: it tells the digest of its state at each step."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import logging
import os
import select
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from everystep import Checkpointer, Peers, Replica, Retention
from peers.hosts import move_to
from waiting import until


def tensors(value: Any) -> list[torch.Tensor]:
    """All tensors in a state, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else value
    if isinstance(value, dict | list | tuple):
        return [tensor for one in inner for tensor in tensors(one)]
    return []


PACE_S = 0.02
"""Between two steps: it leaves the processors to agents that start."""

PATIENCE_S = 120.0

MOST_ON_THEIR_WAY, STILL_S = 5, 5.0
"""So many steps may have been handed over and not been folded: an agent that stands still for so
long is waited for, since a lost host costs what is on its way."""


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


def wait_for_agent(ck: Any) -> None:
    """Let it fold, if it can: where a host is gone, the others find out by training."""
    log = ck._agent.log
    with contextlib.suppress(TimeoutError):
        until(lambda: len(log.unsaved()) <= MOST_ON_THEIR_WAY, STILL_S, "steps to be folded")


def train(
    host: str,
    run: str,
    rank: int,
    world_size: int,
    master: str,
    port: int,
    steps: int,
    reference: bool = False,
) -> None:
    """Train from what there is to `steps` steps, with a copy of each rank's state elsewhere.

    Args:
        host: where.
        master: the address of rank 0's host.
        reference: then do it once more, from the start and without this library.
    """
    move_to(host)
    os.environ["MASTER_ADDR"] = master
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{master}:{port}",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=PATIENCE_S),  # agents of all ranks may start meanwhile
    )
    job = Job(rank)
    strategy = Replica(persist_every=100_000, peers=Peers(copies=2))
    ck = Checkpointer(
        run, model=job.model, optimizer=job.optimizer, strategy=strategy,
        retention=Retention(keep_last=None),
    )  # fmt: skip
    done = ck.restore()
    print(f"restored {done} {job.digest()}", flush=True)
    for step in range(done + 1, steps + 1):
        select.select([], [], [], PACE_S)
        job.step()
        ck.step()
        wait_for_agent(ck)
        print(f"step {step} {job.digest()}", flush=True)
    if reference:
        job = Job(rank)
        for step in range(1, steps + 1):
            job.step()
            print(f"reference {step} {job.digest()}", flush=True)
        print("done", flush=True)
    ck.close()
