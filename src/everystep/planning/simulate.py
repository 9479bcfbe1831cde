"""A discrete-event simulation of training steps with full checkpoints, chunk by chunk.

It knows the rules (who may use what, when) and none of the formulas of `hiding`, which it is
tested against. All times are exact fractions inside, so equal input gives equal output, and a copy
that ends when the update begins is in time.

Lanes: the training thread runs forward, backward, stalls and update one after the other; the link
carries one chunk at a time, the oldest checkpoint first; snapshots are made one after the other
while training stands still; storage writes one whole checkpoint at a time. A copy out of live
memory cannot be called back, so a chunk that would not be out before the update is not begun.
"""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from msgspec import Struct

from everystep.errors import UsageError
from everystep.planning.hiding import STAGING_SLOTS, Figures, Policy

Time = Fraction
"""Seconds since training began."""


class Span(NamedTuple):
    """A stretch of time in which one thing was going on."""

    lane: str
    """`forward`, `backward`, `update`, `stall`; `offload`, `snapshot`; `write`."""
    start_s: float
    stop_s: float


class Step(Struct, frozen=True, kw_only=True):
    """One step. Times are in seconds since training began."""

    step: int
    start_s: float
    end_s: float
    snapshot_s: float
    """Stall of this step: copying what was about to be overwritten."""
    staging_s: float
    """Stall of this step: waiting for room in staging memory."""
    snapshot_bytes: int
    """What was copied then."""
    extra_peak_bytes: int
    """By how much, in this step, snapshots raised device memory above training's own peak."""
    staged_s: float | None
    """When all of the state after this step was in staging memory; None: no checkpoint of it."""
    durable_s: float | None
    """When it was durable; None: it never became so."""

    @property
    def stall_s(self) -> float:
        """By how much the library lengthened this step."""
        return self.snapshot_s + self.staging_s


class Simulation(Struct, frozen=True):
    """What happened."""

    steps: tuple[Step, ...]
    spans: tuple[Span, ...]
    """Of all lanes, each in the order of time."""


class _Taken:
    """A checkpoint of the state after one step."""

    def __init__(self, begun: Time, room: Time) -> None:
        self.begun, self.room = begun, room  # the state is stable; there is a place in staging
        self.staged: Time | None = None
        self.durable: Time | None = None
        self.released: Time | None = None  # when its place in staging is free again


class _Past(NamedTuple):
    """One step, and the checkpoint of the state after it."""

    start: Time
    forward: Time
    end: Time
    snapshot: Time
    staging: Time
    left: Fraction
    taken: _Taken | None


def simulate(
    figures: Figures,
    steps: int,
    *,
    chunk_bytes: int,
    policy: Policy = "skip",
    every: int = 1,
    staging_slots: int | None = None,
) -> Simulation:
    """Run so many steps from a cold start: nothing is there to be copied in the first.

    After the last step training ends, and nothing is overwritten any more.

    Args:
        figures: of the device.
        steps: how many, at least 1.
        chunk_bytes: what leaves in one piece; the last piece of a state may be smaller.
        policy: what happens at a checkpoint for which staging memory has no room: `skip` takes
            none of this step; `block` takes it, and waits before the next update if need be.
        every: a checkpoint after every so many steps.
        staging_slots: whole states that staging memory has room for; None: as the policy needs.

    Raises:
        UsageError: fewer than one step, byte or interval, or fewer than two slots.
    """
    slots = STAGING_SLOTS[policy] if staging_slots is None else staging_slots
    if min(steps, chunk_bytes, every) < 1 or slots < 2:
        problem = f"steps={steps}, chunk_bytes={chunk_bytes}, every={every}, staging_slots={slots}"
        raise UsageError(f"nothing to simulate with {problem}")
    run = _Run(figures, chunk_bytes, policy, every, slots)
    for number in range(1, steps + 1):
        run.step(number)
    return run.finish()


