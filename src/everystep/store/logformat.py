"""The log's format as data: names of segments, the head of a record, and its kinds.

docs/format.md says the same in words and tables; a test compares the two.
"""

from __future__ import annotations

import enum
import re
import struct
from typing import NamedTuple

import msgspec
import xxhash
from msgspec import Struct

from everystep.errors import Damaged, StoreError
from everystep.store.format import STEP_DIGITS, PartName, part_of
from everystep.types import Buffer, is_timeline

LOG_VERSION = 1
"""Of everything below; a reader refuses a higher one."""

LOGS = "logs"
"""The directory of all segments."""

MAGIC = b"stepslog"
"""What every record begins with."""

END_MAGIC = b"log ends"
"""The last eight bytes of a segment that was sealed."""

HEAD = struct.Struct("<8sHHIQIIQ16s16s16s")
"""Magic, version, kind, rank, step, session, zero, length of the payload; hashes of the padded
payload, of the record before (see `Head.digest`), and of all that stands before this hash."""

HEAD_BYTES = HEAD.size
_HASHED_BYTES = HEAD_BYTES - 16

END = struct.Struct("<Q8s")
"""The last bytes of a sealed segment: where its last record begins, and `END_MAGIC`."""

ALIGNMENT = 8
"""Every record begins at a multiple of this; zeros stand between."""

MAX_LAYOUT_BYTES = 256 << 20
"""A longer first record is refused before it is read."""

LAST_NUMBER = 999_999_999

NO_DIGEST = bytes(16)
"""Where there is no record before."""


class Kind(enum.IntEnum):
    """What the payload of a record is."""

    BEGIN = 1
    """The first of a segment: the length of a `SegmentRecord` as 8 bytes, the record as JSON, zeros
    up to a multiple of `ALIGNMENT`, and what the writer calls the layout. Its step is the base."""
    DELTA = 2
    """What a step has changed."""
    SEAL = 3
    """The last of a segment: the heads of all records before it, then `END`. Its step is theirs."""


class SegmentRecord(Struct, frozen=True, kw_only=True):
    """Whose segment it is: where it lies can be changed by whoever copies files."""

    run: str
    timeline: str
    session: int
    rank: int
    world_size: int
    base: int
    number: int


class Segment(Struct, frozen=True, order=True):
    """What the name of a segment says."""

    timeline: str
    session: int
    rank: int
    world_size: int
    number: int
    """From 1; in the order in which the rank began them in this session."""
    base: int
    """The step whose state its first delta follows, or an earlier one."""

    @property
    def stem(self) -> str:
        """What the names of all files of this rank in this session begin with."""
        return PartName(self.session, self.rank, self.world_size, "").stem

    @property
    def name(self) -> str:
        """Where it lies."""
        file = f"{self.stem}-{self.base:0{STEP_DIGITS}d}.{self.number}.log"
        return f"{log_directory(self.timeline)}/{file}"


class Head(NamedTuple):
    """The fixed part of a record."""

    kind: int
    rank: int
    step: int
    session: int
    nbytes: int
    """Of the payload, without the zeros behind it."""
    xxh3_128: bytes
    """Of the payload and the zeros behind it."""
    previous: bytes
    """The digest of the record before; `NO_DIGEST`: there is none."""
    digest: bytes
    """The hash of the head, which covers everything through the other two."""

    @property
    def padded_bytes(self) -> int:
        """The payload and the zeros behind it."""
        return padded(self.nbytes)

    @property
    def record_bytes(self) -> int:
        """All of the record."""
        return HEAD_BYTES + self.padded_bytes


_FILE = re.compile(rf"(.+)-([0-9]{{{STEP_DIGITS}}})\.([1-9][0-9]{{0,8}})\.log")


def log_directory(timeline: str) -> str:
    """The directory of a timeline's segments."""
    return f"{LOGS}/{timeline}"


def parse_log_path(name: str) -> Segment | None:
    """Read the path of a segment; None if it is no such path."""
    parts = name.split("/")
    if len(parts) != 3 or parts[0] != LOGS or not is_timeline(parts[1]):
        return None
    match = _FILE.fullmatch(parts[2])
    part = part_of(match.group(1)) if match else None
    if match is None or part is None or part.replica:
        return None
    base, number = int(match.group(2)), int(match.group(3))
    return Segment(parts[1], part.session, part.rank, part.world_size, number, base)


def record_of(segment: Segment, run: str) -> SegmentRecord:
    """What the first record of a segment says of it."""
    return SegmentRecord(
        run=run,
        timeline=segment.timeline,
        session=segment.session,
        rank=segment.rank,
        world_size=segment.world_size,
        base=segment.base,
        number=segment.number,
    )


def has_room(segment: Segment) -> bool:
    """Whether the names have room for these numbers."""
    numbered = msgspec.structs.replace(segment, number=segment.number or 1)
    return parse_log_path(numbered.name) == numbered


def padded(nbytes: int) -> int:
    """A length with the zeros that follow."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def raw_digest(data: Buffer) -> bytes:
    """xxh3-128 (seed 0), canonical big-endian form."""
    return xxhash.xxh3_128(data).digest()


def encode_head(
    kind: Kind, segment: Segment, step: int, nbytes: int, xxh3_128: bytes, previous: bytes
) -> tuple[bytes, bytes]:
    """The head of a record, and its digest."""
    fields = (MAGIC, LOG_VERSION, kind, segment.rank, step, segment.session, 0, nbytes)
    start = HEAD.pack(*fields, xxh3_128, previous, NO_DIGEST)[:_HASHED_BYTES]
    own = raw_digest(start)
    return start + own, own


def decode_head(data: Buffer, path: object, at: int) -> Head:
    """Check and read the head of a record.

    Raises:
        Damaged: there is none, or a byte differs from what was written.
        StoreError: it is of a newer version of the format.
    """
    if len(data) < HEAD_BYTES:
        what = "the file ends inside the head of a record"
        raise Damaged(what, path=path, at=at, expected=f"{HEAD_BYTES} bytes", found=len(data))
    data = data[:HEAD_BYTES]
    magic, version, kind, rank, step, session, zero, nbytes, payload, previous, own = HEAD.unpack(
        data
    )
    if magic != MAGIC:
        what = "no record begins here" if any(data) else "only zeros where a record was to begin"
        raise Damaged(what, path=path, at=at, expected=MAGIC.hex(), found=magic.hex())
    digest = raw_digest(data[:_HASHED_BYTES])
    if digest != own:
        what = "hash of the head of a record differs"
        raise Damaged(what, path=path, at=at, expected=own.hex(), found=digest.hex())
    if version > LOG_VERSION:  # not damage: a newer library can read it
        raise StoreError(
            "was written by a newer everystep",
            path=path,
            expected=f"version {LOG_VERSION} of the log",
            found=version,
            hint="upgrade everystep to read this run",
        )
    if version < 1 or zero or kind not in list(Kind):
        raise Damaged("is no head of a record", path=path, at=at)
    return Head(kind, rank, step, session, nbytes, payload, previous, digest)
