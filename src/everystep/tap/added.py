"""Whether a ring has the added step, where it was not told.

An added step looks like the first message of the next all-reduce. It shows in that it comes again,
or in what it holds: the sum of a chunk that the neighbour's link carries, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from everystep.tap.collectives import Plan, plan_of
from everystep.tap.pieces import Bytes
from everystep.tap.schedule import Schedule
from everystep.tap.waiting import Channels

_ENOUGH = 3
"""All-reduces after which an added step would have shown itself, if chunks are not all alike."""


def has_added_step(
    ring: Channels,
    others: Iterable[object],
    plain: Plan | None,
    added: tuple[Schedule, int, Plan],
) -> bool | None:
    """Whether what waits has an added step, where both readings fit; None: not to be known.

    Args:
        ring: that waits.
        others: the rings of other links, which may wait, too.
        plain: of the first channel, without the added step; None: it does not fit.
        added: the all-reduce with it, the ring index of the sender, and the first channel's plan.
    """
    schedule, ring_index, plan = added
    run, size = ring.run(ring.channels[0]), len(plan.lengths)
    if run[:size] != list(plan.lengths):
        return None if plain is None or _goes_on(run, plan.lengths) else False
    if not _goes_on(run, plan.lengths):
        return False
    if ring.is_final and ring.is_aligned and _is_echo(ring, others, schedule, ring_index):
        return True
    if plain is not None and _goes_on(run, plain.lengths):
        return False if ring.is_final or len(run) >= _ENOUGH * size else None
    return True if len(run) >= 2 * size or plain is None else None


def _goes_on(run: Sequence[int | None], lengths: Sequence[int]) -> bool:
    """Whether these are the lengths, again and again."""
    return all(length == lengths[i % len(lengths)] for i, length in enumerate(run))


def _is_echo(ring: Channels, others: Iterable[object], schedule: Schedule, ring_index: int) -> bool:
    """Whether the messages of the added step hold what others on other links do, all that can be
    compared."""
    last = schedule.shape.ring_steps - 1
    plain = set(range(schedule.shape.ranks - 1, last))
    own = list(_held(ring, schedule, ring_index, {last}))
    found = [
        np.array_equal(mine[max(a, c) - a : min(b, d) - a], theirs[max(a, c) - c : min(b, d) - c])
        for other in others
        if isinstance(other, Channels) and other is not ring and other.rank_index is not None
        for c, d, theirs in _held(other, schedule, other.rank_index, plain)
        for a, b, mine in own
        if max(a, c) < min(b, d)
    ]
    return bool(found) and all(found)


def _held(
    ring: Channels, schedule: Schedule, ring_index: int, steps: set[int]
) -> Iterator[tuple[int, int, Bytes]]:
    """What waits of the messages of these ring steps: bytes [start, stop) of the buffer, and what
    they are."""
    for channel, connection in enumerate(ring.channels[: len(schedule.channels)]):
        plan = plan_of(schedule, channel, ring_index)
        for position, sent in enumerate(plan.sends, connection.base or 0):
            write = connection.pending.get(position)
            if write is None or sent is None or sent.ring_step not in steps:
                continue
            e, shift = plan.element_bytes, write.data_offset()
            for start, stop in write.data_ranges((sent.stop - sent.start) * e):
                data = write.data[start - shift : stop - shift]
                yield sent.start * e + start, sent.start * e + stop, data
