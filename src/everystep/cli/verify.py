"""`everystep verify`: read every byte of a run, fold it whole, and say what is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Literal

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
from everystep.cli.target import (
    AsJson,
    RunPath,
    StepText,
    chain_bytes,
    path_text,
    restorable,
    writings,
)
from everystep.errors import NothingToRestore, StoreError, UsageError
from everystep.recovery.stretches import lines_of
from everystep.store import format as fmt
from everystep.store.chains import Chain, Excluded
from everystep.store.reading import Stretch
from everystep.store.run import Listing, Run, StepEntry
from everystep.store.segments import read
from everystep.store.verify import Finding, verify_logs, verify_run, verify_step
from everystep.types import StepRef

if TYPE_CHECKING:
    from everystep.recovery.deep import Judged


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
    proved: list[str] | None
    """With --deep: steps that come out as they were in training."""
    differing: list[str] | None
    """With --deep: steps that do not."""
    lost: list[str] | None
    """With --deep: steps that cannot be had."""
    findings: list[Found]


def verify(
    run: RunPath,
    step: StepText = None,
    deep: Annotated[
        bool,
        typer.Option("--deep", help="Also fold all deltas, and prove that every step comes out."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Read every byte of a run and compare it with what was written.

    With --deep every step is also done again from the full checkpoint before it, and compared with
    what was recorded of it. Exit status: 0 if nothing is damaged, 1 if something is. Nothing is
    changed.
    """
    if deep and step is not None:
        raise UsageError("--deep proves whole runs", hint="export --step proves one step")
    opened = Run.open(run)
    listing = opened.listing()
    output = Output(as_json)
    if step is None:
        total = sum(entry.nbytes for entry in listing.steps)
        total += sum(log.nbytes for log in listing.logs)
        with output.progress("verifying", total) as progress:
            verdict = judge(opened, listing, path_text(run), progress)
    else:
        verdict = _judge_step(opened, listing, step, path_text(run), output)
    if deep:
        verdict = _deepen(opened, listing, verdict, output)
    output.show(verdict, blocks(verdict))
    raise typer.Exit(0 if verdict.ok else 1)


class _Reading:
    """What has been read and found."""

    def __init__(self, run: Run, progress: Progress) -> None:
        self.run, self._progress = run, progress
        self.read_bytes = 0
        self.findings: list[Finding] = []
        self.whole: list[StepRef] = []
        self.damaged: list[StepRef] = []
        self.incomplete: list[StepRef] = []
        self.spoilt: set[tuple[StepRef, int]] = set()
        """Steps and sessions of damaged full checkpoints."""
        self._proved: set[Stretch] = set()

    def count(self, nbytes: int) -> None:
        """So many bytes have been read."""
        self.read_bytes += nbytes
        self._progress(nbytes)

    def entry(self, entry: StepEntry) -> None:
        """Read a full checkpoint."""
        found = list(verify_step(self.run, entry, self.count, self._proved))
        damaged = any(finding.level == "damage" for finding in found)
        if damaged and _was_removed(self.run, entry):
            gone = fmt.step_directory(entry.ref)
            what = "was removed while it was read"
            self.findings.append(Finding(level="note", what=what, path=gone, step=entry.ref))
            return
        self.findings += found
        if damaged:
            self.spoilt.add((entry.ref, entry.session))
        listed = self.whole if entry.complete else self.incomplete
        (self.damaged if damaged else listed).append(entry.ref)

    def verdict(self, path: str) -> Verdict:
        """All of it as the command prints it."""
        location = self.run.backend.abilities.location
        return Verdict(
            path=path,
            ok=not any(finding.level == "damage" for finding in self.findings),
            read_bytes=self.read_bytes,
            whole=[str(ref) for ref in self.whole],
            damaged=[str(ref) for ref in self.damaged],
            incomplete=[str(ref) for ref in self.incomplete],
            proved=None,
            differing=None,
            lost=None,
            findings=[_plain(finding, location) for finding in self.findings],
        )


def judge(run: Run, listing: Listing, path: str, progress: Progress) -> Verdict:
    """Read all files of a run."""
    reading = _Reading(run, progress)
    reading.findings += verify_run(run, msgspec.structs.replace(listing, steps=(), logs=()))
    for entry in listing.steps:
        reading.entry(entry)
    if listing.logs:
        of_logs = list(verify_logs(run, listing, reading.count))
        reading.findings += of_logs
        _judge_deltas(reading, listing, of_logs)
    return reading.verdict(path)


