"""Restore from the agent's memory after the trainer was killed, beside the same files cold.

A child trains a step and is killed (SIGKILL); this process, with its objects at hand, is the
restart. Once it comes when the agent has made all durable, as after a restart that takes seconds;
and once at the instant of the kill, when `restore` also waits until the agent has written what it
holds.
"""

from __future__ import annotations

import mmap
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

import everystep
from benchmarks.common import (
    HOME,
    Setting,
    bytes_of,
    forget,
    make_state,
    page_aligned,
    plain_read,
    settle,
    tensors_of,
    timed,
)
from benchmarks.figures import Figure, median_of
from benchmarks.limits import copy_whole
from benchmarks.loop import Everystep

STEPS = 1
STRATEGY = everystep.Full(policy="skip", every=1)


def train(run: Path, quick: bool, durable: bool) -> None:
    """What the child does: it says when its steps are where they are to be, and sleeps."""
    model, optimizer = make_state(quick)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)  # at once: each kill waits for this
    subject = Everystep(run, model, optimizer, STRATEGY)
    for _ in range(STEPS):
        optimizer.step()
        subject.step()
    if durable:
        subject.finish()
    else:
        subject.ck._session._engine.settle()  # until it is staged
    print("ready", flush=True)
    time.sleep(600)


def kill_one(run: Path, quick: bool, *, durable: bool) -> None:
    """Have a child train, and kill it."""
    words = [str(run), str(int(quick)), str(int(durable))]
    child = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.killed", *words], cwd=HOME, stdout=subprocess.PIPE
    )
    try:
        if child.stdout is None or child.stdout.readline().strip() != b"ready":
            raise ChildProcessError("the child that trains has failed")
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()


class _Restart:
    """The process that comes after the killed one."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.run = setting, setting.directory / "killed"
        self.model, self.optimizer = make_state(setting.quick)
        self.nbytes = bytes_of(tensors_of(self.model, self.optimizer))

    def restore_s(self) -> float:
        """Seconds that `restore` takes."""
        with everystep.Checkpointer(
            self.run, model=self.model, optimizer=self.optimizer, strategy=STRATEGY
        ) as ck:
            took_s = timed(lambda: ck.restore(required=True))
            if ck.steps()[-1] != STEPS:
                raise ValueError(f"restored {ck.steps()}, not step {STEPS}")
        return took_s

    def killed_s(self, *, durable: bool) -> float:
        """Seconds that `restore` takes after a kill."""
        if self.run.exists():
            shutil.rmtree(self.run)
        settle(self.setting.settle_s)
        kill_one(self.run, self.setting.quick, durable=durable)
        return self.restore_s()

    def newest_files(self) -> list[Path]:
        """Those of the step that was restored."""
        files = [path for path in self.run.rglob("*") if path.is_file()]
        largest = max(path.stat().st_size for path in files)
        data = [path for path in files if path.stat().st_size > largest / 2]
        newest = max(data, key=lambda path: path.stat().st_mtime_ns)
        return [path for path in newest.parent.iterdir() if path.is_file()]

    def read_s(self) -> float:
        """Seconds to read these files into new memory."""
        forget(self.run)
        return sum(plain_read(path) for path in self.newest_files())

    def cold_s(self) -> float:
        """Seconds that `restore` takes without the agent."""
        forget(self.run)
        return self.restore_s()

    def fresh_s(self) -> float:
        """Seconds that `restore` takes from memory with an optimizer without slots, as after a real
        restart: new memory is made for them."""
        self.optimizer.state.clear()
        return self.killed_s(durable=True)


def _copy_to_new_s(data: memoryview) -> float:
    """Seconds to copy into memory that the process did not have before, in large pages."""
    new = mmap.mmap(-1, len(data), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    new.madvise(mmap.MADV_HUGEPAGE)
    return timed(lambda: copy_whole(data, memoryview(new)))


def measure_killed(setting: Setting) -> list[Figure]:
    """All of this part."""
    restart, runs = _Restart(setting), setting.runs
    few = 1 if setting.quick else min(2, runs)  # of what has no reach, or one that is far away
    at_once = [restart.killed_s(durable=False) for _ in range(few)]
    from_memory, reads, cold = [], [], []
    for _ in range(runs):
        from_memory.append(restart.killed_s(durable=True))
        if len(reads) < few:
            reads.append(restart.read_s())
            cold.append(restart.cold_s())
    fresh = [restart.fresh_s() for _ in range(few)]
    shutil.rmtree(restart.run)
    data, target = page_aligned(restart.nbytes), page_aligned(restart.nbytes)
    copy_whole(data, target)
    copy_s = statistics.median(timed(lambda: copy_whole(data, target)) for _ in range(runs))
    new_s = statistics.median(_copy_to_new_s(data) for _ in range(runs))
    head = "killed trainer: "
    speed = [copy_s / took_s for took_s in from_memory]
    fresh_speed = [copy_s / took_s for took_s in fresh]
    beside_read = [took_s / statistics.median(reads) for took_s in from_memory]
    return [
        median_of(head + "one memory copy", [copy_s], "s"),
        median_of(head + "restore from memory", from_memory, "s"),
        median_of(head + "restore's speed / memory copy's", speed, "x", reach=0.5, at_least=True),
        median_of(head + "fresh optimizer, restore from memory", fresh, "s"),
        median_of(head + "one memory copy into new memory", [new_s], "s"),
        median_of(head + "fresh optimizer, restore's speed / memory copy's", fresh_speed, "x"),
        median_of(head + "restore / cold read of the files", beside_read, "x", reach=1.0),
        median_of(head + "cold read of the files", reads, "s"),
        median_of(head + "restore, cold, no agent", cold, "s"),
        median_of(head + "restore at once, agent still writing", at_once, "s"),
    ]


if __name__ == "__main__":
    train(Path(sys.argv[1]), sys.argv[2] == "1", sys.argv[3] == "1")
