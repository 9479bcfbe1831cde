"""The replay of what was logged, in a process beside training: started, awaited, and reported."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
from torch.optim import Optimizer

from everystep.agent.arena import available_bytes
from everystep.recovery.check import Order, Verdict
from everystep.types import StepRef

SHARE = 0.1
"""Of all time a check may be running."""


class Checks:
    """One check at a time.

    Args:
        path: of the run.
        rank: whose part is replayed.
        optimizers: the live ones, by name.
    """

    def __init__(self, path: Path, rank: int, optimizers: Mapping[str, Optimizer]) -> None:
        self._path, self._rank = path, rank
        kinds = {type(optimizer) for optimizer in optimizers.values()}
        self.unfit = next((why for why in map(_unfit, kinds) if why is not None), None)
        groups = [group for optimizer in optimizers.values() for group in optimizer.param_groups]
        if any(one.device.type != "cpu" for group in groups for one in group["params"]):
            self.unfit = "a replay would need memory of the device that trains"
        """Why no check is possible."""
        self._classes = {
            f"{kind.__module__}.{kind.__qualname__}": (kind.__module__, kind.__qualname__)
            for kind in kinds
            if not kind.__module__.startswith("torch.")
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._step: StepRef | None = None
        self._begun_s = 0.0
        self._not_before_s = 0.0

    def start(self, step: StepRef, state_bytes: int) -> bool:
        """Begin to replay up to a step that has a full checkpoint; False: not now.

        Args:
            state_bytes: of the state, of which three must fit into memory.
        """
        if self.unfit is not None or self._process is not None:
            return False
        if time.monotonic() < self._not_before_s:
            return False
        available = available_bytes()
        if available is not None and available < 3 * state_bytes:
            return False
        order = Order(path=str(self._path), step=step, rank=self._rank, classes=self._classes)
        words = [
            sys.executable,
            "-m",
            "everystep.recovery.check",
            msgspec.json.encode(order).decode(),
        ]
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,
        )
        self._step, self._begun_s = step, time.monotonic()
        return True

    def result(self) -> tuple[StepRef, Verdict] | None:
        """What the check has found, once it is over."""
        process, step = self._process, self._step
        if process is None or step is None or process.poll() is None:
            return None
        output, _ = process.communicate()
        self._process = None
        ended_s = time.monotonic()
        self._not_before_s = ended_s + (ended_s - self._begun_s) * (1 / SHARE - 1)
        try:
            return step, msgspec.json.decode(output, type=Verdict)
        except msgspec.MsgspecError:
            return step, Verdict(skipped=f"the check ended with status {process.returncode}")

    def close(self) -> None:
        """End a check that is running."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def _unfit(kind: type[Optimizer]) -> str | None:
    """Why another process cannot have this class; None: it can."""
    if kind.__module__ != "__main__" and "<locals>" not in kind.__qualname__:
        return None
    return (
        f"{kind.__qualname__} is defined in {kind.__module__}, which another process cannot import;"
        " put it into a module of its own"
    )