def _judge_deltas(reading: _Reading, listing: Listing, found: list[Finding]) -> None:
    """Tell which steps without a full checkpoint can be had from what is whole."""
    segments = reading.run.segments(listing)
    bad: dict[str, list[int]] = {}
    for finding in found:
        if finding.level == "damage" and finding.path is not None and finding.at is not None:
            bad.setdefault(finding.path, []).append(finding.at)
    deltas = {
        (scanned.segment.name, record.offset)
        for scanned in segments
        for record in scanned.records
        if any(
            record.offset <= at < record.payload_offset + record.nbytes
            for at in bad.get(scanned.segment.name, [])
        )
    }
    excluded = Excluded(deltas, reading.spoilt)
    for (_, before), (_, after) in zip(
        lines_of(listing, segments), lines_of(listing, segments, excluded), strict=True
    ):
        for ref, had in before.had.items():
            if had.full is None:
                (reading.whole if ref in after.had else reading.damaged).append(ref)
    reading.whole.sort()
    reading.damaged.sort()


def _judge_step(run: Run, listing: Listing, step: str, path: str, output: Output) -> Verdict:
    """Read one step: every writing of its full checkpoint, or what it is folded from."""
    try:
        entries = writings(listing, step)
    except NothingToRestore:
        chain = restorable(run, step)
        with output.progress("verifying", chain_bytes(chain)) as progress:
            return _judge_chain(run, chain, path, progress)
    with output.progress("verifying", sum(entry.nbytes for entry in entries)) as progress:
        reading = _Reading(run, progress)
        for entry in entries:
            reading.entry(entry)
    return reading.verdict(path)


def _judge_chain(run: Run, chain: Chain, path: str, progress: Progress) -> Verdict:
    reading = _Reading(run, progress)
    reading.entry(chain.full)
    reading.whole.clear()
    for link in chain.links:
        for place in link.places:
            try:
                reading.count(len(read(run.backend, place.name, place.found)))
            except StoreError as error:
                finding = Finding(
                    level="damage", what=error.message, path=place.name, at=error.at,
                    step=link.ref, rank=place.scanned.segment.rank,
                )  # fmt: skip
                reading.findings.append(finding)
    damaged = any(finding.level == "damage" for finding in reading.findings)
    reading.damaged = [chain.ref] if damaged else []
    reading.whole = [] if damaged else [chain.ref]
    return reading.verdict(path)


def _deepen(run: Run, listing: Listing, verdict: Verdict, output: Output) -> Verdict:
    """Fold the whole run."""
    from everystep.recovery.deep import prove_run, steps_to_fold
    from everystep.recovery.reach import How

    segments = run.segments(listing)
    with output.progress("folding", steps_to_fold(listing, segments), "steps") as progress:
        judged = prove_run(run, listing, segments, How(folded=progress))
    by_proof: dict[str, list[str]] = {"proved": [], "differs": [], "lost": [], "unfinished": []}
    for ref, one in judged.items():
        by_proof[one.proof].append(str(ref))
    findings = [*verdict.findings, *_grouped(judged)]
    return msgspec.structs.replace(
        verdict,
        ok=not any(finding.level == "damage" for finding in findings),
        proved=by_proof["proved"],
        differing=by_proof["differs"],
        lost=[*by_proof["lost"], *by_proof["unfinished"]],
        findings=findings,
    )


def _grouped(judged: Mapping[StepRef, Judged]) -> Iterator[Found]:
    """What there is to say of steps that are not proved, of neighbours once."""
    refs = [ref for ref, one in judged.items() if one.why is not None]
    while refs:
        first = last = refs.pop(0)
        one = judged[first]
        while refs and refs[0] == StepRef(last.timeline, last.step + 1) and judged[refs[0]] == one:
            last = refs.pop(0)
        until = "" if first == last else f", and those to step {last.step},"
        what = one.why if one.proof == "differs" else f"the step{until} cannot be had: {one.why}"
        level: Literal["damage", "note"] = "note" if one.proof == "unfinished" else "damage"
        yield Found(level=level, what=what or "", path=None, byte=None, step=str(first), rank=None)


def _was_removed(run: Run, entry: StepEntry) -> bool:
    """Whether what looks like damage is a step that its training has removed meanwhile."""
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
        ("not as in training", verdict.differing, "red"),
        ("cannot be had", verdict.lost, "red"),
        ("proved", verdict.proved, "green"),
    ):
        if steps:
            yield Line(f"{title}: {ranges(steps)}", style)
    read = f"{size(verdict.read_bytes)} of tensors and deltas read"
    damages = sum(finding.level == "damage" for finding in verdict.findings)
    if not verdict.ok:
        yield Line(f"{counted(damages, 'damage')} found, {read}", "bold red")
    elif not (verdict.whole or verdict.incomplete):
        yield Line("there is no step yet", "bold")
    elif verdict.proved is not None:
        yield Line(f"nothing is damaged, every step comes out, {read}", "bold green")
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
