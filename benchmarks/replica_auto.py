"""`auto`: what its choice wastes beside the best fixed strategy, in simulation, and what it chooses
in real runs, from what it measures itself, beside what the model chooses from known facts."""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import numpy as np
import torch

import everystep
from benchmarks.common import (
    Setting,
    bytes_of,
    page_aligned,
    plain_write,
    settle,
    tensors_of,
    timed,
)
from benchmarks.figures import Figure, median_of
from everystep import automatic
from everystep.deltas.encodings import encode
from everystep.planning.choosing import Name, Verdict, choose
from everystep.planning.facts import Facts
from everystep.planning.failures import estimate_mtbf, poisson
from everystep.planning.workloads import WORKLOADS, compare

_REACH = 1.1
"""Wasted time beside the least."""

_FAILURES = 150
_MOST_S = 45.0
"""Until a real run has chosen."""


def measure_auto(setting: Setting) -> list[Figure]:
    """All of this part."""
    figures = []
    for name, (facts, _) in WORKLOADS.items():
        figures += _simulated(name, facts)
    for real in REALS:
        figures += _measure(setting, real)
    return figures


def _simulated(name: str, facts: Facts) -> list[Figure]:
    duration_s = _FAILURES * facts.mtbf_s
    draw = poisson(np.random.default_rng(11), facts.mtbf_s, facts.host_share)
    failures = list(takewhile(lambda failure: failure.at_s < duration_s, draw))
    found = compare(facts, failures, duration_s)
    least = found.best_share[found.best]
    head = f"auto, {name}: {found.chosen}, "
    return [
        median_of(head + "wasted time", [100 * found.chosen_share], "%"),
        median_of(
            head + f"wasted / {found.best}'s, the least", [found.chosen_share / least], "x", _REACH
        ),
    ]


# ---------------------------------------------------------------- real runs


@dataclass(frozen=True)
class Real:
    """A training of which the facts that matter are known, since it is made so."""

    name: str
    elements: int
    density: float
    """Of its gradients."""
    wait_s: float
    """Forward and backward, in which the host is idle."""
    restarts: tuple[int, float]
    """That the run is said to have seen, and in how many seconds."""


REALS = (
    Real("dense, fails once a day", 4_000_000, 1.0, 0.1, (0, 0.0)),
    Real("1 % of elements, fails every minute", 40_000_000, 0.01, 0.25, (1439, 0.0)),
)


class Made:
    """Its model, optimizer and gradients, made anew at each step as a backward pass does."""

    def __init__(self, real: Real) -> None:
        width = 1000
        rows = real.elements // width // 4
        self.model = torch.nn.ModuleList(torch.nn.Linear(width, rows, bias=False) for _ in range(4))
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, fused=True)
        generator = torch.Generator().manual_seed(5)
        self._gradients = [
            torch.where(
                torch.rand(p.shape, generator=generator) < real.density,
                torch.randn(p.shape, generator=generator),
                0.0,
            )
            for p in self.parameters
        ]
        self.wait_s = real.wait_s
        self.update_s = statistics.median(timed(self._update) for _ in range(4))

    def _put(self) -> None:
        for p, gradient in zip(self.parameters, self._gradients, strict=True):
            p.grad = gradient.view_as(gradient)

    def _update(self) -> None:
        self._put()
        self.optimizer.step()

    def step(self) -> None:
        """One step."""
        self.optimizer.zero_grad()
        time.sleep(self.wait_s)
        self._update()

    def known(self, real: Real, directory: Path) -> Facts:
        """The facts, measured by plain means."""
        nbytes = bytes_of(tensors_of(self.model, self.optimizer))
        coded = [encode(g, 0, g.numel()) for g in self._gradients]
        source, target = torch.ones(1 << 26), torch.zeros(1 << 26)
        target.copy_(source)
        copy_bytes_per_s = source.nbytes / statistics.median(
            timed(lambda: target.copy_(source)) for _ in range(3)
        )
        data, path = page_aligned(nbytes), directory / "plain"
        write_s = statistics.median(plain_write(path, data, direct=True) for _ in range(3))
        path.unlink()
        return Facts(
            state_bytes=nbytes,
            gradient_bytes=bytes_of(self._gradients),
            delta_bytes=sum(len(one.gaps) + len(one.values) for one in coded),
            window_s=self.wait_s,
            update_s=self.update_s,
            offload_bytes_per_s=copy_bytes_per_s,
            snapshot_bytes_per_s=copy_bytes_per_s,
            write_bytes_per_s=nbytes / write_s,
            sync_s=_sync_s(directory / "small"),
            mtbf_s=estimate_mtbf(*real.restarts).mean_s,
            fold_s=self.update_s,
            record_stall_s=0.0,
            on_device=False,
        )


def _sync_s(path: Path) -> float:
    """A small file, and its fsync."""

    def write() -> None:
        with path.open("wb", buffering=0) as file:
            file.write(bytes(4096))
            os.fsync(file.fileno())

    took_s = statistics.median(timed(write) for _ in range(9))
    path.unlink()
    return took_s


def _measure(setting: Setting, real: Real) -> list[Figure]:
    made, run = Made(real), setting.directory / "auto"
    known = made.known(real, setting.directory)
    settle(setting.settle_s)
    with _heard(real) as choices:
        started_s = time.monotonic()
        with everystep.Checkpointer(run, model=made.model, optimizer=made.optimizer) as ck:
            ck.restore()
            while not choices and time.monotonic() < started_s + _MOST_S:
                made.step()
                ck.step()
            took_s = time.monotonic() - started_s
            for _ in range(2):  # the change is made at the next step
                made.step()
                ck.step()
            used = type(ck.strategy).__name__.lower()
    shutil.rmtree(run)
    if not choices:
        raise TimeoutError(f"{real.name}: nothing was chosen")
    measured, verdict = choices[0]
    expected = choose(known, "full").strategy
    head = f"auto, real, {real.name}: "
    figures = [median_of(head + "until it has chosen", [took_s], "s")]
    for what in ("state_bytes", "delta_bytes", "window_s", "write_bytes_per_s"):
        ratio = getattr(measured, what) / getattr(known, what)
        figures.append(median_of(f"{head}{what} / known", [ratio], "x"))
    agrees = float(expected == verdict.strategy == used)
    words = f"it uses {used}, the model chooses {expected}"
    return [*figures, median_of(head + words, [agrees], "", reach=1.0, at_least=True)]


@contextlib.contextmanager
def _heard(real: Real) -> Iterator[list[tuple[Facts, Verdict]]]:
    """What is chosen, from what; at once, and with so many restarts."""
    heard: list[tuple[Facts, Verdict]] = []
    before = {name: getattr(automatic, name) for name in ("choose", "restarts_of", "FIRST_S")}

    def listen(facts: Facts, now: Name) -> Verdict:
        verdict = choose(facts, now)
        heard.append((facts, verdict))
        return verdict

    planted = {"choose": listen, "restarts_of": lambda run, rank: real.restarts, "FIRST_S": 0.0}
    try:
        for name, value in planted.items():
            setattr(automatic, name, value)
        yield heard
    finally:
        for name, value in before.items():
            setattr(automatic, name, value)
