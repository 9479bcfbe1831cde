"""The format as data: names of files, the frame around JSON, and what each record holds.

docs/format.md says the same in words and tables; a test compares the two.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple, TypeVar

import msgspec
import xxhash
from msgspec import Struct

from everystep.errors import Damaged, StoreError, StoreFailed
from everystep.types import Buffer, Json, Piece, StepRef, TensorSpec, is_timeline

FORMAT = 2
"""Version of everything below; a reader refuses a higher one. 1: no file had a `step`."""

RUN_FILE = "run.json"
LOCK_FILE = "owner.lock"
STEP_DIGITS = 12

FRAME_PREFIX = b'{"xxh3_128":"'
FRAME_MIDDLE = b'",\n"content":'
FRAME_SUFFIX = b"}\n"
FRAME_BYTES = len(FRAME_PREFIX) + 32 + len(FRAME_MIDDLE)
"""Where the content begins; the hash covers all bytes from the comma on."""

MAX_RECORD_BYTES = 256 << 20
"""A larger JSON file is refused before it is read."""


class RunRecord(Struct, frozen=True, kw_only=True):
    """`run.json`: the identity of a run."""

    format: int = FORMAT
    run: str
    """32 hexadecimal digits, random."""
    created: str
    """UTC, for people; no decision looks at a clock."""


class TimelineRecord(Struct, frozen=True, kw_only=True):
    """`timelines/NAME.json`: a line of steps, and where it left its parent."""

    format: int = FORMAT
    name: str
    parent: StepRef | None
    """The step it was forked from; None for the first."""


class SessionRecord(Struct, frozen=True, kw_only=True):
    """`sessions/NUMBER.json`: one start of the training processes."""

    format: int = FORMAT
    run: str
    session: int
    timeline: str
    world_size: int
    restored: StepRef | None
    """The step it began from; retention keeps it while the session is the newest."""
    created: str
    host: str
    pid: int
    """Of rank 0."""
    versions: dict[str, str]


class StoredTensor(Struct, frozen=True, kw_only=True):
    """A tensor of the rank's state, with the hash of all its bytes in row-major order."""

    spec: TensorSpec
    xxh3_128: str
    """Empty where this rank had none of its bytes: the record of a rank that stores it has it."""


class StoredPiece(Struct, frozen=True, kw_only=True):
    """Elements of one tensor that lie in one of this rank's data files."""

    piece: Piece
    file: int
    """Index into `files`."""
    name: str
    """Its name in that safetensors file."""
    xxh3_128: str


class DataFile(Struct, frozen=True, kw_only=True):
    """A safetensors file of this rank, written for this step or an earlier one."""

    name: str
    """Without directories."""
    nbytes: int
    header_bytes: int
    """Length of everything before the first tensor: the length field and the JSON."""
    header_xxh3_128: str
    step: StepRef | None = None
    """The earlier step in whose directory it lies; None: beside the record."""


class RankRecord(Struct, frozen=True, kw_only=True):
    """The sidecar of one rank's part of a step; its presence is the commit marker."""

    format: int = FORMAT
    run: str
    timeline: str
    step: int
    session: int
    rank: int
    world_size: int
    created: str
    metrics: dict[str, Json]
    files: list[DataFile]
    tensors: list[StoredTensor]
    """Everything this rank needs, whoever stores it."""
    pieces: list[StoredPiece]
    """What this rank stores."""
    replica_xxh3_128: str | None
    """Over all replicated tensors, or, where a replica was written, over their fingerprints since
    its beginning; equal on all ranks, or the replicas differ."""
    tree: Json
    """All that is not a tensor: aliases, groups, hyperparameters, extras, RNG."""
    versions: dict[str, str]


_Record = TypeVar("_Record", RunRecord, TimelineRecord, SessionRecord, RankRecord)


