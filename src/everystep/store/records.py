"""Framed JSON files of a run, read and written."""

from __future__ import annotations

import logging
from typing import TypeVar

from msgspec import Struct

from everystep.errors import Damaged, Missing
from everystep.store import format as fmt
from everystep.store.backend import Backend, NewFile
from everystep.store.format import RankRecord, RunRecord, SessionRecord, TimelineRecord

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
