"""Where each message of a connection stands.

The position of a message is its number on the connection. It is known by the message itself (the
flag of LL and LL128 is its step plus one), by the receiver's clear-to-send record of its address,
or by packet sequence numbers, so that loss never shifts it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from everystep.tap.cutting import Cut
from everystep.tap.pieces import TCP_STREAMS
from everystep.tap.positions import BYTES, LAP, PACKETS, Course, Record, Rooms, Windows
from everystep.tap.writes import Write

_SMALL_STEP = 64
"""A connection whose first message seen is behind this one was made before the capture."""

_MAX_FLOATING = 256
_WINDOWS = 64
_FLAGS = 1 << 32

SPLIT_BYTES = 8192
"""NCCL_IB_AR_THRESHOLD: larger messages are split where adaptive routing is on."""

Walk = Callable[[Write, int, int], "int | None"]
"""Tells the position of a message that begins so many packets after the one at a position, by the
messages that are expected in between."""


class Located:
    """The queue pairs of a connection, and what is known of the positions of its messages."""

    def __init__(self) -> None:
        self.role: str | None = None
        self.courses: dict[int, Course] = {}
        """By the number of the stream: one per queue pair."""
        self.cts = 0
        self.size: int | None = None
        """Room told by the last clear-to-send record."""
        self.is_tcp = False
        self.numbers = PACKETS
        self.mtu = 0
        self.is_split: bool | None = None
        """Whether large messages are split for adaptive routing; None: not seen yet."""
        self.cut: Cut | None = None
        """Its messages are cut over its queue pairs."""
        self.is_refused = False
        """Whether it cannot be read."""
        self.base: int | None = None
        """The first position that no collective has taken."""
        self.base_psn: int | None = None
        """Of its first packet, if it is known."""
        self.least_psn: int | None = None
        """Where it is not: the packet of the base is not before this one."""
        self.from_start = False
        """Whether position 0 is the first message of the connection."""
        self.pending: dict[int, Write] = {}
        """Messages that no collective has taken, by position."""
        self.windows = Windows(maxlen=_WINDOWS)
        self.lead: int | None = None
        """Step minus position, of the last message with a flag."""
        self.step: int | None = None
        """Of the last message with a flag."""
        self.has_only_flags = True
        self.rooms = Rooms()
        self.floating: list[Write] = []
        """Messages whose position is not known yet."""

    def open(self, stream: int) -> None:
        """One more queue pair, or the TCP connection."""
        if stream >= TCP_STREAMS:
            self.is_tcp, self.numbers = True, BYTES
        for course in self.courses.values():
            if course.last < 0:
                course.psn = None  # it was taken to be the only one
        self.courses[stream] = Course()
        if self.is_spread:  # each counts its own
            self.base_psn = self.least_psn = None

    def be_cut(self) -> list[Write]:
        """Each message goes in pieces over all queue pairs: gives what had been taken for whole
        ones, to be looked at anew."""
        self.cut = Cut()
        self.base_psn = self.least_psn = None
        if self.windows:  # what was used was one piece, with all bytes of its message
            others = [*self.courses.values()][1:]
            self.is_refused = any(course.last >= 0 for course in others)
            return []
        waiting = sorted([*self.pending.values(), *self.floating], key=lambda write: write.frame)
        self.pending.clear()
        self.floating.clear()
        self.courses = {stream: Course() for stream in self.courses}
        self.base = self.lead = self.step = None
        self.from_start, self.has_only_flags = False, True
        return waiting

    @property
    def is_spread(self) -> bool:
        """Whether it has several queue pairs."""
        return len(self.courses) > 1 or self.cut is not None

    @property
    def _turn(self) -> int:
        """Messages from one of a queue pair to its next."""
        return len(self.courses) if self.cut is None else 1

    def told(self, records: Sequence[Record], size: int) -> None:
        """The receiver has room for these messages: for so many bytes, as the last record says."""
        self.cts += len(records)
        self.size = size
        self.rooms.told(records)

    def locate(self, write: Write, walk: Walk) -> int | None:
        """The position of a message; None while it cannot be known."""
        course = self.courses[write.stream]
        self.mtu = max(self.mtu, write.mtu)
        if write.is_split or (write.immediate is not None and write.length > SPLIT_BYTES):
            self.is_split = write.is_split
        if write.length and not write.flag:
            self.has_only_flags = False
        if course.psn is None and not write.flag and self._is_early(write):
            course.psn, course.last = 0, -1
            self.rooms.fix()
        ahead = None if course.psn is None else self.numbers.after(write.psn, course.psn)
        position = self._position(write, course, ahead, walk)
        if position is None:
            if write not in self.floating:
                self.floating = [*self.floating[1 - _MAX_FLOATING :], write]
            return None
        self._move_on(write, course, ahead, position)
        if self.base is None:
            self._begin(write, position)
        write.position = position
        return position

    def _move_on(self, write: Write, course: Course, ahead: int | None, position: int) -> None:
        """Note what the position of a message tells of those that come."""
        if write.flag:
            self.step = self._step(write.flag)
            self.lead = self.step - position
            self.from_start = self.from_start and not self._has_come_round()
        if ahead == 0 and not self.rooms.is_fixed:
            self.rooms.observe(write.va, write.rkey, write.frame, position)
        if not write.span:
            return
        stop = (write.psn + write.span) % self.numbers.count
        if ahead is None or ahead >= 0:
            course.psn, course.last = stop, position
        if self.is_spread:
            course.recent.append((write.psn, stop, position))

    def _position(self, write: Write, course: Course, ahead: int | None, walk: Walk) -> int | None:
        if ahead is None:
            return self._first_position(write)
        if ahead < 0:
            return self._older(write, course, -ahead)
        # messages take their queue pairs in turn, and each takes at least one packet
        turn = self._turn
        following = course.last + turn
        lawful = range(following, following + turn * ahead + 1, turn)
        if write.flag and self.has_only_flags and (self.lead is not None or ahead):
            position = self._step(write.flag) - (self.lead or 0)
            return position if position in lawful else None
        least = self.rooms.least(write.va, write.rkey, write.frame)
        if ahead == 0:
            return following if least is None or self._agrees(following, least) else None
        beside = None if self.cut is None or self.role != "ring" else self.cut.beside(write, lawful)
        if beside is not None:
            return beside
        if turn == 1:
            found = walk(write, following, ahead)
            if found is not None:
                return found if least is None or self._agrees(found, least) else None
        if least is None or least not in lawful:
            return None
        return least if self._is_last(write, least, lawful.stop) else None

    def _first_position(self, write: Write) -> int | None:
        """Of the first message of a queue pair, where it did not begin within the capture."""
        if write.flag and self.has_only_flags and self.lead is not None:
            return self._step(write.flag) - self.lead
        is_first = self.base is None
        least = self.rooms.least(write.va, write.rkey, write.frame, is_first=is_first)
        if least is not None and self._is_last(write, least, None):
            if is_first:
                self.rooms.fix()
            return least
        if is_first and write.flag and self.has_only_flags:
            return self._step(write.flag)
        is_alone = is_first and not self.cts and len(self.courses) == 1
        return 0 if is_alone and write.length else None

    def _is_last(self, write: Write, least: int, stop: int | None) -> bool:
        """Whether a message stands where the last record of its address says, though a later one
        may be lost: there must be no room for another lap."""
        lap = LAP if self.role == "ring" else 1
        if stop is not None and least + lap >= stop:
            return True
        most = self.rooms.most(write.frame)
        return most is not None and most < least + lap

    def _agrees(self, position: int, least: int) -> bool:
        """Whether a position is that of the last record of its address, or whole laps later."""
        return position == least or position >= least + (LAP if self.role == "ring" else 1)

    def _is_early(self, write: Write) -> bool:
        """Whether the connection was made just before its first message was seen."""
        if write.psn > self.numbers.small or self._is_behind_others(write.stream):
            return False
        if self.cut is not None:
            return self.step is None or self.from_start
        return self.step is None and len(self.courses) == 1

    def _is_behind_others(self, stream: int) -> bool:
        """Whether messages have come whose numbers are before the first, counted modulo."""
        return any(
            one.stream == stream and self.numbers.after(one.psn, 0) < 0 for one in self.floating
        )

    def _has_come_round(self) -> bool:
        """Whether steps tell that small sequence numbers are not the first."""
        return self.has_only_flags and (self.lead or 0) > _SMALL_STEP

    def _step(self, flag: int) -> int:
        """The step that a flag means: flags are counted modulo 2^32."""
        if self.step is None:
            return (flag - 1) % _FLAGS
        return self.step + (flag - 1 - self.step + _FLAGS // 2) % _FLAGS - _FLAGS // 2

    def _older(self, write: Write, course: Course, behind: int) -> int | None:
        """The position of a message that was sent again, or came late: so many packets before what
        comes next."""
        found = self.windows.place_of(write.psn, self.numbers)
        if found is not None and not found[2]:
            return found[0].first + found[1]
        if write.flag and self.is_spread and self.has_only_flags and self.lead is not None:
            position = self._step(write.flag) - self.lead
            lawful = range(course.last, course.last - self._turn * behind, -self._turn)
            return position if position in lawful else None
        stop = (write.psn + write.span) % self.numbers.count
        for first, after, position in course.recent if self.is_spread else self._waiting():
            if after == write.psn != first:
                return position + self._turn
            if first == stop != write.psn:
                return position - self._turn
        return None

    def _waiting(self) -> Iterator[tuple[int, int, int]]:
        for position, write in self.pending.items():
            yield write.psn, (write.psn + write.span) % self.numbers.count, position

    def take_next(self, stream: int) -> Write | None:
        """The message that had no position and begins where the last one of its stream ends."""
        psn = self.courses[stream].psn
        for write in self.floating:
            if write.stream == stream and write.psn == psn:
                self.floating.remove(write)
                return write
        return None

    def _begin(self, write: Write, position: int) -> None:
        is_small = position <= _SMALL_STEP and write.psn <= self.numbers.small
        self.from_start = is_small and not self._has_come_round()
        # empty messages before the first flag stand right before it
        psn = write.psn
        for earlier in reversed(self.floating):
            is_before = earlier.stream == write.stream and (
                (earlier.psn + earlier.span) % self.numbers.count == psn
            )
            if not is_before or position == 0 or self.is_spread:
                break
            position -= 1
            psn = earlier.psn
            earlier.position = position
            self.pending[position] = earlier
        self.base, self.base_psn = (0, 0) if self.from_start else (position, psn)
        if self.is_spread:
            self.base_psn = None
        if self.cut is None:
            self.floating.clear()
