"""The log as it is read: the heads in a segment, and the payload of one record.

Whatever is in the file, nothing is raised but what `everystep.errors` names, and no more memory is
taken than the file is long.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import xxhash

from everystep.errors import Damaged
from everystep.store import logformat as lf
from everystep.store.backend import Backend
from everystep.store.logformat import Head, Kind, Segment, SegmentRecord
from everystep.types import Buffer

_WINDOW_BYTES = 16 << 10
"""How much is read at a time where heads are looked for."""

_CHUNK_BYTES = 16 << 20
"""How much of a payload is read before it is hashed."""


class Found(NamedTuple):
    """A record of a segment, by its head alone."""

    step: int
    offset: int
    """Where its head begins, in bytes from the beginning of the file."""
    nbytes: int
    """Of its payload."""
    xxh3_128: bytes
    """Of its payload."""
    digest: bytes
    """Of its head."""
    previous: bytes
    """The digest of the delta before it; of the first in a segment, what `Log.begin` was told, with
    `NO_DIGEST` where it follows none."""

    @property
    def payload_offset(self) -> int:
        """Where the payload begins, in bytes from the beginning of the file."""
        return self.offset + lf.HEAD_BYTES


class Scanned(NamedTuple):
    """What the heads in a segment say."""

    segment: Segment
    layout: bytes
    """Empty where the first record is damaged; then there are no others."""
    records: list[Found]
    """The deltas, by ascending step."""
    torn: Damaged | None
    """Where and why reading ended before the end of the file. In a segment that is not sealed, this
    is what a crash leaves, or an append that is under way."""
    sealed: bool
    nbytes: int
    """Length of the file."""
    cut: bool = False
    """Whether reading ended since the file does, inside a record."""


def last_step(scanned: Scanned) -> int:
    """The newest step whose delta can be read from a segment; its base, where there is none."""
    return scanned.records[-1].step if scanned.records else scanned.segment.base


def older_segments(backend: Backend, run: str, timeline: str, rank: int) -> dict[Segment, int]:
    """The last step in each segment of a rank on a timeline, but for the newest segment, which may
    be the one that is being written.

    Raises:
        StoreError: as `scan`.
    """
    names = [entry.name for entry in backend.list(lf.log_directory(timeline))]
    found = [segment for segment in map(lf.parse_log_path, names) if segment is not None]
    mine = [segment for segment in found if segment.rank == rank]
    older = sorted(mine, key=lambda segment: (segment.session, segment.number))[:-1]
    return {segment: last_step(scan(backend, segment.name, run)) for segment in older}


def scan(backend: Backend, name: str, run: str) -> Scanned:
    """Read the heads of a segment: of a sealed one those at its end, of any other one by one.

    What is damaged, or of another run, timeline, session or rank, ends what is found. Memory: the
    layout, and 88 bytes for each record of a sealed segment.

    Args:
        name: the path of a segment.
        run: the identity of the run.

    Raises:
        Missing: it is not there.
        StoreError: the store did not answer, or a newer version has written it.
        Damaged: the name is no segment's, or a link or special file has it.
    """
    segment = lf.parse_log_path(name)
    if segment is None:
        raise Damaged("is not the name of a segment", path=name)
    window = _Window(backend, name, backend.size(name))
    walk = _Walk(window, segment)
    try:
        layout = _read_begin(window, walk, run)
    except Damaged as damage:
        return Scanned(segment, b"", [], damage, False, window.size, walk.cut)
    indexed = _Walk(window, segment)
    indexed.take(window.bytes_at(0, lf.HEAD_BYTES))
    of_index: Damaged | None = None
    try:
        if _walk_index(window, indexed):
            return Scanned(segment, layout, indexed.found, None, True, window.size)
    except Damaged as damage:
        of_index = damage
    torn: Damaged | None = None
    try:
        while walk.at < window.size and not walk.sealed:
            walk.take(window.bytes_at(walk.at, lf.HEAD_BYTES))
        if walk.at < window.size:
            raise Damaged(
                "bytes behind the last record", path=name, at=walk.at,
                expected=f"{walk.at:,} bytes", found=f"{window.size:,}",
            )  # fmt: skip
    except Damaged as damage:
        torn = damage
    if walk.sealed:
        torn = torn or of_index or _not_ended(window)
    return Scanned(segment, layout, walk.found, torn, walk.sealed, window.size, walk.cut)


def read(backend: Backend, name: str, found: Found, into: memoryview | None = None) -> memoryview:
    """Read and prove the payload of a record.

    Args:
        into: writable memory of at least `found.nbytes` rounded up to a multiple of 8; None: new.

    Raises:
        Damaged: a byte differs from what was written.
        Missing: the segment is not there.
        StoreError: the store did not answer.
    """
    length = lf.padded(found.nbytes)
    view = memoryview(bytearray(length)) if into is None else into[:length]
    state = xxhash.xxh3_128()
    for start in range(0, length, _CHUNK_BYTES):
        chunk = view[start : start + _CHUNK_BYTES]
        backend.read(name, chunk, found.payload_offset + start)
        state.update(chunk)
    if state.digest() != found.xxh3_128:
        first = found.payload_offset
        raise Damaged(
            f"delta of step {found.step}: hash of bytes {first:,} to {first + length:,} differs",
            path=name, at=first, expected=found.xxh3_128.hex(), found=state.hexdigest(),
        )  # fmt: skip
    return view[: found.nbytes]


def check_head(backend: Backend, name: str, found: Found) -> None:
    """Compare the head of a record with what the index of its segment says of it.

    Raises:
        Damaged: a byte differs.
        StoreError: the store did not answer.
    """
    data = bytearray(lf.HEAD_BYTES)
    backend.read(name, memoryview(data), found.offset)
    digest = lf.decode_head(data, name, found.offset).digest
    if digest != found.digest:
        raise Damaged(
            "the head is that of another record", path=name, at=found.offset,
            expected=found.digest.hex(), found=digest.hex(),
        )  # fmt: skip


def is_cut_off(backend: Backend, scanned: Scanned) -> bool:
    """Whether what ended the reading of a segment is as an append leaves it that was cut off: the
    file ends inside a record, or only zeros follow. All that follows is read.

    Raises:
        StoreError: the store did not answer.
    """
    if scanned.torn is None or scanned.sealed or scanned.cut:
        return scanned.cut
    for offset in range(scanned.torn.at or 0, scanned.nbytes, _CHUNK_BYTES):
        data = bytearray(min(_CHUNK_BYTES, scanned.nbytes - offset))
        backend.read(scanned.segment.name, memoryview(data), offset)
        if any(data):
            return False
    return True


class _Window:
    """A file, of which a stretch is in memory."""

    def __init__(self, backend: Backend, name: str, size: int) -> None:
        self._backend, self.name, self.size = backend, name, size
        self._start, self._data = 0, b""

    def bytes_at(self, offset: int, nbytes: int) -> bytes:
        """Bytes of the file; fewer where it ends."""
        stop = min(offset + nbytes, self.size)
        if not self._start <= offset <= stop <= self._start + len(self._data):
            self.load(offset, max(nbytes, _WINDOW_BYTES))
        return self._data[offset - self._start : stop - self._start]

    def load(self, offset: int, nbytes: int) -> None:
        """Take a stretch into memory."""
        data = bytearray(max(0, min(nbytes, self.size - offset)))
        self._backend.read(self.name, memoryview(data), offset)
        self._start, self._data = offset, bytes(data)


class _Walk:
    """Where a reader of heads stands, and what it has found."""

    def __init__(self, window: _Window, segment: Segment) -> None:
        self._name, self._size, self.segment = window.name, window.size, segment
        self.at = 0
        self.digest = lf.NO_DIGEST
        """Of the head before `at`."""
        self.found: list[Found] = []
        self.sealed = False
        self.cut = False
        """Whether the file ends inside the record at `at`."""
        self._step = segment.base
        self._after = lf.NO_DIGEST

    def take(self, data: Buffer) -> Head:
        """Check the head of the record at `at`, and go behind that record.

        Raises:
            Damaged: it is not what belongs there.
        """
        self.cut = self.at + lf.HEAD_BYTES > self._size
        head = lf.decode_head(data, self._name, self.at)
        self._require(head)
        if head.kind == Kind.BEGIN:
            self._after = head.previous
        elif head.kind == Kind.DELTA:
            previous = self.found[-1].digest if self.found else self._after
            self.found.append(
                Found(head.step, self.at, head.nbytes, head.xxh3_128, head.digest, previous)
            )
            self._step = head.step
        self.sealed = head.kind == Kind.SEAL
        self.at, self.digest = self.at + head.record_bytes, head.digest
        return head

    def _require(self, head: Head) -> None:
        segment = self.segment
        whose, mine = (head.session, head.rank), (segment.session, segment.rank)
        if whose != mine:
            raise self._damaged("belongs to another session or rank", mine, whose)
        if (head.kind == Kind.BEGIN) != (self.at == 0):
            raise self._damaged("the kind of a record", "BEGIN first", Kind(head.kind).name)
        if self.at and head.previous != self.digest:
            what = "a record does not follow the one before it"
            raise self._damaged(what, self.digest.hex(), head.previous.hex())
        if head.kind == Kind.DELTA and head.step <= self._step:
            raise self._damaged("steps do not ascend", f"> {self._step}", head.step)
        end = self.at + head.record_bytes
        if end > self._size:
            self.cut = True
            what = f"the file ends inside the record of step {head.step}"
            raise self._damaged(what, f"{end:,} bytes", f"{self._size:,}")

    def _damaged(self, what: str, expected: object, found: object) -> Damaged:
        return Damaged(what, path=self._name, at=self.at, expected=expected, found=found)


def _read_begin(window: _Window, walk: _Walk, run: str) -> bytes:
    """Check the first record; returns the layout."""
    name, segment = window.name, walk.segment
    head = walk.take(window.bytes_at(0, lf.HEAD_BYTES))
    if head.nbytes > lf.MAX_LAYOUT_BYTES:
        limit = f"<= {lf.MAX_LAYOUT_BYTES:,} bytes"
        raise Damaged("length", path=name, at=0, expected=limit, found=f"{head.nbytes:,}")
    payload = window.bytes_at(lf.HEAD_BYTES, head.padded_bytes)
    _require_hash(payload, head, name, 0)
    length = int.from_bytes(payload[:8], "little")
    if 8 + lf.padded(length) > head.nbytes:
        raise Damaged("the first record is cut", path=name, at=lf.HEAD_BYTES)
    try:
        record = msgspec.json.decode(payload[8 : 8 + length], type=SegmentRecord)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        what = f"the first record makes no sense: {error}"
        raise Damaged(what, path=name, at=lf.HEAD_BYTES) from error
    expected = lf.record_of(segment, run)
    if record != expected or head.step != segment.base:
        raise Damaged("belongs elsewhere", path=name, at=0, expected=expected, found=record)
    return payload[8 + lf.padded(length) : head.nbytes]


def _walk_index(window: _Window, walk: _Walk) -> bool:
    """Take the heads from the last record of a sealed segment; False: it is not sealed.

    Raises:
        Damaged: the index is.
    """
    name, size = window.name, window.size
    window.load(max(0, size - _WINDOW_BYTES), _WINDOW_BYTES)
    offset, magic = lf.END.unpack(window.bytes_at(size - lf.END.size, lf.END.size))
    if magic != lf.END_MAGIC:
        return False
    if not walk.at <= offset <= size - lf.HEAD_BYTES:
        raise Damaged("where the last record begins", path=name, at=size - 16, found=offset)
    head = lf.decode_head(window.bytes_at(offset, lf.HEAD_BYTES), name, offset)
    if head.kind != Kind.SEAL or offset + head.record_bytes != size:
        raise Damaged("the last record is no index", path=name, at=offset)
    payload = window.bytes_at(offset + lf.HEAD_BYTES, head.padded_bytes)
    _require_hash(payload, head, name, offset)
    heads = payload[: head.nbytes - lf.END.size]
    if len(heads) % lf.HEAD_BYTES or heads[lf.HEAD_BYTES - 16 : lf.HEAD_BYTES] != walk.digest:
        raise Damaged("the index is of another segment", path=name, at=offset)
    for start in range(lf.HEAD_BYTES, len(heads), lf.HEAD_BYTES):
        walk.take(heads[start : start + lf.HEAD_BYTES])
    if (walk.at, walk.digest) != (offset, head.previous):
        raise Damaged("the index does not name every record", path=name, at=offset)
    return True


def _not_ended(window: _Window) -> Damaged:
    """What is wrong with a segment that has a last record, and not the last bytes of one."""
    at = window.size - len(lf.END_MAGIC)
    found = window.bytes_at(at, len(lf.END_MAGIC)).hex()
    what = "the last bytes of a sealed segment"
    return Damaged(what, path=window.name, at=at, expected=lf.END_MAGIC.hex(), found=found)


def _require_hash(payload: bytes, head: Head, name: str, at: int) -> None:
    found = lf.raw_digest(payload)
    if found != head.xxh3_128:
        first = at + lf.HEAD_BYTES
        raise Damaged(
            f"hash of bytes {first:,} to {first + len(payload):,} differs",
            path=name, at=first, expected=head.xxh3_128.hex(), found=found.hex(),
        )  # fmt: skip
