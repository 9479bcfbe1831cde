"""A training loop on an emulated accelerator, with clocks around all that a checkpointer adds.

Forward and backward are a wait in which the host is idle; the update is real, and in place. The
stall of a step is what the checkpointer's own call takes, and what its hooks on the optimizer take.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

import everystep
from benchmarks.common import cpu_s
from everystep.store.local import LocalBackend
from everystep.store.measured import Measure, read_measures

DEADLINE_S = 120.0
"""After so long without becoming durable, a step never will."""

_LOOK_EVERY_S = 0.05
"""Looking takes CPU time, which is counted."""


class Subject(Protocol):
    """What is measured: something that takes a checkpoint at every step."""

    @property
    def warm(self) -> bool:
        """Whether it has come to its steady state."""
        ...

    def step(self) -> None:
        """End a training step."""
        ...

    def finish(self) -> None:
        """Return when all is durable that will be."""
        ...

    def close(self) -> None:
        """Give up everything."""
        ...


class Nothing:
    """No checkpoints."""

    warm = True

    def step(self) -> None:
        """See `Subject.step`."""

    def finish(self) -> None:
        """See `Subject.finish`."""

    def close(self) -> None:
        """See `Subject.close`."""


class Everystep:
    """Our own, at work in a new run."""

    def __init__(
        self,
        run: Path,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        strategy: everystep.Full | everystep.Deltas | everystep.Replica,
        retention: everystep.Retention | None = None,
        warm_after: int = 5,
        idle_s: float | None = None,
        extras: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            warm_after: so many steps must be durable first; with five, files are recycled.
            idle_s: the newest step need not become durable (several ranks with `skip` choose
                which do): it is given up when no step has become so for this long. None: it must.
        """
        self.run, self._warm_after, self._idle_s = run, warm_after, idle_s
        self.ck = everystep.Checkpointer(
            run,
            model=model,
            optimizer=optimizer,
            extras=extras or {},
            strategy=strategy,
            retention=retention or everystep.Retention(),
            on_error="raise",
        )
        self.ck.restore()

    @property
    def warm(self) -> bool:
        """See `Subject.warm`."""
        return self.durable >= self._warm_after

    def step(self) -> None:
        """See `Subject.step`."""
        self.ck.step()

    def finish(self) -> None:
        """See `Subject.finish`."""
        seen, since_s = -1, time.monotonic()
        while (stats := self.ck.stats) and not stats[-1].durable:
            now_s, durable = time.monotonic(), sum(one.durable for one in stats)
            if durable != seen:
                seen, since_s = durable, now_s
            elif self._idle_s is not None and now_s - since_s > self._idle_s:
                return
            elif now_s - since_s > DEADLINE_S:
                raise TimeoutError(f"not durable: {stats[-1]}")
            time.sleep(_LOOK_EVERY_S)

    @property
    def durable(self) -> int:
        """How many steps have become durable."""
        return sum(stats.durable for stats in self.ck.stats)

    def close(self) -> None:
        """See `Subject.close`."""
        self.ck.close()

    def measures(self) -> list[Measure]:
        """What the run has measured itself; whole only after `close`."""
        return [
            measure
            for measures in read_measures(LocalBackend(self.run)).values()
            for measure in measures
        ]


@dataclass
class Taken:
    """What some steps took; all lists have one number per step, in seconds."""

    walls: list[float] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)
    updates: list[float] = field(default_factory=list)
    """The optimizer's step without the hooks in it."""
    cpu_s: float = 0.0
    """Of this process and its children, from the first of these steps until all was durable."""

    def means(self, of: int = 2) -> list[float]:
        """Lengths of steps as means over neighbours, where short and long ones take turns."""
        walls, of = self.walls, min(of, len(self.walls))
        return [sum(walls[i : i + of]) / of for i in range(len(walls) - of + 1)]

    @property
    def wall_s(self) -> float:
        """The median step."""
        return statistics.median(self.walls)

    @property
    def stall_s(self) -> float:
        """The median stall."""
        return statistics.median(self.stalls)

    @property
    def update_s(self) -> float:
        """U: the median update."""
        return statistics.median(self.updates)


class _HookClock:
    """Time in all hooks on an optimizer's step that were set since this was made. They are wrapped
    where they are: hooks of our own around them would not do, since some have to be the last."""

    def __init__(self, optimizer: Any) -> None:
        self.total_s = 0.0
        self._hooks = [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
        self._seen = {number for hooks in self._hooks for number in hooks}

    def watch(self) -> None:
        """Put a clock around those that have been set since."""
        for hooks in self._hooks:
            for number in hooks.keys() - self._seen:
                hooks[number] = self._timed(hooks[number])
                self._seen.add(number)

    def _timed(self, hook: Callable[..., object]) -> Callable[..., object]:
        def timed(*args: object) -> object:
            since_s = time.perf_counter()
            try:
                return hook(*args)
            finally:
                self.total_s += time.perf_counter() - since_s

        return timed


@contextlib.contextmanager
def _clocked(
    optimizer: torch.optim.Optimizer, make: Callable[[], Subject]
) -> Iterator[tuple[Subject, _HookClock]]:
    """A subject, and a clock for its hooks."""
    clock = _HookClock(optimizer)
    subject = make()
    try:
        yield subject, clock
    finally:
        subject.close()


def drive(
    optimizer: torch.optim.Optimizer,
    compute_s: float,
    make: Callable[[], Subject],
    steps: int,
    *,
    clean: bool = False,
    at_least_before: int = 4,
    at_most_before: int = 40,
    backward: Callable[[], None] = lambda: None,
) -> tuple[Taken, Subject]:
    """Train until the subject is warm, and then so many steps with the clocks on.

    Args:
        compute_s: T: forward and backward.
        make: makes the subject, which is closed at the end.
        clean: wait before the first step until all is durable, so that CPU time is of these steps
            alone. Where storage is the bottleneck, it would make the first steps too short.
        at_least_before: steps before the clocks go on.
        at_most_before: the same, where it never becomes warm.
        backward: called after the wait, to put gradients in place; part of no figure but the step.
    """
    taken = Taken()

    def compute() -> None:
        time.sleep(compute_s)
        backward()

    with _clocked(optimizer, make) as (subject, clock):
        before = 0
        while before < at_least_before or (not subject.warm and before < at_most_before):
            _step(optimizer, compute, subject, clock, Taken())
            before += 1
        if clean:
            subject.finish()
        cpu_before_s = cpu_s()
        for _ in range(steps):
            _step(optimizer, compute, subject, clock, taken)
        subject.finish()
        taken.cpu_s = cpu_s() - cpu_before_s
    return taken, subject


def _step(
    optimizer: torch.optim.Optimizer,
    compute: Callable[[], None],
    subject: Subject,
    clock: _HookClock,
    taken: Taken,
) -> None:
    clock.watch()
    clock.total_s = 0.0
    begun_s = time.perf_counter()
    compute()
    update_s = time.perf_counter()
    optimizer.step()
    step_s = time.perf_counter()
    subject.step()
    ended_s = time.perf_counter()
    taken.walls.append(ended_s - begun_s)
    taken.stalls.append(ended_s - step_s + clock.total_s)
    taken.updates.append(step_s - update_s - clock.total_s)
