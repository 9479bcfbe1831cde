"""`everystep diff`: how two stored steps differ, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec import Struct

from everystep.cli.output import Block, Column, Line, Output, Table, counted, plain
from everystep.cli.output import spoken_value as spoken
from everystep.cli.target import AsJson, RunPath, chain_bytes, path_text, restorable
from everystep.errors import UsageError
from everystep.store.chains import Chain
from everystep.store.run import Run
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
    """By key; with --top those of models that moved most, the one that did most first."""
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
    top: Annotated[
        int | None,
        typer.Option(
            "--top",
            metavar="N",
            help="Show the N tensors of models that moved most, by relative L2 norm.",
            min=1,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare two steps of a run, or of two runs, bit by bit.

    Any two steps that can be had; those that are stored as deltas are folded in memory. Exit
    status: 0 if tensors, hyperparameters, extras and random states are all equal, 1 if not.
    """
    if b is None and other is None:
        raise UsageError("there is one step, and nothing to compare it with", hint=_HINT)
    path_b = run if other is None else other
    chain_a, run_a = _find(run, a)
    chain_b, run_b = _find(path_b, a if b is None else b)
    from everystep.recovery.compare import compare
    from everystep.recovery.folded import open_step
    from everystep.recovery.reach import How

    output = Output(as_json)
    with output.progress("comparing", chain_bytes(chain_a) + chain_bytes(chain_b)) as progress:
        how = How(progress=progress)
        opened_a = open_step(run_a, chain_a, how=how)
        found = compare(opened_a, open_step(run_b, chain_b, how=how))
    report = record(found, _side(run, chain_a), _side(path_b, chain_b), top)
    output.show(report, blocks(report, top))
    raise typer.Exit(0 if report.equal else 1)


def _find(path: Path, step: str) -> tuple[Chain, Run]:
    run = Run.open(path)
    return restorable(run, step), run


def _side(path: Path, chain: Chain) -> Side:
    size = chain.links[-1].world_size if chain.links else chain.full.world_size
    return Side(path=path_text(path), step=str(chain.ref), world_size=size)


def record(found: Differences, a: Side, b: Side, top: int | None = None) -> DiffReport:
    """What was found as the command prints it; with `top` only the tensors that moved most."""
    from everystep.recovery.compare import most_moved

    return DiffReport(
        equal=found.none,
        a=a,
        b=b,
        tensors=found.tensors if top is None else most_moved(found.tensors)[:top],
        forms=found.forms,
        only_a=found.only_a,
        only_b=found.only_b,
        values=[
            ValueRow(place=value.place, rank=value.rank, a=plain(value.a), b=plain(value.b))
            for value in found.values
        ],
    )


def blocks(report: DiffReport, top: int | None = None) -> Iterator[Block]:
    """The record for people."""
    same_run = report.a.path == report.b.path
    yield Line(f"a: {report.a.step}" + ("" if same_run else f" of {report.a.path}"), "bold")
    yield Line(f"b: {report.b.step}" + ("" if same_run else f" of {report.b.path}"), "bold")
    if report.equal:
        yield Line("equal, bit for bit", "bold green")
        return
    if report.tensors:
        yield _tensors(report.tensors[: top or SHOWN])
        yield from _more(len(report.tensors) if top is None else 0)
    if top is not None:
        yield Line(
            f"the {counted(len(report.tensors), 'tensor')} of models that moved most", "bold red"
        )
        return
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
    columns += [Column("max |a-b|", True), Column("|a-b|/|a|", True), Column("NaN", True)]
    columns += [Column("first: bits a, bits b")]
    rows = [
        [
            t.key,
            _rank(t.rank),
            f"{t.dtype} {spoken(t.shape)}",
            f"{t.differing:,} of {t.elements:,}",
            "" if t.max_abs is None else spoken(t.max_abs),
            "" if t.relative_l2 is None else spoken(t.relative_l2),
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
