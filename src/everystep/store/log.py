"""The log as it is written: segments of records that a rank appends to.

Bytes only: what a payload means is its writer's business. Each record's head holds the digest of
the record before it, over all segments of the rank's session, so that no record can be lost,
doubled or slipped in between two others without being seen. `segments` reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import xxhash

from everystep.errors import StoreFailed
from everystep.store import logformat as lf
from everystep.store.backend import Backend
from everystep.store.logformat import Kind, Segment
from everystep.store.segments import Found
from everystep.types import Buffer


class NewRecord(NamedTuple):
    """A record to be appended."""

    step: int
    nbytes: int
    parts: Sequence[Buffer]
    """The payload in order, `nbytes` in all."""


class Appended(NamedTuple):
    """Where a record lies that was appended."""

    name: str
    """Of the segment."""
    found: Found


class Log:
    """What one rank appends in one session. Used by one thread at a time.

    A segment is a file. Its first record goes out with the first append, so that a segment without
    a delta is no file at all.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        run: str,
        timeline: str,
        session: int,
        rank: int,
        world_size: int,
    ) -> None:
        self._backend, self._run = backend, run
        self._next = Segment(
            timeline, session, rank, world_size, 0, 0
        )  # before the first: number 0
        self._layout: bytes | None = None
        self._segment: Segment | None = None
        self._nbytes = 0
        self._heads: list[bytes] = []
        self._last_step = 0
        self._last: bytes | None = None
        self.appended: list[Appended] = []
        """By the last append."""

    @property
    def last(self) -> bytes | None:
        """The digest of the newest record that is durable; None: this log has appended none."""
        return self._last

    @property
    def segment(self) -> Segment | None:
        """The one that is being written; None: the next append begins one."""
        return self._segment

    def begin(self, base: int, layout: bytes, after: bytes | None = None) -> None:
        """Let the next append begin a new segment.

        Args:
            base: the step whose state the first delta follows.
            layout: goes into the segment's first record.
            after: the digest of the record that the first one follows, where another process (an
                agent that died) has appended it: `Found.digest`. None: what this log has appended
                last; at its first segment, nothing.

        Raises:
            StoreFailed: a number is too large for a name.
        """
        self._next = msgspec.structs.replace(self._next, base=base)
        if not lf.has_room(self._next) or len(layout) > lf.MAX_LAYOUT_BYTES // 2:
            what = "a step, session or rank has too many digits, or the layout is too long"
            raise StoreFailed(what, path=self._next.name)
        self._layout, self._segment = layout, None
        self._last, self._last_step = after or self._last, max(base, self._last_step)

    def append(self, records: Sequence[NewRecord]) -> int:
        """Make records durable with one write and one fsync; returns the bytes that were written.

        After a failure the segment is given up: its tail may hold any part of these records. The
        next append begins another one; give it these records again.

        Args:
            records: of ascending steps, all after those before.

        Raises:
            StoreFull: no space or quota.
            StoreFailed: any other refusal; also, with nothing written, where steps do not ascend or
                a payload has another length than it says.
        """
        if self._layout is None:
            raise StoreFailed("append() before begin()", path=self._next.name)
        if not records:
            return 0
        self._require_order(records)
        parts: list[Buffer] = []
        heads: list[bytes] = []
        last = self._last or lf.NO_DIGEST
        segment = self._segment or self._numbered()
        if self._segment is None:
            payload = _begin_payload(self._run, segment, self._layout)
            last = _add(parts, heads, Kind.BEGIN, segment, segment.base, payload, last)
        for record in records:
            _require_length(record, segment)
            last = _add(parts, heads, Kind.DELTA, segment, record.step, record.parts, last)
        nbytes = sum(len(part) for part in parts)
        at = self._nbytes if self._segment is not None else 0
        self._write(segment, parts, at)
        if at == 0:
            self._heads = []
        self.appended = list(_places(segment.name, heads, at))
        self._segment, self._nbytes = segment, at + nbytes
        self._heads += heads
        self._last, self._last_step = last, records[-1].step
        return nbytes

    def seal(self) -> None:
        """Close the segment with a record that holds all heads, so that a reader needs not look for
        them; without one being written, do nothing. It is over in any case.

        Raises:
            StoreError: the record is not there, or not whole; nothing else is lost.
        """
        segment, self._segment = self._segment, None
        if segment is None:
            return
        parts: list[Buffer] = []
        end = lf.END.pack(self._nbytes, lf.END_MAGIC)
        payload = [b"".join(self._heads), end]
        _add(parts, [], Kind.SEAL, segment, self._last_step, payload, self._last or lf.NO_DIGEST)
        self._backend.append(segment.name, parts, self._nbytes)

    def _write(self, segment: Segment, parts: Sequence[Buffer], at: int) -> None:
        try:
            self._backend.append(segment.name, parts, at)
        except BaseException:
            self._segment = None
            raise
        finally:
            self._next = msgspec.structs.replace(self._next, number=segment.number)

    def _require_order(self, records: Sequence[NewRecord]) -> None:
        before = self._last_step
        for record in records:
            if record.step <= before:
                what = "steps of a log do not ascend"
                raise StoreFailed(
                    what, path=self._next.name, expected=f"> {before}", found=record.step
                )
            before = record.step

    def _numbered(self) -> Segment:
        """The next segment, with a number that this rank's files of this session do not have."""
        number = self._next.number
        if number == 0:  # another process may have begun some
            names = self._backend.list(lf.log_directory(self._next.timeline))
            found = [s for s in (lf.parse_log_path(e.name) for e in names) if s is not None]
            number = max((s.number for s in found if s.stem == self._next.stem), default=0)
        if number >= lf.LAST_NUMBER:
            raise StoreFailed("there are no more numbers of segments", path=self._next.name)
        return msgspec.structs.replace(self._next, number=number + 1)


def _places(name: str, heads: Sequence[bytes], at: int) -> Iterator[Appended]:
    """Where the deltas lie whose heads these are, one record after the other from `at` on; what was
    written is checked by reading it."""
    for data in heads:
        head = lf.decode_head(data, name, at)
        if head.kind == Kind.DELTA:
            found = Found(head.step, at, head.nbytes, head.xxh3_128, head.digest, head.previous)
            yield Appended(name, found)
        at += head.record_bytes


def _begin_payload(run: str, segment: Segment, layout: bytes) -> list[Buffer]:
    text = msgspec.json.encode(lf.record_of(segment, run))
    return [len(text).to_bytes(8, "little"), text, bytes(lf.padded(len(text)) - len(text)), layout]


def _require_length(record: NewRecord, segment: Segment) -> None:
    found = sum(memoryview(part).nbytes for part in record.parts)
    if found != record.nbytes:
        what = f"the delta of step {record.step} has another length than it says"
        raise StoreFailed(what, path=segment.name, expected=record.nbytes, found=found)


def _add(
    parts: list[Buffer],
    heads: list[bytes],
    kind: Kind,
    segment: Segment,
    step: int,
    payload: Sequence[Buffer],
    previous: bytes,
) -> bytes:
    """Put a record behind others; returns its digest."""
    views = [memoryview(part).cast("B") for part in payload]
    nbytes = sum(len(view) for view in views)
    views.append(memoryview(bytes(lf.padded(nbytes) - nbytes)))
    state = xxhash.xxh3_128()
    for view in views:
        state.update(view)
    head, digest = lf.encode_head(kind, segment, step, nbytes, state.digest(), previous)
    heads.append(head)
    parts.append(head)
    parts.extend(view for view in views if view)
    return digest
