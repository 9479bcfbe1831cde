"""What was measured as a Chrome trace event file, which Perfetto and chrome://tracing open.

The form is that of the "Trace Event Format" document of the Chromium project: a JSON object whose
`traceEvents` are complete events (`X`: `ts` and `dur` in microseconds) and metadata (`M`). A
process is a rank, a thread is a lane. What overlaps in a lane without one being inside the other
goes to a further thread of that lane, since viewers draw one thread as a stack of calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from everystep.cli.report_figures import Measured, shortened, step_name, tame
from everystep.store.measured import Measure, MeasuredBy

LANES = ("forward", "backward", "update", "stall", "offload", "snapshot", "hash", "write")
"""In the order in which they are shown; a lane of another name comes behind them."""

SESSION, STEP = "session", "step"
"""Lanes of ours, above all others."""

_ROUNDING_NS = 10
"""By so little one thing may seem to begin before the other has ended, where it followed it."""

_GAP_S = 1.0
"""Between sessions: how much time passed there was not measured."""


class _Event(NamedTuple):
    """Something with a beginning and an end, in nanoseconds from the beginning of the trace."""

    lane: str
    start_ns: int
    stop_ns: int
    name: str
    session: int


def encode_trace(measured: Measured) -> Iterator[bytes]:
    """The file's bytes, in pieces.

    Ranks of one session share a clock where they are on one host. A rank whose clock is off by
    more than a step is on another, and is moved so that the first step that both measured begins
    at one time. Sessions follow each other one second apart.
    """
    events: dict[int, list[_Event]] = {}
    for by, zero_s in _zeros(measured).items():
        if measured[by]:
            events.setdefault(by.rank, []).extend(_events(by, measured[by], zero_s))
    before = b'{"displayTimeUnit":"ms","traceEvents":[\n'
    for rank, found in sorted(events.items()):
        for event in _encoded(rank, found):
            yield before + msgspec.json.encode(event)
            before = b",\n"
    yield b"\n]}\n"


def _events(by: MeasuredBy, measures: Sequence[Measure], zero_s: float) -> Iterator[_Event]:
    def event(lane: str, start_s: float, stop_s: float, name: str) -> _Event:
        start_ns = round((start_s - zero_s) * 1e9)
        stop_ns = round((stop_s - zero_s) * 1e9)
        return _Event(lane, start_ns, max(start_ns, stop_ns), name, by.session)

    yield event(SESSION, *_extent(measures), f"session {by.session}")
    for m in measures:
        name, begun_s = step_name(m), tame(m.begun_s)
        yield event(STEP, begun_s, begun_s + tame(m.took_s), name)
        for span in m.spans:
            lane, start_s = shortened(span.lane), begun_s + _offset(span.start_s)
            yield event(lane, start_s, begun_s + _offset(span.stop_s), f"{lane} {name}")


def _offset(seconds: float) -> float:
    """Of a span: copies may begin before their step does."""
    return max(-1e15, min(seconds, 1e15))


def _extent(measures: Sequence[Measure]) -> tuple[float, float]:
    """From the first beginning to the last end, on the rank's clock, in seconds."""
    starts, stops = [], []
    for m in measures:
        begun_s = tame(m.begun_s)
        starts += [begun_s, *(begun_s + _offset(span.start_s) for span in m.spans)]
        stops += [begun_s + tame(m.took_s), *(begun_s + _offset(span.stop_s) for span in m.spans)]
    return min(starts), max(*starts, *stops)


def _zeros(measured: Measured) -> dict[MeasuredBy, float]:
    """What is to be subtracted from the clock of each file, in seconds."""
    zeros: dict[MeasuredBy, float] = {}
    now_s = 0.0
    for session in sorted({by.session for by in measured}):
        files = {by: ms for by, ms in measured.items() if by.session == session and ms}
        if not files:
            continue
        reference = files[min(files)]
        shifts = {by: _shift(reference, measures) for by, measures in files.items()}
        extents = {by: _extent(measures) for by, measures in files.items()}
        start_s = min(first - shifts[by] for by, (first, _) in extents.items())
        stop_s = max(last - shifts[by] for by, (_, last) in extents.items())
        zeros |= {by: shifts[by] + start_s - now_s for by in files}
        now_s += stop_s - start_s + _GAP_S
    return zeros


def _shift(reference: Sequence[Measure], measures: Sequence[Measure]) -> float:
    """By how many seconds another host's clock is ahead of the reference's; 0 for the same."""
    by_step = {(m.timeline, m.step): m for m in reference}
    pairs = ((by_step.get((m.timeline, m.step)), m) for m in measures)
    one, other = next(((a, b) for a, b in pairs if a is not None), (reference[0], measures[0]))
    ahead_s = tame(other.begun_s) - tame(one.begun_s)
    return ahead_s if abs(ahead_s) > max(one.took_s, other.took_s) else 0.0


def _encoded(rank: int, events: list[_Event]) -> Iterator[dict[str, object]]:
    """One rank's events in order of time, after what names its lanes."""
    names = {event.lane for event in events}
    order = [SESSION, STEP, *LANES]
    lanes = [lane for lane in order if lane in names] + sorted(names - set(order))
    threads: dict[tuple[str, int], int] = {}
    placed = _rows(events)
    for key in sorted({(lanes.index(event.lane), row) for event, row in placed}):
        threads[lanes[key[0]], key[1]] = len(threads)
    yield _metadata("process_name", rank, 0, name=f"rank {rank}")
    yield _metadata("process_sort_index", rank, 0, sort_index=rank)
    for (lane, row), tid in threads.items():
        yield _metadata("thread_name", rank, tid, name=f"{lane} {row + 1}" if row else lane)
        yield _metadata("thread_sort_index", rank, tid, sort_index=tid)
    for event, row in placed:
        yield {
            "ph": "X",
            "name": event.name,
            "cat": event.lane,
            "pid": rank,
            "tid": threads[event.lane, row],
            "ts": max(0, event.start_ns) / 1000,
            "dur": (event.stop_ns - event.start_ns) / 1000,
            "args": {"session": event.session},
        }


def _rows(events: list[_Event]) -> list[tuple[_Event, int]]:
    """Events in order of time, each with the first row of its lane that is free."""
    last: dict[str, list[int]] = {}
    placed: list[tuple[_Event, int]] = []
    for event in sorted(events, key=lambda event: (event.start_ns, -event.stop_ns)):
        rows = last.setdefault(event.lane, [])
        latest = event.start_ns + _ROUNDING_NS
        free = (n for n, at in enumerate(rows) if placed[at][0].stop_ns <= latest)
        row = next(free, len(rows))
        if row < len(rows):
            before, _ = placed[rows[row]]
            stop_ns = max(before.start_ns, min(before.stop_ns, event.start_ns))
            placed[rows[row]] = before._replace(stop_ns=stop_ns), row
        rows[row : row + 1] = [len(placed)]
        placed.append((event, row))
    return placed


def _metadata(what: str, rank: int, tid: int, **args: object) -> dict[str, object]:
    return {"ph": "M", "name": what, "pid": rank, "tid": tid, "args": args}
