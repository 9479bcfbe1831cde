"""Restore from the replica after the trainer was killed.

Once the restart comes when the agent has stored the last step, as after a restart that takes
seconds; and once at the instant of the kill, when `restore` also waits for that.
"""

from __future__ import annotations

import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import everystep
from benchmarks.common import HOME, Setting, bytes_of, page_aligned, settle, tensors_of, timed
from benchmarks.figures import Figure, median_of
from benchmarks.limits import copy_whole
from benchmarks.replica_emulated import Dense
from everystep.store.run import Run
from everystep.types import StepRef

STEPS = 8
DEADLINE_S = 120.0
STRATEGY = everystep.Replica(persist_every=1000)


def train(run: Path, quick: bool) -> None:
    """What the child does: some steps; it says when the last of them has ended, and sleeps."""
    dense = Dense(quick, fused=True)
    ck = everystep.Checkpointer(
        run, model=dense.model, optimizer=dense.optimizer, strategy=STRATEGY
    )
    ck.restore()
    for _ in range(STEPS):
        dense.put_next()
        dense.optimizer.step()
        ck.step()
    while not all(one.staged for one in ck.stats):
        time.sleep(0.01)
    print("ready", flush=True)
    time.sleep(600)


def kill_one(run: Path, quick: bool) -> None:
    """Have a child train, and kill it."""
    child = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.replica_killed", str(run), str(int(quick))],
        cwd=HOME,
        stdout=subprocess.PIPE,
    )
    try:
        if child.stdout is None or child.stdout.readline().strip() != b"ready":
            raise ChildProcessError("the child that trains has failed")
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()


def _until_stored(run: Path) -> None:
    """The agent has folded the last step, and stored it.

    Raises:
        TimeoutError: it has not.
    """
    give_up_s = time.monotonic() + DEADLINE_S
    while StepRef("main", STEPS) not in Run.open(run).listing().complete():
        if time.monotonic() > give_up_s:
            raise TimeoutError(f"step {STEPS} is not stored after {DEADLINE_S:g} s")
        time.sleep(0.1)


def measure_killed(setting: Setting) -> list[Figure]:
    """All of this part."""
    dense, run = Dense(setting.quick, fused=True), setting.directory / "killed"
    nbytes = bytes_of(tensors_of(dense.model, dense.optimizer))

    def restore_s(*, at_once: bool) -> float:
        settle(setting.settle_s)
        kill_one(run, setting.quick)
        if not at_once:
            _until_stored(run)
            settle(setting.settle_s)
        with everystep.Checkpointer(
            run, model=dense.model, optimizer=dense.optimizer, strategy=STRATEGY
        ) as ck:
            took_s = timed(lambda: ck.restore(required=True))
            if ck.steps()[-1] != STEPS:
                raise ValueError(f"restored {ck.steps()}, not step {STEPS}")
        shutil.rmtree(run)
        return took_s

    at_once = restore_s(at_once=True)
    took = [restore_s(at_once=False) for _ in range(setting.runs)]
    data, target = page_aligned(nbytes), page_aligned(nbytes)
    copy_whole(data, target)
    copy_s = statistics.median(timed(lambda: copy_whole(data, target)) for _ in range(5))
    head = "killed trainer: "
    speeds = [copy_s / one for one in took]
    return [
        median_of(head + "one memory copy", [copy_s], "s"),
        median_of(head + "restore from the replica", took, "s"),
        median_of(head + "restore's speed / memory copy's", speeds, "x", reach=0.5, at_least=True),
        median_of(head + "restore at once, agent still writing", [at_once], "s"),
    ]


if __name__ == "__main__":
    train(Path(sys.argv[1]), sys.argv[2] == "1")
