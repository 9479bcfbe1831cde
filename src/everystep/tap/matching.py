"""Which all-reduces of a process group were the buckets of one backward.

DDP starts the all-reduces of a backward in the order of its buckets. They are looked for as a run:
all-reduces of just these sizes, in this order. Between two of them only such may lie whose size is
known and is another one; where one was not seen, it may be the bucket itself, and nothing behind
it is taken in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

Run = tuple[int, ...]
"""Numbers of all-reduces, one for each bucket."""

SizeOf = Callable[[int], int | None]
"""Bytes of the all-reduce of this number; None: not known, or not an all-reduce."""


def runs(sizes: Sequence[int], low: int, high: int, size_of: SizeOf) -> Iterator[Run]:
    """Every run with numbers above `low` and up to `high` that these sizes (in bytes) may be; the
    last one first."""
    for first in range(high - len(sizes) + 1, low, -1):
        run = _from(first, sizes, high, size_of)
        if run is not None:
            yield run


def _from(first: int, sizes: Sequence[int], high: int, size_of: SizeOf) -> Run | None:
    numbers: list[int] = []
    number = first
    for size in sizes:
        while size_of(number) not in (None, size):
            if not numbers:
                return None
            number += 1
        if number > high:
            return None
        numbers.append(number)
        number += 1
    return tuple(numbers)
