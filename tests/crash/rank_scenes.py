"""What each rank does in tests/crash/test_ranks.py; what it finds is printed as JSON."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from crash.trainer import Board, Job
from everystep import Checkpointer, Retention
from everystep.errors import EverystepError
from everystep.store import local
from faults import Faults, installed
from waiting import until


def begin(rank: int, world_size: int, meet: str) -> None:
    """Join the group, and log to where the prints go."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    local.LOCK_PATIENCE_S = 0.3
    if world_size > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{meet}", rank=rank, world_size=world_size
        )


def tell(**facts: object) -> None:
    """One line for the test."""
    print(json.dumps(facts), flush=True)


def _told(act: Callable[[], object]) -> None:
    """Print what `act` returns or raises."""
    try:
        tell(result=act())
    except EverystepError as error:
        tell(raised=type(error).__name__, text=str(error))


def _steps(job: Job, ck: Checkpointer, count: int) -> None:
    for _ in range(count):
        job.step()
        ck.step()


def plain(rank: int, world_size: int, meet: str, run: str, steps: int) -> None:
    """Restore and train on."""
    begin(rank, world_size, meet)
    job = Job(rank, world_size)
    with job.checkpointer(run) as ck:
        try:
            done = ck.restore()
        except EverystepError as error:
            tell(raised=type(error).__name__, text=str(error))
            return
        tell(restored=done, digest=job.digest())
        _steps(job, ck, steps)
        tell(digest=job.digest(), errors=[s.step for s in ck.stats if s.error])


def write_fails(rank: int, world_size: int, meet: str, run: str, call: str, number: int) -> None:
    """The third step cannot be written on rank 1."""
    begin(rank, world_size, meet)
    job, faults = Job(rank, world_size), Faults()
    with installed(faults), job.checkpointer(run, retention=Retention(keep_last=None)) as ck:
        ck.restore()
        _steps(job, ck, 2)
        if rank == 1:
            faults.at(call, 1, number)
        _steps(job, ck, 1)
        faults.watch()
        _steps(job, ck, 2)
        tell(fired=faults.fired, failed=[s.step for s in ck.stats if not s.durable])


def diverge(rank: int, world_size: int, meet: str, run: str) -> None:
    """From the third step on, a parameter differs on rank 1 (by a bit that no rounding removes)."""
    begin(rank, world_size, meet)
    job = Job(rank, world_size)
    with job.checkpointer(run, retention=Retention(keep_last=None)) as ck:
        ck.restore()
        _steps(job, ck, 2)
        if rank == 1:
            with torch.no_grad():
                next(job.model.parameters()).view(torch.int32)[0, 0] ^= 1 << 18
        for _ in range(4):
            _steps(job, ck, 1)
            dist.barrier()
        tell(digest=job.digest(), written=[s.written_bytes for s in ck.stats])


def slow(rank: int, world_size: int, meet: str, run: str, board: str) -> None:
    """Rank 1 takes as long for the fsync of its second step as rank 0 for twenty steps."""
    begin(rank, world_size, meet)
    job, faults, progress = Job(rank), Faults(), Board(board)
    with installed(faults), job.checkpointer(run) as ck:
        ck.restore()
        _steps(job, ck, 1)
        if rank == 1:
            faults.call_at(5, lambda: until(lambda: progress["returned"] == 21, 60, "rank 0"))
        for _ in range(20):
            _steps(job, ck, 1)
            if rank == 0:
                progress["returned"] = ck.stats[-1].step
        tell(fired=faults.fired, digest=job.digest())


def only_rank_0(rank: int, world_size: int, meet: str, run: str) -> None:
    """`if rank == 0: ck.step()`, as with other tools."""
    begin(rank, world_size, meet)
    job = Job(rank)
    with job.checkpointer(run) as ck:
        _told(ck.step)
        ck.restore()
        if rank == 0:
            _steps(job, ck, 40)
        dist.barrier()
        tell(steps=ck.steps())


def disagree(rank: int, world_size: int, meet: str, run: str, other: str) -> None:
    """Ranks call restore() with other arguments, or look into other directories."""
    begin(rank, world_size, meet)
    job = Job(rank, world_size)
    with job.checkpointer(run) as ck:
        _told(lambda: ck.restore(1 if rank == 0 else 2))
        _told(lambda: ck.restore(required=rank == 0))
        _told(lambda: ck.restore(strict=rank == 0))
        _told(lambda: ck.restore(required=True))
        _told(ck.restore)
    with job.checkpointer(other if rank else run) as ck:
        _told(ck.restore)
    with job.checkpointer(run) as ck:
        _told(ck.restore)


def busy(rank: int, world_size: int, meet: str, run: str) -> None:
    """Another process has the run."""
    begin(rank, world_size, meet)

    def make() -> None:
        Job().checkpointer(run)

    _told(make)


def told(said: str) -> list[dict[str, Any]]:
    """The lines that `tell` has printed."""
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")]
