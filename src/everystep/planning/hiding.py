"""How much of a full checkpoint hides behind a training step, and what the rest costs.

The model is Checkflow's (IEEE Computer Architecture Letters, 2025), for one device. Between two
updates the state is stable, so its S bytes leave over the link, at B bytes/s, while forward (F
seconds) and backward (K) run. What is left when the update (U) is about to write is snapshotted at
D bytes/s, and leaves later. docs/cost-model.md derives every formula and says where ours goes
beyond the paper's. Comparisons are made in exact fractions, so that a limit belongs to one side.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from everystep.errors import UsageError

Policy = Literal["block", "skip"]

STAGING_SLOTS: dict[Policy, int] = {"skip": 3, "block": 2}
"""Whole states that host memory has room for: one being written and one being filled; with `skip`
also the newest whole one, so that staging never waits."""

MARGIN = 0.1
"""Share by which a measured need may pass a limit before the interval changes."""

PATIENCE = 8
"""Observations in a row before checkpoints are taken more often."""

TOLERANCE = 0.2
"""Share by which a measured figure may be away from the planned one before it is told."""

NEGLIGIBLE_S = 1e-3
"""Times that differ by less agree, whatever the share."""


class Figures(Struct, frozen=True, kw_only=True):
    """What one device and its storage can do, measured or assumed.

    Raises:
        UsageError: a figure that makes no sense.
    """

    state_bytes: int
    """S: what this rank stores of a whole state."""
    forward_s: float
    """F."""
    backward_s: float
    """K."""
    update_s: float
    """U: the optimizer's step, in which the state is written."""
    offload_bytes_per_s: float
    """B: from the device to staging memory, beside computing."""
    snapshot_bytes_per_s: float
    """D: copies within the device; without a device, of memory."""
    write_bytes_per_s: float
    """W: from staging memory to the store."""
    activation_bytes: int = 0
    """A: what the backward pass has freed when it ends, and the next forward takes again."""
    on_device: bool = True
    """Snapshots stay on the device until they are offloaded. False (training on the CPU): they go
    to staging memory at once."""

    def __post_init__(self) -> None:
        for name in ("state_bytes", "offload_bytes_per_s", "snapshot_bytes_per_s"):
            _require(0 < getattr(self, name) < math.inf, name, getattr(self, name))
        _require(0 < self.write_bytes_per_s < math.inf, "write_bytes_per_s", self.write_bytes_per_s)
        for name in ("forward_s", "backward_s", "update_s", "activation_bytes"):
            _require(0 <= getattr(self, name) < math.inf, name, getattr(self, name))
        window_s = self.forward_s + self.backward_s
        _require(window_s > 0, "forward_s + backward_s", window_s)


class Verdict(Struct, frozen=True, kw_only=True):
    """What checkpoints cost in the steady state."""

    policy: Policy
    every: int
    """A checkpoint at every so many steps."""
    least_every: int
    """The link could carry one at every so many, the time of stalls included."""
    hidden: bool
    """The whole state leaves while it is stable: nothing is snapshotted."""
    snapshot_bytes: int
    """X: what is snapshotted for a checkpoint."""
    snapshot_s: float
    """By how much that lengthens one step of `every`."""
    staging_s: float
    """How long training waits for room in staging memory per checkpoint; `block` only."""
    step_s: float
    """Mean length of a step, stalls included."""
    stall_share: float
    """Of all time."""
    extra_peak_bytes: int
    """By how much snapshots raise the peak of device memory."""
    staging_bytes: int
    """Host memory for staging."""
    staged_s: float
    """From the end of a step until all of it is in staging memory."""
    durable_every_steps: float
    """Mean distance of durable steps."""
    durable_gap_steps: int
    """Longest distance of durable steps."""
    host_loss_s: float
    """The most training time that is lost with the host."""
    hides_at_window_s: float
    """Forward and backward together would have to take this long to hide all."""
    hides_at_offload_bytes_per_s: float
    """The link would have to carry this much to hide all."""
    durable_at_write_bytes_per_s: float
    """From here on storage makes every checkpoint durable without a wait."""


