"""A run directory: its identity, timelines and sessions, and one scan that lists its steps."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from everystep.errors import Damaged, Missing, NotARun, NothingToRestore, StoreFailed
from everystep.store import format as fmt
from everystep.store import newest
from everystep.store.backend import Backend, Entry
from everystep.store.entries import LogEntry, step_entries
from everystep.store.entries import StepEntry as StepEntry
from everystep.store.format import RankRecord, RunRecord, SessionRecord, TimelineRecord
from everystep.store.local import LocalBackend, exists
from everystep.store.logformat import parse_log_path
from everystep.store.measured import parse_name
from everystep.store.records import (
    identity_from_sessions,
    read_record,
    read_session,
    read_timeline,
    require_empty,
    write_record,
)
from everystep.store.references import leftovers, needed_places
from everystep.store.segments import Scanned, scan
from everystep.store.wellformed import require_wellformed
from everystep.types import MAIN, StepRef, is_timeline

_log = logging.getLogger("everystep")

SET_ASIDE = "damaged"
"""Where files of a step that failed its proof are moved, below the run."""

_Record = TypeVar("_Record", TimelineRecord, SessionRecord)


class Listing(Struct, frozen=True, kw_only=True):
    """One scan of a run: everything that decisions are made from."""

    steps: tuple[StepEntry, ...]
    """By timeline, step and session; complete or not."""
    timelines: Mapping[str, TimelineRecord]
    sessions: tuple[SessionRecord, ...]
    """By number."""
    loose: tuple[tuple[StepRef, str], ...] = ()
    """(step, stem) of parts that have data files and no record: being written, or given up."""
    strangers: tuple[str, ...] = ()
    """Names that are not ours, and temporary files."""
    logs: tuple[LogEntry, ...] = ()
    """By timeline, session, rank and number."""
    damages: tuple[Damaged, ...] = ()
    """Records of timelines and sessions that cannot be read."""

    def complete(self) -> dict[StepRef, StepEntry]:
        """The newest complete writing of each step."""
        return {entry.ref: entry for entry in self.steps if entry.complete}

    def current_timeline(self) -> str:
        """The one that the newest session writes; seen by its steps if its record is damaged."""
        by_session = {log.segment.session: log.segment.timeline for log in self.logs}
        by_session |= {entry.session: entry.ref.timeline for entry in self.steps}
        by_session |= {session.session: session.timeline for session in self.sessions}
        return by_session[max(by_session)] if by_session else MAIN

    def line(self, timeline: str) -> list[StepEntry]:
        """Complete steps that lead up to and along a timeline, oldest first.

        Raises:
            NothingToRestore: there is no such timeline.
        """
        complete = self.complete()
        found: list[StepEntry] = []
        seen: set[str] = set()
        limit: int | None = None
        name: str | None = timeline
        while name is not None and name not in seen:
            seen.add(name)
            if name not in self.timelines:
                if name == timeline:
                    raise NothingToRestore(f"there is no timeline {name!r}")
                break  # nothing of this ancestor is left, or it is named by nothing that is whole
            found += [
                entry
                for ref, entry in complete.items()
                if ref.timeline == name and (limit is None or ref.step <= limit)
            ]
            parent = self.timelines[name].parent
            name, limit = (parent.timeline, parent.step) if parent else (None, None)
        return sorted(found, key=lambda entry: entry.ref.step)


class Run:
    """A run directory that exists. Reading it needs no lock; writing is for its owner."""

    def __init__(self, backend: Backend, record: RunRecord) -> None:
        self.backend = backend
        self.id = record.run
        self._records: dict[str, Struct] = {}
        self._scans: dict[tuple[str, int], Scanned] = {}

    @staticmethod
    def open(path: str | os.PathLike[str]) -> Run:
        """Open a run that is there.

        Raises:
            NotARun: the directory holds something else, or nothing.
            Damaged: it is one, and its identity can be read nowhere.
        """
        root = Path(path)
        if not exists(root):
            raise NotARun("there is no such directory", path=root, hint="check the path")
        backend = LocalBackend(root)
        try:
            return Run(backend, read_record(backend, fmt.RUN_FILE, RunRecord))
        except (Missing, Damaged) as error:
            record = identity_from_sessions(backend)
            if record is not None:
                return Run(backend, record)
            if isinstance(error, Damaged):
                raise
            problem = f"the directory has no {fmt.RUN_FILE}"
            raise NotARun(problem, path=root, hint="check the path") from None

    @staticmethod
    def open_or_create(backend: Backend) -> Run:
        """Open a run, or make one in a directory that is empty. For its owner, who also writes a
        lost or damaged identity again.

        Raises:
            NotARun: the directory holds something else.
            Damaged: it is a run, and its identity can be read nowhere.
        """
        try:
            return Run(backend, read_record(backend, fmt.RUN_FILE, RunRecord))
        except (Missing, Damaged) as error:
            record = identity_from_sessions(backend)
            if record is None and isinstance(error, Damaged):
                raise
        if record is None:
            require_empty(backend)
            record = RunRecord(run=secrets.token_hex(16), created=now())
            write_record(backend, fmt.timeline_file(MAIN), TimelineRecord(name=MAIN, parent=None))
        write_record(backend, fmt.RUN_FILE, record)
        return Run(backend, record)

    def identity(self, session: int) -> list[tuple[str, bytes]]:
        """The files that make a directory this run, in the order in which to write them again
        should it lose them: name and bytes.

        Raises:
            StoreError: one cannot be read.
        """
        names = [entry.name for entry in self.backend.list("timelines")]
        names = sorted(name for name in names if fmt.parse_timeline_file(name) is not None)
        files = []
        for name in [*names, fmt.session_file(session), fmt.RUN_FILE]:
            data = bytearray(self.backend.size(name))
            self.backend.read(name, memoryview(data), 0)
            files.append((name, bytes(data)))
        return files

    def listing(self) -> Listing:
        """Scan the run. Complete steps are seen by the names of their records alone."""
        files: dict[StepRef, list[Entry]] = {}
        timelines: dict[str, TimelineRecord] = {}
        sessions: list[SessionRecord] = []
        strangers: list[str] = []
        damages: list[Damaged] = []
        logs: list[LogEntry] = []
        for entry in self.backend.list(""):
            name = entry.name
            place = fmt.parse_step_path(name)
            try:
                if place is not None and fmt.owner_of(place[1]) is not None:
                    files.setdefault(place[0], []).append(entry)
                elif fmt.parse_timeline_file(name) is not None:
                    timeline = self._cached(name, read_timeline)
                    timelines[timeline.name] = timeline
                elif fmt.parse_session_file(name) is not None:
                    sessions.append(self._cached(name, read_session))
                elif (segment := parse_log_path(name)) is not None:
                    logs.append(LogEntry(segment, entry.nbytes))
                elif not _is_known(name):
                    strangers.append(name)
            except Damaged as damage:
                damages.append(damage)
        used_by_any = {ref.timeline for ref in files} | {log.segment.timeline for log in logs}
        for used in used_by_any | {session.timeline for session in sessions}:
            if used not in timelines:  # its record is lost; its name says the same
                timelines[used] = fmt.timeline_from_name(used)
        found = [step_entries(ref, entries) for ref, entries in files.items()]
        return Listing(
            steps=tuple(sorted((e for f in found for e in f[0]), key=lambda e: (e.ref, e.session))),
            loose=tuple(sorted(part for f in found for part in f[1])),
            timelines=timelines,
            sessions=tuple(sorted(sessions, key=lambda session: session.session)),
            strangers=tuple(sorted(strangers)),
            logs=tuple(sorted(logs)),
            damages=tuple(damages),
        )

    def _cached(self, name: str, read: Callable[[Backend, str, str], _Record]) -> _Record:
        """A record that never changes once written."""
        if name not in self._records:
            self._records[name] = read(self.backend, name, self.id)
        return self._records[name]  # type: ignore[return-value]

    def segments(self, listing: Listing) -> list[Scanned]:
        """What the heads in all segments of the log say; each is read when it has grown.

        Raises:
            StoreError: the store did not answer, or a newer version has written one.
        """
        found = []
        for log in listing.logs:
            key = log.segment.name, log.nbytes
            with contextlib.suppress(Missing):  # removed meanwhile
                if key not in self._scans:
                    self._scans[key] = scan(self.backend, log.segment.name, self.id)
                found.append(self._scans[key])
        self._scans = {(s.segment.name, s.nbytes): s for s in found}
        return found

    def entries(self, ref: StepRef) -> list[StepEntry]:
        """What is there of one step, without a scan of the run."""
        return step_entries(ref, list(self.backend.list(fmt.step_directory(ref))))[0]

    def record(self, entry: StepEntry, rank: int) -> RankRecord:
        """Read one rank's record of a step.

        Raises:
            Damaged: it is not what was written, not of this run, step and rank, or makes no sense.
            Missing: it is not there.
        """
        part = next((part for part in entry.parts if part.rank == rank), None)
        name = f"{fmt.step_directory(entry.ref)}/{part.marker if part else f'rank {rank}'}"
        if part is None:
            raise Missing("this rank has stored nothing", step=entry.ref, rank=rank)
        record = read_record(self.backend, name, RankRecord)
        require_wellformed(record, self.id, entry.ref, part, name)
        return record

    def records(self, entry: StepEntry) -> dict[int, RankRecord]:
        """All ranks' records of a step. Hashes that one of them has left to another are there."""
        return completed({part.rank: self.record(entry, part.rank) for part in entry.parts})

    def part_files(self, ref: StepRef, part_stem: str) -> list[str]:
        """All files of one rank's part of a step, its record first."""
        start = (part_stem + ".", part_stem + "-")
        names = [entry.name for entry in self.backend.list(fmt.step_directory(ref))]
        mine = [name for name in names if name.rsplit("/", 1)[1].startswith(start)]
        return sorted(mine, key=lambda name: (not name.endswith(".json"), name))

    def delete_part(self, ref: StepRef, part_stem: str, *, reuse: bool = False) -> None:
        """Remove one rank's part of a step: first the record, so that it ceases to exist. With
        `reuse` the space of its data files may be written over by later ones."""
        for name in self.part_files(ref, part_stem):
            if reuse and not name.endswith(".json"):
                self.backend.delete(name, reuse=True)
            else:
                self.backend.delete(name)

    def set_aside(self, entry: StepEntry) -> str:
        """Move all files of a step that failed its proof out of the way, records first; returns
        where they are. A data file to which another whole step refers stays where it is."""
        target = f"{SET_ASIDE}/{entry.ref.timeline}/{entry.ref.step:0{fmt.STEP_DIGITS}d}"
        needed = needed_places(self, [e for e in self.listing().steps if e.ref != entry.ref])
        for part in entry.parts:
            for name in self.part_files(entry.ref, part.stem):
                file = name.rsplit("/", 1)[1]
                if (entry.ref, file) not in needed:
                    self.backend.move(name, f"{target}/{file}")
        return target

    def clean_up(self) -> int:
        """Remove what earlier sessions left unfinished; for the owner. Returns the number of the
        next session.

        A part of a step that is not complete can never become so once its session is over.
        Replicas that differ are kept: they are whole, and evidence. So is a part to which a rank's
        record of a whole step refers.

        Raises:
            StoreError: the store did not answer, so that it is not known what may go.
        """
        listing = self.listing()
        for ref, stem in leftovers(self, listing):
            self.delete_part(ref, stem)
        numbers = [fmt.parse_session_file(e.name) or 0 for e in self.backend.list("sessions")]
        numbers += [log.segment.session for log in listing.logs]
        last = max([0, *numbers, *(entry.session for entry in listing.steps)])
        if last >= fmt.LAST_SESSION:
            raise StoreFailed("there are no more session numbers", found=last)
        return last + 1

    def begin_session(
        self,
        number: int,
        timeline: TimelineRecord,
        world_size: int,
        restored: StepRef | None,
        versions: dict[str, str],
    ) -> None:
        """Record a start of training, and its timeline if that is new."""
        name = fmt.timeline_file(timeline.name)
        if not any(entry.name == name for entry in self.backend.list("timelines")):
            write_record(self.backend, name, timeline)
        session = SessionRecord(
            run=self.id,
            session=number,
            timeline=timeline.name,
            world_size=world_size,
            restored=restored,
            created=now(),
            host=socket.gethostname(),
            pid=os.getpid(),
            versions=versions,
        )
        write_record(self.backend, fmt.session_file(number), session)


