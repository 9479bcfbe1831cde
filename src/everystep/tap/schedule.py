"""NCCL's ring all-reduce as arithmetic: which elements each message of each rank holds.

Notation: k ranks, r a rank's ring index, c a chunk (0 to k-1), s a ring step, N elements of e
bytes, C channels, M the largest chunk in elements. In each loop over the buffer rank r sends 2(k-1)
messages to rank r+1 (twice as many with Simple): at ring step s chunk (r-1-s) mod k, a partial sum
up to s = k-2 and reduced from s = k-1 on. A ring that was given an "added step" sends once more,
at s = 2k-2, the reduced chunk r+1, which otherwise never leaves rank r.

How a buffer is cut into chunks changed with NCCL 2.20: before, loops of C*k*M elements, and (LL,
LL128) the channels interleaved inside a chunk; since, each channel owns a contiguous part.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

from msgspec import Struct

Protocol = Literal["LL", "LL128", "Simple"]

MAX_CHUNK_BYTES: dict[Protocol, int] = {"LL": 32768, "LL128": 576000, "Simple": 2097152}
"""The largest chunk with NCCL's default buffers."""

MAX_COUNT = 1 << 44
"""A buffer of more elements is taken for nonsense."""

_THREADS: dict[Protocol, tuple[int, ...]] = {"LL": (512,), "LL128": (640,), "Simple": (512, 256)}


class Sent(Struct, frozen=True):
    """One message of an all-reduce, as its schedule has it."""

    ring_step: int
    chunk: int
    start: int
    """First element of the buffer."""
    stop: int
    reduced: bool


class Shape(Struct, frozen=True):
    """What stays the same for all all-reduces of a communicator."""

    ranks: int
    element_bytes: int
    added_step: bool = False

    @property
    def ring_steps(self) -> int:
        """Sends of a rank in one loop, in ring steps."""
        return 2 * (self.ranks - 1) + self.added_step

    def chunk(self, ring_index: int, ring_step: int) -> int:
        """The chunk that a rank sends at a ring step."""
        return (ring_index - 1 - ring_step) % self.ranks


Extent = tuple[int, int]
"""Elements [start, stop)."""


class Schedule(Struct, frozen=True):
    """Where every chunk of one all-reduce lies."""

    shape: Shape
    protocol: Protocol
    count: int
    """N, elements of the buffer."""
    channels: tuple[tuple[tuple[Extent, ...], ...], ...]
    """Per channel and loop the k chunks; empty ones have start = stop."""

    @property
    def nbytes(self) -> int:
        return self.count * self.shape.element_bytes

    def missing_chunk(self, ring_index: int) -> list[Extent]:
        """The elements whose sum rank `ring_index` never sends on, joined where they touch."""
        chunk = (ring_index + 1) % self.shape.ranks
        extents = sorted(loop[chunk] for loops in self.channels for loop in loops)
        joined: list[Extent] = []
        for start, stop in extents:
            if start == stop:
                continue
            if joined and joined[-1][1] == start:
                start = joined.pop()[0]
            joined.append((start, stop))
        return joined


@lru_cache(maxsize=512)
def sends(schedule: Schedule, channel: int, ring_index: int) -> tuple[Sent, ...]:
    """The messages of one rank on one channel, in order."""
    shape = schedule.shape
    found = []
    for chunks in schedule.channels[channel]:
        for step in range(shape.ring_steps):
            chunk = shape.chunk(ring_index, step)
            start, stop = chunks[chunk]
            reduced = step >= shape.ranks - 1
            if schedule.protocol == "Simple":
                middle = start + min(
                    slice_elements(stop - start, shape.element_bytes), stop - start
                )
                found.append(Sent(step, chunk, start, middle, reduced))
                found.append(Sent(step, chunk, middle, stop, reduced))
            else:
                found.append(Sent(step, chunk, start, stop, reduced))
    return tuple(found)


def wire_bytes(protocol: Protocol, nbytes: int) -> int:
    """Length on the wire of a message of `nbytes` data bytes."""
    if protocol == "LL":
        return 16 * -(-nbytes // 8)
    if protocol == "LL128":
        return 2048 * -(-nbytes // 1920)
    return nbytes


def data_bytes(protocol: Protocol, length: int) -> int:
    """The most data bytes that a message of `length` bytes on the wire can hold."""
    if protocol == "LL":
        return length // 16 * 8
    if protocol == "LL128":
        return length // 2048 * 1920
    return length


def slice_elements(elements: int, element_bytes: int) -> int:
    """Simple: elements of the first of the two messages of a chunk, where it has that many."""
    return max(16 * ceil(elements, 32), 32768 // element_bytes)


# ---------------------------------------------------------------- from the size of the buffer


@lru_cache(maxsize=128)
def interleaved(
    shape: Shape, protocol: Protocol, count: int, channels: int, max_chunk_bytes: int
) -> tuple[Schedule, ...]:
    """What NCCL up to 2.19 can choose, with its default threads, for just so many channels.

    Empty where the buffer is too small for them. Source: docs/wire.md.
    """
    found = []
    for most in _THREADS[protocol]:
        threads = _threads(shape, protocol, count, channels, most)
        if threads is not None:
            found.append(_with_threads(shape, protocol, count, channels, max_chunk_bytes, threads))
    return tuple(found)


def _with_threads(
    shape: Shape, protocol: Protocol, count: int, channels: int, max_chunk_bytes: int, threads: int
) -> Schedule:
    e, k = shape.element_bytes, shape.ranks
    largest = max_chunk_bytes // e
    grain = threads * 8 // e
    if protocol == "LL128":
        grain = threads * (60 // e) // 2
    sizes = []
    at = 0
    while at < count:
        if protocol == "Simple":
            size = up(min(largest, ceil(count - at, channels * k)), grain)
        else:
            size = min(largest, ceil(count - at, channels * k * grain) * grain)
        sizes.append(size)
        at += channels * k * largest
    return walk_interleaved(shape, protocol, count, channels, largest, sizes)


def _threads(
    shape: Shape, protocol: Protocol, count: int, channels: int, threads: int
) -> int | None:
    """Threads per channel, or None where the buffer is too small for so many channels."""
    per_thread = {"LL": 8 * shape.ranks, "LL128": 8, "Simple": 64}[protocol]
    nbytes = count * shape.element_bytes
    if channels > 1:
        return threads if nbytes >= channels * threads * per_thread else None
    while nbytes < threads * per_thread and threads % 128 == 0:
        threads //= 2
    return max(threads, 96)


def walk_interleaved(
    shape: Shape,
    protocol: Protocol,
    count: int,
    channels: int,
    largest: int,
    sizes: Sequence[int],
) -> Schedule:
    """Up to 2.19: loops of C*k*M elements; `sizes` has the size of a chunk in each."""
    k = shape.ranks
    laid: list[list[tuple[Extent, ...]]] = [[] for _ in range(channels)]
    for loop, size in enumerate(sizes):
        at = loop * channels * k * largest
        for channel in range(channels):
            chunks = []
            for chunk in range(k):
                place = channel * k + chunk if protocol == "Simple" else chunk * channels + channel
                start = at + place * size
                chunks.append((start, start + max(0, min(size, count - start))))
            laid[channel].append(tuple(chunks))
    return Schedule(shape, protocol, count, tuple(map(tuple, laid)))


def ceil(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def up(a: int, b: int) -> int:
    """The next multiple of b that is not less than a."""
    return ceil(a, b) * b
