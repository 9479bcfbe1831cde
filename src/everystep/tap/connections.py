"""One direction of one channel between two ranks: where each of its messages stands.

The position of a message is its number on the connection. It is known by the message itself (the
flag of LL and LL128 is its step plus one), by the receiver's clear-to-send record of its address,
or by packet sequence numbers, so that loss never shifts it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from everystep.tap.collectives import Collective, Plan
from everystep.tap.pieces import TCP_STREAMS
from everystep.tap.positions import (
    BYTES,
    PACKETS,
    SIZE_BYTES,
    Course,
    Record,
    Rooms,
    Window,
    Windows,
    offsets_of,
)
from everystep.tap.schedule import Protocol
from everystep.tap.writes import Write

_SMALL_STEP = 64
"""A connection whose first message seen is behind this one was made before the capture."""

_MAX_HEADLESS = 64
_MAX_FLOATING = 256
_WINDOWS = 64
_KEPT_OF_A_GAP = 64
_LAP = 4
"""A ring writes to an address again after so many messages at the earliest."""

_NEAR = 8
"""Slots of a buffer: so many messages can be under way."""

_FLAGS = 1 << 32
_SPLIT_BYTES = 8192
"""NCCL_IB_AR_THRESHOLD: larger messages are split where adaptive routing is on."""


Walk = Callable[["Connection", Write, int, int], "int | None"]


class Connection:
    """A connection's messages by position: given to a collective, or waiting for one."""

    def __init__(self, sender: int, receiver: int, source_port: int) -> None:
        self.sender = sender
        """Index into the table of addresses."""
        self.receiver = receiver
        self.source_port = source_port
        self.data_qp: int | None = None
        self.cts_qp: int | None = None
        self.role: str | None = None
        self.protocols: dict[int, Protocol] = {}
        """By remote key: each protocol has its own buffer."""
        self.keys: set[int] = set()
        """All that were seen, the first few: those of empty messages, too."""
        self.courses: dict[int, Course] = {}
        """By the number of the stream: one per queue pair."""
        self.messages = 0
        self.cts = 0
        self.size: int | None = None
        """Room told by the last clear-to-send record."""
        self.is_tcp = False
        self.numbers = PACKETS
        self.mtu = 0
        self.is_split: bool | None = None
        """Whether large messages are split for adaptive routing; None: not seen yet."""
        self.is_cut = False
        """Whether its messages are cut over queue pairs: they are not read."""
        self.base: int | None = None
        """The first position that no collective has taken."""
        self.base_psn: int | None = None
        """Of its first packet, if it is known."""
        self.least_psn: int | None = None
        """Where it is not: the packet of the base is not before this one."""
        self.from_start = False
        """Whether position 0 is the first message of the connection."""
        self.pending: dict[int, Write] = {}
        self.headless: list[Write] = []
        self.windows = Windows(maxlen=_WINDOWS)
        self.lead: int | None = None
        """Step minus position, of the last message with a flag."""
        self.step: int | None = None
        """Of the last message with a flag."""
        self.has_only_flags = True
        self.rooms = Rooms()
        self.floating: list[Write] = []
        """Messages whose position is not known yet."""

    # ------------------------------------------------------------ where a message stands

    def open(self, stream: int) -> None:
        """One more queue pair, or the TCP connection."""
        if stream >= TCP_STREAMS:
            self.is_tcp, self.numbers = True, BYTES
        for course in self.courses.values():
            if course.last < 0:
                course.psn = None  # it was taken to be the only one
        self.courses[stream] = Course()
        if len(self.courses) > 1:  # each counts its own
            self.base_psn = self.least_psn = None

    def told(self, records: Sequence[Record], size: int) -> None:
        """The receiver has room for these messages: for so many bytes, as the last record says."""
        self.cts += len(records)
        self.size = size
        self.rooms.told(records)

    def locate(self, write: Write, walk: Walk) -> int | None:
        """The position of a message; None while it cannot be known.

        `walk(connection, write, position, packets)` tells the position of a message that begins so
        many packets after the one at `position`, by the messages that are expected in between.
        """
        course = self.courses[write.stream]
        self.mtu = max(self.mtu, write.mtu)
        if write.is_split or (write.immediate is not None and write.length > _SPLIT_BYTES):
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
        if write.flag:
            self.step = self._step(write.flag)
            self.lead = self.step - position
            self.from_start = self.from_start and not self._has_come_round()
        if ahead == 0 and not self.rooms.is_fixed:
            self.rooms.observe(write.va, write.rkey, write.frame, position)
        if write.span and (ahead is None or ahead >= 0):
            course.psn = (write.psn + write.span) % self.numbers.count
            course.last = position
        if self.base is None:
            self._begin(write, position)
        write.position = position
        return position

    def _position(self, write: Write, course: Course, ahead: int | None, walk: Walk) -> int | None:
        if ahead is None:
            return self._first_position(write)
        if ahead < 0:
            return self._older(write)
        # messages take their queue pairs in turn, and each takes at least one packet
        turn = len(self.courses)
        following = course.last + turn
        lawful = range(following, following + turn * ahead + 1, turn)
        if write.flag and self.has_only_flags and (self.lead is not None or ahead):
            position = self._step(write.flag) - (self.lead or 0)
            return position if position in lawful else None
        least = self.rooms.least(write.va, write.rkey, write.frame)
        if ahead == 0:
            return following if least is None or self._agrees(following, least) else None
        if turn == 1:
            found = walk(self, write, following, ahead)
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
        lap = _LAP if self.role == "ring" else 1
        if stop is not None and least + lap >= stop:
            return True
        most = self.rooms.most(write.frame)
        return most is not None and most < least + lap

    def _agrees(self, position: int, least: int) -> bool:
        """Whether a position is that of the last record of its address, or whole laps later."""
        return position == least or position >= least + (_LAP if self.role == "ring" else 1)

    def _is_early(self, write: Write) -> bool:
        """Whether the connection was made just before its first message was seen."""
        return write.psn <= self.numbers.small and self.step is None and len(self.courses) == 1

    def _has_come_round(self) -> bool:
        """Whether steps tell that small sequence numbers are not the first."""
        return self.has_only_flags and (self.lead or 0) > _SMALL_STEP

    def _step(self, flag: int) -> int:
        """The step that a flag means: flags are counted modulo 2^32."""
        if self.step is None:
            return (flag - 1) % _FLAGS
        return self.step + (flag - 1 - self.step + _FLAGS // 2) % _FLAGS - _FLAGS // 2

    def _older(self, write: Write) -> int | None:
        """The position of a message that was sent again, by the packets of known windows."""
        found = self.windows.place_of(write.psn, self.numbers)
        if found is not None and not found[2]:
            return found[0].first + found[1]
        turn = len(self.courses)
        for position, other in self.pending.items():
            if other.stream != write.stream:
                continue
            if other.span and (other.psn + other.span) % self.numbers.count == write.psn:
                return position + turn
            if write.span and (write.psn + write.span) % self.numbers.count == other.psn:
                return position - turn
        return None

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
            if not is_before or position == 0 or len(self.courses) > 1:
                break
            position -= 1
            psn = earlier.psn
            earlier.position = position
            self.pending[position] = earlier
        self.base, self.base_psn = (0, 0) if self.from_start else (position, psn)
        if len(self.courses) > 1:
            self.base_psn = None
        self.floating.clear()

    def retry(self, walk: Walk) -> list[tuple[Write, Window, int]]:
        """Look again for the positions of messages that had none; gives those of old windows."""
        waiting, self.floating = self.floating, []
        found = []
        for write in waiting:
            position = self.locate(write, walk)
            if position is None:
                continue
            window = self.window_of(position)
            if window is not None:
                found.append((write, window, position - window.first))
            elif position >= (self.base or 0):
                self.pending[position] = write
        return found

    def gap(self) -> tuple[int, int | None]:
        """Messages that are missing at the base, and at most how many packets they took."""
        base = self.base or 0
        after = min((p for p in self.pending if p > base), default=base)
        known = self.base_psn if self.base_psn is not None else self.least_psn
        if after == base or known is None:
            return after - base, None
        return after - base, self.numbers.after(self.pending[after].psn, known)

    def frames_at_base(self) -> list[int]:
        """Frames that show that the message at the base was, or will be, sent."""
        base = self.base or 0
        found = [w.frame for position, w in self.pending.items() if position - base < _NEAR]
        found += [write.frame for write in (*self.headless, *self.floating)]
        return found + self.rooms.frames_from(base)

    def owns(self, rkey: int) -> bool:
        """Whether a remote key is of one of its buffers."""
        return rkey in self.keys or self.rooms.owns(rkey)

    def add_headless(self, write: Write) -> None:
        """Keep a message whose beginning was lost until its place is known."""
        self.headless = [*self.headless[1 - _MAX_HEADLESS :], write]

    # ------------------------------------------------------------ collectives

    def window_of(self, position: int) -> Window | None:
        """The collective that a position was given to, if it is still remembered."""
        return self.windows.of(position)

    def spans(self, lengths: Sequence[int]) -> list[int] | None:
        """Sequence numbers from the first message to each, and to the end; None if unsure."""
        if self.is_tcp:
            return list(accumulate(lengths, lambda at, n: at + n + SIZE_BYTES, initial=0))
        if not self.mtu or len(self.courses) > 1:
            return None
        if self.is_split is None and max(lengths, default=0) > _SPLIT_BYTES:
            return None
        return offsets_of(lengths, self.mtu, _SPLIT_BYTES if self.is_split else None)

    def fits(self, plan: Plan, base: int, psn: int | None) -> tuple[int, bool] | None:
        """How many messages with data agree with a plan from `base` on; None where one does not.

        The second value tells whether the first message is there, or its packet is known and
        agrees: whether the plan can stand nowhere else.
        """
        agreeing = 0
        offsets = self.spans(plan.lengths)
        is_sure = base in self.pending or psn is not None
        for position, write in self.pending.items():
            place = position - base
            if not 0 <= place < len(plan.lengths):
                continue
            length = plan.lengths[place]
            if write.length != length or write.protocol not in (None, plan.protocol):
                return None
            if offsets is not None:
                start = (write.psn - offsets[place]) % self.numbers.count
                if psn is not None and start != psn:
                    return None
                least = start if self.least_psn is None else self.least_psn
                if psn is None and self.numbers.after(start, least) < 0:
                    return None
            agreeing += length > 0 or psn is not None
        return agreeing, is_sure

    def take(self, plan: Plan, collective: Collective) -> list[Write]:
        """Give the positions from the base on to a collective; returns its waiting messages."""
        base = self.base or 0
        window = Window(base, plan, collective)
        self.windows.append(window)
        waiting = [self.pending[p] for p in sorted(self.pending) if base <= p < window.stop]
        for write in waiting:
            del self.pending[write.position or 0]
        window.offsets = offsets = self.spans(plan.lengths)
        window.psn = self.base_psn
        if offsets is not None and window.psn is None and waiting:
            first = waiting[0]
            place = (first.position or 0) - base
            window.psn = (first.psn - offsets[place]) % self.numbers.count
        self.base = window.stop
        self.base_psn = self.least_psn = None
        last = waiting[-1] if waiting else None
        if len(self.courses) > 1:
            window.psn = None  # each queue pair counts its own
        elif last is not None and last.position == window.stop - 1 and last.span:
            self.base_psn = (last.psn + last.span) % self.numbers.count
        elif window.psn is not None and offsets is not None:
            self.base_psn = (window.psn + offsets[-1]) % self.numbers.count
        return waiting

    def skip(self) -> Write | None:
        """Leave out one position: of another collective, or lost."""
        base = self.base or 0
        write = self.pending.pop(base, None)
        self.base = base + 1
        if write is None:
            # a long gap at once, but for what may be the beginning of the next collective
            self.base = max(self.base, min(self.pending, default=0) - _KEPT_OF_A_GAP)
        if write is not None and write.span and len(self.courses) == 1:
            self.base_psn = (write.psn + write.span) % self.numbers.count
            self.least_psn = None
        else:
            known = self.base_psn if self.base_psn is not None else self.least_psn
            skipped = self.base - base
            self.least_psn = None if known is None else (known + skipped) % self.numbers.count
            self.base_psn = None
        return write

    def found_places(self) -> list[tuple[Write, Window, int]]:
        """Messages without a beginning whose place has become known, with it."""
        found = []
        kept = []
        for write in self.headless:
            known = self.windows.place_of(write.psn, self.numbers)
            if known is None:
                kept.append(write)
                continue
            window, place, behind = known
            write.offset = behind * (self.mtu or 1)
            found.append((write, window, place))
        self.headless = kept[-_MAX_HEADLESS:]
        return found