def completed(records: Mapping[int, RankRecord]) -> dict[int, RankRecord]:
    """All ranks' records of a step, with the hashes that one of them has left to another."""
    known = {
        tensor.spec.key: tensor.xxh3_128
        for record in records.values()
        for tensor in record.tensors
        if tensor.spec.replicated and tensor.xxh3_128
    }
    return {rank: _completed(record, known) for rank, record in records.items()}


def _completed(record: RankRecord, known: Mapping[str, str]) -> RankRecord:
    if all(tensor.xxh3_128 for tensor in record.tensors):
        return record
    tensors = [
        tensor if tensor.xxh3_128 else replace(tensor, xxh3_128=known.get(tensor.spec.key, ""))
        for tensor in record.tensors
    ]
    return replace(record, tensors=tensors)


def _is_known(name: str) -> bool:
    """Whether a file that is neither of a step nor a record belongs to the run all the same."""
    own = name in (fmt.RUN_FILE, fmt.LOCK_FILE) or parse_name(name) is not None
    return own or newest.is_ours(name) or is_set_aside(name)


def is_set_aside(name: str) -> bool:
    """Whether a file belongs to a step that failed its proof."""
    return name.startswith(SET_ASIDE + "/")


def fork_name(listing: Listing, ref: StepRef) -> str:
    """A new timeline's name: `main@900`, then `main@900.2`, …"""
    base = f"{ref.timeline}@{ref.step}"
    if not is_timeline(f"{base}.{len(listing.timelines) + 2}"):
        base = "t"  # a fork of forks whose name has become too long; its record says from where
    names = [base] + [f"{base}.{n}" for n in range(2, len(listing.timelines) + 3)]
    return next(name for name in names if name not in listing.timelines)


def now() -> str:
    """The time in UTC, for people."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
