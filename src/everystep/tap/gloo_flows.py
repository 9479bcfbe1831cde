"""One all-reduce as one rank sends it: its messages are counted, and their places found.

A flow follows a plan (`Fit`) from the moment on at which only one is possible. Messages that came
before that, or behind a gap, wait in memory until their places are certain; `gloo` says when.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from msgspec import Struct

from everystep.tap import gloo_schedule
from everystep.tap.gloo_schedule import Fit, Sent
from everystep.tap.pieces import Bytes, Table
from everystep.tap.ring import SCATTERED, Buffer, Scattered


class Ring(Struct, frozen=True):
    """What all flows of a process group share."""

    ranks: int
    item_bytes: int
    sizes: tuple[int, ...] | None
    """In bytes: of every buffer that is looked for; None: of any size."""


class Room:
    """Bounds the memory of all that waits, and keeps a few buffers for the next."""

    def __init__(self, most_bytes: int) -> None:
        self._left_bytes = most_bytes
        self._free: list[Buffer] = []
        self._cooling: list[Buffer] = []  # what they hold has just been handed out

    def take(self, nbytes: int) -> bool:
        """Whether there is room for so much more."""
        if nbytes > self._left_bytes:
            return False
        self._left_bytes -= nbytes
        return True

    def cool(self) -> None:
        """What was handed out before is not needed any more."""
        self._free = [*self._free, *self._cooling][:2]
        self._cooling = []

    def buffer(self) -> Buffer:
        """An empty one."""
        if not self._free:
            return Buffer()
        buffer = self._free.pop()
        buffer.reset()
        return buffer

    def give_back(self, buffer: Buffer, nbytes: int) -> None:
        """What was taken, and the buffer that it was taken for."""
        self._left_bytes += nbytes
        self._cooling.append(buffer)


class _Waiting:
    """Messages in the order in which they came, one behind the other."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._used_bytes = 0
        self._messages: list[tuple[int, int, int, int]] = []  # index, offset, length, frame
        self.buffer = room.buffer()

    def add(self, index: int, length: int, frame: int) -> int | None:
        """Where this message's bytes are to be written; None: there is no room."""
        if not self._room.take(length):
            return None
        offset = self._used_bytes
        self._used_bytes += length
        self._messages.append((index, offset, length, frame))
        return offset

    def write(self, table: Table, data: Bytes, spill: Bytes) -> None:
        """What has come of them."""
        self.buffer.reserve(self._used_bytes)
        self.buffer.write(table, data, spill)

    def placed(self, place: Callable[[int], Sent | None], number: int, stream: int) -> Scattered:
        """All that is there and has a place, by the index of its message."""
        rows = []
        runs = self.buffer.present(self._used_bytes)
        at = 0
        for index, offset, length, frame in self._messages:
            sent = place(index)
            while at < len(runs) and runs[at][0] < offset + length:
                first, last = max(runs[at][0], offset), min(runs[at][1], offset + length)
                if sent is not None and sent.is_reduced and first < last:
                    to = sent.start + first - offset
                    rows.append((to, first, last - first, frame, number, stream, 0))
                if runs[at][1] > offset + length:
                    break  # it goes on in the next message
                at += 1
        return Scattered(np.array(rows, SCATTERED), self.buffer.data)

    def release(self) -> None:
        """Nothing waits any more; what was placed holds until `Room.cool`."""
        self._room.give_back(self.buffer, self._used_bytes)
        self._used_bytes = 0
        self._messages = []


class Place(Struct, frozen=True):
    """Where the bytes of a message go."""

    start: int
    waits: bool
    """Not to the reduced buffer yet, but to what waits."""


