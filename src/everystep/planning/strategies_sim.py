"""A simulation of training with `Full`, `Deltas` or `Replica` and failures, by rules alone.

It knows what is where at which moment, and none of the formulas of `choosing`, which it is tested
against. Deltas are simulated by `failures`. The rules of the other two:

- `Full`: a state is taken at every n-th step that finds a free slot. It leaves over the link while
  training computes; what is left when the next update is about to write is snapshotted first. It is
  in the agent's memory when all of it has left. Whenever storage is free it writes the newest.
- `Replica`: a step's record is handed over after its end, and folded when those before it are. A
  copy is written after every n-th step; while it is, nothing is folded. Training waits where no
  memory is left for a record. Each process begins with a copy that is written.
- A process that dies takes what was not in the agent's memory; what was is still written. The next
  process loads it, once the agent has folded all it holds. A host takes what was not durable, and
  recovery loads from the store. A failure in a recovery begins it again.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable
from itertools import chain

from msgspec import Struct

from everystep.errors import UsageError
from everystep.planning import failures as deltas_sim
from everystep.planning.choosing import Name
from everystep.planning.facts import Facts
from everystep.planning.failures import Failure


class Spent(Struct, frozen=True, kw_only=True):
    """Where the time of a simulated run went."""

    duration_s: float
    useful_s: float
    """Steps that were kept, without their stalls."""
    recovering_s: float
    """From failures until training went on."""
    steps: int
    """Kept."""
    process_failures: int
    host_failures: int

    @property
    def wasted_share(self) -> float:
        """Of all time."""
        return 1 - self.useful_s / self.duration_s


class Settings(Struct, frozen=True, kw_only=True):
    """How a strategy is run."""

    every: int
    """Steps from one full, or one written copy, to the next."""
    batch: int = 1
    """Deltas per write; `deltas` only."""
    slots: int = 3
    """States that staging memory has room for; `full` only."""
    records: int = 1 << 30
    """Records that memory has room for; `replica` only."""


def simulate(
    facts: Facts,
    name: Name,
    settings: Settings,
    failures: Iterable[Failure],
    *,
    duration_s: float,
) -> Spent:
    """Train for so long, from a state that is durable, with failures at given times.

    Args:
        facts: of the run; `mtbf_s` and `host_share` are not looked at, but by the time to load
            that all failures share with `deltas`.
        name: of the strategy.
        settings: of it.
        failures: by time; may be without end.
        duration_s: when to stop.

    Raises:
        UsageError: no time, fewer than one step, times that go back, or more than storage can take.
    """
    if not 0 < duration_s < math.inf or min(settings.every, settings.batch) < 1:
        raise UsageError(f"duration_s={duration_s!r}, {settings}: makes no sense")
    if name == "deltas":
        found = deltas_sim.simulate(
            facts.costs(), settings.every, settings.batch, failures, duration_s=duration_s
        )
        return Spent(
            duration_s=found.duration_s,
            useful_s=found.useful_s,
            recovering_s=found.restart_s + found.load_s + found.replay_s,
            steps=found.steps,
            process_failures=found.process_failures,
            host_failures=found.host_failures,
        )
    if name == "replica":
        facts = facts.mirrored()
    stretch = _Fulls(facts, settings) if name == "full" else _Replicas(facts, settings)
    run = _Run(facts, stretch)
    for failure in chain(failures, [Failure(math.inf)]):
        if failure.at_s < run.now_s:
            raise UsageError(f"a failure at {failure.at_s} s, after one at {run.now_s} s")
        run.advance(min(failure.at_s, duration_s))
        if failure.at_s >= duration_s:
            break
        run.fail(failure)
    return run.spent()


# ---------------------------------------------------------------- training without failures


class _Stretch(ABC):
    """Training from a recovery on, as far as it has been looked at: the same after each."""

    def __init__(self, facts: Facts, settings: Settings) -> None:
        self.facts, self.settings = facts, settings
        self.ends_s = [0.0]
        """Of each step."""
        self.held: tuple[list[float], list[int]] = [], []
        """When which step came into the agent's memory."""
        self.durable: tuple[list[float], list[int]] = [], []

    def look(self, to_s: float) -> None:
        """At all that happens until then."""
        while self.ends_s[-1] <= to_s:
            self.step(len(self.ends_s))

    @abstractmethod
    def step(self, number: int) -> None:
        """Train one more."""

    def folded_s(self, step: int) -> float:
        """When the agent has in one piece what it holds up to this step."""
        return 0.0


def _newest(seen: tuple[list[float], list[int]], at_s: float) -> int | None:
    place = bisect_right(seen[0], at_s)
    return seen[1][place - 1] if place else None


