"""`everystep prune`: remove checkpoints that no rule keeps, and what crashes have left."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from typing import Annotated

import msgspec
import typer
from msgspec import Struct

from everystep.cli.output import Block, Column, Line, Output, Table, counted, ranges, size
from everystep.cli.target import AsJson, RunPath, path_text
from everystep.errors import CannotRestore, NothingToRestore, StoreError, UsageError
from everystep.recovery.stretches import lines_of
from everystep.store import format as fmt
from everystep.store.local import LocalBackend
from everystep.store.pruning import PrunePlan, carry_out, plan_prune
from everystep.store.references import References, references_of
from everystep.store.retention import Retention, metric_of
from everystep.store.run import Listing, Run, StepEntry
from everystep.store.segments import Scanned, last_step
from everystep.store.verify import verify_step
from everystep.types import StepRef


class Removed(Struct, frozen=True, kw_only=True):
    """Files that go, or went, together."""

    kind: str
    step: str | None
    session: int | None
    files: list[str]
    size_bytes: int


class Spared(Struct, frozen=True, kw_only=True):
    """A step that no rule keeps, and that stays since its files are needed."""

    step: str
    referred_by: list[str]
    """The steps that refer to them."""


class Pruned(Struct, frozen=True, kw_only=True):
    """The record that the command prints."""

    path: str
    done: bool
    """The files are gone; false for a dry run, and where there was nothing to do."""
    freed_bytes: int
    """What is, or would be, freed."""
    removed: list[Removed]
    kept: list[str]
    """Steps that can be had, and stay so: by a full checkpoint, or by deltas."""
    spared: list[Spared]
    proved: list[str]
    """Steps that were read whole before anything was removed."""


def prune(
    run: RunPath,
    keep_last: Annotated[
        int | None, typer.Option(help="Keep the newest N steps of each timeline.", metavar="N")
    ] = None,
    keep_every: Annotated[
        int | None, typer.Option(help="Keep steps whose number is a multiple of N.", metavar="N")
    ] = None,
    keep_best: Annotated[
        str | None,
        typer.Option(help="Keep the step with the least value of a metric.", metavar="METRIC"),
    ] = None,
    largest: Annotated[
        bool, typer.Option("--max", help="With --keep-best: the greatest value.")
    ] = False,
    timeline: Annotated[
        str | None, typer.Option(help="Touch steps of this timeline only.", metavar="NAME")
    ] = None,
    damaged: Annotated[
        bool, typer.Option("--damaged", help="Remove steps that were set aside, too.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would go, and remove nothing.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove checkpoints that no rule keeps, and what crashes have left.

    A step stays if any rule keeps it; without a rule all complete steps stay. The newest complete
    step of each timeline, steps that timelines fork from, the one that the newest session was
    restored from and those to which one that stays refers stay always. Refused during training.
    """
    if largest and keep_best is None:
        raise UsageError("--max says nothing without --keep-best METRIC")
    policy = Retention(
        keep_last=keep_last,
        keep_every=keep_every,
        keep_best=keep_best,
        best="max" if largest else "min",
    )
    asks = not (dry_run or yes)
    if asks and (as_json or not (sys.stdin.isatty() and sys.stdout.isatty())):
        raise UsageError("nobody is here to be asked", hint="--yes removes, --dry-run only says")
    opened = Run.open(run)
    output = Output(as_json)
    with contextlib.nullcontext() if dry_run else owning(opened):
        plan, kept = decide(opened, policy, timeline, damaged)
        report = record(plan, kept, path_text(run))
        if not dry_run and plan.removals:
            if asks:
                output.show(report, blocks(report))
                if not typer.confirm("Remove them?", err=True):
                    raise typer.Exit(1)
            total = sum(entry.nbytes for entry in plan.prove)
            with output.progress("proving what stays", total) as progress:
                prove(opened, plan, progress)
            carry_out(opened, plan, LocalBackend(run).sweep)
            report = record(plan, kept, path_text(run), done=True)
    output.show(report, blocks(report) if not (asks and report.done) else [_summary(report)])


@contextlib.contextmanager
def owning(run: Run) -> Iterator[None]:
    """Own the run as its ranks would, so that nobody trains into it meanwhile.

    Raises:
        RunBusy: a live process owns it.
    """
    sessions = run.listing().sessions
    with contextlib.ExitStack() as owned:
        for slot in range(sessions[-1].world_size if sessions else 1):
            owned.enter_context(run.backend.lock(fmt.LOCK_FILE, slot))
        yield


def decide(
    run: Run, policy: Retention, timeline: str | None, damaged: bool
) -> tuple[PrunePlan, list[StepRef]]:
    """Scan the run and plan; returns also the steps that can be had afterwards.

    Raises:
        NothingToRestore: there is no such timeline.
        UsageError: no step has the metric to keep the best by.
    """
    listing = run.listing()
    if timeline is not None and timeline not in listing.timelines:
        there = ", ".join(sorted(listing.timelines))
        raise NothingToRestore(f"there is no timeline {timeline!r}", hint=f"there are: {there}")
    metrics = {}
    if policy.keep_best is not None:
        metrics = _metrics(run, listing, policy.keep_best, timeline)
    files = {entry.name: entry.nbytes for entry in run.backend.list("")}

    scans = run.segments(listing)
    segments = {s.segment: last_step(s) for s in scans}

    def plan(references: References) -> PrunePlan:
        return plan_prune(
            listing, files, policy, metrics, references,
            segments=segments, timeline=timeline, set_aside=damaged,
        )  # fmt: skip

    planned = plan({})  # no record need be read if nothing goes to which one could refer
    if any(removal.step is not None for removal in planned.removals):
        planned = plan(references_of(run, listing.steps))
    return planned, _had_afterwards(listing, scans, planned, timeline)


