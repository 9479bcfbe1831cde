"""Read every byte of a run and yield what is wrong, as records that other commands can use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from msgspec import Struct

from everystep.errors import Damaged, EverystepError, StoreError
from everystep.store import format as fmt
from everystep.store.format import RankRecord, RunRecord
from everystep.store.reading import StepReader, Stretch, locate
from everystep.store.records import read_record
from everystep.store.run import Listing, Run, StepEntry, is_set_aside
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
        yield from _verify_whole(run, entry, records, read=whole)
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
