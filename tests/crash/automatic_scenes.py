"""What the forked trainers of tests/crash/test_automatic.py do: train with `auto`, which changes
after certain steps, and die beside a change."""

from __future__ import annotations

import logging

import pytest

from crash.staged_scenes import die_in
from crash.trainer import Job
from everystep import Retention
from planted import after_steps

PLAN = {4: "deltas", 8: "replica", 12: "full"}
LAST = 16


def train(run: str, die: tuple[str, int, bool] | None = None) -> None:
    """Train to the last step; print the digest of what was restored and of each step."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    if die is not None:
        die_in(die[0], die[1], after=die[2])
    job = Job()
    with pytest.MonkeyPatch.context() as patch:
        after_steps(patch, PLAN)  # type: ignore[arg-type]
        with job.checkpointer(run, strategy="auto", retention=Retention(keep_last=None)) as ck:
            done = ck.restore()
            print("at", done, job.digest(), flush=True)
            for step in range(done + 1, LAST + 1):
                job.step(1)
                ck.step()
                print("at", step, job.digest(), flush=True)
