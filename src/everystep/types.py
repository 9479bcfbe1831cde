"""The nouns that everybody passes: step references, tensor descriptions, statistics."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from everystep.errors import UsageError

VERSION = "0.1.0"
"""Of this library."""

Json = Any
"""What `json.loads` returns: None, bool, int, float, str, list, dict with string keys."""

Buffer = memoryview | bytes | bytearray

MAIN = "main"
"""The first timeline of every run."""

_TIMELINE = re.compile(r"[A-Za-z0-9][A-Za-z0-9@.]{0,99}")

_STEP = re.compile(r"[0-9]{1,12}")

_ITEM_BYTES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "complex128": 16,
    "complex64": 8,
    "complex32": 4,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
    "bits16": 2,
    "bits8": 1,
    "bits1x8": 1,
    "bits2x4": 1,
    "bits4x2": 1,
} | {f"{sign}int{bits}": 1 for sign in ("", "u") for bits in range(1, 8)}
"""Bytes of one element by torch's name of the dtype. A literal table: what was stored must be
recognised with certainty."""


def item_bytes(dtype: str) -> int | None:
    """Bytes of one element of `dtype` (torch's name without `torch.`); None if it is not known."""
    return _ITEM_BYTES.get(dtype)


def element_count(shape: tuple[int, ...]) -> int:
    """The number of elements of a tensor of this shape (1 for a 0-dim tensor)."""
    count = 1
    for length in shape:
        count *= length
    return count


class StepRef(Struct, frozen=True, order=True):
    """One step of one timeline, written `main:900`."""

    timeline: str
    step: int

    def __str__(self) -> str:
        return f"{self.timeline}:{self.step}"

    @staticmethod
    def parse(text: str) -> StepRef:
        """Read `main:900`.

        Raises:
            UsageError: the text is not of this form.
        """
        timeline, colon, step = text.rpartition(":")
        if not colon or not _STEP.fullmatch(step) or not is_timeline(timeline):
            raise UsageError(f"{text!r} is not a step", hint="write 900 or main:900")
        return StepRef(timeline, int(step))


def is_timeline(name: str) -> bool:
    """Whether `name` can be a timeline: letters, digits, `@` and `.`, at most 100 characters."""
    return _TIMELINE.fullmatch(name) is not None and ".." not in name


class Shard(Struct, frozen=True, kw_only=True):
    """Which part of a global tensor one rank holds (a DTensor)."""

    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    """Where the local part begins in each dimension of the global tensor, in elements."""
    mesh_shape: tuple[int, ...]
    mesh_dim_names: tuple[str, ...] | None
    placements: tuple[str, ...]
    """One per mesh dimension: `S(0)` (sharded along dimension 0) or `R` (replicated)."""


class TensorSpec(Struct, frozen=True, kw_only=True):
    """One tensor of the training state as one rank holds it."""

    key: str
    """Its place in the state as a JSON pointer (RFC 6901), such as `/models/model/fc.weight`."""
    dtype: str
    """torch's name, without `torch.`."""
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None
    """In elements, where the tensor is dense but not in row-major order; None: row-major."""
    device: str = "cpu"
    """The device *type* it lived on."""
    shard: Shard | None = None
    replicated: bool = False
    """Every data-parallel rank holds the same bits, so each may store a share of it."""

    @property
    def elements(self) -> int:
        """How many elements this rank holds."""
        return element_count(self.shape)

    @property
    def nbytes(self) -> int:
        """How many bytes they take; 0 for a dtype that this version does not know."""
        return self.elements * (item_bytes(self.dtype) or 0)


class Piece(Struct, frozen=True):
    """A contiguous range of elements, in row-major order, of one tensor."""

    key: str
    start: int
    stop: int


class StepStats(Struct, frozen=True, kw_only=True):
    """What one step cost and what became of it. Some of it is known only later."""

    step: int
    stall_s: float
    """Seconds by which the library lengthened the training step; the sum of the next three."""
    snapshot_s: float = 0.0
    """Copying what was about to be overwritten."""
    staging_s: float = 0.0
    """Waiting for room in staging memory."""
    bookkeeping_s: float = 0.0
    """All else that the training thread was made to do."""
    copied_bytes: int = 0
    """Bytes brought to staging memory for this step."""
    written_bytes: int
    """Bytes this rank made durable."""
    staged: bool = False
    """Whether this rank's part of the step has left this process."""
    durable: bool
    """Whether this rank's part of the step is on the store."""
    staged_lag_steps: int = 0
    """When `step()` returned, the newest staged step was so many steps behind."""
    durable_lag_steps: int = 0
    """When `step()` returned, the newest durable step was so many steps behind."""
    error: str | None = None
    """What went wrong, where it is not staged or not durable."""
    deviation: str | None = None
    """Where the step was more than 20 % away from what the ones before let expect."""


def join_key(*parts: str) -> str:
    """A JSON pointer (RFC 6901) from unescaped parts."""
    return "".join("/" + part.replace("~", "~0").replace("/", "~1") for part in parts)


def split_key(key: str) -> list[str]:
    """The unescaped parts of a JSON pointer."""
    return [part.replace("~1", "/").replace("~0", "~") for part in key.split("/")[1:]]


def spoken(key: str) -> str:
    """A key as people say it in a message: `extras.schedule._foo`."""
    return ".".join(split_key(key))


def chunks_of(view: memoryview, chunk_bytes: int) -> Iterator[memoryview]:
    """Cut a flat byte view into views of at most `chunk_bytes`."""
    for start in range(0, len(view), chunk_bytes):
        yield view[start : start + chunk_bytes]
