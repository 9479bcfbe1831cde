"""What a communicator did: its collectives, and which of them are expected next."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from everystep.tap.schedule import (
    MAX_CHUNK_BYTES,
    Protocol,
    Schedule,
    Sent,
    Shape,
    interleaved,
    sends,
    wire_bytes,
)
from everystep.tap.writes import Write

Numbers = npt.NDArray[np.int64]

Kind = Literal["allreduce", "allgather", "broadcast", "p2p", "other"]

_MOST_COMING = 256

_REMEMBERED = 256
"""Collectives whose schedule and frames are kept, to match other links with them."""


class Collective:
    """One collective, on one link; the same all-reduce on another link has the same number."""

    __slots__ = ("first_frame", "kind", "last_frame", "number", "schedule", "what", "writes")

    def __init__(
        self,
        kind: Kind,
        number: int,
        schedule: Schedule | None = None,
        what: str | None = None,
        writes: list[Write] | None = None,
    ) -> None:
        self.kind = kind
        self.number = number
        """Of its kind, within the communicator."""
        self.schedule = schedule
        self.what = what
        self.writes = writes
        """Its messages, where a record is kept."""
        self.first_frame = 0
        self.last_frame = 0

    def ran(self, first: int, last: int) -> None:
        """Note the numbers of frames that are part of it."""
        self.first_frame = min(self.first_frame or first, first)
        self.last_frame = max(self.last_frame, last)

    def saw(self, write: Write) -> None:
        """Note that a message is part of it."""
        self.ran(write.frame, write.last_frame)
        if self.writes is not None:
            self.writes.append(write)


class Plan(Struct, frozen=True, dict=True):
    """The messages of one connection in one collective."""

    sends: tuple[Sent | None, ...]
    lengths: tuple[int, ...]
    """Bytes on the wire."""
    protocol: Protocol
    element_bytes: int

    @cached_property
    def wire(self) -> Numbers:
        """`lengths`, as an array."""
        return np.array(self.lengths, np.int64)

    @cached_property
    def reduced(self) -> tuple[Numbers, Numbers]:
        """Per message where its data lies in the reduced buffer, and how much: 0 where it is not of
        it. In bytes."""
        e = self.element_bytes
        rows = [
            (e * sent.start, e * (sent.stop - sent.start) if sent.reduced else 0)
            for sent in self.sends
            if sent is not None
        ]
        both = np.array(rows, np.int64).reshape(-1, 2)
        return both[:, 0], both[:, 1]


@lru_cache(maxsize=512)
def plan_of(schedule: Schedule, channel: int, ring_index: int) -> Plan:
    """What rank `ring_index` sends on a channel."""
    e = schedule.shape.element_bytes
    sent = sends(schedule, channel, ring_index)
    lengths = tuple(wire_bytes(schedule.protocol, (s.stop - s.start) * e) for s in sent)
    return Plan(sent, lengths, schedule.protocol, e)


class Expectations:
    """Which all-reduce has which size, as far as told, found on another link, or seen before."""

    def __init__(self, shapes: Sequence[Shape]) -> None:
        self.shapes = list(shapes)
        """Those that are still possible, the likeliest first."""
        self.told: list[tuple[int, tuple[int, ...]]] = []
        self.chunk_bytes: dict[Protocol, int] = dict(MAX_CHUNK_BYTES)
        self.contiguous: bool | None = None
        """Whether channels own parts of the buffer (NCCL 2.20 and later); None: not known."""
        self.is_fine = False
        """Whether the records are those of NCCL 2.24 or later: chunks are multiples of 16 bytes."""
        self.is_absolute = True
        """Whether all-reduces are numbered from the first that there was, as far as any are."""
        self._schedules: dict[int, Schedule] = {}
        self._frames: dict[int, tuple[int, int]] = {}
        self.rings: list[object] = []
        """Those that have sent, each in its turn."""

    def tell(self, first: int, counts: Sequence[int]) -> None:
        """From all-reduce `first` on the buffers have these numbers of elements, again and again.

        An empty `counts` ends what was told before: sizes are then found out.
        """
        self.told = [item for item in self.told if item[0] < first] + [(first, tuple(counts))]

    def count(self, number: int) -> int | None:
        """The elements of an all-reduce, if told."""
        for first, counts in reversed(self.told):
            if first <= number:
                return counts[(number - first) % len(counts)] if counts else None
        return None

    def schedules(self, number: int, protocol: Protocol, channels: int) -> list[Schedule]:
        """What all-reduce `number` may look like, the likeliest first."""
        known = self._schedules.get(number)
        if known is not None:
            return [known]
        found = []
        count = self.count(number)
        for schedule in self._likely(number):
            if schedule.protocol == protocol and (count is None or schedule.count == count):
                found.append(schedule)
        if count is not None and self.contiguous is False:
            most = self.chunk_bytes[protocol]
            for used in range(channels, 0, -1):
                for shape in self.shapes:
                    found += interleaved(shape, protocol, count, used, most)
        return list(dict.fromkeys(found))

    def coming(self, number: int, protocol: Protocol, channels: int) -> list[list[Schedule]]:
        """What all-reduce `number` and those after it may look like, until sizes come again."""
        counts = next((c for first, c in reversed(self.told) if first <= number), ())
        span = min(max(1, len(counts)), _MOST_COMING)
        return [self.schedules(number + i, protocol, channels) for i in range(span)]

    def _likely(self, number: int) -> list[Schedule]:
        """What followed when the all-reduce before was like the last one; then all seen."""
        recent = sorted(n for n in self._schedules if n < number)
        if not recent:
            return []
        last = self._schedules[recent[-1]]
        follow = [
            self._schedules[n + 1]
            for n in reversed(recent[:-1])
            if self._schedules[n] == last and n + 1 in self._schedules
        ]
        return list(dict.fromkeys([*follow[:1], *(self._schedules[n] for n in reversed(recent))]))

    @property
    def shape(self) -> Shape:
        """The likeliest."""
        return self.shapes[0]

    def found(self, number: int, schedule: Schedule) -> None:
        """A link has found what an all-reduce looks like."""
        self.shapes = [schedule.shape]
        self._schedules.setdefault(number, schedule)
        while len(self._schedules) > _REMEMBERED:
            self._frames.pop(next(iter(self._schedules)), None)
            del self._schedules[next(iter(self._schedules))]

    def schedule(self, number: int) -> Schedule | None:
        """The schedule of an all-reduce, once it was found."""
        return self._schedules.get(number)

    def seen(self, collective: Collective) -> None:
        """Note when an all-reduce ran, by the numbers of its frames."""
        number = collective.number
        first, last = self._frames.get(number, (collective.first_frame, 0))
        self._frames[number] = (
            min(first, collective.first_frame),
            max(last, collective.last_frame),
        )
        while len(self._frames) > _REMEMBERED:
            del self._frames[next(iter(self._frames))]

    def number_before(self, frame: int) -> int | None:
        """The last all-reduce that had begun when this frame was captured."""
        begun = [number for number, (first, _) in self._frames.items() if first <= frame]
        return max(begun, default=None)

    def number_at(self, frame: int) -> int | None:
        """The all-reduce that another link was busy with when this frame was captured, if one was.

        A message of ring step k-1 holds a sum over all ranks, and without it no rank has the whole
        buffer: so on every link it comes after the first message of the same all-reduce, and before
        the first of the next. For other messages that need not be so.
        """
        for number, (first, last) in reversed(self._frames.items()):
            if first <= frame <= last:
                return number
        return None

    def may_tell(self, number: int, frames: Sequence[int]) -> bool:
        """Whether messages in these frames, of the kind that tells (`number_at`), may be of an
        all-reduce that another link has shown."""
        first, _ = self._frames.get(number, (0, 0))
        later = [begun for other, (begun, _) in self._frames.items() if other > number]
        return all(first <= frame < min(later, default=frame + 1) for frame in frames)

    def newest(self) -> int:
        """The greatest number that an all-reduce was given; -1 before the first."""
        return max(self._schedules, default=-1)

    def begin_anew(self) -> int:
        """The number of an all-reduce before which there may have been any number of others."""
        self.is_absolute = False
        return self.newest() + 1

    def others(self, ring: object) -> bool:
        """Whether other links can tell numbers, too."""
        return any(other is not ring for other in self.rings)