def verdict(figures: Figures, policy: Policy = "skip", every: int | None = None) -> Verdict:
    """What checkpoints cost in the steady state, with `STAGING_SLOTS` of the policy.

    Args:
        figures: of the device.
        policy: what happens where storage is slower than checkpoints come.
        every: a checkpoint at every so many steps; None: as the engine chooses, the least power
            of two for which the link needs no longer than the steps compute.

    Raises:
        UsageError: the link cannot carry a checkpoint at every so many steps.
    """
    least = least_interval(figures)
    compute_s = figures.forward_s + figures.backward_s + figures.update_s
    if every is None:
        needed = steps_between(figures.state_bytes, compute_s, figures.offload_bytes_per_s)
        every = power_of_two(needed)
    if every < least:
        problem = f"the link cannot carry a checkpoint at every {every} steps"
        raise UsageError(problem, hint=f"at every {least} steps it can")
    state, offload, snapshot, write = _rates(figures)
    window, compute = _times(figures)
    steady = _steady(figures, policy, every)
    left, period, written = steady.left, steady.period, state / write
    slow = written > period
    return Verdict(
        policy=policy,
        every=every,
        least_every=least,
        hidden=left == 0,
        snapshot_bytes=math.ceil(left),
        snapshot_s=float(left / snapshot),
        staging_s=float(steady.wait),
        step_s=float(period / every),
        stall_share=float(1 - every * compute / period),
        extra_peak_bytes=math.ceil(_extra_peak(figures, left)),
        staging_bytes=STAGING_SLOTS[policy] * figures.state_bytes,
        staged_s=float(steady.staged),
        durable_every_steps=float(every * max(written / period, Fraction(1))),
        durable_gap_steps=every * (math.ceil(written / period) if slow else 1),
        host_loss_s=float(
            (STAGING_SLOTS[policy] + 2) * written
            if period > steady.unhindered
            else steady.staged + period + written * (2 if slow else 1)
        ),
        hides_at_window_s=float(state / offload),
        hides_at_offload_bytes_per_s=float(state / window),
        durable_at_write_bytes_per_s=float(state / steady.unhindered),
    )


class _Steady(NamedTuple):
    """One checkpoint among many alike."""

    left: Fraction
    """Bytes that are snapshotted."""
    wait: Fraction
    """Seconds for room in staging memory."""
    period: Fraction
    """Seconds from one checkpoint to the next."""
    unhindered: Fraction
    """The same where storage is fast enough."""
    staged: Fraction
    """Seconds from the end of the step until it is staged."""


def _steady(figures: Figures, policy: Policy, every: int) -> _Steady:
    state, offload, snapshot, write = _rates(figures)
    window, compute = _times(figures)
    left = _left(figures)
    unhindered = every * compute + left / snapshot
    period, wait, room = unhindered, Fraction(0), Fraction(0)
    if policy == "block" and state / write > period:
        # room comes while training waits for it, so less leaves directly: the snapshot grows with
        # the period, up to the whole state, and what is still short is waited for
        period = state / write
        left = min(snapshot * (period - every * compute), state)
        wait = period - every * compute - left / snapshot
        room = window + wait - (state - left) / offload
    staged = room + (state - left) / offload + left / snapshot
    if figures.on_device:
        staged = max(room + state / offload, staged)
    return _Steady(left, wait, period, unhindered, staged)


def least_interval(figures: Figures) -> int:
    """The least n for which the link carries a checkpoint at every n-th step.

    The snapshot of one checkpoint must have left when the next begins to leave, and the link goes
    on while training stands still for the snapshot: `S <= B (n (F + K + U) + X / D)`. The paper's
    condition leaves out the last term, and so is sufficient, not necessary. Where snapshots go to
    staging memory at once, nothing is left to carry: 1.
    """
    if not figures.on_device:
        return 1
    state, offload, snapshot, _ = _rates(figures)
    _, compute = _times(figures)
    need = (state - offload * _left(figures) / snapshot) / (offload * compute)
    return max(1, math.ceil(need))


def _extra_peak(figures: Figures, left: Fraction) -> Fraction:
    """Bytes by which `left` bytes of snapshot raise the peak, which training itself reaches at the
    end of a forward; activations grow evenly in it, so the worst moments are its two ends."""
    if not figures.on_device:
        return Fraction(0)
    _, offload, snapshot, _ = _rates(figures)
    free = Fraction(figures.activation_bytes)
    taken = left / snapshot
    begun = taken + Fraction(figures.update_s)
    full = begun + Fraction(figures.forward_s)
    held = (left - offload * taken - free, left - offload * begun - free, left - offload * full)
    return max(*held, Fraction(0))


def _left(figures: Figures) -> Fraction:
    """X: the bytes that have not left when the update begins."""
    state, offload, _, _ = _rates(figures)
    window, _ = _times(figures)
    return max(state - offload * window, Fraction(0))


def _times(figures: Figures) -> tuple[Fraction, Fraction]:
    """F + K and F + K + U."""
    window = Fraction(figures.forward_s) + Fraction(figures.backward_s)
    return window, window + Fraction(figures.update_s)


