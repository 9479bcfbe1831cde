"""The headline figures of what was measured, as numbers and in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

from everystep.cli.output import clean, counted, size
from everystep.store.measured import KEPT_STEPS, Measure, MeasuredBy

Measured = Mapping[MeasuredBy, Sequence[Measure]]

_MOST_MESSAGES = 50
"""So many different errors, and deviations, are listed; the others are counted."""

_MESSAGE_LENGTH = 400
"""A longer text is cut."""

_NAME_LENGTH = 100
"""A longer name is cut: no timeline has one."""


class Message(Struct, frozen=True, kw_only=True):
    """An error or deviation, once, however often it came."""

    text: str
    count: int
    first: str
    """The first step that had it, such as `main:12`."""
    last: str
    rank: int
    """Of the first."""


class Spread(Struct, frozen=True, kw_only=True):
    """How a figure is spread over the steps that have it."""

    median: float
    p95: float
    """The 95th percentile: the least value that 95 % of them do not pass (nearest rank)."""
    largest: float


class Figures(Struct, frozen=True, kw_only=True):
    """Figures of some steps of some ranks. Times in seconds, rates in bytes per second; null where
    no step has the figure."""

    steps: int
    """Measured, each session and rank for itself."""
    staged: int
    """Of them: held whole by the agent at some time."""
    durable: int
    step_s: Spread | None
    stall_s: Spread | None
    stall_share: Spread | None
    """Stall by length of the step that it lengthened."""
    staged_lag_s: Spread | None
    durable_lag_s: Spread | None
    durable_lag_steps: Spread | None
    """At the end of a step: how many steps newer it was than the newest durable one."""
    state_bytes: int
    """The largest that one rank stored of a state."""
    copied_bytes: Spread | None
    written_bytes: Spread | None
    """Of steps that became durable."""
    offload_bytes_per_s: float | None
    """Medians, as the next two."""
    snapshot_bytes_per_s: float | None
    write_bytes_per_s: float | None
    errors: int
    """Steps with an error."""
    deviations: int


class Words(NamedTuple):
    """A figure for people."""

    label: str
    text: str


def tame(value: float) -> float:
    """A time or rate as it can be: a file may hold anything that is a number."""
    return min(max(value, 0.0), 1e15)


def figures(measured: Measured) -> Figures:
    """The figures of all these steps."""
    every = [m for measures in measured.values() for m in measures]
    durable = [m for m in every if m.durable_s is not None]
    behind = [n for ms in measured.values() for n in durable_lag_steps(ms) if n is not None]
    return Figures(
        steps=len(every),
        staged=sum(m.staged_s is not None for m in every),
        durable=len(durable),
        step_s=_spread(m.took_s for m in every),
        stall_s=_spread(m.stall_s for m in every),
        stall_share=_spread(m.stall_s / m.took_s for m in every if m.took_s > 0),
        staged_lag_s=_spread(m.staged_s for m in every if m.staged_s is not None),
        durable_lag_s=_spread(m.durable_s for m in durable if m.durable_s is not None),
        durable_lag_steps=_spread(behind),
        state_bytes=int(tame(max((m.state_bytes for m in every), default=0))),
        copied_bytes=_spread(m.copied_bytes for m in every),
        written_bytes=_spread(m.written_bytes for m in durable),
        offload_bytes_per_s=_median(m.offload_bytes_per_s for m in every),
        snapshot_bytes_per_s=_median(m.snapshot_bytes_per_s for m in every),
        write_bytes_per_s=_median(m.write_bytes_per_s for m in every),
        errors=sum(m.error is not None for m in every),
        deviations=sum(m.deviation is not None for m in every),
    )


def durable_lag_steps(measures: Sequence[Measure]) -> list[int | None]:
    """For each step of one session and rank: by how many steps the newest durable one was older
    when it ended. None where that is not known: the file begins in mid-session, and nothing in it
    was durable yet."""
    instants = sorted(
        (m.begun_s + m.took_s + m.durable_s, m.step) for m in measures if m.durable_s is not None
    )
    # what a session begins from is durable, but long sessions have lost their beginning
    newest = measures[0].step - 1 if measures and len(measures) < KEPT_STEPS else None
    found: list[int | None] = []
    at = 0
    for m in measures:
        while at < len(instants) and instants[at][0] <= m.begun_s + m.took_s:
            newest = max(newest or 0, instants[at][1])
            at += 1
        found.append(None if newest is None else max(0, m.step - newest))
    return found


def _spread(values: Iterable[float]) -> Spread | None:
    ordered = sorted(map(tame, values))
    if not ordered:
        return None
    return Spread(median=_rank(ordered, 0.5), p95=_rank(ordered, 0.95), largest=_rank(ordered, 1.0))


def _rank(ordered: list[float], share: float) -> float:
    """The least value that `share` of them do not pass."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _median(values: Iterable[float | None]) -> float | None:
    spread = _spread(value for value in values if value is not None)
    return spread.median if spread else None


