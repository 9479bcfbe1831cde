"""`everystep diff`: how two stored steps differ, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec import Struct

from everystep.cli.output import Block, Column, Line, Output, Table, counted, plain
from everystep.cli.output import spoken_value as spoken
from everystep.cli.target import AsJson, RunPath, complete_step, path_text
from everystep.errors import UsageError
from everystep.store.run import Run, StepEntry
from everystep.types import Json

if TYPE_CHECKING:
    from everystep.recovery.compare import Differences, FormDifference, TensorDifference

_HINT = "everystep diff RUN A B, or everystep diff RUN A --with OTHER_RUN"

SHOWN = 50
"""So many rows of each kind are shown to people; --json has all."""


class Side(Struct, frozen=True, kw_only=True):
    """One of the two steps."""

    path: str
    step: str
    world_size: int


class ValueRow(Struct, frozen=True, kw_only=True):
    """One value that differs and is not in a tensor."""

    place: str
    rank: int | None
    a: Json
    b: Json
    """In plain JSON; null also where there is none."""


class DiffReport(Struct, frozen=True, kw_only=True):
    """The record that the command prints."""

    equal: bool
    a: Side
    b: Side
    tensors: list[TensorDifference]
    forms: list[FormDifference]
    """Tensors of another dtype or shape."""
    only_a: list[str]
    only_b: list[str]
    values: list[ValueRow]


def diff(
    run: RunPath,
    a: Annotated[str, typer.Argument(metavar="A", help="A step: 900, or main:900.")],
    b: Annotated[
        str | None,
        typer.Argument(metavar="[B]", help="The step to compare with. Left out: A, of --with RUN."),
    ] = None,
    other: Annotated[
        Path | None, typer.Option("--with", metavar="RUN", help="The run of B, if not the same.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare two steps of a run, or of two runs, bit by bit.

    Exit status: 0 if tensors, hyperparameters, extras and random states are all equal, 1 if not.
    """
    if b is None and other is None:
        raise UsageError("there is one step, and nothing to compare it with", hint=_HINT)
    path_b = run if other is None else other
    entry_a, run_a = _open(run, a)
    entry_b, run_b = _open(path_b, a if b is None else b)
    from everystep.recovery.compare import compare
    from everystep.recovery.stream import StoredStep

    output = Output(as_json)
    with output.progress("comparing", entry_a.nbytes + entry_b.nbytes) as progress:
        found = compare(StoredStep(run_a, entry_a, progress), StoredStep(run_b, entry_b, progress))
    report = record(found, _side(run, entry_a), _side(path_b, entry_b))
    output.show(report, blocks(report))
    raise typer.Exit(0 if report.equal else 1)


def _open(path: Path, step: str) -> tuple[StepEntry, Run]:
    run = Run.open(path)
    return complete_step(run.listing(), step), run


def _side(path: Path, entry: StepEntry) -> Side:
    return Side(path=path_text(path), step=str(entry.ref), world_size=entry.world_size)


def record(found: Differences, a: Side, b: Side) -> DiffReport:
    """What was found as the command prints it."""
    return DiffReport(
        equal=found.none,
        a=a,
        b=b,
        tensors=found.tensors,
        forms=found.forms,
        only_a=found.only_a,
        only_b=found.only_b,
        values=[
            ValueRow(place=value.place, rank=value.rank, a=plain(value.a), b=plain(value.b))
            for value in found.values
        ],
    )


def blocks(report: DiffReport) -> Iterator[Block]:
    """The record for people."""
    same_run = report.a.path == report.b.path
    yield Line(f"a: {report.a.step}" + ("" if same_run else f" of {report.a.path}"), "bold")
    yield Line(f"b: {report.b.step}" + ("" if same_run else f" of {report.b.path}"), "bold")
    if report.equal:
        yield Line("equal, bit for bit", "bold green")
        return
    if report.tensors:
        yield _tensors(report.tensors[:SHOWN])
        yield from _more(len(report.tensors))
    if report.values:
        rows = [
            [v.place, _rank(v.rank), spoken(v.a, 40), spoken(v.b, 40)]
            for v in report.values[:SHOWN]
        ]
        columns = [Column("value"), Column("rank", True), Column("a"), Column("b")]
        yield Table(columns, rows)
        yield from _more(len(report.values))
    if report.forms:
        rows = [[f.key, _rank(f.rank), f.a, f.b] for f in report.forms[:SHOWN]]
        columns = [Column("other form"), Column("rank", True), Column("a"), Column("b")]
        yield Table(columns, rows)
        yield from _more(len(report.forms))
    for title, keys in (("only in a", report.only_a), ("only in b", report.only_b)):
        for key in keys[:SHOWN]:
            yield Line(f"{title}: {key}", "yellow")
        yield from _more(len(keys))
    yield Line(_summary(report), "bold red")


def _tensors(tensors: list[TensorDifference]) -> Table:
    columns = [Column("tensor"), Column("rank", True), Column("form"), Column("differing", True)]
    columns += [Column("max |a-b|", True), Column("NaN", True), Column("first: bits a, bits b")]
    rows = [
        [
            t.key,
            _rank(t.rank),
            f"{t.dtype} {spoken(t.shape)}",
            f"{t.differing:,} of {t.elements:,}",
            "" if t.max_abs is None else spoken(t.max_abs),
            f"{t.nan_a:,}, {t.nan_b:,}" if t.nan_a or t.nan_b else "",
            f"{t.first:,}: {t.first_a}, {t.first_b}",
        ]
        for t in tensors
    ]
    return Table(columns, rows)


def _rank(rank: int | None) -> str:
    return "" if rank is None else str(rank)


def _more(number: int) -> Iterator[Line]:
    if number > SHOWN:
        yield Line(f"… and {number - SHOWN:,} more; --json has all")


def _summary(report: DiffReport) -> str:
    parts = [counted(len(report.tensors), "tensor") + " of other bits"] if report.tensors else []
    if report.values:
        parts.append(counted(len(report.values), "other value"))
    if report.forms:
        parts.append(counted(len(report.forms), "tensor") + " of another dtype or shape")
    alone = len(report.only_a) + len(report.only_b)
    if alone:
        parts.append(counted(alone, "tensor") + " on one side only")
    return "they differ: " + ", ".join(parts)