def _rates(figures: Figures) -> tuple[Fraction, Fraction, Fraction, Fraction]:
    """S, B, D, W."""
    rates = (figures.offload_bytes_per_s, figures.snapshot_bytes_per_s, figures.write_bytes_per_s)
    b, d, w = map(Fraction, rates)
    return Fraction(figures.state_bytes), b, d, w


# ---------------------------------------------------------------- the interval, chosen online


def steps_between(state_bytes: int, cycle_s: float, link_bytes_per_s: float) -> int:
    """The least n, at least 1, with `state_bytes <= link_bytes_per_s * n * cycle_s`, exactly.

    Args:
        state_bytes: what one checkpoint moves.
        cycle_s: length of a step; for the link without stalls, or a step that a snapshot
            makes longer would excuse the snapshot.
        link_bytes_per_s: of the link to the host or, for the durable interval, of storage.

    Raises:
        UsageError: a time or rate that is not positive and finite.
    """
    return max(1, math.ceil(_need(state_bytes, cycle_s, link_bytes_per_s)))


def power_of_two(steps: int) -> int:
    """The least power of two that is at least `steps`; 1 for less than 1."""
    return 1 << max(steps - 1, 0).bit_length()


class Interval(Struct, frozen=True):
    """A checkpoint at every so many steps, as measurements change.

    The number is a power of two, so that ranks that choose on their own still have every multiple
    of the largest in common. It rises at once, and falls by half only after `PATIENCE`
    observations in a row that call for it, so that it does not swing.
    """

    steps: int = 1
    calm: int = 0
    """Observations in a row by which half would have been enough."""

    def observe(self, state_bytes: int, cycle_s: float, link_bytes_per_s: float) -> Interval:
        """The interval after one more step was measured.

        Args:
            state_bytes: what one checkpoint moves.
            cycle_s: length of a step without stalls.
            link_bytes_per_s: rate of the link to the host.

        Raises:
            UsageError: a time or rate that is not positive and finite.
        """
        need = _need(state_bytes, cycle_s, link_bytes_per_s)
        margin = 1 + Fraction(MARGIN)
        if need > self.steps * margin:
            return Interval(power_of_two(math.ceil(need)))
        if self.steps == 1 or need * margin > Fraction(self.steps, 2):
            return replace(self, calm=0)
        if self.calm + 1 < PATIENCE:
            return replace(self, calm=self.calm + 1)
        return Interval(self.steps // 2)


def _need(state_bytes: int, cycle_s: float, link_bytes_per_s: float) -> Fraction:
    """Steps' worth of link time that one checkpoint takes, not rounded."""
    _require(0 < cycle_s < math.inf, "cycle_s", cycle_s)
    _require(0 < link_bytes_per_s < math.inf, "link_bytes_per_s", link_bytes_per_s)
    return Fraction(state_bytes) / (Fraction(link_bytes_per_s) * Fraction(cycle_s))


# ---------------------------------------------------------------- plan and reality


class Pace(Struct, frozen=True, kw_only=True):
    """Figures of one step, planned or measured; None: not known."""

    forward_s: float | None = None
    backward_s: float | None = None
    update_s: float | None = None
    snapshot_s: float | None = None
    staging_s: float | None = None
    staged_s: float | None = None
    offload_bytes_per_s: float | None = None
    snapshot_bytes_per_s: float | None = None
    write_bytes_per_s: float | None = None


def deviation(planned: Pace, measured: Pace) -> str | None:
    """Where reality is more than `TOLERANCE` away from the plan, in words; None: nowhere.

    Only what both know is compared.
    """
    told = []
    for name in Pace.__struct_fields__:
        plan, real = getattr(planned, name), getattr(measured, name)
        if plan is None or real is None or abs(real - plan) <= TOLERANCE * plan:
            continue
        rate = name.endswith("_bytes_per_s")
        if not rate and abs(real - plan) < NEGLIGIBLE_S:
            continue
        what = name.removesuffix("_bytes_per_s" if rate else "_s")
        say = _rate_words if rate else _time_words
        told.append(f"{what} {say(real)}, planned {say(plan)}")
    return "; ".join(told) or None


def _time_words(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _rate_words(rate: float) -> str:
    return f"{rate / 1e9:.3g} GB/s" if rate >= 1e9 else f"{rate / 1e6:.3g} MB/s"


def _require(sensible: bool, name: str, value: object) -> None:
    if not sensible:
        raise UsageError(f"{name}={value!r} makes no sense")
