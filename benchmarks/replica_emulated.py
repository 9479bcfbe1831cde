"""A second copy of the state beside an emulated accelerator: the stall, the lag, and how fast steps
are done again."""

from __future__ import annotations

import os
import shutil
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import everystep
from benchmarks.common import Setting, make_state, page_aligned, settle, timed
from benchmarks.figures import Figure, median_of
from benchmarks.limits import copy_whole
from benchmarks.loop import Everystep, Nothing, Subject, Taken, drive

STEP_S = 1.0
"""The accelerator's step: the wait, and the update."""

_SETS = 3
ADAMW_BYTES = 28
"""Of memory traffic per fp32 parameter: parameter, both moments read and written, gradient read."""


class Dense:
    """A model, its optimizer, and some sets of dense gradients.

    A backward pass leaves its gradients in memory of its own at every step; here they are aliases
    of a few sets, so that making them costs nothing.
    """

    def __init__(self, quick: bool, *, fused: bool) -> None:
        self.model = make_state(quick)[0]
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, fused=fused, foreach=not fused)
        self._sets = [[torch.randn_like(p) for p in self.parameters] for _ in range(_SETS)]
        self._turn = 0
        self.put_next()
        self.optimizer.step()  # makes its slots

    def put_next(self) -> None:
        """What a backward pass would leave."""
        self._turn += 1
        for p, gradient in zip(self.parameters, self._sets[self._turn % _SETS], strict=True):
            p.grad = gradient

    def update_s(self) -> float:
        """Seconds of one step of torch's own."""
        self.put_next()
        return timed(self.optimizer.step)

    @property
    def elements(self) -> int:
        """Of all parameters."""
        return sum(p.numel() for p in self.parameters)


def measure_emulated(setting: Setting) -> list[Figure]:
    """All of this part."""
    figures = []
    for fused in (True, False):
        figures += _measure(setting, Dense(setting.quick, fused=fused), fused)
    return figures


def _measure(setting: Setting, dense: Dense, fused: bool) -> list[Figure]:
    updates = [dense.update_s() for _ in range(5)]
    update_s = statistics.median(updates)
    step_s = max(STEP_S, 2 * update_s)  # beside an accelerator the host is idle at times
    wait_s = step_s - update_s
    steps = max(8, setting.steps)
    bare = drive(
        dense.optimizer, wait_s, Nothing, steps, at_least_before=2, backward=dense.put_next
    )[0]
    run = setting.directory / "run"
    settle(setting.settle_s)
    made: list[Everystep] = []
    folds: list[float] = []
    lags: list[int] = []

    def make() -> Subject:
        made.append(_Watched(run, dense, folds, lags))
        return made[0]

    taken = drive(dense.optimizer, wait_s, make, steps, at_least_before=6, backward=dense.put_next)[
        0
    ]
    shutil.rmtree(run)
    name = "fused" if fused else "foreach"
    head = f"emulated, step {step_s:.2g} s, {name} AdamW: "
    shares = [100 * stall / step_s for stall in taken.stalls]
    folds = folds[-steps:]
    # as before the copy's, the host has been idle before each of these
    torchs = statistics.median([*bare.updates, *taken.updates])
    figures = [
        median_of(head + "step without checkpoints", bare.walls, "s"),
        median_of(head + "its update", bare.updates, "s"),
        median_of(head + "update beside the copy", taken.updates, "s"),
        median_of(head + "stall", [1000 * stall for stall in taken.stalls], "ms"),
        median_of(head + "stall by the clock around it", shares, "% of step", reach=1.0),
        median_of(head + "longest stall", [1000 * max(taken.stalls)], "ms"),
        median_of(head + "step beside none", _added(taken, bare), "ms"),
        median_of(head + "CPU time per step", [(taken.cpu_s - bare.cpu_s) / steps], "s"),
        median_of(head + "lag of the copy when a step ends", lags[-steps:], "steps", reach=1.0),
        median_of(head + "a step is done again in", folds, "s"),
        median_of(
            head + "done again / torch's own step", [one / torchs for one in folds], "x", reach=1.3
        ),
    ]
    if fused:
        floor_s = ADAMW_BYTES * dense.elements / _memory_bytes_per_s()
        figures += [
            median_of(head + "memory-bandwidth floor", [floor_s], "s"),
            median_of(
                head + "done again / floor", [one / floor_s for one in folds], "x", reach=2.0
            ),
        ]
    return figures


def _added(taken: Taken, bare: Taken) -> list[float]:
    return [1000 * (wall - bare.wall_s) for wall in taken.walls]


def _memory_bytes_per_s() -> float:
    """Of a copy, reading and writing, by all cores."""
    data, target = page_aligned(1 << 30), page_aligned(1 << 30)
    cores = os.cpu_count() or 1
    parts = [slice(n * len(data) // cores, (n + 1) * len(data) // cores) for n in range(cores)]
    with ThreadPoolExecutor(cores) as pool:

        def copy() -> None:
            list(pool.map(lambda part: copy_whole(data[part], target[part]), parts))

        copy()
        return 2 * len(data) / statistics.median(timed(copy) for _ in range(5))


class _Watched(Everystep):
    """Notes what the agent says of the steps that it does again."""

    def __init__(self, run: Path, dense: Dense, folds: list[float], lags: list[int]) -> None:
        super().__init__(
            run, dense.model, dense.optimizer, everystep.Replica(persist_every=1000), warm_after=1
        )
        self._lags, self._taken, self._folded = lags, 0, 0
        session = self.ck._session
        hear = session._note

        def note(message: object) -> None:
            if type(message).__name__ == "Folded":
                folds.append(message.took_s)
                self._folded = message.step
            hear(message)

        self.ck._agent.listen(note)

    def step(self) -> None:
        """See `Subject.step`."""
        self._lags.append(self._taken - self._folded if self._folded else 0)
        self._taken += 1
        super().step()

    def finish(self) -> None:
        """See `Subject.finish`."""
        deadline_s = time.monotonic() + 60
        while self._folded < self._taken and time.monotonic() < deadline_s:
            time.sleep(0.01)
