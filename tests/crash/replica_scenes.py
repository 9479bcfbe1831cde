"""What the forked trainers of tests/crash/test_replica.py do: train with a second copy of the state
in the agent."""

from __future__ import annotations

import copy
import json
import logging
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from crash.logged_scenes import sizes
from crash.staged_scenes import _held, agents_of, die_in, note
from crash.trainer import Board, Job, Loader, _join
from everystep import Checkpointer, Deltas, Replica, Retention
from everystep.agent.tail import Tail
from recovery.own_optimizer import Halving
from waiting import until


class Sharded(Job):
    """Under FSDP2: each rank holds its shard of every parameter, and trains on data of its own."""

    def __init__(self, rank: int, world_size: int) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(8, 15), nn.LayerNorm(15), nn.Dropout(0.3), nn.Linear(15, 4)]
        self.model = nn.Sequential(*layers)
        fully_shard(self.model[0])
        fully_shard(self.model)
        torch.manual_seed(1 + rank)
        random.seed(rank)
        np.random.seed(rank)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=50)
        self.loader = Loader(rank)

    def digest(self) -> str:
        """Of every bit that this rank holds."""
        local: Any = copy.copy(self)
        local.model, local.optimizer = _Local(self.model), _Local(self.optimizer)
        return Job.digest(local)


class _Local:
    """Tells the state of a thing with this rank's shards in the place of whole tensors."""

    def __init__(self, of: Any) -> None:
        self._of = of

    def state_dict(self) -> Any:
        return _to_local(self._of.state_dict())


def _to_local(thing: Any) -> Any:
    if isinstance(thing, DTensor):
        return thing.to_local()
    if isinstance(thing, dict):
        return {key: _to_local(value) for key, value in thing.items()}
    return [_to_local(item) for item in thing] if isinstance(thing, list) else thing


def _job(rank: int, world_size: int, *, sharded: bool) -> Job:
    return Sharded(rank, world_size) if sharded else Job(rank, world_size)


def reference(total: int, rank: int, world_size: int, meet: str, sharded: bool = False) -> None:
    """Train without this library; print the digest of every step."""
    _join(rank, world_size, meet)
    job = _job(rank, world_size, sharded=sharded)
    for step in range(total + 1):
        if step:
            job.step(1)
        print(job.digest())


def train(
    run: str,
    total: int,
    board: str,
    rank: int = 0,
    world_size: int = 1,
    meet: str = "",
    policy: str = "block",
    persist_every: int = 7,
    logs: bool = False,
    linger_s: float = 40,
    die: tuple[str, int, bool] | None = None,
    catch_up_every: int = 0,
    sharded: bool = False,
    compacts_every: int = 0,
) -> None:
    """Train from what there is to `total` steps; print the digest of what was restored, of each
    step, and of the end, and what became of each step.

    Args:
        catch_up_every: after so many steps, wait until one of them is durable.
        sharded: under FSDP2.
        compacts_every: log deltas, and let the agent make a full checkpoint of every so many steps.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    progress = Board(board)
    if die is not None:
        die_in(die[0], die[1], after=die[2], owners={"Tail": Tail})
    _join(rank, world_size, meet)
    job = _job(rank, world_size, sharded=sharded)
    strategy: Replica | Deltas
    if compacts_every:
        strategy = Deltas(full_every=compacts_every, compact=True, batch=1, linger_s=linger_s)
    else:
        strategy = Replica(persist_every=persist_every, log=logs, policy=policy, linger_s=linger_s)  # type: ignore[arg-type]
    with job.checkpointer(run, strategy=strategy, retention=Retention(keep_last=None)) as ck:
        done = ck.restore()
        print("restored", done, job.digest(), flush=True)
        progress["restored"] = done
        for step in range(done + 1, total + 1):
            progress.await_leave(step - done)
            progress["place"] = Board.TRAINING
            job.step(1)
            print("at", step, job.digest(), flush=True)
            progress["place"] = Board.SAVING
            ck.step(loss=step / 3)
            progress["returned"] = step
            note(progress, ck)
            if catch_up_every and step % catch_up_every == 0:
                until(lambda: has_caught_up(ck, step - catch_up_every), 60, "a durable step")  # noqa: B023
    note(progress, ck)
    rows = [[s.step, s.staged, s.durable, s.error, s.stall_s] for s in ck.stats]
    print("stats", json.dumps(rows))
    print("end", total, job.digest(), flush=True)


def durable(ck: Checkpointer) -> int:
    """The newest durable step."""
    return max((s.step for s in ck.stats if s.durable), default=0)


def has_caught_up(ck: Checkpointer, step: int) -> bool:
    """Whether a later step than this one is durable, or nobody has a copy now."""
    session: Any = ck._session
    return durable(ck) > step or session._lost is not None


def own_optimizer(run: str, steps: int) -> None:
    """Train with an optimizer that only this process's paths lead to; print what became of it."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    job = Job()
    job.optimizer = Halving(job.model.parameters())
    job.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(job.optimizer, T_max=50)
    with job.checkpointer(run, strategy=Replica(persist_every=4, linger_s=1)) as ck:
        ck.restore()
        for _ in range(steps):
            job.step(1)
            ck.step()
    print(json.dumps([s.durable for s in ck.stats]))


def many_steps(run: str, steps: int) -> None:
    """Print what this process, its agent and the run hold, now and then: step, resident bytes,
    descriptors and threads of the trainer, the same of the agent, bytes of the run, and by how many
    steps the newest durable one was behind."""
    job = Job()
    strategy = Replica(persist_every=20, linger_s=1)
    with job.checkpointer(run, strategy=strategy, retention=Retention(keep_last=3)) as ck:
        ck.restore()
        for step in range(1, steps + 1):
            job.step(1)
            ck.step(loss=random.random())
            if step == 1 or step % (steps // 20) == 0:
                (agent,) = agents_of(run)
                nbytes = sum(sizes(Path(run), "*.safetensors"))
                held = [*_held(os.getpid()), *_held(agent), nbytes, step - durable(ck)]
                print(json.dumps([step, *held]), flush=True)
    assert ck.stats[-1].durable
    assert not agents_of(run)
    print(json.dumps(len(os.listdir("/proc/self/fd"))), flush=True)
