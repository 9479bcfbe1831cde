"""`everystep ls`: what is in a run, by the names of its files and the metrics in its records."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated

import typer
from msgspec import Struct

from everystep.cli.output import Block, Cell, Column, Line, Output, Table, counted, plain, size
from everystep.cli.output import spoken_value as spoken
from everystep.cli.spark import is_wide, spark
from everystep.cli.target import (
    STYLES,
    AsJson,
    RunPath,
    SessionRow,
    State,
    Stored,
    path_text,
    place_bytes,
    session_row,
    state_of,
)
from everystep.deltas.metrics import LENGTH_BYTES, header_bytes, metrics_of
from everystep.errors import StoreError
from everystep.recovery.plan import plan_restore
from everystep.recovery.stretches import Had, lines_of
from everystep.store import format as fmt
from everystep.store.chains import Chain, Gap, Link
from everystep.store.run import SET_ASIDE, Listing, Run, StepEntry, is_set_aside
from everystep.types import Json, StepRef

SHOWN = 50
"""So many of the newest rows are shown to people, unless they want --all; --json has all."""

_PREFIX_BYTES = 4 << 10
"""Of a delta; mostly all of its header."""


class StepRow(Struct, frozen=True, kw_only=True):
    """One writing of one step."""

    step: str
    state: State
    stored: Stored
    size_bytes: int
    """Of the full checkpoint and the deltas of all ranks."""
    session: int
    world_size: int
    missing_ranks: list[int]
    metrics: dict[str, Json]
    """As rank 0 recorded them."""


class TimelineRow(Struct, frozen=True, kw_only=True):
    """One line of steps."""

    timeline: str
    parent: str | None
    """The step that it was forked from."""
    current: bool
    """The newest session writes it."""
    complete_steps: int
    """That can be had, as full checkpoints or by their deltas."""


class GapRow(Struct, frozen=True, kw_only=True):
    """Steps that were recorded and cannot be had."""

    first: str
    last: str
    what: str
    path: str | None
    """Where reading the log ended, if it did."""
    byte: int | None


class SetAside(Struct, frozen=True, kw_only=True):
    """A step that failed its proof at a restore and was moved out of the way."""

    step: str
    path: str
    files: int
    size_bytes: int


class RunReport(Struct, frozen=True, kw_only=True):
    """The record that the command prints."""

    path: str
    run: str
    size_bytes: int
    newest: str | None
    """The step that restore() would take first."""
    timelines: list[TimelineRow]
    steps: list[StepRow]
    gaps: list[GapRow]
    sessions: list[SessionRow]
    set_aside: list[SetAside]
    unrecorded: list[str]
    """Parts of steps that have data and no record: being written, or given up."""
    strangers: list[str]
    """Names that are not ours, and temporary files."""
    damages: list[str]
    """Records of timelines and sessions that cannot be read."""


def ls(
    run: RunPath,
    everything: Annotated[
        bool, typer.Option("--all", help=f"Show all steps, not the newest {SHOWN}.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List timelines, steps and metrics of a run.

    Every step that can be restored is listed, whether it is stored in full or by what changed.
    """
    opened = Run.open(run)
    report = survey(opened, opened.listing(), path_text(run))
    Output(as_json).show(report, blocks(report, None if everything else SHOWN))


def survey(run: Run, listing: Listing, path: str) -> RunReport:
    """Collect what there is to say about a run; reads what rank 0 recorded of every step."""
    segments = run.segments(listing)
    newest = plan_restore(listing, segments, None).chain
    had: dict[StepRef, Had] = {}
    gaps: list[Gap] = []
    for _, line in lines_of(listing, segments):
        had |= line.had
        gaps += line.gaps
    files = {entry.name: entry.nbytes for entry in run.backend.list("")}
    return RunReport(
        path=path,
        run=run.id,
        size_bytes=sum(files.values()),
        newest=None if newest is None else str(newest.ref),
        timelines=_timelines(listing, had),
        steps=_steps(run, listing, had),
        gaps=[_gap(gap) for gap in gaps],
        sessions=[session_row(session) for session in listing.sessions],
        set_aside=_set_aside({name: n for name, n in files.items() if is_set_aside(name)}),
        unrecorded=[f"{fmt.step_directory(ref)}/{stem}" for ref, stem in listing.loose],
        strangers=list(listing.strangers),
        damages=[damage.headline() for damage in listing.damages],
    )


