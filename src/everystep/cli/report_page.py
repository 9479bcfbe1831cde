"""The page of `everystep report`: the template with what was measured placed in it as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from typing import Any

import msgspec
from msgspec import Struct

from everystep.cli.output import counted
from everystep.cli.report_figures import (
    Measured,
    Message,
    Words,
    durable_lag_steps,
    duration,
    figures,
    percent,
    shortened,
    step_name,
    tame,
)
from everystep.cli.report_trace import LANES
from everystep.store.measured import Measure, MeasuredBy

MAX_ROWS = 8_000
"""So many steps are placed in a page, shared out over the ranks; the newest."""

MAX_RANKS = 64
"""So many ranks have charts; the lowest."""

MAX_SPANS = 60_000
"""So many spans are placed in a page, shared out over the ranks; of the newest steps."""

_MARK = b"@DATA@"
"""Where the data goes."""

_FIELDS = (
    *("session", "step", "begun", "took", "stall", "snapshot", "staging", "bookkeeping"),
    *("forward", "backward", "update", "copied", "written", "staged", "durable", "behind"),
    *("error", "deviation", "spans"),
)
"""Of a row; times in seconds, `begun` from the first row's of its session; `spans` are lists of
the lane's number, start and stop, or null where they were left out."""


class Page(Struct, frozen=True, kw_only=True):
    """What stands above the charts."""

    title: str
    headline: Sequence[Words]
    sessions: Mapping[int, str]
    """What is known of each session, in words."""
    errors: Sequence[Message]
    deviations: Sequence[Message]


def encode_page(page: Page, measured: Measured) -> bytes:
    """The whole page.

    Whatever comes from the run is in one JSON text, in which no `<` stands: no script, tag or
    comment can begin or end there.
    """
    template = resources.files("everystep.cli").joinpath("report.html").read_bytes()
    before, _, after = template.partition(_MARK)
    data = msgspec.json.encode(_data(page, measured))
    return before + data.replace(b"<", b"\\u003c") + after


def _data(page: Page, measured: Measured) -> dict[str, Any]:
    every = sorted({by.rank for by in measured})
    ranks = every[:MAX_RANKS]
    lanes: dict[str, int] = {lane: number for number, lane in enumerate(LANES)}
    charts = []
    left_out = 0
    for rank in ranks:
        rows = [row for by, ms in measured.items() if by.rank == rank for row in _rows(by, ms)]
        kept = rows[-max(1, MAX_ROWS // len(ranks)) :]
        left_out += len(rows) - len(kept)
        spans = _spans([m for _, m in kept], MAX_SPANS // len(ranks), lanes)
        charts.append(
            {"rank": rank, "rows": [[*row, s] for (row, _), s in zip(kept, spans, strict=True)]}
        )
    notes = []
    if left_out:
        notes.append(
            f"The charts show the newest steps; {counted(left_out, 'older one')} left out."
        )
    if len(every) > len(ranks):
        notes.append(f"The charts show the lowest {len(ranks)} of {len(every):,} ranks.")
    return {
        **msgspec.to_builtins(page),
        "headline": [list(words) for words in page.headline],
        "notes": notes,
        "by_rank": _by_rank(measured, every) if len(every) > 1 else [],
        "fields": _FIELDS,
        "lanes": list(lanes),
        "charts": charts,
    }


def _rows(by: MeasuredBy, measures: Sequence[Measure]) -> Iterator[tuple[list[Any], Measure]]:
    behind = durable_lag_steps(measures)
    for m, lag in zip(measures, behind, strict=True):
        times = (m.begun_s - measures[0].begun_s, m.took_s, m.stall_s, m.snapshot_s)
        more = (m.staging_s, m.bookkeeping_s, m.forward_s, m.backward_s, m.update_s)
        row = [by.session, step_name(m), *map(_seconds, (*times, *more))]
        row += [int(tame(m.copied_bytes)), int(tame(m.written_bytes))]
        row += [None if t is None else _seconds(t) for t in (m.staged_s, m.durable_s)]
        yield [*row, lag, _text(m.error), _text(m.deviation)], m


def _text(text: str | None) -> str | None:
    return None if text is None else shortened(text)


def _seconds(seconds: float) -> float:
    return round(tame(seconds), 7)


def _spans(
    measures: Sequence[Measure], room: int, lanes: dict[str, int]
) -> list[list[list[float]] | None]:
    """The spans of the newest steps, as far as there is room; other lanes are added to `lanes`."""
    found: list[list[list[float]] | None] = []
    for m in reversed(measures):
        room -= len(m.spans)
        if not m.spans or room < 0:
            found.append(None)
            continue
        found.append(
            [
                [
                    lanes.setdefault(shortened(span.lane), len(lanes)),
                    round(span.start_s, 7),
                    round(max(span.start_s, span.stop_s), 7),
                ]
                for span in m.spans
            ]
        )
    return found[::-1]


def _by_rank(measured: Measured, ranks: Sequence[int]) -> list[list[str]]:
    """Where ranks differ: a row of texts for each."""
    rows = []
    for rank in ranks:
        found = figures({by: ms for by, ms in measured.items() if by.rank == rank})
        share, lag = found.stall_share, found.durable_lag_s
        rows.append(
            [
                *(str(rank), f"{found.steps:,}", f"{found.staged:,}", f"{found.durable:,}"),
                duration(found.step_s.median) if found.step_s else "",
                percent(share.median) if share else "",
                percent(share.p95) if share else "",
                duration(lag.median) if lag else "",
                f"{found.errors:,}",
                f"{found.deviations:,}",
            ]
        )
    return rows
