"""Read every byte of a run and yield what is wrong, as records that other commands can use."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct

from everystep.errors import Damaged, EverystepError, Missing, StoreError
from everystep.store import format as fmt
from everystep.store.chains import Excluded, plan_chains
from everystep.store.format import RankRecord, RunRecord
from everystep.store.reading import StepReader, Stretch, locate
from everystep.store.records import read_record
from everystep.store.run import Listing, Run, StepEntry, completed, is_set_aside
from everystep.store.segments import Scanned, check_head, is_cut_off, last_step, read, scan
from everystep.store.wellformed import torn_shards
from everystep.types import StepRef, spoken


class Finding(Struct, frozen=True, kw_only=True):
    """One thing that `verify` has to say."""

    level: Literal["damage", "note"]
    """`damage`: a step or record cannot be used as it is; `note`: nothing is lost."""
    what: str
    path: str | None = None
    at: int | None = None
    """The first byte concerned."""
    step: StepRef | None = None
    """The step that it costs."""
    rank: int | None = None


def verify_run(
    run: Run, listing: Listing, progress: Callable[[int], None] | None = None
) -> Iterator[Finding]:
    """Check every file of a run: records by their own hash, data by the hashes in the records.

    Memory: one buffer of the largest tensor at a time. What several steps refer to is read once.

    Args:
        progress: called with the number of bytes just read.
    """
    proved: set[Stretch] = set()
    try:
        read_record(run.backend, fmt.RUN_FILE, RunRecord)
    except StoreError as error:
        yield _finding(run, error)
    for damage in listing.damages:
        yield _finding(run, damage)
    for entry in listing.steps:
        yield from verify_step(run, entry, progress, proved)
    yield from verify_logs(run, listing, progress)
    for ref, stem in listing.loose:
        yield Finding(
            level="note", what="data without a record: being written, or given up",
            path=f"{fmt.step_directory(ref)}/{stem}", step=ref,
        )  # fmt: skip
    for name in listing.strangers:
        yield Finding(level="note", what="not a file of this run, or a temporary one", path=name)
    aside = sorted(e.name for e in run.backend.list("") if is_set_aside(e.name))
    if aside:
        what = f"{len(aside)} files of steps that failed their proof were set aside"
        yield Finding(level="note", what=what, path=aside[0])


def verify_step(
    run: Run,
    entry: StepEntry,
    progress: Callable[[int], None] | None = None,
    proved: set[Stretch] | None = None,
) -> Iterator[Finding]:
    """Check all ranks' files of one step, those of earlier steps to which it refers included.

    Args:
        progress: called with the number of bytes just read.
        proved: see `StepReader.check_piece`.
    """
    records: dict[int, RankRecord] = {}
    for part in entry.parts:
        try:
            records[part.rank] = run.record(entry, part.rank)
        except StoreError as error:
            yield _finding(run, error, entry.ref, part.rank)
    whole = True
    for rank, record in records.items():
        for problem in _verify_part(run, entry, rank, record, progress, proved):
            whole = False
            yield _finding(run, problem, entry.ref, rank)
    yield from _unnamed_files(run, entry, records)
    if len(records) == entry.world_size:
        yield from _verify_whole(run, entry, completed(records), read=whole)
    elif len(entry.parts) < entry.world_size:
        yield Finding(
            level="note", what=f"incomplete: nothing of rank {entry.missing}", step=entry.ref
        )


def _verify_part(
    run: Run,
    entry: StepEntry,
    rank: int,
    record: RankRecord,
    progress: Callable[[int], None] | None,
    proved: set[Stretch] | None,
) -> Iterator[EverystepError]:
    """Read each piece that this rank has stored, by itself, so that all damage is found."""
    specs = {tensor.spec.key: tensor.spec for tensor in record.tensors}
    reader = StepReader(run.backend, entry, {rank: record})
    unusable: set[int] = set()
    for index in range(len(record.files)):
        try:
            path, slots = reader.open_file(rank, index)
            nameless = slots.keys() - {p.name for p in record.pieces if p.file == index}
            if nameless and record.files[index].step is None:  # else its own record says
                what = f"holds {min(nameless)!r}, which the record does not name"
                raise Damaged(what, path=path)
        except StoreError as error:
            unusable.add(index)
            yield error
    for stored in record.pieces:
        if stored.file in unusable:
            continue
        try:
            reader.check_piece(rank, stored, specs[stored.piece.key], progress, proved)
        except StoreError as error:
            yield error


def _verify_whole(
    run: Run, entry: StepEntry, records: dict[int, RankRecord], *, read: bool
) -> Iterator[Finding]:
    """Check that the ranks' parts make the tensors of every rank; if `read`, those that are stored
    in several pieces are read once more, in order."""
    reader = StepReader(run.backend, entry, records)
    known: set[tuple[str, str]] = set()
    for key in torn_shards(records.values()):
        what = f"{spoken(key)}: the ranks' shards do not make the whole tensor"
        yield _finding(run, Damaged(what), entry.ref)
    for rank in records:
        try:
            for place in locate(records, rank):
                tensor = place.tensor.spec.key, place.tensor.xxh3_128
                if read and len(place.parts) > 1 and tensor not in known:
                    known.add(tensor)
                    reader.check_whole(place)
        except EverystepError as error:
            yield _finding(run, error, entry.ref, rank)


def _unnamed_files(run: Run, entry: StepEntry, records: dict[int, RankRecord]) -> Iterator[Finding]:
    for rank, record in records.items():
        part = next(part for part in entry.parts if part.rank == rank)
        known = {part.marker} | {file.name for file in record.files if file.step is None}
        for name in run.part_files(entry.ref, part.stem):
            if name.rsplit("/", 1)[1] not in known:
                what = "no record names this file"
                yield Finding(level="note", what=what, path=name, step=entry.ref, rank=rank)


def verify_logs(
    run: Run, listing: Listing, progress: Callable[[int], None] | None = None
) -> Iterator[Finding]:
    """Check every record of the log, and name the steps that damage costs.

    What an append leaves that was cut off is a note: nothing of it had been durable.

    Args:
        progress: called with the number of bytes just read.
    """
    scans: list[Scanned] = []
    spoilt: set[tuple[str, int]] = set()  # records, by segment and offset
    ends: list[Damaged] = []  # where damage, and no append that was cut off, ends a segment
    for log in listing.logs:
        rank = log.segment.rank
        try:
            scanned = scan(run.backend, log.segment.name, run.id)
            cut_off = is_cut_off(run.backend, scanned)
        except Missing:
            continue  # removed meanwhile
        except StoreError as error:
            yield _finding(run, error, rank=rank)
            continue
        scans.append(scanned)
        if scanned.torn is not None and (cut_off or scanned.sealed):
            what = "the end of an append that was cut off" if cut_off else "nothing is lost by it"
            yield Finding(
                level="note", what=f"{scanned.torn.message}: {what}", path=log.segment.name,
                at=scanned.torn.at, rank=rank,
            )  # fmt: skip
        elif scanned.torn is not None:
            ends.append(scanned.torn)
            lost = StepRef(log.segment.timeline, last_step(scanned) + 1)  # and what follows
            yield _finding(run, scanned.torn, lost, rank)
        yield from _verify_records(run, scanned, spoilt, progress)
    yield from _verify_chains(listing, scans, spoilt, ends)


def _verify_records(
    run: Run,
    scanned: Scanned,
    spoilt: set[tuple[str, int]],
    progress: Callable[[int], None] | None,
) -> Iterator[Finding]:
    """Read each delta of a segment, and its head, which the index of a sealed one repeats."""
    segment = scanned.segment
    for found in scanned.records:
        ref = StepRef(segment.timeline, found.step)
        try:
            data = read(run.backend, segment.name, found)
        except StoreError as error:
            spoilt.add((segment.name, found.offset))
            yield _finding(run, error, ref, segment.rank)
            continue
        if progress is not None:
            progress(len(data))
        try:
            check_head(run.backend, segment.name, found)
        except StoreError as error:
            what = f"{error.message}; the end of the segment repeats it, and nothing is lost"
            yield Finding(
                level="note", what=what, path=segment.name, at=error.at, step=ref, rank=segment.rank
            )


def _verify_chains(
    listing: Listing,
    scans: Sequence[Scanned],
    spoilt: Collection[tuple[str, int]],
    ends: Sequence[Damaged],
) -> Iterator[Finding]:
    """Name the steps of which there are deltas, and which cannot be had."""
    known: set[tuple[StepRef, int]] = set()
    for timeline in sorted(listing.timelines):
        chains = plan_chains(listing, scans, timeline, Excluded(deltas=spoilt))
        first = chains.refs[0].step if chains.refs else None
        for gap in chains.gaps:
            if (gap.ref, gap.last) in known or (first is not None and gap.last < first):
                continue  # the full checkpoint before these deltas is gone, as retention has it
            known.add((gap.ref, gap.last))
            damaged = gap.unfit or any(gap.damage is damage for damage in ends)
            until = f", and those to step {gap.last}," if gap.last > gap.ref.step else ""
            yield Finding(
                level="damage" if damaged else "note",
                what=f"the step{until} cannot be had by deltas: {gap.what}",
                step=gap.ref,
            )


def _finding(
    run: Run, error: EverystepError, step: StepRef | None = None, rank: int | None = None
) -> Finding:
    text = error.message
    if error.expected is not None:
        text += f" (expected {error.expected}, found {error.found})"
    path = None if error.path is None else str(error.path)
    if isinstance(error.path, Path):  # the operating system was asked: give the name in the run
        path = path.removeprefix(run.backend.abilities.location + "/") if path else None
    return Finding(level="damage", what=text, path=path, at=error.at, step=step, rank=rank)
