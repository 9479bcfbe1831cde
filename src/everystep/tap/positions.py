"""Where a message stands on its connection, as sequence numbers and the receiver's records tell.

Neither is enough alone. A sequence number says where a message stands only while nothing before it
is lost. A record says which message was to be written to an address; addresses come round again, so
that where later records may be lost, the last one seen gives the least that the number can be.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence

from msgspec import Struct

from everystep.tap.collectives import Collective, Plan
from everystep.tap.pieces import PSN_COUNT

Record = tuple[tuple[int, int], int, int]
"""Of a receiver: address and key, number of the message (from 1), and the frame that it came in."""

SLOTS = 8
"""Of a buffer: so many messages can be under way, at most."""

LAP = 4
"""A ring writes to an address again after so many messages at the earliest."""

_MAX_ROOMS = 256
_LAPS = 32
_RECENT = 64
_ENOUGH = 4
"""Messages in a row that must give the same distance between their positions and the records'."""

_MORE_THAN_ENOUGH = 256


class Numbering(Struct, frozen=True):
    """How sequence numbers are counted."""

    count: int
    """Modulo this."""
    small: int
    """A connection whose first message seen is not behind this one was made within the capture."""

    def after(self, number: int, base: int) -> int:
        """How far a number lies behind another: signed."""
        return (number - base + self.count // 2) % self.count - self.count // 2

    def least(self, lengths: Sequence[int]) -> int:
        """How many numbers messages of these lengths take at least."""
        return len(lengths) if self is PACKETS else sum(lengths) + SIZE_BYTES * len(lengths)


PACKETS = Numbering(PSN_COUNT, 4096)
"""One for each packet of a message, at least one."""

BYTES = Numbering(1 << 32, 1 << 24)
"""TCP: one for each byte of a message, and `SIZE_BYTES` for the size of the next."""

SIZE_BYTES = 4


def offsets_of(lengths: Sequence[int], mtu: int, longest_whole: int | None) -> list[int]:
    """Sequence numbers from the first message to each, and to the end.

    `longest_whole`: a longer one is followed by an empty write; None: none is.
    """
    found, at = [0], 0
    for length in lengths:
        at += max(1, -(-length // mtu)) + (longest_whole is not None and length > longest_whole)
        found.append(at)
    return found


class Course:
    """The sequence numbers of one queue pair of a connection."""

    __slots__ = ("last", "psn", "recent")

    def __init__(self) -> None:
        self.psn: int | None = None
        """After the last message whose position is known."""
        self.last = -1
        """The position of that message."""
        self.recent: deque[tuple[int, int, int]] = deque(maxlen=_RECENT)
        """First packet, packet after the last, and position of messages of one of several."""


class Window:
    """The positions that one collective takes on one connection."""

    __slots__ = ("collective", "first", "lead", "offsets", "plan", "psn", "stop")

    def __init__(self, first: int, plan: Plan, collective: Collective) -> None:
        self.first = first
        self.stop = first + len(plan.lengths)
        self.plan = plan
        self.collective = collective
        self.lead: int | None = None
        """Step minus position, of all its messages, where they have flags."""
        self.psn: int | None = None
        """Of its first packet."""
        self.offsets: list[int] | None = None
        """Sequence numbers from there to each of its messages, and to its end."""


class Windows(deque[Window]):
    """The last ones of a connection, the newest at the end."""

    def of(self, position: int) -> Window | None:
        """The one that a position was given to, if it is still remembered."""
        for window in reversed(self):
            if window.first <= position < window.stop:
                return window
        return None

    def place_of(self, number: int, numbers: Numbering) -> tuple[Window, int, int] | None:
        """The message that a sequence number is of, in its window, and how far behind its beginning
        it lies; None where that is not known."""
        for window in reversed(self):
            if window.psn is None or window.offsets is None:
                continue
            ahead = numbers.after(number, window.psn)
            if 0 <= ahead < window.offsets[-1]:
                place = bisect_right(window.offsets, ahead) - 1
                return window, place, ahead - window.offsets[place]
        return None


class Rooms:
    """The receiver's records of one connection: which message may be written where."""

    __slots__ = ("_agreeing", "_by_place", "_shift", "_told", "is_fixed")

    def __init__(self) -> None:
        self._by_place: dict[tuple[int, int], deque[tuple[int, int]]] = {}
        self._told: deque[tuple[int, int]] = deque(maxlen=_MAX_ROOMS)
        self._shift = 0
        """Number in a record, from 0, minus position."""
        self._agreeing = 0
        self.is_fixed = False
        """Whether that is known for good."""

    def told(self, records: Iterable[Record]) -> None:
        """There is room for these messages, in this order."""
        by_place = self._by_place
        for place, index, frame in records:
            self._told.append((index, frame))
            told = by_place.pop(place, None) or deque(maxlen=_LAPS)
            told.append((index, frame))
            by_place[place] = told
            if len(by_place) > _MAX_ROOMS:
                del by_place[next(iter(by_place))]

    def fix(self) -> None:
        """Positions are counted as in the records."""
        self._shift, self.is_fixed = 0, True

    def observe(self, va: int, rkey: int, frame: int, position: int) -> None:
        """A message has a position that is known otherwise: learn how the two counts differ.

        A record that was lost makes the difference too small, never too large.
        """
        index = self._index(va, rkey, frame)
        if self.is_fixed or index is None:
            return
        shift = index - 1 - position
        if self._agreeing and shift == self._shift:
            self._agreeing += 1
            self.is_fixed = self._agreeing >= _MORE_THAN_ENOUGH
        elif not self._agreeing or shift > self._shift:
            self._shift, self._agreeing = shift, 1

    def least(self, va: int, rkey: int, frame: int, *, is_first: bool = False) -> int | None:
        """The least position that a message to this address, in this frame, can have.

        `is_first`: no position is known yet, so that they may be counted as in the records.
        """
        if not (is_first or self.is_fixed or self._agreeing >= _ENOUGH):
            return None
        index = self._index(va, rkey, frame)
        return None if index is None else index - 1 - self._shift

    def most(self, frame: int) -> int | None:
        """A position that no message in this frame has reached; None if nothing tells."""
        after = [index for index, told in self._told if told > frame]
        return min(after) - 1 - self._shift if after else None

    def _index(self, va: int, rkey: int, frame: int) -> int | None:
        for index, told in reversed(self._by_place.get((va, rkey), ())):
            if told < frame:
                return index
        return None

    def frames_from(self, position: int) -> list[int]:
        """Frames of the records of messages from a position on."""
        return [frame for index, frame in self._told if index - 1 - self._shift >= position]

    def owns(self, rkey: int) -> bool:
        """Whether a remote key is of one of these places."""
        return any(key == rkey for _, key in self._by_place)

    def cleared(self, va: int, rkey: int) -> bool:
        """Whether this address was told."""
        return (va, rkey) in self._by_place
