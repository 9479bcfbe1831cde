"""Messages that are cut over all queue pairs of a connection, put together again.

Queue pair q of Q carries bytes [q P, (q+1) P) of each message of T bytes, with P = ceil(T / Q)
rounded up to 128, each piece with T as its immediate, and pieces without bytes, too (NCCL's IB
transport, `NCCL_IB_SPLIT_DATA_ON_QPS`). So every queue pair carries one write of every message, in
order, and a message has the same number on all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from everystep.tap import writes
from everystep.tap.positions import LAP, SLOTS
from everystep.tap.schedule import ceil, up
from everystep.tap.writes import FORMS, Write

_ALIGNMENT = 128
_MOST_BYTES = 1 << 24
_MAX_HELD = 256
_KEPT = 64
"""Messages whose pieces are remembered: some may come late."""


def is_piece(write: Write) -> bool:
    """Whether a write is part of a message: its immediate is the size of the whole."""
    if not write.rkey or not (write.complete and write.has_head):
        return False
    told = write.told_lengths
    return write.length not in told and any(write.length < n <= _MOST_BYTES for n in told)


class Cut:
    """The pieces of one connection: which queue pair carries which, and those that came."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        """q, by the number of the stream."""
        self._is_known = False
        self._order = 0
        """Which reading of an immediate is right."""
        self._mtu = self._looks_in = 0
        self._held: list[Write] = []
        self._messages: dict[int, _Message] = {}
        self._waiting: set[int] = set()
        self._newest = 0
        self._left_out = 0

    # ------------------------------------------------------------ which piece it is

    def know(self, write: Write) -> list[Write]:
        """The writes that are known to be which piece of a message now, in their order: none while
        it is not clear which queue pair carries what, and those that waited once it is."""
        if write.stream not in self._places:
            self._places[write.stream] = 0
            self._is_known, self._looks_in = False, 0  # it was taken for one of fewer
            self._messages.clear()
            self._waiting.clear()
        self._mtu = max(self._mtu, write.mtu)
        self._left_out += len(self._held) >= _MAX_HELD
        self._held = [*self._held[1 - _MAX_HELD :], write]
        if not (self._is_known or self._may_learn()):
            return []
        ready, self._held = self._held, []
        return [one for one in ready if self._note(one)]

    @property
    def left_out(self) -> int:
        """Pieces of which it is not known where they belong, or that contradict each other."""
        return self._left_out + len(self._held)

    def _may_learn(self) -> bool:
        """Whether it is known now; the more wait, the more seldom they are looked at."""
        self._looks_in -= 1
        if self._looks_in > 0:
            return False
        self._looks_in = len(self._held) // 8
        return self._learn()

    def _learn(self) -> bool:
        """Whether some message is there whole, by its addresses: it shows which queue pair carries
        what."""
        for order in (0, 1):
            found: dict[tuple[int, int], dict[int, Write]] = {}
            for write in self._held:
                told = write.told_lengths
                if told and write.rkey and write.complete and write.has_head:
                    found.setdefault((write.rkey, told[order]), {})[write.va] = write
            for (_, total), by_address in found.items():
                for address in by_address:
                    streams = self._carriers(total, address, by_address)
                    if streams:
                        self._places = {stream: q for q, stream in enumerate(streams)}
                        self._order, self._is_known = order, True
                        return True
        return False

    def _carriers(self, total: int, address: int, by_address: Mapping[int, Write]) -> list[int]:
        """The streams of the pieces of a message to this address, in order; nothing where not all
        of them are there."""
        count = len(self._places)
        streams = []
        for q in range(count):
            before, nbytes = _extent(total, q, count)
            piece = by_address.get(address + before)
            if piece is None or piece.length != nbytes:
                return []
            streams.append(piece.stream)
        return streams if len({*streams}) == count > 1 else []

    def _note(self, write: Write) -> bool:
        """Note of which message a write is which piece; whether it can be one."""
        if write.immediate is None:
            return write.has_head  # how long the message is the other pieces tell
        write.total = write.told_lengths[self._order] if write.immediate else 0
        before, nbytes = self._extent_of(write, write.total)
        if write.row[writes.IS_CHAIN] and write.length == write.total:
            write.shorten(nbytes)
        if not (write.has_head and write.length) and not write.rkey:
            write.restore(self._mtu, (nbytes,))
        write.va -= before
        is_right = write.has_head and write.length == nbytes and write.total <= _MOST_BYTES
        self._left_out += not is_right
        return is_right

    def _extent_of(self, write: Write, total: int) -> tuple[int, int]:
        return _extent(total, self._places[write.stream], len(self._places))

    # ------------------------------------------------------------ which message it is of

    def beside(self, write: Write, lawful: range) -> int | None:
        """The one of some positions at which another piece of the message stands, by the address;
        None if that is not sure."""
        if len(lawful) > LAP or write.total is None or not write.rkey:
            return None
        its = (write.va, write.rkey, write.total)
        found = [
            position
            for position in lawful
            if any((one.va, one.rkey, one.total) == its for one in self._messages.get(position, ()))
        ]
        return found[0] if len(found) == 1 else None

    def put(self, write: Write, position: int) -> list[Write]:
        """Put a piece to the others of its message; gives messages that are whole now, or to which
        nothing more will come."""
        if not self._is_known:
            self._left_out += 1
            return []
        message = self._messages.get(position)
        if message is None:
            message = self._messages[position] = _Message()
            self._waiting.add(position)
        write.data = write.data.copy()  # what it lies in will be overwritten
        message.append(write)
        self._newest = max(self._newest, position)
        over = {other for other in self._waiting if other <= self._newest - SLOTS}
        if position not in self._waiting or self._is_whole(message):  # late ones are added to it
            over.add(position)
        self._waiting -= over
        ready = [self._joined(other) for other in sorted(over)]
        while len(self._messages) > _KEPT and (oldest := min(self._messages)) != position:
            del self._messages[oldest]
            self._waiting.discard(oldest)
        return [whole for whole in ready if whole is not None]

    def rest(self) -> list[Write]:
        """Nothing more will come: the messages that are not whole."""
        ready = [self._joined(position) for position in sorted(self._waiting)]
        self._waiting.clear()
        return [whole for whole in ready if whole is not None]

    def frames(self) -> list[int]:
        """Of the pieces that wait for others."""
        return [write.frame for other in self._waiting for write in self._messages[other]]

    def _is_whole(self, message: _Message) -> bool:
        there = {write.stream for write in message if write.complete}
        return len(there) == len(self._places)

    def _joined(self, position: int) -> Write | None:
        """The message, as far as its pieces are there and agree."""
        message = self._messages[position]
        totals = {write.total for write in message if write.total is not None}
        framings = {(one.protocol, one.flag) for one in message if one.length and one.ranges}
        if len(totals) > 1 or len(framings) > 1:
            self._left_out += len(message)
        if len(totals) != 1 or len(framings) > 1:
            return None
        (total,) = totals
        protocol, flag = framings.pop() if framings else (None, 0)
        unit = 2 if protocol == "LL" else 1  # its flags are taken out already; of LL128, not yet
        data, ranges = np.zeros(total // unit, np.uint8), []
        for write in message:
            before, nbytes = self._extent_of(write, total)
            if write.length != nbytes:
                self._left_out += 1
                continue
            at = before + write.offset
            for start, stop in write.ranges:
                part = write.data[start // unit : stop // unit]
                data[(at + start) // unit : (at + start) // unit + len(part)] = part
                ranges.append((at + start, at + stop))
        whole = Write(_row(message, total, flag, _merged(ranges)), data, _merged(ranges))
        whole.protocol, whole.position = protocol, position
        whole.pieces = [*message]
        if protocol == "LL128":
            whole.unpack(FORMS[protocol])
        return whole


_Message = list[Write]
"""The pieces of a message that came."""


def _extent(total: int, q: int, count: int) -> tuple[int, int]:
    """Bytes of a message before piece q, and in it."""
    part = up(ceil(total, count), _ALIGNMENT)
    return q * part, min(max(total - q * part, 0), part)


def _merged(ranges: Iterable[tuple[int, int]]) -> writes.Ranges:
    found: writes.Ranges = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        elif start < stop:
            found.append((start, stop))
    return found


def _row(message: Sequence[Write], total: int, flag: int, ranges: writes.Ranges) -> tuple[Any, ...]:
    """MESSAGE: of its first piece, with what is true of the whole."""
    row = [*message[0].row]
    row[writes.VA] = max(write.va for write in message if write.total is not None)
    row[writes.LENGTH], row[writes.FLAG] = total, flag
    row[writes.FRAME] = min(write.frame for write in message)
    row[writes.LAST_FRAME] = max(write.last_frame for write in message)
    row[writes.COMPLETE] = ranges == ([(0, total)] if total else [])
    row[writes.HAS_HEAD] = True
    return tuple(row)
