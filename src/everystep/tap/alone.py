"""Whether what waits on the channels of a ring can be no other all-reduces than it is taken for.

Lengths alone are what tells one from another. Where a capture began in the middle, or messages were
left out, the base of a channel may lie inside an all-reduce, or before another one than the next.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from everystep.tap.collectives import plan_of
from everystep.tap.connections import Connection
from everystep.tap.schedule import Schedule
from everystep.tap.waiting import MAX_LOOKED_AT, Channels

Numbers = npt.NDArray[np.int64]


def stands_alone(waiting: Channels) -> bool:
    """Whether the next all-reduce can only begin at the bases of the channels, and no other."""
    expected, number = waiting.expected, waiting.number or 0
    if expected.count(number) is None:
        return _reads_alone(waiting, [])
    coming = expected.coming(number, waiting.protocol(), len(waiting.channels))
    others = _other_turns([expected.count(number + i) for i in range(len(coming))])
    if not all(coming):  # how they are cut is not known
        return _reads_alone(waiting, others)
    seen = [_seen(connection) for connection in waiting.channels]
    return not any(
        _may_be(waiting, seen, coming, i, schedule, ring_index, is_turn=i in others)
        for i, options in enumerate(coming)
        for schedule in options
        for ring_index in waiting.ring_indices()
    )


def _other_turns(counts: Sequence[int | None]) -> list[int]:
    """How many all-reduces further on the sizes that come again and again are in another order."""
    return [i for i in range(1, len(counts)) if [*counts[i:], *counts[:i]] != list(counts)]


def _may_be(
    waiting: Channels,
    seen: Sequence[Numbers],
    coming: list[list[Schedule]],
    i: int,
    schedule: Schedule,
    ring_index: int,
    *,
    is_turn: bool,
) -> bool:
    """Whether a channel may stand inside the all-reduce so many further on, or (`is_turn`) all of
    them before it."""
    before = []
    for channel in range(min(len(schedule.channels), len(seen))):  # another link may have more
        lengths = plan_of(schedule, channel, ring_index).lengths
        rest = _following(waiting, coming, i, schedule, channel, ring_index)
        foreseen = np.array([*lengths, *rest], np.int64)
        if any(_agree(foreseen[at:], seen[channel]) for at in range(1, len(lengths))):
            return True
        before.append(_agree(foreseen, seen[channel]))
    return is_turn and all(before)


def _reads_alone(waiting: Channels, others: Sequence[int]) -> bool:
    """The same where it is not known how buffers are cut: nothing else can be read from any place
    further on, nor one of the `others` from here.

    Never on several channels: an all-reduce may use some only, so that those that wait on one
    need not be of those that wait on another.
    """
    if len(waiting.channels) > 1:
        return False
    loop, number = waiting.loop_messages(), waiting.number or 0
    if any(len(waiting.run(c)) < 2 * loop for c in waiting.channels if c.pending):
        return False
    counts = {waiting.expected.count(number + i): number + i for i in (0, *others)}
    return not any(
        waiting.may_read(ahead, one)
        for one in counts.values()
        for ahead in range(one == number, loop)
    )


def _following(
    waiting: Channels,
    coming: list[list[Schedule]],
    i: int,
    schedule: Schedule,
    channel: int,
    ring_index: int,
) -> list[int]:
    """Lengths of the messages of a channel after an all-reduce, as far as they can be told."""
    connection = waiting.channels[channel]
    found: list[int] = []
    most = max(connection.pending, default=0) - (connection.base or 0)
    while len(found) <= min(most, MAX_LOOKED_AT):  # a position may be anything
        i = (i + 1) % len(coming)
        alike = [
            one
            for one in coming[i]
            if one.shape == schedule.shape and len(one.channels) == len(schedule.channels)
        ]
        if len(alike) != 1:
            break
        found += plan_of(alike[0], channel, ring_index).lengths
    return found


def _seen(connection: Connection) -> Numbers:
    """The lengths of the messages that wait, from the base on; -1 where one is not there."""
    base = connection.base or 0
    found = np.full(min(max(connection.pending, default=base) + 1 - base, MAX_LOOKED_AT), -1)
    for position, write in connection.pending.items():
        if 0 <= position - base < len(found):
            found[position - base] = write.length
    return found


def _agree(foreseen: Numbers, seen: Numbers) -> bool:
    """Whether none of the messages that were seen is of another length."""
    known = seen[: len(foreseen)]
    return not (foreseen[: len(known)] != known)[known >= 0].any()
