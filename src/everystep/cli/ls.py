"""`everystep ls`: what is in a run, by the names of its files and the metrics in its records."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from everystep.cli.output import Block, Cell, Column, Line, Output, Table, counted, plain, size
from everystep.cli.output import spoken_value as spoken
from everystep.cli.target import (
    STYLES,
    AsJson,
    RunPath,
    SessionRow,
    State,
    path_text,
    session_row,
    state_of,
)
from everystep.errors import StoreError
from everystep.recovery.plan import plan_restore
from everystep.store import format as fmt
from everystep.store.run import SET_ASIDE, Listing, Run, StepEntry, is_set_aside
from everystep.types import Json, StepRef


class StepRow(Struct, frozen=True, kw_only=True):
    """One writing of one step."""

    step: str
    state: State
    size_bytes: int
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
    sessions: list[SessionRow]
    set_aside: list[SetAside]
    unrecorded: list[str]
    """Parts of steps that have data and no record: being written, or given up."""
    strangers: list[str]
    """Names that are not ours, and temporary files."""
    damages: list[str]
    """Records of timelines and sessions that cannot be read."""


def ls(run: RunPath, as_json: AsJson = False) -> None:
    """List timelines, steps and metrics of a run."""
    opened = Run.open(run)
    report = survey(opened, opened.listing(), path_text(run))
    Output(as_json).show(report, blocks(report))


def survey(run: Run, listing: Listing, path: str) -> RunReport:
    """Collect what there is to say about a run; reads the record of rank 0 of every step."""
    newest = listing.complete()
    candidates = plan_restore(listing, None).candidates
    files = {entry.name: entry.nbytes for entry in run.backend.list("")}
    return RunReport(
        path=path,
        run=run.id,
        size_bytes=sum(files.values()),
        newest=str(candidates[0].ref) if candidates else None,
        timelines=_timelines(listing, newest),
        steps=[_step(run, entry, newest) for entry in _in_order(listing)],
        sessions=[session_row(session) for session in listing.sessions],
        set_aside=_set_aside({name: n for name, n in files.items() if is_set_aside(name)}),
        unrecorded=[f"{fmt.step_directory(ref)}/{stem}" for ref, stem in listing.loose],
        strangers=list(listing.strangers),
        damages=[damage.headline() for damage in listing.damages],
    )


def _timelines(listing: Listing, newest: dict[StepRef, StepEntry]) -> list[TimelineRow]:
    current = listing.current_timeline()
    return [
        TimelineRow(
            timeline=name,
            parent=None if record.parent is None else str(record.parent),
            current=name == current,
            complete_steps=sum(ref.timeline == name for ref in newest),
        )
        for name, record in sorted(listing.timelines.items())
    ]


def _in_order(listing: Listing) -> list[StepEntry]:
    """The current timeline last, so that the newest step is at the end."""
    current = listing.current_timeline()
    return sorted(listing.steps, key=lambda e: (e.ref.timeline == current, e.ref, e.session))


def _step(run: Run, entry: StepEntry, newest: dict[StepRef, StepEntry]) -> StepRow:
    state = state_of(entry, newest)
    metrics: dict[str, Json] = {}
    if entry.parts and entry.parts[0].rank == 0:
        try:
            metrics = plain(run.record(entry, 0).metrics)
        except StoreError:
            state = "damaged"
    return StepRow(
        step=str(entry.ref),
        state=state,
        size_bytes=entry.nbytes,
        session=entry.session,
        world_size=entry.world_size,
        missing_ranks=entry.missing_ranks,
        metrics=metrics,
    )


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


def blocks(report: RunReport) -> Iterator[Block]:
    """The record for people."""
    complete = sum(row.state == "complete" for row in report.steps)
    yield Line(
        f"{report.path}: {counted(complete, 'complete step')}, {size(report.size_bytes)}, "
        f"{counted(len(report.sessions), 'session')}",
        "bold",
    )
    if report.steps:
        yield _table(report)
    forks = [row for row in report.timelines if row.parent is not None or len(report.timelines) > 1]
    for row in forks:
        origin = f"forked from {row.parent}" if row.parent else "from the start"
        current = ", current" if row.current else ""
        yield Line(f"timeline {row.timeline}: {origin}, {row.complete_steps} complete{current}")
    if report.newest is None:
        yield Line("there is no complete step yet")
    else:
        yield Line(f"newest: {report.newest}")
    for aside in report.set_aside:
        what = f"{counted(aside.files, 'file')}, {size(aside.size_bytes)}"
        yield Line(f"set aside, it failed its proof: {aside.step} in {aside.path} ({what})", "red")
    for name in report.unrecorded:
        yield Line(f"no record, being written or given up: {name}", "yellow")
    for name in report.strangers:
        yield Line(f"temporary or not of this run: {name}", "yellow")
    for text in report.damages:
        yield Line(f"damaged: {text}", "red")


def _table(report: RunReport) -> Table:
    names = list(dict.fromkeys(name for row in report.steps for name in row.metrics))
    columns = [Column("step"), Column("state"), Column("size", True), Column("session", True)]
    columns += [Column("ranks", True), *(Column(name, True) for name in names)]
    rows: list[list[str | Cell]] = []
    for row in report.steps:
        state = row.state if not row.missing_ranks else f"{row.state}, {_missing(row)}"
        cells: list[str | Cell] = [
            Cell(row.step, "bold" if row.step == report.newest else ""),
            Cell(state, STYLES[row.state]),
            size(row.size_bytes),
            str(row.session),
            str(row.world_size),
        ]
        cells += [spoken(row.metrics[name]) if name in row.metrics else "" for name in names]
        rows.append(cells)
    return Table(columns, rows)


def _missing(row: StepRow) -> str:
    return f"no rank {', '.join(map(str, row.missing_ranks))}"
