"""One NCCL data message, as far as it was seen, and what its bytes say about its protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from everystep.tap import roce
from everystep.tap.pieces import LL, LL128, MESSAGE, PSN_COUNT, RAW, Bytes, Messages
from everystep.tap.schedule import Protocol

if TYPE_CHECKING:
    from everystep.tap.collectives import Collective
    from everystep.tap.schedule import Sent

FORMS: dict[Protocol, int] = {"LL": LL, "LL128": LL128, "Simple": RAW}

MAX_FLAG = 1 << 28
"""A larger number in the place of a flag is a gradient: a run of so many messages on one connection
would last for days, and floats of so small a pattern are below 1e-29."""

_NAMES = MESSAGE.names or ()
VA, LENGTH, FLAG, FRAME, LAST_FRAME, IMMEDIATE_FRAME, AT, NBYTES = map(
    _NAMES.index,
    ("va", "length", "flag", "frame", "last_frame", "immediate_frame", "at", "nbytes"),
)
RANGE_AT, RANGES, STREAM, PSN, PACKETS, SPAN, MTU, RKEY, IMMEDIATE = map(
    _NAMES.index,
    ("range_at", "ranges", "stream", "psn", "packets", "span", "mtu", "rkey", "immediate"),
)
OPERATION, FORM, HAS_IMMEDIATE, COMPLETE, HAS_HEAD, IS_SPLIT, IS_CHAIN = map(
    _NAMES.index,
    ("operation", "form", "has_immediate", "complete", "has_head", "is_split", "is_chain"),
)
"""Columns of a row of MESSAGE."""

_MAX_BYTES = 1 << 24
_LL128_LINE = 128
_UNSPLIT_BYTES = 512
"""A longer write without an immediate waits for one (see pieces)."""

Ranges = list[tuple[int, int]]


class Write:
    """A message of one connection; `row` is its row of MESSAGE."""

    __slots__ = (
        "collective",
        "complete",
        "data",
        "flag",
        "frame",
        "has_head",
        "is_tail",
        "is_used",
        "last_frame",
        "length",
        "offset",
        "pieces",
        "position",
        "protocol",
        "psn",
        "ranges",
        "row",
        "sent",
        "span",
        "stream",
        "total",
        "va",
    )

    def __init__(self, row: tuple[Any, ...], data: Bytes, ranges: Ranges) -> None:
        self.row = row
        self.data = data
        self.ranges = ranges
        self.va: int = row[VA]
        """Where its message was written to."""
        self.length: int = row[LENGTH]
        self.flag: int = row[FLAG]
        self.frame: int = row[FRAME]
        self.last_frame: int = row[LAST_FRAME]
        self.stream: int = row[STREAM]
        self.psn: int = row[PSN]
        self.span: int = row[SPAN]
        self.complete = bool(row[COMPLETE])
        self.has_head = bool(row[HAS_HEAD]) and not self._may_be_part(row)
        """Whether its beginning and its length are known."""
        self.protocol: Protocol | None = None
        self.offset = 0
        """Where the ranges count from, in bytes on the wire of the whole message."""
        self.position: int | None = None
        """Number of the message on its connection."""
        self.collective: Collective | None = None
        self.sent: Sent | None = None
        self.is_tail = False
        """Whether this is the empty write behind a split message that was not seen whole."""
        self.is_used = False
        """Whether pieces of it were handed out."""
        self.total: int | None = None
        """Bytes of the whole message, where this is a piece of one (see cutting)."""
        self.pieces: list[Write] = []
        """Of a message that was put together."""

    @staticmethod
    def _may_be_part(row: tuple[Any, ...]) -> bool:
        """Whether a write of single packets may have lost some of them on either side: nothing
        tells its length but the empty write behind it, which was lost."""
        if row[IS_SPLIT] or row[HAS_IMMEDIATE] or row[LENGTH] <= _UNSPLIT_BYTES:
            return False
        return bool(row[IS_CHAIN] or row[SPAN] <= 1)

    @property
    def mtu(self) -> int:
        return int(self.row[MTU])

    @property
    def rkey(self) -> int:
        return int(self.row[RKEY])

    @property
    def immediate(self) -> int | None:
        return int(self.row[IMMEDIATE]) if self.row[HAS_IMMEDIATE] else None

    @property
    def told_lengths(self) -> tuple[int, ...]:
        """What the immediate may mean, in either order of its bytes: the length of a message."""
        told = self.immediate
        return (told, int.from_bytes(told.to_bytes(4, "little"), "big")) if told else ()

    @property
    def immediate_frame(self) -> int:
        return int(self.row[IMMEDIATE_FRAME])

    @property
    def packets(self) -> int:
        return int(self.row[PACKETS])

    @property
    def has_line(self) -> bool:
        """Whether enough of it is there to tell its protocol."""
        return self.complete or any(
            -(-start // _LL128_LINE) < stop // _LL128_LINE for start, stop in self.ranges
        )

    @property
    def is_split(self) -> bool:
        return bool(self.row[IS_SPLIT]) or self.is_tail

    def unpack(self, form: int) -> None:
        """Take the flags out of raw bytes; a range whose flags are not those of the first is not
        taken."""
        unit, data_unit = (2048, 1920) if form == LL128 else (16, 8)
        shift = self.offset % unit  # the data begins with the unit that the first byte is in
        data = np.zeros(-(-(shift + len(self.data)) // unit) * data_unit, np.uint8)
        taken = []
        line = _LL128_LINE if form == LL128 else 16
        for start, stop in self.ranges:
            start += -(start + shift) % line  # of TCP, a segment may begin and end anywhere
            stop -= (stop + shift) % line
            if start > stop:
                continue
            flag, is_right = roce.unpack(form, self.data[start:stop], data, start + shift)
            if is_right and flag == (self.flag or flag):
                self.flag = flag
                taken.append((start, stop))
        self.complete &= taken == self.ranges
        self.data, self.ranges = data, taken

    def restore(self, mtu: int, lengths: Sequence[int]) -> None:
        """Use what the immediate tells of the length, where the beginning was lost.

        The immediate of an empty write that split messages have is that of the message before it.
        """
        if not mtu or (self.has_head and self.length):
            return
        is_tail = self.length == 0
        for total in lengths:
            span = -(-total // mtu)
            start = 0 if is_tail else (span - self.packets) * mtu
            fits = is_tail or (start >= 0 and start + self.length == total)
            if not (fits and 0 < total <= _MAX_BYTES):
                continue
            before = span if is_tail else span - self.packets
            self.psn = (self.psn - before) % PSN_COUNT
            self.span = span + is_tail
            self.length, self.offset = total, start
            self.has_head, self.complete = True, False
            self.is_tail = is_tail
            if is_tail:
                self.ranges = []
            return

    def shorten(self, nbytes: int) -> None:
        """It was taken for the end of more: a write that went in packets with addresses of their
        own has no length but that of the immediate."""
        surplus = -(-self.length // self.mtu) - -(-nbytes // self.mtu) if self.mtu else 0
        front = surplus * self.mtu
        if surplus <= 0 or any(not front <= a <= b <= front + nbytes for a, b in self.ranges):
            return
        self.psn = (self.psn + surplus) % PSN_COUNT
        self.span -= surplus
        self.va += front
        self.data = self.data[front // (2 if self.row[FORM] == LL else 1) :]
        self.ranges = [(start - front, stop - front) for start, stop in self.ranges]
        self.length, self.complete = nbytes, self.ranges == [(0, nbytes)]

    def lost_inside(self) -> int:
        """Packets that were lost between the first and the last one seen."""
        if not self.mtu or not self.ranges:
            return 0
        gaps = zip(self.ranges, self.ranges[1:], strict=False)
        return sum(-(-(start - stop) // self.mtu) for (_, stop), (start, _) in gaps)

    def data_between(self, start: int, stop: int) -> Bytes:
        """The data of a present range of the wire, flags left out."""
        if self.protocol == "LL":
            shift = self.offset % 16
            start, stop = (start + shift) // 2, (stop + shift) // 2
        elif self.protocol == "LL128":
            shift = self.offset % 2048
            start, stop = -(-(start + shift) // 2048) * 1920, (stop + shift) // 2048 * 1920
        return self.data[start:stop]

    def data_ranges(self, nbytes: int) -> Ranges:
        """The present ranges of the first `nbytes` data bytes, flags left out."""
        found = []
        for start, stop in self.ranges:
            start, stop = start + self.offset, stop + self.offset
            if self.protocol == "LL":
                start, stop = -(-start // 16) * 8, stop // 16 * 8
            elif self.protocol == "LL128":
                start, stop = -(-start // 2048) * 1920, stop // 2048 * 1920
            else:  # whole elements
                start, stop = -(-start // 4) * 4, stop if stop >= nbytes else stop // 4 * 4
            if start < min(stop, nbytes):
                found.append((start, min(stop, nbytes)))
        return found

    def data_offset(self) -> int:
        """Data bytes of the message before the first of `data`."""
        if self.protocol == "LL":
            return self.offset // 16 * 8
        if self.protocol == "LL128":
            return self.offset // 2048 * 1920
        return self.offset


def write_of(row: tuple[Any, ...], messages: Messages) -> Write:
    """A message as it came."""
    at = row[AT]
    ranges = [(0, row[LENGTH])]
    if not row[COMPLETE]:
        rows = messages.ranges[row[RANGE_AT] : row[RANGE_AT] + row[RANGES]]
        ranges = [(start, stop) for start, stop in rows.tolist()]
    return Write(row, messages.data[at : at + row[NBYTES]], ranges)


def protocol_of(raw: Bytes, ranges: Sequence[tuple[int, int]], length: int) -> tuple[Protocol, int]:
    """What the bytes of a message of this length look like, and the flag: LL, LL128, or Simple with
    0.

    Bytes of equal words look like LL; whether the flag goes on from message to message tells.
    """
    for protocol, unit, line in (("LL128", 2048, _LL128_LINE), ("LL", 16, 16)):
        flags = []
        for start, stop in ranges:
            start, stop = -(-start // line) * line, stop // line * line
            if start < stop:
                flags.append(_flags(raw[start:stop], protocol))
        if length % unit == 0 and flags:
            every = np.concatenate(flags)
            first = int(every[0])
            if 0 < first < MAX_FLAG and bool((every == first).all()):
                return ("LL128" if protocol == "LL128" else "LL"), first
    return "Simple", 0


def _flags(raw: Bytes, protocol: str) -> np.ndarray[Any, np.dtype[Any]]:
    whole = np.frombuffer(raw.tobytes(), "<u8" if protocol == "LL128" else "<u4")
    return whole[15::16] if protocol == "LL128" else whole[1::2]