class _Fulls(_Stretch):
    """States through staging memory."""

    def __init__(self, facts: Facts, settings: Settings) -> None:
        super().__init__(facts, settings)
        self._leaving: tuple[int, float] | None = None  # a step, and when it ended
        self._link_free_s = self._store_free_s = 0.0
        self._waiting: list[tuple[float, int]] = []  # when staged, which step; not written
        self._written = 0

    def step(self, number: int) -> None:
        f = self.facts
        ready_s = self.ends_s[-1] + f.window_s
        if self._leaving is not None:
            taken, begun_s = self._leaving
            begun_s = max(begun_s, self._link_free_s)
            left = f.state_bytes - max(0.0, ready_s - begun_s) * f.offload_bytes_per_s
            stall_s = max(0.0, left) / f.snapshot_bytes_per_s
            out_s = begun_s + f.state_bytes / f.offload_bytes_per_s
            ready_s += stall_s
            self._link_free_s = max(out_s, ready_s) if f.on_device else min(out_s, ready_s)
            staged_s = self._link_free_s if left > 0 else out_s
            self._link_free_s = staged_s
            self._leaving = None
            self._waiting.append((staged_s, taken))
            self.held[0].append(staged_s)
            self.held[1].append(taken)
        self.ends_s.append(ready_s + f.update_s)
        if number % self.settings.every == 0 and self._has_room(self.ends_s[-1]):
            self._leaving = number, self.ends_s[-1]

    def _has_room(self, now_s: float) -> bool:
        """Of a slot each have the state that is written, the newest, and one on its way."""
        self._write(now_s)
        staged = [step for _, step in self._waiting]
        newest = staged[-1] if staged else self._written
        used = {newest} | ({self._written} if self._store_free_s > now_s else set())
        return len(used - {0}) < self.settings.slots

    def _write(self, now_s: float) -> None:
        """What storage has begun by now: each time the newest that is there."""
        while self._waiting:
            start_s = max(self._store_free_s, self._waiting[0][0])
            if start_s > now_s:
                return
            there = [one for one in self._waiting if one[0] <= start_s]
            del self._waiting[: len(there)]
            self._written = there[-1][1]
            self._store_free_s = start_s + self.facts.write_s
            self.durable[0].append(self._store_free_s)
            self.durable[1].append(self._written)


class _Replicas(_Stretch):
    """Records that are folded onto a copy in the agent's memory."""

    def __init__(self, facts: Facts, settings: Settings) -> None:
        super().__init__(facts, settings)
        self._folded_s = [0.0]
        self._written_s = facts.write_s  # the process begins with a copy that is written
        self.durable[0].append(self._written_s)
        self.durable[1].append(0)

    def step(self, number: int) -> None:
        f = self.facts
        room = self._folded_s[max(0, number - self.settings.records)]
        end_s = max(self.ends_s[-1] + f.step_s + f.record_s, room)
        self.ends_s.append(end_s)
        there_s = end_s + f.handover_s
        self.held[0].append(there_s)
        self.held[1].append(number)
        begun_s = max(there_s, self._folded_s[-1], self._written_s)
        self._folded_s.append(begun_s + f.refold_s)
        if number % self.settings.every == 0:
            self._written_s = self._folded_s[-1] + f.write_s
            self.durable[0].append(self._written_s)
            self.durable[1].append(number)

    def folded_s(self, step: int) -> float:
        return self._folded_s[step]


# ---------------------------------------------------------------- failures


class _Run:
    """The clock, what is there to be restored, and where the time went."""

    def __init__(self, facts: Facts, stretch: _Stretch) -> None:
        self._facts, self._stretch = facts, stretch
        self.now_s = self._start_s = 0.0
        self._first = 0
        """The step that training began from."""
        self._ready_s: float | None = None
        """When the recovery that is going on ends."""
        self._durable = 0
        self._pending: list[tuple[float, int]] = []
        """What the agent of a dead process is about to make durable."""
        self._recovering_s = 0.0
        self._failures = [0, 0]

    def advance(self, to_s: float) -> None:
        """Let time pass, with nothing failing."""
        if self._ready_s is not None:
            until_s = min(self._ready_s, to_s)
            self._recovering_s += until_s - self.now_s
            if self._ready_s <= to_s:
                self._start_s, self._ready_s = self._ready_s, None
        self.now_s = to_s

    def fail(self, failure: Failure) -> None:
        """Something dies now; recovery begins."""
        self._failures[failure.host] += 1
        f, wait_s = self._facts, self._facts.restart_s
        if self._ready_s is None:
            trained_s = self.now_s - self._start_s
            self._stretch.look(trained_s)
            kept = _newest(self._stretch.held, trained_s) or 0
            stored = _newest(self._stretch.durable, trained_s)
            if stored is not None:
                self._durable = max(self._durable, self._first + stored)
            self._first += kept
            wait_s = max(wait_s, self._stretch.folded_s(kept) - trained_s)
        if failure.host:
            done = [step for at_s, step in self._pending if at_s <= self.now_s]
            self._durable = self._first = max([self._durable, *done])
            self._pending.clear()
            self._ready_s = self.now_s + f.restart_s + f.read_s
        else:
            self._pending = [*self._pending[-8:], (self.now_s + f.write_s, self._first)]
            self._ready_s = self.now_s + wait_s + f.reload_s

    def spent(self) -> Spent:
        """Where the time went until now."""
        steps = self._first
        if self._ready_s is None:
            trained_s = self.now_s - self._start_s
            self._stretch.look(trained_s)
            steps += bisect_right(self._stretch.ends_s, trained_s) - 1
        return Spent(
            duration_s=self.now_s,
            useful_s=steps * self._facts.step_s,
            recovering_s=self._recovering_s,
            steps=steps,
            process_failures=self._failures[0],
            host_failures=self._failures[1],
        )