def _timelines(listing: Listing, had: Mapping[StepRef, Had]) -> list[TimelineRow]:
    current = listing.current_timeline()
    return [
        TimelineRow(
            timeline=name,
            parent=None if record.parent is None else str(record.parent),
            current=name == current,
            complete_steps=sum(ref.timeline == name for ref in had),
        )
        for name, record in sorted(listing.timelines.items())
    ]


def _gap(gap: Gap) -> GapRow:
    damage = gap.damage
    return GapRow(
        first=str(gap.ref),
        last=str(StepRef(gap.ref.timeline, gap.last)),
        what=gap.what,
        path=None if damage is None or damage.path is None else str(damage.path),
        byte=None if damage is None else damage.at,
    )


def _steps(run: Run, listing: Listing, had: Mapping[StepRef, Had]) -> list[StepRow]:
    """By timeline, step and session; the current timeline last, so that the newest step is at the
    end."""
    found: list[tuple[StepRef, int, StepRow]] = []
    for entry in listing.steps:
        its = had.get(entry.ref, Had(None, None))
        found.append((entry.ref, entry.session, _full_row(run, entry, its)))
    found += [
        (ref, its.link.session, _delta_row(run, its.link))
        for ref, its in had.items()
        if its.full is None and its.link is not None
    ]
    current = listing.current_timeline()
    found.sort(key=lambda row: (row[0].timeline == current, row[0], row[1]))
    return [row for _, _, row in found]


def metrics_of_step(run: Run, chain: Chain) -> dict[str, Json]:
    """What rank 0 recorded with a step, encoded, without reading its tensors.

    Raises:
        StoreError: it cannot be read.
    """
    return _recorded(run, chain.links[-1]) if chain.links else run.record(chain.full, 0).metrics


def _full_row(run: Run, entry: StepEntry, had: Had) -> StepRow:
    state = state_of(entry, entry is had.full)
    link = had.link if entry is had.full else None
    metrics: dict[str, Json] = {}
    if entry.parts and entry.parts[0].rank == 0:
        try:
            metrics = plain(run.record(entry, 0).metrics)
        except StoreError:
            state = "damaged"
    return StepRow(
        step=str(entry.ref),
        state=state,
        stored="full" if link is None else "both",
        size_bytes=entry.nbytes + (0 if link is None else _link_bytes(link)),
        session=entry.session,
        world_size=entry.world_size,
        missing_ranks=entry.missing_ranks,
        metrics=metrics,
    )


def _delta_row(run: Run, link: Link) -> StepRow:
    state: State = "complete"
    metrics: dict[str, Json] = {}
    try:
        metrics = plain(_recorded(run, link))
    except StoreError:
        state = "damaged"
    return StepRow(
        step=str(link.ref),
        state=state,
        stored="delta",
        size_bytes=_link_bytes(link),
        session=link.session,
        world_size=link.world_size,
        missing_ranks=[],
        metrics=metrics,
    )


def _link_bytes(link: Link) -> int:
    return sum(place_bytes(place.found.nbytes) for place in link.places)


def _recorded(run: Run, link: Link) -> dict[str, Json]:
    """What rank 0 recorded with a step, without reading all of its delta."""
    name, found = link.places[0].name, link.places[0].found

    def beginning(nbytes: int) -> memoryview:
        data = memoryview(bytearray(min(nbytes, found.nbytes)))
        run.backend.read(name, data, found.payload_offset)
        return data

    data = beginning(_PREFIX_BYTES)
    if len(data) >= LENGTH_BYTES and header_bytes(data) > len(data):
        data = beginning(header_bytes(data))
    return metrics_of(data)


def _set_aside(files: dict[str, int]) -> list[SetAside]:
    found: dict[str, list[int]] = {}
    for name, nbytes in files.items():
        found.setdefault(name.rpartition("/")[0], []).append(nbytes)
    return [
        SetAside(step=_aside_step(path), path=path, files=len(sizes), size_bytes=sum(sizes))
        for path, sizes in sorted(found.items())
    ]


def _aside_step(path: str) -> str:
    place = fmt.parse_step_path("steps" + path.removeprefix(SET_ASIDE) + "/x")
    return path if place is None else str(place[0])


