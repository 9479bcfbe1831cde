"""gloo's ring all-reduce as arithmetic: which part of the buffer each message of a rank carries.

With k ranks, N elements of e bytes, B = N e and P = e max(1, floor(2**20 / e)): the buffer is cut
into n = up(max(ceil(B / P), 2 k), k) segments of w = up(ceil(B / n), e) bytes, q = n / k per chunk;
empty ones are not sent. Rank r sends to r - 1: first, for i = 0 .. n - q - 1, its partial sum of
segment ((r + 1) q + i) mod n, then the reduced segment (r q + i) mod n. Source: gloo's ring
all-reduce, and packets of PyTorch 2.13 (k = 2, 3, 4).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from msgspec import Struct

_LARGEST_SEGMENT = 1 << 20


class Sent(Struct, frozen=True):
    """One data message: bytes [start, stop) of the buffer."""

    start: int
    stop: int
    is_reduced: bool

    @property
    def length(self) -> int:
        """In bytes."""
        return self.stop - self.start


class Fit(Struct, frozen=True):
    """An all-reduce of `nbytes` bytes, as one rank sends it."""

    nbytes: int
    rank: int
    sent: tuple[Sent, ...]


def segments(nbytes: int, ranks: int, item_bytes: int) -> tuple[int, int]:
    """How many segments there are (n), and the bytes of each but the last (w)."""
    count = max(-(-nbytes // largest(item_bytes)), 2 * ranks)
    count = -(-count // ranks) * ranks
    length = -(-nbytes // count)
    return count, -(-length // item_bytes) * item_bytes


@functools.lru_cache(maxsize=512)
def sends(nbytes: int, ranks: int, item_bytes: int, rank: int) -> Fit:
    """What `rank` sends, in order."""
    count, length = segments(nbytes, ranks, item_bytes)
    per_chunk = count // ranks
    sent = []
    for first, is_reduced in ((rank + 1) * per_chunk, False), (rank * per_chunk, True):
        for i in range(count - per_chunk):
            start = (first + i) % count * length
            stop = min(start + length, nbytes)
            if start < stop:
                sent.append(Sent(start, stop, is_reduced))
    return Fit(nbytes, rank, tuple(sent))


def largest(item_bytes: int) -> int:
    """Bytes of the largest segment (P)."""
    return item_bytes * max(1, _LARGEST_SEGMENT // item_bytes)


# ---------------------------------------------------------------- what may have been sent


def beginning(
    lengths: Sequence[int],
    *,
    ranks: int,
    item_bytes: int,
    senders: Iterable[int],
    sizes: Iterable[int],
) -> list[Fit]:
    """The all-reduces of one of these sizes, sent by one of these ranks, that begin with messages
    of these lengths."""
    fits = (sends(size, ranks, item_bytes, rank) for size in sizes for rank in senders)
    return [fit for fit in fits if _agree(lengths, fit.sent[: len(lengths)])]


def ending(
    fits: Iterable[Fit], front: Sequence[int], back: Sequence[int], *, is_whole: bool
) -> list[Fit]:
    """Those that begin with messages of lengths `front` and end with those of `back`; `is_whole`:
    with nothing between."""
    found = []
    for fit in fits:
        count = len(fit.sent)
        if len(front) + len(back) > count or (is_whole and len(front) + len(back) < count):
            continue
        if _agree(front, fit.sent[: len(front)]) and _agree(back, fit.sent[count - len(back) :]):
            found.append(fit)
    return found


def unsized(
    lengths: Sequence[int],
    *,
    ranks: int,
    item_bytes: int,
    senders: Sequence[int],
    is_over: bool,
) -> list[Fit]:
    """The all-reduces, of any size, that consist of messages of just these lengths.

    Where nothing is known to end the all-reduce (`is_over`), only if it cannot be the beginning of
    a longer one; else none.
    """
    longest, count = max(lengths), len(lengths)
    if longest > largest(item_bytes) or any(length % item_bytes for length in lengths):
        return []
    if not is_over and not _cannot_go_on(lengths, ranks, item_bytes, senders):
        return []
    sizes: set[int] = set()
    if count % (2 * (ranks - 1)) == 0:  # no empty segments
        segments_in_all = count // (2 * (ranks - 1)) * ranks
        if segments_in_all >= 2 * ranks:
            sizes.add((segments_in_all - 1) * longest + min(lengths))
    sizes |= set(_small(longest, ranks, item_bytes))
    fits = beginning(lengths, ranks=ranks, item_bytes=item_bytes, senders=senders, sizes=sizes)
    if not is_over and any(len(fit.sent) > count for fit in fits):
        return []
    return [fit for fit in fits if len(fit.sent) == count]


def _small(longest: int, ranks: int, item_bytes: int) -> Iterable[int]:
    """The sizes with two segments per chunk of this length, the last ones of which may be empty."""
    count, items = 2 * ranks, longest // item_bytes
    if items > count:
        return ()
    return (n * item_bytes for n in range((items - 1) * count + 1, items * count + 1))


def _cannot_go_on(
    lengths: Sequence[int], ranks: int, item_bytes: int, senders: Sequence[int]
) -> bool:
    """Whether the number of segments is known: by their length, or by the place of the short one.

    With q > 2 segments per chunk, B > (n - k) P, and so w > (1 - 1/q) P >= 2/3 P.
    """
    longest = max(lengths)
    if 3 * longest <= 2 * largest(item_bytes):
        return True
    short = next((i for i, length in enumerate(lengths) if length < longest), None)
    if short is None or len(senders) != 1:
        return False
    # the last segment is message (k - 1 - r) q - 1 of the partial ones, or, where rank k - 1 does
    # not send it among these, message q - 1 of the reduced ones
    before = ranks - 1 - senders[0] or ranks
    per_chunk, rest = divmod(short + 1, before)
    return not rest and len(lengths) == 2 * (ranks - 1) * per_chunk


def _agree(lengths: Sequence[int], sent: Sequence[Sent]) -> bool:
    return len(lengths) == len(sent) and all(
        length == message.length for length, message in zip(lengths, sent, strict=True)
    )