def _had_afterwards(
    listing: Listing, scans: list[Scanned], plan: PrunePlan, timeline: str | None
) -> list[StepRef]:
    """The steps of the chosen timelines that can be had when what goes has gone."""
    if not scans:
        return [entry.ref for entry in plan.kept]
    gone = {(removal.step, removal.session) for removal in plan.removals}
    names = {name for removal in plan.removals for name in removal.names}
    steps = tuple(entry for entry in listing.steps if (entry.ref, entry.session) not in gone)
    left = [scanned for scanned in scans if scanned.segment.name not in names]
    lines = lines_of(msgspec.structs.replace(listing, steps=steps), left)
    return [ref for name, line in lines if timeline in (None, name) for ref in line.had]


def _metrics(run: Run, listing: Listing, name: str, timeline: str | None) -> dict[StepRef, float]:
    entries = [e for r, e in listing.complete().items() if timeline in (None, r.timeline)]
    metrics = {entry.ref: metric_of(run, entry, name) for entry in entries}
    if entries and all(math.isnan(value) for value in metrics.values()):
        raise UsageError(
            f"no step has a number as metric {name!r}", hint=_known_metrics(run, entries)
        )
    return metrics


def _known_metrics(run: Run, entries: list[StepEntry]) -> str:
    known: set[str] = set()
    for entry in entries:
        with contextlib.suppress(StoreError):
            known.update(run.record(entry, 0).metrics)
    return f"there are: {', '.join(sorted(known))}" if known else "no metrics were recorded"


def prove(run: Run, plan: PrunePlan, progress: Callable[[int], None]) -> None:
    """Read every byte of the newest steps that stay, before anything older goes.

    Raises:
        CannotRestore: one of them is damaged.
    """
    for entry in plan.prove:
        for finding in verify_step(run, entry, progress):
            if finding.level == "damage":
                raise CannotRestore(
                    f"the newest step that would stay is damaged: {finding.what}; "
                    "nothing was removed",
                    step=entry.ref,
                    rank=finding.rank,
                    path=finding.path,
                    at=finding.at,
                    hint="everystep verify RUN shows all damage; the next restore() sets the step "
                    "aside and goes on from the one before",
                )


def record(plan: PrunePlan, kept: list[StepRef], path: str, done: bool = False) -> Pruned:
    """The plan as the command prints it."""
    return Pruned(
        path=path,
        done=done,
        freed_bytes=sum(removal.nbytes for removal in plan.removals),
        removed=[
            Removed(
                kind=removal.kind,
                step=None if removal.step is None else str(removal.step),
                session=removal.session,
                files=list(removal.names),
                size_bytes=removal.nbytes,
            )
            for removal in plan.removals
        ],
        kept=[str(ref) for ref in kept],
        spared=[
            Spared(step=str(step.step), referred_by=[str(ref) for ref in step.referred_by])
            for step in plan.spared
        ],
        proved=[str(entry.ref) for entry in plan.prove] if done else [],
    )


_KINDS = {
    "step": "no rule keeps it",
    "incomplete": "never became complete",
    "unrecorded": "data without a record",
    "log": "deltas before every checkpoint that a rule keeps",
    "temporary": "temporary file",
    "damaged": "failed its proof, set aside",
}


def blocks(report: Pruned) -> Iterator[Block]:
    """The record for people."""
    if report.removed:
        rows = [
            [r.step or r.files[0], _KINDS[r.kind], str(len(r.files)), size(r.size_bytes)]
            for r in report.removed
        ]
        columns = [Column("removed" if report.done else "to remove"), Column("because")]
        yield Table([*columns, Column("files", True), Column("size", True)], rows)
    for spared in report.spared:
        yield Line(f"{spared.step} stays, since its files are needed: {_needed_by(spared)}")
    yield _summary(report)


def _needed_by(spared: Spared) -> str:
    verb = "refers" if len(spared.referred_by) == 1 else "refer"
    return f"{ranges(spared.referred_by)} {verb} to them"


def _summary(report: Pruned) -> Line:
    stay = f"{counted(len(report.kept), 'complete step')} {_verb(report.kept)}"
    if not report.removed:
        return Line(f"nothing to remove; {stay}", "bold")
    if not report.done:
        return Line(f"{size(report.freed_bytes)} would be freed; {stay}", "bold")
    proved = f", {', '.join(report.proved)} proved before" if report.proved else ""
    return Line(f"{size(report.freed_bytes)} freed; {stay}{proved}", "bold green")


def _verb(kept: list[str]) -> str:
    return "stays" if len(kept) == 1 else "stay"