def digest(data: bytes | bytearray | memoryview) -> str:
    """xxh3-128 (seed 0, canonical big-endian form) as 32 hexadecimal digits."""
    return xxhash.xxh3_128(data).hexdigest()


def encode_record(record: Struct) -> bytes:
    """A record in its frame: JSON whose first entry is the hash of the rest.

    Raises:
        StoreFailed: it is longer than a reader would accept.
    """
    rest = FRAME_MIDDLE[2:] + msgspec.json.encode(record) + FRAME_SUFFIX
    data = FRAME_PREFIX + digest(rest).encode() + FRAME_MIDDLE[:2] + rest
    if len(data) > MAX_RECORD_BYTES:
        limit = f"<= {MAX_RECORD_BYTES:,} bytes"
        raise StoreFailed("the record is too long", expected=limit, found=f"{len(data):,}")
    return data


def check_frame_start(data: Buffer, path: object) -> None:
    """Check as much of a frame as stands before its content.

    Raises:
        Damaged: this is not the beginning of a record.
    """
    start = bytes(data[:FRAME_BYTES])
    if not start.startswith(FRAME_PREFIX) or start[-len(FRAME_MIDDLE) :] != FRAME_MIDDLE:
        raise Damaged("is cut or is not one of our records", path=path, at=0)


def decode_record(data: Buffer, kind: type[_Record], path: object) -> _Record:
    """Check the frame and read the record.

    Raises:
        Damaged: a byte differs from what was written, or the record is not well formed.
        StoreError: it is of a newer version of the format.
    """
    view = memoryview(data)
    check_frame_start(view, path)
    hash_end = len(FRAME_PREFIX) + 32
    if len(view) < FRAME_BYTES + len(FRAME_SUFFIX) or view[-len(FRAME_SUFFIX) :] != FRAME_SUFFIX:
        raise Damaged("is cut or is not one of our records", path=path, at=len(view))
    if view[len(FRAME_PREFIX) : hash_end] != digest(view[hash_end + 2 :]).encode():
        raise Damaged(f"hash differs somewhere in its {len(view):,} bytes", path=path, at=0)
    content = view[FRAME_BYTES : -len(FRAME_SUFFIX)]
    try:
        _check_version(content, path)
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise Damaged(f"is not a {kind.__name__}: {error}", path=path, at=FRAME_BYTES) from error


class _Version(Struct):
    format: int


def _check_version(content: Buffer, path: object) -> None:
    version = msgspec.json.decode(content, type=_Version).format
    if version < 1:
        raise Damaged("format", path=path, expected="1 or higher", found=version)
    if version > FORMAT:  # not damage: nothing may be set aside or written over because of it
        raise StoreError(
            "was written by a newer everystep",
            path=path,
            expected=f"format {FORMAT} or lower",
            found=version,
            hint="upgrade everystep to read this run",
        )


def readable(record: RankRecord) -> dict[str, Any]:
    """A record as plain dicts, for people and scripts."""
    plain: dict[str, Any] = msgspec.to_builtins(record)
    return plain


# Names of files: the path is the index, so that listing needs no reading.


UNKNOWN = "0" * 32
"""A replica hash that says nothing: it agrees with any other."""


class PartName(NamedTuple):
    """What the name of a rank's record says."""

    session: int
    rank: int
    world_size: int
    replica: str
    """The first 16 digits of the replica hash; empty where nothing is replicated."""

    @property
    def stem(self) -> str:
        """What all files of this part begin with."""
        return f"s{self.session:06d}-r{self.rank:05d}of{self.world_size:05d}"

    @property
    def marker(self) -> str:
        """The name of the record."""
        return self.stem + (f"-{self.replica}" if self.replica else "") + ".json"


