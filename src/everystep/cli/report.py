"""`everystep report`: what checkpointing cost a run, step by step, as a page and as a trace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from msgspec import Struct

from everystep.cli.export import _appearing, _refuse_target
from everystep.cli.output import Block, Column, Line, Output, Table, counted
from everystep.cli.report_figures import Figures, Measured, Message, figures, in_words, messages
from everystep.cli.report_page import Page, encode_page
from everystep.cli.report_trace import encode_trace
from everystep.cli.target import AsJson, RunPath, path_text
from everystep.errors import Missing, UsageError
from everystep.store.measured import read_measures
from everystep.store.run import Run
from everystep.types import Buffer


class Reported(Struct, frozen=True, kw_only=True):
    """The record that the command prints."""

    path: str
    output: str
    """The page."""
    trace: str | None
    sessions: list[int]
    """Those that measured something."""
    ranks: list[int]
    figures: Figures
    errors: list[Message]
    deviations: list[Message]


def report(
    run: RunPath,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="The page. Default: RUN-report.html, here."
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace", metavar="FILE", help="Also a trace for ui.perfetto.dev or chrome://tracing."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what checkpointing cost, step by step: stall, lag, bytes, rates, errors.

    One page that needs no network; open it in a browser.
    """
    page = output or Path(f"{run.resolve().name or 'run'}-report.html")
    for target in [page] if trace is None else [page, trace]:
        _refuse_target(target, run, force)
    if trace is not None and trace.resolve() == page.resolve():
        raise UsageError("cannot be both the page and the trace", path=page)
    opened = Run.open(run)
    measured = {by: ms for by, ms in read_measures(opened.backend).items() if ms}
    if not measured:
        raise Missing(
            "nothing was measured in this run",
            path=run,
            hint="train with an agent beside: strategy=everystep.Full() or everystep.Deltas()",
        )
    found = Reported(
        path=path_text(run),
        output=path_text(page),
        trace=None if trace is None else path_text(trace),
        sessions=sorted({by.session for by in measured}),
        ranks=sorted({by.rank for by in measured}),
        figures=figures(measured),
        errors=messages(measured, lambda m: m.error),
        deviations=messages(measured, lambda m: m.deviation),
    )
    _write(page, [encode_page(_page(found, opened, measured), measured)])
    if trace is not None:
        _write(trace, encode_trace(measured))
    Output(as_json).show(found, blocks(found))


def _write(to: Path, parts: Iterable[Buffer]) -> None:
    with _appearing(to) as temporary, open(temporary, "xb") as file:
        file.writelines(parts)


def _page(found: Reported, run: Run, measured: Measured) -> Page:
    facts = {session.session: session for session in run.listing().sessions}
    sessions = {}
    for by in measured:
        session = facts.get(by.session)
        text = counted(by.world_size, "rank")
        if session is not None:
            origin = f"from {session.restored}" if session.restored else "a fresh start"
            text += f", {origin}, begun {session.created} on {session.host}, pid {session.pid}"
        sessions[by.session] = text
    return Page(
        title=found.path,
        headline=list(in_words(found.figures)),
        sessions=sessions,
        errors=found.errors,
        deviations=found.deviations,
    )


def blocks(found: Reported) -> Iterator[Block]:
    """The record for people."""
    who = f"{counted(len(found.sessions), 'session')}, {counted(len(found.ranks), 'rank')}"
    yield Line(f"{found.path}: {who}", "bold")
    yield Table([Column("figure"), Column("")], [list(w) for w in in_words(found.figures)])
    for what, listed in (("error", found.errors), ("deviation", found.deviations)):
        columns = [Column(what), Column("steps", True), Column("first"), Column("last")]
        rows = [[m.text, f"{m.count:,}", m.first, m.last] for m in listed]
        if rows:
            yield Table(columns, rows)
    yield Line(f"open {found.output} in a browser", "bold green")
    if found.trace is not None:
        yield Line(f"open {found.trace} at ui.perfetto.dev or chrome://tracing", "bold green")
