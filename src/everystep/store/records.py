"""Framed JSON files of a run, read and written."""

from __future__ import annotations

import logging
from typing import TypeVar

from msgspec import Struct

from everystep.errors import Damaged, Missing, NotARun
from everystep.store import durable
from everystep.store import format as fmt
from everystep.store.backend import Backend, NewFile
from everystep.store.format import RankRecord, RunRecord, SessionRecord, TimelineRecord
from everystep.types import MAIN, is_timeline

_log = logging.getLogger("everystep")

_LARGE_BYTES = 1 << 20

_Record = TypeVar("_Record", RunRecord, TimelineRecord, SessionRecord, RankRecord)


def read_record(backend: Backend, name: str, kind: type[_Record]) -> _Record:
    """Read a framed JSON file.

    Raises:
        Missing: it is not there.
        Damaged: it is not what was written.
    """
    length = backend.size(name)
    if length > fmt.MAX_RECORD_BYTES:
        raise Damaged("length", path=name, expected=f"<= {fmt.MAX_RECORD_BYTES:,}", found=length)
    if length > _LARGE_BYTES:  # before so much memory is taken
        start = bytearray(fmt.FRAME_BYTES)
        backend.read(name, memoryview(start), 0)
        fmt.check_frame_start(start, name)
    data = bytearray(length)
    backend.read(name, memoryview(data), 0)
    return fmt.decode_record(data, kind, name)


def read_timeline(backend: Backend, name: str, run: str) -> TimelineRecord:
    """Read the record of a timeline; it does not say of which run it is.

    Raises:
        Missing, Damaged: see `read_record`; or it belongs elsewhere.
    """
    record = read_record(backend, name, TimelineRecord)
    named = fmt.parse_timeline_file(name)
    if record.name != named:
        raise Damaged("belongs elsewhere", path=name, expected=named, found=record.name)
    return record


def read_session(backend: Backend, name: str, run: str) -> SessionRecord:
    """Read the record of a session of a run.

    Raises:
        Missing, Damaged: see `read_record`; or it belongs elsewhere.
    """
    record = read_record(backend, name, SessionRecord)
    expected = (run, fmt.parse_session_file(name))
    if (record.run, record.session) != expected or not is_timeline(record.timeline):
        found = (record.run, record.session, record.timeline)
        raise Damaged("belongs elsewhere", path=name, expected=expected, found=found)
    return record


def write_record(backend: Backend, name: str, record: Struct) -> None:
    """Make a framed JSON file durable."""
    data = fmt.encode_record(record)
    backend.put([NewFile(name, len(data), [data])])


def identity_from_sessions(backend: Backend) -> RunRecord | None:
    """The identity of a run whose `run.json` is lost: every session's record repeats it."""
    names = [e.name for e in backend.list("sessions") if fmt.parse_session_file(e.name) is not None]
    for name in sorted(names, key=lambda name: fmt.parse_session_file(name) or 0, reverse=True):
        try:
            session = read_record(backend, name, SessionRecord)
        except (Damaged, Missing):
            continue
        _log.warning("%s is lost or damaged; identity taken from %s", fmt.RUN_FILE, name)
        return RunRecord(run=session.run, created=session.created)
    return None


def require_run_or_empty(backend: Backend) -> None:
    """Refuse a directory that is neither a run nor empty, before anything is written there.

    Raises:
        NotARun: it holds something else.
    """
    try:
        backend.size(fmt.RUN_FILE)
    except Missing:
        if not any(backend.list("sessions")):  # they say whose run it is, too
            require_empty(backend)


def require_empty(backend: Backend) -> None:
    """Refuse a directory that holds anything but what a start that was cut off has left.

    Raises:
        NotARun: it does.
    """
    ours = (fmt.LOCK_FILE, fmt.timeline_file(MAIN))
    strangers = [e.name for e in backend.list("") if e.name not in ours]
    strangers = [name for name in strangers if not durable.is_temporary(name)]
    if strangers:
        raise NotARun(
            f"the directory has no {fmt.RUN_FILE} and is not empty ({strangers[0]})",
            path=backend.abilities.location,
            hint="choose another directory, or restore the missing file from a copy",
        )
