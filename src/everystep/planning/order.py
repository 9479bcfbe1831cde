"""In which order chunks of the state share one link: the one that is written next goes first."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

from msgspec import Struct
from msgspec.structs import replace

from everystep.errors import UsageError


class Chunk(Struct, frozen=True, kw_only=True):
    """A part of the state, in the window in which it is stable."""

    nbytes: int
    stable_s: float
    """From when on it can leave."""
    written_s: float
    """When it is written next: what has not left by then must be snapshotted."""


class Slice(Struct, frozen=True):
    """A stretch of time in which one chunk leaves."""

    chunk: int
    """Its place in the input."""
    start_s: float
    stop_s: float


class Schedule(Struct, frozen=True):
    """Who has the link when, and what it leaves behind."""

    slices: tuple[Slice, ...]
    """In the order of time."""
    late_bytes: tuple[int, ...]
    """Of each chunk: what must be snapshotted."""


def by_deadline(chunks: list[Chunk], link_bytes_per_s: float) -> Schedule:
    """The schedule that leaves the fewest bytes to be snapshotted: at every moment, of the chunks
    that are stable, the one that is written next has the link; what is not out by then is cut.

    It is optimal where a chunk can be interrupted at any byte and what has left of it counts: byte
    by byte it is Glover's greedy matching in a convex bipartite graph (Naval Research Logistics
    Quarterly 14, 1967), bytes on one side, moments on the other. Cut into pieces that are moved
    whole, chunks that are all stable from the start lose less than one piece more per deadline.
    For chunks that must be moved whole or not at all, no order of deadlines is optimal.

    Args:
        chunks: in any order; of equal deadlines the first comes first.
        link_bytes_per_s: what the link carries.

    Raises:
        UsageError: a rate that is not positive and finite.
    """
    if not 0 < link_bytes_per_s < math.inf:
        raise UsageError(f"link_bytes_per_s={link_bytes_per_s!r} makes no sense")
    rate = Fraction(link_bytes_per_s)
    stable = [Fraction(chunk.stable_s) for chunk in chunks]
    written = [Fraction(chunk.written_s) for chunk in chunks]
    left = [Fraction(chunk.nbytes) for chunk in chunks]
    slices: list[Slice] = []
    moments = sorted({*stable, *written})
    for now, change in pairwise(moments):
        ready = [i for i in range(len(chunks)) if stable[i] <= now < written[i]]
        for i in sorted(ready, key=lambda i: written[i]):
            moved = min(left[i], rate * (change - now))
            if moved:
                then = now + moved / rate
                if slices and slices[-1].chunk == i and slices[-1].stop_s == float(now):
                    slices[-1] = replace(slices[-1], stop_s=float(then))
                else:
                    slices.append(Slice(i, float(now), float(then)))
                now, left[i] = then, left[i] - moved
    return Schedule(tuple(slices), tuple(map(math.ceil, left)))