def blocks(report: RunReport, shown: int | None) -> Iterator[Block]:
    """The record for people.

    Args:
        shown: how many of the newest rows; None: all.
    """
    complete = sum(row.state == "complete" for row in report.steps)
    yield Line(
        f"{report.path}: {counted(complete, 'complete step')}, {size(report.size_bytes)}, "
        f"{counted(len(report.sessions), 'session')}",
        "bold",
    )
    yield from _sparks(report)
    if report.steps:
        hidden = 0 if shown is None else max(0, len(report.steps) - shown)
        if hidden:
            yield Line(f"{counted(hidden, 'earlier row')} not shown; --all shows them")
        yield _table(report, report.steps[hidden:])
    forks = [row for row in report.timelines if row.parent is not None or len(report.timelines) > 1]
    for row in forks:
        origin = f"forked from {row.parent}" if row.parent else "from the start"
        current = ", current" if row.current else ""
        yield Line(f"timeline {row.timeline}: {origin}, {row.complete_steps} complete{current}")
    for gap in report.gaps:
        steps = gap.first if gap.first == gap.last else f"{gap.first} to {gap.last.split(':')[1]}"
        where = "" if gap.path is None else f"; reading ended in {gap.path}, byte {gap.byte:,}"
        yield Line(f"cannot be had: {steps}: {gap.what}{where}", "yellow")
    if report.newest is None:
        yield Line("there is no complete step yet")
    else:
        yield Line(f"newest: {report.newest}")
    yield from _leftovers(report)


def _leftovers(report: RunReport) -> Iterator[Block]:
    for aside in report.set_aside:
        what = f"{counted(aside.files, 'file')}, {size(aside.size_bytes)}"
        yield Line(f"set aside, it failed its proof: {aside.step} in {aside.path} ({what})", "red")
    for name in report.unrecorded:
        yield Line(f"no record, being written or given up: {name}", "yellow")
    for name in report.strangers:
        yield Line(f"temporary or not of this run: {name}", "yellow")
    for text in report.damages:
        yield Line(f"damaged: {text}", "red")


def _sparks(report: RunReport) -> Iterator[Block]:
    """Every metric that is a number, along the line of the current timeline, the loss first."""
    series: dict[str, list[float]] = {}
    for row in _line(report):
        for name, value in row.metrics.items():
            number = _number(value)
            if number is not None:
                series.setdefault(name, []).append(number)
    series = {name: values for name, values in series.items() if len(values) > 1}
    rows = [
        [name, spark(values), _ends(values), "log" if is_wide(values) else ""]
        for name, values in sorted(series.items(), key=lambda item: "loss" not in item[0])
    ]
    if rows:
        columns = [Column("metric"), Column("by step"), Column("first … last"), Column("scale")]
        yield Table(columns, rows)


def _ends(values: list[float]) -> str:
    return f"{spoken(values[0])} … {spoken(values[-1])}"


def _number(value: Json) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if isinstance(value, str) and value not in ("nan", "inf", "-inf"):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _line(report: RunReport) -> list[StepRow]:
    """The rows that lead up to and along the current timeline, one for each step."""
    parents = {row.timeline: row.parent for row in report.timelines}
    name = next((row.timeline for row in report.timelines if row.current), None)
    limits: dict[str, int] = {}
    last = fmt.LAST_STEP
    while name is not None and name not in limits:
        limits[name] = last
        parent = parents.get(name)
        ref = None if parent is None else StepRef.parse(parent)
        name, last = (None, last) if ref is None else (ref.timeline, min(last, ref.step))
    rows: dict[int, StepRow] = {}
    for row in report.steps:
        ref = StepRef.parse(row.step)
        if row.state == "complete" and ref.step <= limits.get(ref.timeline, -1):
            rows[ref.step] = row
    return [rows[step] for step in sorted(rows)]


def _table(report: RunReport, shown: list[StepRow]) -> Table:
    names = list(dict.fromkeys(name for row in shown for name in row.metrics))
    has_deltas = any(row.stored != "full" for row in report.steps)
    columns = [Column("step"), Column("state"), Column("stored"), Column("size", True)]
    columns += [Column("session", True), Column("ranks", True)]
    columns += [Column(name, True) for name in names]
    rows: list[list[str | Cell]] = []
    for row in shown:
        state = row.state if not row.missing_ranks else f"{row.state}, {_missing(row)}"
        cells: list[str | Cell] = [
            Cell(row.step, "bold" if row.step == report.newest else ""),
            Cell(state, STYLES[row.state]),
            row.stored if has_deltas else "",
            size(row.size_bytes),
            str(row.session),
            str(row.world_size),
        ]
        cells += [spoken(row.metrics[name]) if name in row.metrics else "" for name in names]
        rows.append(cells)
    return Table(columns, rows)


def _missing(row: StepRow) -> str:
    return f"no rank {', '.join(map(str, row.missing_ranks))}"
