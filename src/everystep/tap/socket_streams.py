"""One TCP connection of NCCL's: where each of its messages begins and ends.

From its sender on it carries a magic number (u64), the kind of socket (u32: 3) and the number of
the socket among those of one connection (u8), and then for each message its size (i32) and its
bytes. A hole inside a message costs its own bytes. Where a hole took a size, nothing tells where
the next message begins: a place is looked for from which sizes lead to sizes, several times. The
bytes before it are told as runs without a beginning, with their place in the stream.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterator

import numpy as np
from msgspec import Struct

from everystep.tap.pieces import TCP_STREAMS
from everystep.tap.positions import BYTES, SIZE_BYTES
from everystep.tap.writes import MAX_FLAG, Ranges

MAX_MESSAGE_BYTES = 4 << 20
"""Longer ones take NCCL_BUFFSIZE of 16 MiB or more."""

_KIND = 3
_HELLO = struct.Struct("<QIB")
_MAX_SOCKETS = 64
_SIZES = 4  # in a row, so that a place is taken for the beginning of a message
_FIRST_SIZES = 8  # the same, where no message of the stream was seen before
_FLAG_SIZES = 4  # so many does a message of LL count for
_FLAG_LINES = 4  # if it has so many, all with its flag
_MAX_EMPTY = 64  # messages in a row, where one is looked for
_MOST_EMPTY = 4096  # that NCCL sends
_MAX_PLACES = 1 << 16  # that are looked at
_LEAST_LOOK = 4096
_MOST_HUNTED = 2 * MAX_MESSAGE_BYTES

BEGINS, HUNTS, FOLLOWS = range(3)
"""What is done with the next bytes: read the greeting, look for a message, read a message."""


class Cut(Struct, frozen=True):
    """A message, or a run of bytes of one whose beginning is not known."""

    number: int
    """Of its first byte: see `BYTES`."""
    length: int
    data: bytes
    ranges: Ranges
    """Of the data, that are there."""
    frame: int
    last_frame: int
    has_head: bool
    is_whole: bool


class Stream:
    """What has come of one connection and is not yet handed out."""

    def __init__(self, row: np.void) -> None:
        """`row`: OPENED."""
        self.opened: int = int(row["stream"])
        self.number = TCP_STREAMS + self.opened
        self.source, self.destination = int(row["source"]), int(row["destination"])
        self.ports = int(row["source_port"]), int(row["destination_port"])
        self.from_start = bool(row["from_start"])
        self.state = BEGINS if self.from_start else HUNTS
        self.socket = 0
        """Its number among those of one connection."""
        self.is_foreign = False
        """Whether it is not NCCL's."""
        self.is_found = False
        """Whether messages were seen, or are known to follow."""
        self.found: list[Cut] = []
        """Not handed out yet."""
        self.is_told = False
        """Whether it was named."""
        self.seen_bytes = 0
        self.holes = 0
        """That took the size of a message, or what seemed to be none."""
        self.hunted_bytes = 0
        """Since a message was seen last."""
        # numbers begin with 0, or far from it where others may have been before
        self._zero = _HELLO.size + SIZE_BYTES if self.from_start else -BYTES.count // 2
        self._at = 0  # position of the first byte of the buffer
        self._buffer = bytearray()
        self._gaps: Ranges = []  # positions
        self._stops: list[int] = []  # positions at which what a frame brought ends
        self._frames: list[int] = []
        self._look_at = 0
        self._empty = 0  # messages in a row

    @property
    def found_bytes(self) -> int:
        """Of what is not handed out yet."""
        return sum(len(cut.data) for cut in self.found)

    def told(self) -> tuple[int, ...]:
        """Its row of STREAM, once: channels are numbered in the order of their connections."""
        self.is_told = True
        return self.number, self.source, self.destination, self.opened + 1, self.ports[0], 0, 0

    def add(self, data: memoryview, frame: int) -> None:
        """The next bytes."""
        self._buffer += data
        self.seen_bytes += len(data)
        self._stops.append(self._at + len(self._buffer))
        self._frames.append(frame)

    def lose(self, nbytes: int) -> Iterator[Cut]:
        """So many will not come."""
        start = self._at + len(self._buffer)
        self._gaps.append((start, start + nbytes))
        self._buffer += bytes(min(nbytes, MAX_MESSAGE_BYTES + SIZE_BYTES))
        if nbytes > MAX_MESSAGE_BYTES + SIZE_BYTES:
            yield from self.cut()  # whatever was under way ends within the hole
            self._drop(len(self._buffer))
            self._at, self._gaps, self.state = start + nbytes, [], HUNTS

    def cut(self, *, final: bool = False) -> Iterator[Cut]:
        """The messages that are there, as far as they will be; `final`: nothing more comes."""
        taken, size = 0, len(self._buffer)
        while not self.is_foreign:
            if self.state == BEGINS:
                if size - taken < _HELLO.size:
                    break
                taken += self._greet()
            elif self.state == HUNTS:
                found = self._hunt(taken, final=final)
                if found is None:
                    break
                if self.is_found:
                    yield from self._runs(taken, found)
                taken = found
                self.state, self.is_found, self.hunted_bytes = FOLLOWS, True, 0
            elif size - taken < SIZE_BYTES:
                break
            else:
                length = self._size(taken)
                if length is None:
                    taken = self._lost_track(taken)
                    continue
                stop = taken + SIZE_BYTES + length
                if stop > size and not final:
                    break
                self._empty = 0 if length else self._empty + 1
                self.is_foreign = self._empty > _MOST_EMPTY
                yield self._message(taken, length)
                taken = min(stop, size)
        taken = max(taken, self._too_much(taken))
        self._drop(taken)

    def _greet(self) -> int:
        """Read the beginning of the connection; returns its length."""
        if self._gap_in(0, _HELLO.size):
            self.state = HUNTS
            return 0
        _magic, kind, self.socket = _HELLO.unpack_from(self._buffer)
        self.is_foreign = kind != _KIND or self.socket > _MAX_SOCKETS
        self.state, self.is_found = FOLLOWS, not self.is_foreign
        return _HELLO.size

    def _size(self, at: int) -> int | None:
        """Of the message here; None: it is lost, or is none."""
        if self._gap_in(at, at + SIZE_BYTES):
            return None
        length = int.from_bytes(self._buffer[at : at + SIZE_BYTES], "little")
        return length if length <= MAX_MESSAGE_BYTES else None

    def _lost_track(self, at: int) -> int:
        """Where to look for the next message."""
        self.holes += 1
        self.state, self._look_at = HUNTS, 0
        gap = self._gap_in(at, at + SIZE_BYTES)
        return at + 1 if gap is None else min(gap[1] - self._at, len(self._buffer))

    # ------------------------------------------------------------ looking for a message

    def _hunt(self, start: int, *, final: bool) -> int | None:
        size = len(self._buffer)
        if size - start < SIZE_BYTES or (size - start < self._look_at and not final):
            return None
        view = np.frombuffer(self._buffer, np.uint8, offset=start)
        small = (view[3:] == 0) & (view[2:-1] <= MAX_MESSAGE_BYTES >> 16) & (view[:-3] % 2 == 0)
        small &= (view[:-3] | view[1:-2] | view[2:-1]) > 0
        places = np.flatnonzero(small)
        del view
        for place in places[:_MAX_PLACES].tolist():
            if self._leads_on(start + place):
                return start + int(place)
        self._look_at = max(_LEAST_LOOK, (size - start) * 3 // 2)
        return None

    def _leads_on(self, at: int) -> bool:
        """Whether sizes lead to sizes from here on."""
        sizes, empty, flag = 0, 0, 0
        need = _SIZES if self.is_found else _FIRST_SIZES
        while at + SIZE_BYTES <= len(self._buffer):
            length = self._size(at)
            if length is None or length % 2 or empty > _MAX_EMPTY:
                return False
            if length and self._buffer[at : at + 4] == self._buffer[at + 8 : at + 12]:
                return False  # a flag of LL
            if not length:
                empty += 1
            else:
                own = self._flag(at + SIZE_BYTES, length)
                if own and own <= flag:
                    return False
                flag, empty = own or flag, 0
                sizes += _FLAG_SIZES if own else 1
                if sizes >= need:
                    return True
            at += SIZE_BYTES + length
        return False

    def _flag(self, at: int, length: int) -> int:
        """Of the lines here, if they are of LL; else 0."""
        stop = at + 16 * _FLAG_LINES
        if length % 16 or length < stop - at or stop > len(self._buffer) or self._gap_in(at, stop):
            return 0
        flags = set(struct.unpack_from(f"<{4 * _FLAG_LINES}I", self._buffer, at)[1::2])
        flag: int = flags.pop()
        return flag if not flags and flag < MAX_FLAG else 0

    def _too_much(self, taken: int) -> int:
        """Where to look from, where too much waits for a message to be found."""
        waiting = len(self._buffer) - taken
        if self.state != HUNTS or waiting <= _MOST_HUNTED:
            return taken
        self._look_at = 0
        self.hunted_bytes += waiting // 2
        return taken + waiting // 2

    # ------------------------------------------------------------ handing out

    def _message(self, at: int, length: int) -> Cut:
        start = at + SIZE_BYTES
        stop = min(start + length, len(self._buffer))
        ranges = self._present(start, stop)
        frame, last_frame = self._seen(at, stop)
        return Cut(
            (self._at + start - self._zero) % BYTES.count,
            length,
            bytes(self._buffer[start:stop]).ljust(length, b"\0"),
            ranges,
            frame,
            last_frame,
            True,
            is_whole=ranges == ([(0, length)] if length else []),
        )

    def _runs(self, start: int, stop: int) -> Iterator[Cut]:
        """What is there of messages whose beginning is not known."""
        for a, b in self._present(start, stop):
            number = (self._at + start + a - self._zero) % BYTES.count
            data = bytes(self._buffer[start + a : start + b])
            seen = self._seen(start + a, start + b)
            yield Cut(number, b - a, data, [(0, b - a)], *seen, False, is_whole=False)

    def _present(self, start: int, stop: int) -> Ranges:
        """What is there of a part of the buffer, counted from its beginning."""
        found, at = [], start
        for a, b in self._gaps:
            a, b = a - self._at, b - self._at
            if b <= start or a >= stop:
                continue
            if a > at:
                found.append((at - start, a - start))
            at = max(at, b)
        if at < stop:
            found.append((at - start, stop - start))
        return found

    def _seen(self, start: int, stop: int) -> tuple[int, int]:
        """The first and the last frame that brought a part of the buffer."""
        first = bisect_right(self._stops, self._at + start)
        last = bisect_right(self._stops, self._at + stop - 1)
        frames = self._frames[first : last + 1] or self._frames[-1:] or [0]
        return frames[0], max(frames)

    def _gap_in(self, start: int, stop: int) -> tuple[int, int] | None:
        start, stop = self._at + start, self._at + stop
        after = bisect_right(self._gaps, (start, stop))
        for a, b in self._gaps[max(0, after - 1) : after + 1]:
            if a < stop and start < b:
                return a, b
        return None

    def _drop(self, nbytes: int) -> None:
        if not nbytes:
            return
        del self._buffer[:nbytes]
        self._at += nbytes
        self._gaps = [gap for gap in self._gaps if gap[1] > self._at]
        done = bisect_right(self._stops, self._at)
        del self._stops[:done], self._frames[:done]
