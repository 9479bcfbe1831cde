"""What the forked trainers of tests/crash/test_deltas*.py do: train with every step logged."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import logging
import os
import random
from pathlib import Path
from typing import Any

from crash.staged_scenes import _held, agents_of, die_in, note
from crash.trainer import Board, Job, _join
from everystep import Deltas, Retention
from everystep.agent.tail import Tail

KEEP_ALL = Retention(keep_last=None)


def train(
    run: str,
    total: int,
    board: str,
    rank: int = 0,
    world_size: int = 1,
    meet: str = "",
    policy: str = "block",
    full_every: int = 12,
    batch: int = 4,
    die: tuple[str, int, bool] | None = None,
    keep_all: bool = False,
) -> None:
    """Train from what there is to `total` steps; print the digest of what was restored, and of the
    end, and what became of each step. The board knows what the trainer has been told."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    progress = Board(board)
    if die is not None:
        die_in(die[0], die[1], after=die[2], owners={"Tail": Tail})
    _join(rank, world_size, meet)
    job = Job(rank, world_size)
    strategy = Deltas(
        full_every=full_every, batch=batch, policy=policy, linger_s=20, check=False,  # type: ignore[arg-type]
    )  # fmt: skip
    options: dict[str, Any] = {"retention": KEEP_ALL} if keep_all else {}
    with job.checkpointer(run, strategy=strategy, **options) as ck:
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
    note(progress, ck)
    rows = [[s.step, s.staged, s.durable, s.error, s.stall_s] for s in ck.stats]
    print("stats", json.dumps(rows))
    print("end", total, job.digest(), flush=True)


def many_steps(run: str, steps: int) -> None:
    """Print what this process, its agent and the run hold, now and then: step, resident bytes,
    descriptors and threads of the trainer, the same of the agent, and bytes and files of the
    log."""
    job = Job()
    strategy = Deltas(full_every=50, batch=8, linger_s=1, check=False)
    with job.checkpointer(run, strategy=strategy, retention=Retention(keep_last=3)) as ck:
        ck.restore()
        for step in range(1, steps + 1):
            job.step(1)
            ck.step(loss=random.random())
            if step == 1 or step % (steps // 20) == 0:
                (agent,) = agents_of(run)
                logs = sizes(Path(run, "logs"), "*.log")
                held = [*_held(os.getpid()), *_held(agent), sum(logs), len(logs)]
                print(json.dumps([step, *held]), flush=True)
        ck.steps()
    assert all(s.durable for s in ck.stats), [s for s in ck.stats if not s.durable]
    assert not agents_of(run)
    print(json.dumps(len(os.listdir("/proc/self/fd"))), flush=True)


def sizes(folder: Path, pattern: str) -> list[int]:
    """Of files below a folder; retention may remove some meanwhile."""
    found = []
    for place, _, names in os.walk(folder):  # which passes over folders that have just gone
        for name in fnmatch.filter(names, pattern):
            with contextlib.suppress(FileNotFoundError):
                found.append(Path(place, name).stat().st_size)
    return found


def reference(total: int, rank: int = 0, world_size: int = 1, meet: str = "") -> None:
    """Train without this library; print the digest of every step."""
    _join(rank, world_size, meet)
    job = Job(rank, world_size)
    for step in range(total + 1):
        if step:
            job.step(1)
        print(job.digest())