class _Run:
    """The clocks of all lanes, and what has happened on them."""

    def __init__(self, f: Figures, chunk: int, policy: Policy, every: int, slots: int) -> None:
        self._figures, self._policy, self._every, self._slots = f, policy, every, slots
        self._chunk = Fraction(chunk)
        self._state = Fraction(f.state_bytes)
        self._link, self._copy, self._store = (
            Fraction(1) / Fraction(rate)  # seconds per byte
            for rate in (f.offload_bytes_per_s, f.snapshot_bytes_per_s, f.write_bytes_per_s)
        )
        self._past: list[_Past] = []
        self._taken: list[_Taken] = []
        self._spans: list[tuple[str, Time, Time]] = []
        self._held: list[tuple[Time, Fraction]] = []  # changes of snapshot memory on the device
        self._link_free = self._store_free = Fraction(0)

    def step(self, number: int) -> None:
        start = self._past[-1].end if self._past else Fraction(0)
        forward = start + Fraction(self._figures.forward_s)
        ready = forward + Fraction(self._figures.backward_s)
        self._span("forward", start, forward)
        self._span("backward", forward, ready)
        go, clear, left = ready, ready, Fraction(0)
        previous = self._past[-1].taken if self._past else None
        if previous is not None:
            go = max(ready, previous.room)
            left = self._leave_directly(previous, go)
            clear = self._snapshot(previous, go, left)
        self._span("stall", ready, clear)
        end = clear + Fraction(self._figures.update_s)
        self._span("update", clear, end)
        taken = self._take(end) if number % self._every == 0 else None
        self._past.append(_Past(start, forward, end, clear - go, go - ready, left, taken))

    def _leave_directly(self, taken: _Taken, deadline: Time | None) -> Fraction:
        """Offload what can be out of live memory by the deadline; returns the bytes left."""
        start = max(self._link_free, taken.begun, taken.room)
        out = self._state
        if deadline is not None and start + self._state * self._link > deadline:
            chunks = (deadline - start) / (self._chunk * self._link)
            out = max(math.floor(chunks), 0) * self._chunk
        if out:
            self._link_free = start + out * self._link
            self._span("offload", start, self._link_free)
            taken.staged = self._link_free
        return self._state - out

    def _snapshot(self, taken: _Taken, now: Time, left: Fraction) -> Time:
        """Copy the rest, and offload the copies as the link gets to them; returns when training
        goes on."""
        copied = now
        while left:
            nbytes = min(self._chunk, left)
            left -= nbytes
            begun, copied = copied, copied + nbytes * self._copy
            if not self._figures.on_device:
                taken.staged = copied
                continue
            self._held.append((begun, nbytes))
            start = max(self._link_free, copied)
            taken.staged = self._link_free = start + nbytes * self._link
            self._span("offload", start, self._link_free)
            self._held.append((self._link_free, -nbytes))
        self._span("snapshot", now, copied)
        return copied

    def _take(self, now: Time) -> _Taken | None:
        """A place for the state of this moment, as the policy says."""
        if self._policy == "block":
            self._write_in_order()
            before = self._taken[-self._slots :]
            room = before[0].durable if len(before) == self._slots else None
            taken = _Taken(now, now if room is None else max(now, room))
        else:
            self._write_newest(now)
            used = sum(t.released is None or t.released > now for t in self._taken)
            if used >= self._slots:
                return None
            taken = _Taken(now, now)
        self._taken.append(taken)
        return taken

    def _write(self, taken: _Taken, start: Time) -> None:
        self._store_free = taken.durable = taken.released = start + self._state * self._store
        self._span("write", start, taken.durable)

    def _write_in_order(self) -> None:
        """Write everything that is, or will be, staged."""
        for taken in self._taken:
            if taken.durable is None and taken.staged is not None:
                self._write(taken, max(self._store_free, taken.staged))

    def _write_newest(self, now: Time | None) -> None:
        """Write what storage has begun by now (None: ever): each time the newest that is staged;
        what a newer one has overtaken gives up its place."""
        while True:
            waiting = [t for t in self._taken if t.released is None and t.staged is not None]
            if not waiting:
                return
            start = max(self._store_free, _staged(waiting[0]))
            until = start if now is None else min(start, now)
            due = [t for t in waiting if _staged(t) <= until]
            for older, newer in pairwise(due):
                older.released = newer.staged
            if now is not None and start > now:
                return
            self._write(due[-1], start)

    def finish(self) -> Simulation:
        last = self._past[-1].taken
        if last is not None:
            self._leave_directly(last, None)
        if self._policy == "block":
            self._write_in_order()
        else:
            self._write_newest(None)
        peaks = self._extra_peaks()
        steps = tuple(
            Step(
                step=number,
                start_s=float(past.start),
                end_s=float(past.end),
                snapshot_s=float(past.snapshot),
                staging_s=float(past.staging),
                snapshot_bytes=math.ceil(past.left),
                extra_peak_bytes=math.ceil(peaks[number - 1]),
                staged_s=None if past.taken is None else _seconds(past.taken.staged),
                durable_s=None if past.taken is None else _seconds(past.taken.durable),
            )
            for number, past in enumerate(self._past, 1)
        )
        return Simulation(steps, tuple(Span(n, float(a), float(b)) for n, a, b in self._spans))

    def _extra_peaks(self) -> list[Fraction]:
        """Of each step: the most by which snapshots exceed what activations leave free."""
        held, at = Fraction(0), 0
        changes = sorted(self._held)  # at equal times memory is given back before it is taken
        peaks = []
        for past in self._past:
            peak = max(held - self._free(past, past.start), Fraction(0))
            # between changes the free room is least at the end of the forward
            for moment in (past.forward, past.end):
                while at < len(changes) and changes[at][0] <= moment:
                    when, change = changes[at]
                    peak = max(peak, held - self._free(past, when))
                    held, at = held + change, at + 1
                    peak = max(peak, held - self._free(past, when))
                peak = max(peak, held - self._free(past, moment))
            peaks.append(peak)
        return peaks

    def _free(self, past: _Past, at: Time) -> Fraction:
        """Memory that activations leave free: they grow evenly in the forward, and go evenly in
        the backward."""
        room = Fraction(self._figures.activation_bytes)
        if at <= past.forward:
            spent = past.forward - past.start
            return room * (past.forward - at) / spent if spent else Fraction(0)
        back = Fraction(self._figures.backward_s)
        return room * min((at - past.forward) / back if back else Fraction(1), Fraction(1))

    def _span(self, lane: str, start: Time, stop: Time) -> None:
        """Note a stretch; one that follows another of its lane at once makes it longer."""
        if stop == start:
            return
        for place in range(len(self._spans) - 1, max(len(self._spans) - 3, -1), -1):
            if self._spans[place][::2] == (lane, start):
                self._spans[place] = (lane, self._spans[place][1], stop)
                return
        self._spans.append((lane, start, stop))


def _staged(taken: _Taken) -> Time:
    return Fraction(0) if taken.staged is None else taken.staged


def _seconds(time: Time | None) -> float | None:
    return None if time is None else float(time)
