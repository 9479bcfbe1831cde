"""What the forked trainers of tests/crash/test_staged*.py do: train with an agent beside them."""

from __future__ import annotations

import itertools
import json
import logging
import os
import random
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from crash.trainer import Board, Job, _join
from everystep import Checkpointer, Full, stats
from everystep.agent.client import Agent
from everystep.engine.capture import Capture

WIDTH = 12_000
"""Wide enough for tensors that are copied one by one, in several tasks."""

_OWNERS = {"Agent": Agent, "Capture": Capture}


def agents_of(run: str | Path) -> list[int]:
    """The processes that are agents of a run."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                words = Path("/proc", name, "cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue  # it has ended since the listing
            if "everystep.agent.server" in words and f'"{run}"' in words[-2]:
                found.append(int(name))
    return found


def sockets_of(run: str) -> list[str]:
    """The names at which agents of a run (by its identity) listen."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    return [line.split()[-1] for line in lines if f"/{run}/" in line]


def reference(total: int, rank: int = 0, world_size: int = 1, meet: str = "") -> None:
    """Train without this library; print the digest of every step."""
    _join(rank, world_size, meet)
    job = Job(rank, world_size, WIDTH)
    for step in range(total + 1):
        if step:
            job.step(1)
        print(job.digest())


def die_in(where: str, nth: int, *, after: bool, owners: Mapping[str, type] = _OWNERS) -> None:
    """Die in the n-th call of a method, by default of the engine or of the agent's client.

    Args:
        where: such as `Capture.before_update`.
        after: when it returns, and not before it does anything.
        owners: classes, by name.
    """
    owner, _, name = where.partition(".")
    real: Callable[..., Any] = getattr(owners[owner], name)
    calls = itertools.count(1)

    def call(*arguments: Any, **options: Any) -> Any:
        last = next(calls) == nth
        result = None if last and not after else real(*arguments, **options)
        if last:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owners[owner], name, call)


def train(
    run: str,
    total: int,
    board: str,
    rank: int = 0,
    world_size: int = 1,
    meet: str = "",
    policy: str = "block",
    linger_s: float = 20,
    die: tuple[str, int, bool] | None = None,
    **options: Any,
) -> None:
    """Train from what there is to `total` steps; print the digest of what was restored, and of the
    end, and what became of each step. The board knows what the trainer has been told."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    progress = Board(board)
    if die is not None:
        die_in(die[0], die[1], after=die[2])
    _join(rank, world_size, meet)
    job = Job(rank, world_size, WIDTH)
    strategy = Full(every=1, policy=policy, linger_s=linger_s)  # type: ignore[arg-type]
    with job.checkpointer(run, strategy=strategy, **options) as ck:
        done = ck.restore()
        print("restored", done, job.digest(), flush=True)
        progress["restored"] = done
        for step in range(done + 1, total + 1):
            progress.await_leave(step - done)
            progress["place"] = Board.TRAINING
            job.step(1)
            progress["place"] = Board.SAVING
            ck.step(loss=step / 3)
            progress["returned"] = step
            note(progress, ck)
    note(progress, ck)
    rows = [[s.step, s.staged, s.durable, s.error, s.stall_s] for s in ck.stats]
    print("stats", json.dumps(rows))
    print("end", total, job.digest(), flush=True)


def note(progress: Board, ck: Checkpointer) -> None:
    """Tell the board what the trainer knows."""
    for field in ("staged", "durable"):
        found = [s.step for s in ck.stats if getattr(s, field)]
        progress[field] = max(found, default=-1)


def many_steps(run: str, steps: int, kept: int) -> None:
    """Print what this process and its agent hold, at the first step, now and then, and at the end:
    step, resident bytes, descriptors and threads of the trainer, and the same of the agent.

    Args:
        kept: of how many of the newest steps this process keeps statistics.
    """
    stats.KEPT_STEPS = kept
    job = Job()
    every = max(1, steps // 20)
    with job.checkpointer(run, strategy=Full(every=1, policy="block")) as ck:
        ck.restore()
        for step in range(1, steps + 1):
            job.step(1)
            ck.step(loss=random.random())
            if step == 1 or step % every == 0:
                (agent,) = agents_of(run)
                held = [*_held(os.getpid()), *_held(agent)]
                print(json.dumps([step, *held]), flush=True)
        assert all(s.staged for s in ck.stats[:-2])
    assert not agents_of(run)
    print(json.dumps(len(os.listdir("/proc/self/fd"))), flush=True)


def _held(pid: int) -> tuple[int, int, int]:
    status = Path("/proc", str(pid), "status").read_text()
    anonymous = int(status.split("RssAnon:")[1].split()[0]) << 10  # staging memory is not counted
    fds, threads = (len(os.listdir(f"/proc/{pid}/{name}")) for name in ("fd", "task"))
    return anonymous, fds, threads