def messages(measured: Measured, of: Callable[[Measure], str | None]) -> list[Message]:
    """Different texts in the order in which they came first.

    Args:
        of: gives the text of a step, or None.
    """
    steps: dict[str, list[tuple[str, int]]] = {}
    for by, measures in measured.items():
        for m in measures:
            text = of(m)
            if text is not None:
                steps.setdefault(shortened(text), []).append((step_name(m), by.rank))
    found = [
        Message(text=text, count=len(at), first=at[0][0], last=at[-1][0], rank=at[0][1])
        for text, at in steps.items()
    ]
    return found[:_MOST_MESSAGES]


def step_name(measure: Measure) -> str:
    """`main:12`."""
    return f"{shortened(measure.timeline, _NAME_LENGTH)}:{measure.step}"


def shortened(text: str, length: int = _MESSAGE_LENGTH) -> str:
    """A text that can be shown: of at most `length` characters, with no control character."""
    return clean(text if len(text) <= length else text[: length - 1] + "…")


# ---------------------------------------------------------------- in words


def in_words(found: Figures) -> Iterator[Words]:
    """The figures for people, the most important first."""
    if found.step_s is not None and found.stall_s is not None and found.stall_share is not None:
        share = found.stall_share
        yield Words(
            "stall",
            f"{percent(share.median)} of a step (median), {percent(share.p95)} "
            f"(95th percentile); {_times(found.stall_s)}",
        )
        yield Words("step", _times(found.step_s))
    yield Words(
        "stored",
        f"of {counted(found.steps, 'measured step')} {found.staged:,} were staged and "
        f"{found.durable:,} became durable",
    )
    if found.staged_lag_s is not None:
        yield Words("staged", f"{_times(found.staged_lag_s)} after the step's end")
    if found.durable_lag_s is not None:
        yield Words("durable", f"{_times(found.durable_lag_s)} after the step's end")
    if found.durable_lag_steps is not None:
        lag = found.durable_lag_steps
        text = f"{lag.median:,.0f} (median), at most {counted(int(lag.largest), 'step')}"
        yield Words("durable lag", f"{text} behind training")
    yield Words("bytes per step", _bytes(found))
    rates = {
        "offload": found.offload_bytes_per_s,
        "snapshot": found.snapshot_bytes_per_s,
        "write": found.write_bytes_per_s,
    }
    known = [f"{what} {size(int(r))}/s" for what, r in rates.items() if r is not None]
    yield Words("rates (median)", ", ".join(known) or "nothing was moved")
    yield Words(
        "trouble",
        f"{counted(found.errors, 'step')} with an error, {found.deviations:,} off the plan",
    )


def _bytes(found: Figures) -> str:
    parts = [f"{size(found.state_bytes)} of state per rank"]
    if found.copied_bytes is not None:
        parts.append(f"{size(int(found.copied_bytes.median))} copied")
    if found.written_bytes is not None:
        parts.append(f"{size(int(found.written_bytes.median))} written where it became durable")
    return ", ".join(parts)


def _times(spread: Spread) -> str:
    return (
        f"{duration(spread.median)} (median), {duration(spread.p95)} (95th percentile), "
        f"{duration(spread.largest)} at most"
    )


def percent(ratio: float) -> str:
    """A share for people, to three digits."""
    return f"{100 * ratio:.3g} %" if ratio < 10 else f"{100 * ratio:,.0f} %"


def duration(seconds: float) -> str:
    """A time for people, to three digits: `12.3 ms`."""
    for unit, length_s in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * length_s:
            value = seconds / length_s
            return f"{value:.3g} {unit}" if value < 999.5 else f"{value:,.0f} {unit}"
    return f"{seconds * 1e6:.3g} µs"