class Flow:
    """The messages of one tag in one stream."""

    def __init__(self, ring: Ring, room: Room, *, number: int, stream: int, is_certain: bool):
        self.number, self.stream = number, stream
        self.fit: Fit | None = None
        self.is_refused = False
        """Its messages contradict every plan, or the one that it has followed."""
        self.gaps = 0
        """Of the stream, when the last message came."""
        self._ring, self._room = ring, room
        self._is_certain = is_certain  # the first message seen is the first one sent
        self._lengths: list[int] = []
        self._splits: list[int] = []  # messages before each gap in which some may have been lost
        self._waiting: _Waiting | None = None
        self._is_found = False  # what waits has its places now
        self._is_last = False  # the last message seen is the last one sent

    @property
    def is_complete(self) -> bool:
        """Every message has come and has its place."""
        fit = self.fit
        return fit is not None and not self._splits and len(self._lengths) == len(fit.sent)

    def message(self, length: int, frame: int, senders: Sequence[int]) -> Place | None:
        """The next message; where it goes, or None if it is not wanted.

        Args:
            length: in bytes, of its data.
            frame: number of the frame with its preamble.
            senders: ranks that the stream may come from.
        """
        self._lengths.append(length)
        if length > gloo_schedule.largest(self._ring.item_bytes):
            self.refuse()
        if self.is_refused:
            return None
        if self.fit is None and not self._splits:
            self._choose(self._possible(senders))
        if self.fit is not None and not self._splits:
            return self._follow(self.fit, len(self._lengths) - 1)
        if self._waiting is None:
            self._waiting = _Waiting(self._room)
        start = self._waiting.add(len(self._lengths) - 1, length, frame)
        if start is None:
            self.refuse()
            return None
        return Place(start, True)

    def write(self, table: Table, data: Bytes, spill: Bytes) -> None:
        """Bytes of messages that wait."""
        if self._waiting is not None:
            self._waiting.write(table, data, spill)

    def gap(self) -> None:
        """An unknown number of messages may have been lost here."""
        if not self.is_complete and self._splits[-1:] != [len(self._lengths)]:
            self._splits.append(len(self._lengths))

    def over(self, senders: Sequence[int], *, is_last: bool) -> None:
        """No message will come; `is_last`: nor was one lost after the last that has come."""
        if self.is_refused or self.is_complete:
            return
        if self.fit is not None and not self._splits:
            if is_last:
                self.refuse()  # it ended early, although nothing was lost: it was another one
            return
        front, back = self._ends(is_last=is_last)
        if not front and not back:
            return
        is_whole = self._is_certain and not self._splits and is_last
        if self.fit is not None:
            fits: Iterable[Fit] = (self.fit,)
        elif self._ring.sizes is not None:
            fits = self._all(senders)
        else:
            fits = self._unsized(senders, is_over=True) if is_whole else ()
        found = gloo_schedule.ending(fits, front, back, is_whole=is_whole)
        if self.fit is not None and not found:
            self.refuse()
        self._choose(found)
        self._is_last = is_last
        self._is_found = self.fit is not None

    def take_placed(self) -> Scattered | None:
        """What waited and has found its places; once."""
        waiting = self._waiting
        if waiting is None or not self._is_found or self.fit is None:
            return None
        placed = waiting.placed(self._place, self.number, self.stream)
        self._is_found = False  # what waits from now on comes after a gap
        if not self._splits:  # else it may have come already, in the same batch
            self.release()
        return placed if len(placed.table) else None

    def refuse(self) -> None:
        """Its messages are not what they were taken for, or cannot be kept."""
        self.is_refused = True
        self.release()

    def release(self) -> None:
        """Give back the memory of what waits."""
        if self._waiting is not None:
            self._waiting.release()
            self._waiting = None

    # ---------------------------------------------------------------- plans

    def _choose(self, fits: Sequence[Fit]) -> None:
        if len(fits) == 1:
            self.fit = fits[0]
            self._is_found = self._waiting is not None

    def _follow(self, fit: Fit, index: int) -> Place | None:
        if index >= len(fit.sent) or fit.sent[index].length != self._lengths[index]:
            self.refuse()
            return None
        sent = fit.sent[index]
        return Place(sent.start, False) if sent.is_reduced else None

    def _possible(self, senders: Sequence[int]) -> Sequence[Fit]:
        """Plans that all messages so far fit, so that each has its place if there is only one."""
        ring, count = self._ring, len(self._lengths)
        if ring.sizes is None:
            return self._unsized(senders, is_over=False) if self._is_certain else ()
        fits = gloo_schedule.beginning(
            self._lengths,
            ranks=ring.ranks,
            item_bytes=ring.item_bytes,
            senders=senders,
            sizes=ring.sizes,
        )
        if self._is_certain or not any(len(fit.sent) == count for fit in fits):
            return fits if self._is_certain else ()
        longest = max(self._lengths)
        may_be_longer = any(
            len(fit.sent) > count and max(sent.length for sent in fit.sent) == longest
            for fit in self._all(senders)
        )
        return () if may_be_longer else fits

    def _all(self, senders: Sequence[int]) -> list[Fit]:
        ring = self._ring
        return [
            gloo_schedule.sends(size, ring.ranks, ring.item_bytes, rank)
            for size in ring.sizes or ()
            for rank in senders
        ]

    def _unsized(self, senders: Sequence[int], *, is_over: bool) -> Sequence[Fit]:
        return gloo_schedule.unsized(
            self._lengths,
            ranks=self._ring.ranks,
            item_bytes=self._ring.item_bytes,
            senders=senders,
            is_over=is_over,
        )

    def _ends(self, *, is_last: bool) -> tuple[list[int], list[int]]:
        """Lengths of the messages that can be counted from the first one, and from the last one."""
        splits = self._splits
        if self._is_certain and not splits:
            return self._lengths, []
        front = self._lengths[: splits[0]] if self._is_certain else []
        back = self._lengths[splits[-1] if splits else 0 :] if is_last else []
        return front, back

    def _place(self, index: int) -> Sent | None:
        """Of the message with this number among those that came."""
        if self.fit is None:
            return None
        sent, splits = self.fit.sent, self._splits
        if self._is_certain and (not splits or index < splits[0]):
            return sent[index]
        if not splits and len(self._lengths) == len(sent):
            return sent[index]
        if self._is_last and index >= (splits[-1] if splits else 0):
            return sent[len(sent) - len(self._lengths) + index]
        return None
