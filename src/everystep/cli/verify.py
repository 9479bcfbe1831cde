"""`everystep verify`: read every byte of a run, or of one step, and say what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec
import typer
from msgspec import Struct

from everystep.cli.output import (
    Block,
    Cell,
    Column,
    Line,
    Output,
    Progress,
    Table,
    counted,
    ranges,
    size,
)
from everystep.cli.target import AsJson, RunPath, StepText, path_text, state_of, writings
from everystep.store import format as fmt
from everystep.store.reading import Stretch
from everystep.store.run import Listing, Run, StepEntry
from everystep.store.verify import Finding, verify_run, verify_step


class Found(Struct, frozen=True, kw_only=True):
    """One thing that is wrong, or worth a note."""

    level: Literal["damage", "note"]
    what: str
    path: str | None
    """Below the run."""
    byte: int | None
    """The first one concerned."""
    step: str | None
    """The step that it costs."""
    rank: int | None


class Verdict(Struct, frozen=True, kw_only=True):
    """The record that the command prints."""

    path: str
    ok: bool
    """There is no damage."""
    read_bytes: int
    whole: list[str]
    """Steps of which every byte is what was written."""
    damaged: list[str]
    """Steps that cannot be restored as they are."""
    incomplete: list[str]
    """Steps of which a rank has stored nothing (yet)."""
    findings: list[Found]


def verify(run: RunPath, step: StepText = None, as_json: AsJson = False) -> None:
    """Read every byte of a run and compare it with what was written.

    Exit status: 0 if nothing is damaged, 1 if something is. Nothing is changed.
    """
    opened = Run.open(run)
    listing = opened.listing()
    chosen = list(listing.steps) if step is None else writings(listing, step)
    output = Output(as_json)
    with output.progress("verifying", sum(entry.nbytes for entry in chosen)) as progress:
        verdict = judge(opened, listing, chosen, step is None, path_text(run), progress)
    output.show(verdict, blocks(verdict))
    raise typer.Exit(0 if verdict.ok else 1)


def judge(
    run: Run,
    listing: Listing,
    chosen: list[StepEntry],
    everything: bool,
    path: str,
    progress: Progress,
) -> Verdict:
    """Read the chosen steps, and with `everything` all other files of the run."""
    read_bytes = 0

    def count(nbytes: int) -> None:
        nonlocal read_bytes
        read_bytes += nbytes
        progress(nbytes)

    findings: list[Finding] = []
    if everything:
        findings += verify_run(run, msgspec.structs.replace(listing, steps=()))
    newest = listing.complete()
    by_state: dict[str, list[str]] = {"whole": [], "damaged": [], "incomplete": []}
    proved: set[Stretch] = set()
    for entry in chosen:
        found = list(verify_step(run, entry, count, proved))
        if _was_removed(run, entry, found):
            gone = fmt.step_directory(entry.ref)
            what = "was removed while it was read"
            findings.append(Finding(level="note", what=what, path=gone, step=entry.ref))
            continue
        findings += found
        state = state_of(entry, newest)
        damaged = any(finding.level == "damage" for finding in found)
        name = {"complete": "whole", "superseded": "whole"}.get(state, "incomplete")
        by_state["damaged" if damaged else name].append(str(entry.ref))
    return Verdict(
        path=path,
        ok=not any(finding.level == "damage" for finding in findings),
        read_bytes=read_bytes,
        whole=by_state["whole"],
        damaged=by_state["damaged"],
        incomplete=by_state["incomplete"],
        findings=[_plain(finding, run.backend.abilities.location) for finding in findings],
    )


def _was_removed(run: Run, entry: StepEntry, found: list[Finding]) -> bool:
    """Whether what looks like damage is a step that its training has removed meanwhile."""
    if not any(finding.level == "damage" for finding in found):
        return False
    there = {part for now in run.entries(entry.ref) for part in now.parts}
    return not there.issuperset(entry.parts)


def _plain(finding: Finding, location: str) -> Found:
    path = finding.path
    return Found(
        level=finding.level,
        what=finding.what,
        path=None if path is None else path.removeprefix(location.rstrip("/") + "/"),
        byte=finding.at,
        step=None if finding.step is None else str(finding.step),
        rank=finding.rank,
    )


def blocks(verdict: Verdict) -> Iterator[Block]:
    """The record for people."""
    if verdict.findings:
        yield _table(verdict.findings)
    for title, steps, style in (
        ("damaged", verdict.damaged, "red"),
        ("incomplete", verdict.incomplete, "yellow"),
        ("whole", verdict.whole, "green"),
    ):
        if steps:
            yield Line(f"{title}: {ranges(steps)}", style)
    read = f"{size(verdict.read_bytes)} of tensors read"
    damages = sum(finding.level == "damage" for finding in verdict.findings)
    if not verdict.ok:
        yield Line(f"{counted(damages, 'damage')} found, {read}", "bold red")
    elif not (verdict.whole or verdict.incomplete):
        yield Line("there is no step yet", "bold")
    else:
        yield Line(f"nothing is damaged, {read}", "bold green")


def _table(findings: list[Found]) -> Table:
    columns = [Column("level"), Column("step"), Column("rank", True), Column("byte", True)]
    columns += [Column("what"), Column("path")]
    rows: list[list[str | Cell]] = [
        [
            Cell(finding.level, "red" if finding.level == "damage" else "yellow"),
            finding.step or "",
            "" if finding.rank is None else str(finding.rank),
            "" if finding.byte is None else f"{finding.byte:,}",
            finding.what,
            finding.path or "",
        ]
        for finding in sorted(findings, key=lambda finding: finding.level)  # damage first
    ]
    return Table(columns, rows)
