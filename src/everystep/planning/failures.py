"""Failures of a run: how often they come, and a simulation of training that meets them.

The simulation knows the rules (what is done when, what is durable when, what a failure takes) and
none of the formulas of `intervals`, which it is tested against. Its rules:

- A step ends with the stall of its delta; the last step of a batch with that of the write besides,
  and each F-th step with that of the full. A full ends its batch.
- A batch is durable a while after its last step: fsync, and its bytes at the write rate. A full is
  written with what batches leave of storage.
- A process that dies takes the step in progress. Its agent writes the deltas that it holds, and
  still has the newest full. A host that dies takes what was not durable.
- Recovery restarts, loads the newest full that is there, and replays each step since. A failure in
  it begins it again.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

from everystep.errors import UsageError
from everystep.planning.intervals import Costs, rhythm

if TYPE_CHECKING:
    import numpy as np

# ---------------------------------------------------------------- how often


class Mtbf(Struct, frozen=True, kw_only=True):
    """A mean time between failures, and how sure it is."""

    mean_s: float
    low_s: float
    """It is less than this with probability 5 %."""
    high_s: float
    """It is more than this with probability 5 %."""


def estimate_mtbf(
    failures: int, observed_s: float, *, prior_s: float = 86_400.0, prior_failures: int = 1
) -> Mtbf:
    """The mean time between failures, from those that a run has seen.

    Failures are taken as a Poisson process; its rate has a gamma prior with shape `prior_failures`
    and rate `prior_failures * prior_s`: as if so many had been seen already, `prior_s` apart. The
    posterior is gamma too, with the sums. Waste is nearly linear in the rate, so what minimises
    its expectation is found with the mean rate, `1 / mean_s`:
    `mean_s = (prior_failures * prior_s + observed_s) / (prior_failures + failures)`.

    Args:
        failures: ends of sessions that were followed by a restart.
        observed_s: time in which they could have come, that of the present session included.
        prior_s: mean time between failures where nothing is known.
        prior_failures: what that belief weighs.

    Raises:
        UsageError: a number that makes no sense.
    """
    sensible = failures >= 0 and 0 <= observed_s < math.inf
    if not sensible or prior_failures < 1 or not 0 < prior_s < math.inf:
        seen = f"failures={failures}, observed_s={observed_s}"
        prior = f"prior_s={prior_s}, prior_failures={prior_failures}"
        raise UsageError(f"{seen}, {prior}: makes no sense")
    shape = prior_failures + failures
    total_s = prior_failures * prior_s + observed_s
    often, seldom = (_gamma_quantile(shape, share) / total_s for share in (0.95, 0.05))
    return Mtbf(mean_s=total_s / shape, low_s=1 / often, high_s=1 / seldom)


def _gamma_quantile(shape: int, share: float) -> float:
    """Below which so much of a gamma distribution of rate 1 lies; its shape is a whole number, so
    that is the time by which so many Poisson events have come with this probability."""
    low, high = 0.0, shape + 10 * math.sqrt(shape) + 10
    for _ in range(60):
        middle = (low + high) / 2
        fewer = math.fsum(
            math.exp(n * math.log(middle) - middle - math.lgamma(n + 1)) for n in range(shape)
        )
        low, high = (middle, high) if 1 - fewer < share else (low, middle)
    return low


# ---------------------------------------------------------------- the simulation


class Failure(NamedTuple):
    """Something dies."""

    at_s: float
    """Since the start of the run."""
    host: bool = True
    """With the host; else the training process only."""


def poisson(generator: np.random.Generator, mtbf_s: float, host_share: float) -> Iterator[Failure]:
    """Failures without end that know nothing of each other; none if `mtbf_s` is infinite."""
    at_s = 0.0
    while mtbf_s < math.inf:
        at_s += float(generator.exponential(mtbf_s))
        yield Failure(at_s, bool(generator.random() < host_share))


class Spent(Struct, frozen=True, kw_only=True):
    """Where the time of a simulated run went; the causes add up to all of it."""

    duration_s: float
    useful_s: float
    """Steps that were kept, without their stalls."""
    visible_s: float
    """Stalls of steps that were kept."""
    lost_s: float
    """Training that was done again, and what of a step was in progress at the end."""
    restart_s: float
    load_s: float
    replay_s: float
    steps: int
    """Kept."""
    process_failures: int
    host_failures: int

    @property
    def wasted_share(self) -> float:
        """Of all time."""
        return 1 - self.useful_s / self.duration_s


def simulate(
    costs: Costs,
    full_every: int,
    batch: int,
    failures: Iterable[Failure],
    *,
    duration_s: float,
) -> Spent:
    """Train for so long, from a full of step 0, with failures at given times.

    Args:
        costs: of the run; `mtbf_s` and `host_share` are not looked at.
        full_every: a full at every so many steps.
        batch: deltas per write.
        failures: by time; may be without end.
        duration_s: when to stop.

    Raises:
        UsageError: fewer than one step, no time, times that go back, or more than storage can take.
    """
    if not 0 < duration_s < math.inf:
        raise UsageError(f"duration_s={duration_s!r} makes no sense")
    full_lag_s = rhythm(costs, full_every, batch).full_lag_s
    run = _Run(costs, full_every, min(batch, full_every), full_lag_s)
    for failure in chain(failures, [Failure(math.inf)]):
        if failure.at_s < run.now_s:
            raise UsageError(f"a failure at {failure.at_s} s, after one at {run.now_s} s")
        run.advance(min(failure.at_s, duration_s))
        if failure.at_s >= duration_s:
            break
        run.fail(failure.host)
    return run.spent()


class _Stretch:
    """Training from one recovery to the next failure. Steps are counted from its own start."""

    def __init__(self, run: _Run, start_s: float, first: int) -> None:
        self.start_s, self.first = start_s, first
        self.over_s: float | None = None  # when the process died and its agent wrote the rest
        self.kept = 0
        self._run = run
        self._head = run.every - first % run.every  # steps until the first full
        self._head_s = self._cut_s(self._head)
        self._cycle_s = self._cut_s(run.every)

    def _cut_s(self, steps: int) -> float:
        """Length of so many steps from the start of a batch to a full."""
        c = self._run.costs
        cut = c.batch_stall_s if steps % self._run.batch else 0.0
        return self._uncut_s(steps) + cut + c.full_stall_s

    def _uncut_s(self, steps: int) -> float:
        c = self._run.costs
        return steps * (c.step_s + c.record_stall_s) + steps // self._run.batch * c.batch_stall_s

    def end_s(self, steps: int) -> float:
        """When the so many-th step ended."""
        if steps < self._head:
            return self.start_s + self._uncut_s(steps)
        cycles, rest = divmod(steps - self._head, self._run.every)
        return self.start_s + self._head_s + cycles * self._cycle_s + self._uncut_s(rest)

    def done(self, at_s: float) -> int:
        """Steps that had ended."""
        low, width = 0, self._head
        if at_s >= self.start_s + self._head_s:
            cycles = int((at_s - self.start_s - self._head_s) / self._cycle_s)
            low, width = self._head + cycles * self._run.every, self._run.every
        steps = range(low, low + width + 1)
        return max(low + bisect_right(steps, at_s, key=self.end_s) - 1, 0)

    def durable(self, at_s: float) -> int:
        """Of the steps kept, those whose deltas were durable."""
        upto = self._batch_start(self.kept + 1)
        rest_s = self._run.batch_lag_s(self.kept - upto)
        if self.over_s is not None and upto < self.kept and self.over_s + rest_s <= at_s:
            return self.kept
        while upto:
            begun = self._batch_start(upto)
            if self.end_s(upto) + self._run.batch_lag_s(upto - begun) <= at_s:
                return upto
            upto = begun
        return 0

    def _batch_start(self, steps: int) -> int:
        """The last end of a batch before the so many-th step; 0: none."""
        last = steps - 1
        if last < self._head:
            return last // self._run.batch * self._run.batch
        cycles, rest = divmod(last - self._head, self._run.every)
        return self._head + cycles * self._run.every + rest // self._run.batch * self._run.batch

    def newest_full(self, at_s: float = math.inf) -> int:
        """The newest step kept whose full was durable (ever: staged); 0: none."""
        if self.kept < self._head:
            return 0
        step = self.kept - (self.kept - self._head) % self._run.every
        while step > 0 and self.end_s(step) + self._run.full_lag_s > at_s:
            step -= self._run.every
        return max(step, 0)


class _Run:
    """The clock, what is there to be restored, and where the time went."""

    def __init__(self, costs: Costs, every: int, batch: int, full_lag_s: float) -> None:
        self.costs, self.every, self.batch, self.full_lag_s = costs, every, batch, full_lag_s
        self.now_s = 0.0
        self._floor = (0, 0)  # a step that is durable, and the full that it is replayed from
        self._past: list[_Stretch] = []  # since then
        self._training: _Stretch | None = _Stretch(self, 0.0, 0)
        self._ready_s = math.inf  # when the recovery that is going on ends
        self._begun_s = 0.0  # when it began
        self._replays = 0
        self._trained_s = self._visible_s = 0.0
        self._recovery_s = [0.0, 0.0, 0.0]
        self._failures = [0, 0]

    def batch_lag_s(self, steps: int) -> float:
        return self.costs.sync_s + steps * self.costs.delta_bytes / self.costs.write_bytes_per_s

    def advance(self, to_s: float) -> None:
        """Let time pass, with nothing failing."""
        if self._training is None and self._ready_s <= to_s:
            self._recover_until(self._ready_s)
            self._settle(self._ready_s)
            self._training = _Stretch(self, self._ready_s, self._position())
            self.now_s = self._ready_s
        if self._training is None:
            self._recover_until(to_s)
            self._begun_s = to_s
        else:
            self._trained_s += to_s - self.now_s
        self.now_s = to_s

    def _recover_until(self, to_s: float) -> None:
        left_s = to_s - self._begun_s
        for place, part_s in enumerate(self._parts_s()):
            self._recovery_s[place] += min(part_s, left_s)
            left_s -= min(part_s, left_s)

    def _parts_s(self) -> tuple[float, float, float]:
        c = self.costs
        return c.restart_s, c.load_s, self._replays * c.replay_s

    def fail(self, host: bool) -> None:
        """Something dies now; recovery begins."""
        self._failures[host] += 1
        if self._training is not None:
            self._training.kept = self._training.done(self.now_s)
            self._past.append(self._training)
            self._training = None
            if not host:
                self._past[-1].over_s = self.now_s
        if host:
            self._fall_back()
        position = self._position()
        self._replays = position - self._newest_full()
        self._begun_s = self.now_s
        self._ready_s = self.now_s + sum(self._parts_s())

    def _position(self) -> int:
        return self._past[-1].first + self._past[-1].kept if self._past else self._floor[0]

    def _newest_full(self, at_s: float = math.inf) -> int:
        for stretch in reversed(self._past):
            if full := stretch.newest_full(at_s):
                return stretch.first + full
        return self._floor[1]

    def _fall_back(self) -> None:
        """To what is durable now."""
        full = self._newest_full(self.now_s)
        while self._past:
            last = self._past[-1]
            last.kept = last.durable(self.now_s)
            if last.kept:
                break
            self._past.pop()
        self._floor = (max(self._position(), full), full)
        self._forget()

    def _settle(self, at_s: float) -> None:
        """Forget the past once all of it is durable."""
        if self._past and self._newest_full(at_s) == self._newest_full():
            last = self._past[-1]
            if last.durable(at_s) == last.kept:
                self._floor = (self._position(), self._newest_full())
                self._forget()

    def _forget(self) -> None:
        for stretch in self._past:
            took_s = stretch.end_s(stretch.kept) - stretch.start_s
            self._visible_s += took_s - stretch.kept * self.costs.step_s
        self._past.clear()

    def spent(self) -> Spent:
        """Where the time went until now."""
        if self._training is not None:
            self._training.kept = self._training.done(self.now_s)
            self._past.append(self._training)
        steps = self._position()
        self._forget()
        useful_s = steps * self.costs.step_s
        restart_s, load_s, replay_s = self._recovery_s
        return Spent(
            duration_s=self.now_s,
            useful_s=useful_s,
            visible_s=self._visible_s,
            lost_s=self._trained_s - useful_s - self._visible_s,
            restart_s=restart_s,
            load_s=load_s,
            replay_s=replay_s,
            steps=steps,
            process_failures=self._failures[0],
            host_failures=self._failures[1],
        )