# One spelling for each number, so that a name says nothing that its owner would not write.
_SESSION = r"(?:[0-9]{6}|[1-9][0-9]{6,8})"
_MARKER = re.compile(rf"s({_SESSION})-r([0-9]{{5}})of([0-9]{{5}})(?:-([0-9a-f]{{16}}))?\.json")
_STEM = re.compile(rf"(s{_SESSION}-r[0-9]{{5}}of[0-9]{{5}})[.-][A-Za-z0-9_%@=+.-]{{1,200}}")
_STEP_DIRECTORY = re.compile(rf"[0-9]{{{STEP_DIGITS}}}")
_SESSION_FILE = re.compile(rf"sessions/({_SESSION})\.json")

LAST_SESSION = 999_999_999
LAST_STEP = 10**STEP_DIGITS - 1
MOST_RANKS = 99_999
"""What the names have room for."""


def parse_marker(name: str) -> PartName | None:
    """Read the name of a rank's record; None if it is no such name."""
    match = _MARKER.fullmatch(name)
    if match is None:
        return None
    session, rank, world_size, replica = match.groups()
    part = PartName(int(session), int(rank), int(world_size), replica or "")
    return part if part.rank < part.world_size else None


def owner_of(name: str) -> str | None:
    """The stem of the part that a data file or record belongs to; None for any other name."""
    match = _STEM.fullmatch(name)
    return match.group(1) if match else None


def part_of(stem: str) -> PartName | None:
    """What the stem of a part says; None if it is none."""
    return parse_marker(stem + ".json")


def step_directory(ref: StepRef) -> str:
    """The directory of a step."""
    return f"steps/{ref.timeline}/{ref.step:0{STEP_DIGITS}d}"


def data_path(ref: StepRef, file: DataFile) -> str:
    """Where a data file lies that the record of a step names."""
    return f"{step_directory(file.step or ref)}/{file.name}"


def parse_step_path(name: str) -> tuple[StepRef, str] | None:
    """The step and file name of a path below `steps/`; None if it is no such path."""
    parts = name.split("/")
    if len(parts) != 4 or parts[0] != "steps" or not is_timeline(parts[1]):
        return None
    if not _STEP_DIRECTORY.fullmatch(parts[2]):
        return None
    return StepRef(parts[1], int(parts[2])), parts[3]


def timeline_file(name: str) -> str:
    """The record of a timeline."""
    return f"timelines/{name}.json"


def session_file(number: int) -> str:
    """The record of a session."""
    return f"sessions/{number:06d}.json"


def parse_timeline_file(name: str) -> str | None:
    """The timeline whose record has this path; None if it is no such path."""
    if not name.startswith("timelines/") or not name.endswith(".json"):
        return None
    timeline = name[len("timelines/") : -len(".json")]
    return timeline if is_timeline(timeline) else None


def timeline_from_name(name: str) -> TimelineRecord:
    """What a timeline's name says of it, where its record is lost: `main@900` left `main` there."""
    parent, at, step = name.rpartition("@")
    digits = step.split(".")[0]
    forked = bool(at) and digits.isascii() and digits.isdigit() and is_timeline(parent)
    return TimelineRecord(name=name, parent=StepRef(parent, int(digits)) if forked else None)


def parse_session_file(name: str) -> int | None:
    """The session whose record has this path; None if it is no such path."""
    match = _SESSION_FILE.fullmatch(name)
    return int(match.group(1)) if match else None


def is_identity(name: str) -> bool:
    """Whether a file of this path is one of those that make a directory a run."""
    parsed = (parse_timeline_file(name), parse_session_file(name))
    return name == RUN_FILE or any(one is not None for one in parsed)


def file_label(section: str) -> str:
    """A section's name as part of a file name: bytes that are not plain letters or digits become
    %XX; a label of more than 100 characters is cut, and ends in `%` and 16 digits of a hash."""
    label = "".join(
        chr(byte) if chr(byte).isalnum() and byte < 128 else f"%{byte:02X}"
        for byte in section.encode()
    )
    if len(label) <= _MAX_LABEL:
        return label
    return f"{label[: _MAX_LABEL - 17]}%{digest(section.encode())[:16]}"


_MAX_LABEL = 100
