"""Reduced buffers put together from the pieces of one or several mirrored streams.

A ring all-reduce shows each range of the reduced buffer on several links: a range may come once or
more often. The first copy is written to its place; every later one is compared with it, and a
difference is an alarm. Which bytes are there is kept exactly, a bit per byte: nothing else is ever
said to be present, and where a buffer is given up before it is whole, what is missing is filled
with ones (a NaN in every floating dtype), never left as it was.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from everystep.errors import UsageError
from everystep.tap.capture import need_extension
from everystep.tap.pieces import (
    Announced,
    Bytes,
    Mismatch,
    Piece,
    Reduced,
    Source,
    Table,
)

try:
    from everystep.tap import _tcp
except ImportError:  # no compiler where this was installed
    _tcp = None  # type: ignore[assignment]

SCATTERED = np.dtype(
    [
        ("start", "<u8"),  # in the reduced buffer
        ("at", "<u8"),  # in `data`, or in `spill`
        ("length", "<u8"),
        ("frame", "<u8"),  # number
        ("collective", "<u8"),
        ("stream", "<u4"),
        ("in_spill", "<u4"),
    ]
)

_SOURCE = np.dtype(
    [("start", "<u8"), ("stop", "<u8"), ("frame", "<u8"), ("stream", "<u4"), ("_", "<u4")]
)
_MISMATCH = np.dtype(
    [
        ("start", "<u8"),
        ("at", "<u8"),
        ("stop", "<u8"),
        ("frame", "<u8"),
        ("stream", "<u4"),
        ("_", "<u4"),
    ]
)

_NOTHING = np.empty(0, np.uint8)
_MOST_MISMATCHES = 100  # of one buffer: one is enough not to trust it
_MOST_SOURCES = 1 << 16


class Scattered(Struct, frozen=True, eq=False):
    """Pieces that lie scattered over packets."""

    table: Table
    """SCATTERED."""
    data: Bytes
    spill: Bytes = _NOTHING


class Refused(Struct, frozen=True):
    """The collective is not what its pieces were taken for: none of them is to be used."""

    collective: int


Event = Piece | Scattered | Announced | Refused
"""What a decoder gives."""


class Buffer:
    """Bytes of which each is there or not; grows as it is written to."""

    def __init__(self) -> None:
        self.data: Bytes = _NOTHING
        self._bits: npt.NDArray[np.uint64] = np.empty(0, np.uint64)
        self.present_bytes = 0

    def reset(self) -> None:
        """Nothing is there any more; the memory is kept."""
        self._bits[:] = 0
        self.present_bytes = 0

    def reserve(self, nbytes: int) -> None:
        """Room for so many bytes."""
        if nbytes <= len(self.data):
            return
        room = max(nbytes, min(2 * len(self.data), nbytes + (64 << 20)))
        data, bits = np.empty(room, np.uint8), np.zeros(-(-room // 64), np.uint64)
        data[: len(self.data)] = self.data
        bits[: len(self._bits)] = self._bits
        self.data, self._bits = data, bits

    def write(self, table: Table, data: Bytes, spill: Bytes) -> tuple[bytearray, bytearray]:
        """Copy what is new to its place, compare what is there; room must have been reserved.
        Returns rows of `_SOURCE` and of `_MISMATCH`."""
        fresh, sources, mismatches = _tcp.place(table, data, spill, self.data, self._bits)
        self.present_bytes += fresh
        return sources, mismatches

    def present(self, nbytes: int) -> list[tuple[int, int]]:
        """The ranges [start, stop) that are there, before `nbytes`."""
        if self.present_bytes == nbytes:  # the common case
            return [(0, nbytes)] if nbytes else []
        nbytes = min(nbytes, 64 * len(self._bits))
        runs = np.frombuffer(_tcp.runs(self._bits, nbytes), np.int64).reshape(-1, 2)
        return [(start, stop) for start, stop in runs.tolist()]

    def forget(self, start: int, stop: int) -> None:
        """This range is not there."""
        self.present_bytes -= _tcp.clear(self._bits, start, stop)


class _Collective:
    """One buffer in the making, or just finished."""

    def __init__(self, number: int, buffer: Buffer) -> None:
        self.number, self.buffer = number, buffer
        self.nbytes: int | None = None
        self.reached = 0  # the end of the last byte seen
        self.sources = bytearray()  # rows of _SOURCE
        self.mismatches: list[Mismatch] = []
        self.is_out = False  # it has been handed out, and waits for its twins

    @property
    def is_whole(self) -> bool:
        return self.buffer.present_bytes == self.nbytes

    def write(self, table: Table, data: Bytes, spill: Bytes) -> list[Mismatch]:
        """The copies that differ from what is there."""
        sources, mismatches = self.buffer.write(table, data, spill)
        if len(self.sources) < _MOST_SOURCES * _SOURCE.itemsize:
            self.sources += sources
        if not mismatches:
            return []
        rows = np.frombuffer(mismatches, _MISMATCH)[:_MOST_MISMATCHES]
        found = [self._mismatch(row) for row in rows]
        self.mismatches += found[: _MOST_MISMATCHES - len(self.mismatches)]
        return found

    def _mismatch(self, row: np.void) -> Mismatch:
        at = int(row["at"])
        sources = np.frombuffer(bytes(self.sources), _SOURCE)
        first = sources[(sources["start"] <= at) & (at < sources["stop"])][:1]
        streams = int(first["stream"].sum()), int(row["stream"])  # 0 where it was not kept
        frames = int(first["frame"].sum()), int(row["frame"])
        return Mismatch(self.number, at, int(row["stop"]), streams, frames)

    def reduced(self, *, is_refused: bool = False) -> Reduced:
        nbytes = self.reached if self.nbytes is None else self.nbytes
        self.buffer.reserve(nbytes)
        for mismatch in self.mismatches:
            self.buffer.forget(mismatch.at, mismatch.stop)
        present = [] if is_refused else self.buffer.present(nbytes)
        edges = [0, *(edge for run in present for edge in run), nbytes]
        missing = [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
        data = self.buffer.data[:nbytes]
        if is_refused or nbytes < len(self.buffer.data):  # it may be out; it would hold more memory
            data = data.copy()
        for start, stop in missing:
            data[start:stop] = 0xFF
        data.flags.writeable = False
        return Reduced(
            self.number,
            data,
            tuple(present),
            tuple(missing),
            () if is_refused else self._told_sources(),
            tuple(self.mismatches),
            self.nbytes is not None,
        )

    def _told_sources(self) -> tuple[Source, ...]:
        return tuple(
            Source(start, stop, stream, frame)
            for start, stop, frame, stream, _ in np.frombuffer(self.sources, _SOURCE).tolist()
        )


class Assembler:
    """Puts pieces to their places, and gives each buffer when it is whole or given up.

    Pieces that come for a buffer that is finished are compared if it is one of the last few; else
    they are counted and left out.
    """

    def __init__(
        self,
        *,
        behind: int = 8,
        finished: int = 2,
        largest_bytes: int = 4 << 30,
        total_bytes: int = 16 << 30,
    ) -> None:
        """Nothing in the making.

        Args:
            behind: a buffer is given up when so many with greater numbers have become whole.
            finished: so many whole buffers are kept for their twins to be compared.
            largest_bytes: of one buffer; what lies beyond is left out and counted.
            total_bytes: of all buffers that are kept; beyond, the oldest are given up.

        Raises:
            UsageError: a bound is out of range.
            Unsupported: the compiled loops are not installed.
        """
        need_extension(_tcp)
        if behind < 1 or finished < 1 or largest_bytes < 1 or total_bytes < largest_bytes:
            raise UsageError("bounds are positive, and all buffers take more than one")
        self._behind, self._finished = behind, finished
        self._largest_bytes, self._total_bytes = largest_bytes, total_bytes
        self._open: OrderedDict[int, _Collective] = OrderedDict()
        self._whole_since: dict[int, int] = {}
        self._row = np.zeros(1, SCATTERED)  # made once: a piece may cost microseconds only
        self._over: OrderedDict[int, None] = OrderedDict()  # numbers; the last thousands
        self.alarms: list[Mismatch] = []
        """Twins that differ, those of finished buffers too; the caller may empty it."""
        self.left_out = 0
        """Pieces that came too late, or lay beyond the bounds."""

    def add(self, event: Event) -> list[Reduced]:
        """What one event of a decoder completes, or lets give up."""
        match event:
            case Scattered():
                return self._scattered(event)
            case Piece():
                return self._piece(event)
            case Announced():
                return self._announced(event)
            case Refused():
                collective = self._take(event.collective)
                return [] if collective is None else [collective.reduced(is_refused=True)]

    def give_up(self, through: int | None = None) -> list[Reduced]:
        """End every buffer in the making with a number up to `through`, or all; in order."""
        given = []
        for number in sorted(self._open):
            collective = self._open[number]
            if not collective.is_out and (through is None or number <= through):
                given.append(collective.reduced())
                self._end(collective)
        return given

    # ---------------------------------------------------------------- events

    def _piece(self, piece: Piece) -> list[Reduced]:
        length = len(piece.data)
        table = self._row
        table[0] = (piece.start, 0, length, piece.frame, piece.collective, piece.stream, 0)
        return self._write(piece.collective, table, piece.data, _NOTHING, piece.start + length)

    def _scattered(self, pieces: Scattered) -> list[Reduced]:
        numbers = pieces.table["collective"]
        edges = [0, *(np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).tolist(), len(numbers)]
        given: list[Reduced] = []
        for start, stop in itertools.pairwise(edges):
            if start < stop:
                table = pieces.table[start:stop]
                reach = int((table["start"] + table["length"]).max())
                given += self._write(int(numbers[start]), table, pieces.data, pieces.spill, reach)
        return given

    def _write(
        self, number: int, table: Table, data: Bytes, spill: Bytes, reach: int
    ) -> list[Reduced]:
        collective = self._get(number)
        if collective is None:
            self.left_out += len(table)
            return []
        limit = self._largest_bytes if collective.nbytes is None else collective.nbytes
        if reach > limit:
            fits = table["start"] + table["length"] <= limit
            self.left_out += int((~fits).sum())
            table = table[fits]
            if not len(table):
                return []
            reach = int((table["start"] + table["length"]).max())
        given = self._reserve(collective, reach)
        self.alarms += collective.write(table, data, spill)
        collective.reached = max(collective.reached, reach)
        return given + self._finish(collective)

    def _announced(self, announced: Announced) -> list[Reduced]:
        collective = self._get(announced.collective)
        if collective is None or collective.nbytes is not None:
            return []
        if not collective.reached <= announced.nbytes <= self._largest_bytes:
            self.left_out += 1
            return []
        collective.nbytes = announced.nbytes
        given = self._reserve(collective, announced.nbytes)
        return given + self._finish(collective)

    # ---------------------------------------------------------------- buffers

    def _get(self, number: int) -> _Collective | None:
        """The one in the making, or kept for its twins; None when it is over."""
        found = self._open.get(number)
        if found is None and number not in self._over:
            found = _Collective(number, Buffer())
            self._open[number] = found
            self._whole_since[number] = 0
        return found

    def _take(self, number: int) -> _Collective | None:
        collective = self._get(number)
        if collective is not None:
            self._end(collective)
        return collective

    def _end(self, collective: _Collective) -> None:
        del self._open[collective.number]
        self._whole_since.pop(collective.number, None)
        self._over[collective.number] = None
        while len(self._over) > 1 << 14:
            self._over.popitem(last=False)

    def _finish(self, collective: _Collective) -> list[Reduced]:
        """Hand it out if it is whole now, and give up those that it leaves behind."""
        if collective.is_out or not collective.is_whole:
            return []
        given = []
        for number in sorted(self._whole_since):
            if number >= collective.number:
                break
            self._whole_since[number] += 1
            if self._whole_since[number] >= self._behind:
                given.append(self._open[number].reduced())
                self._end(self._open[number])
        collective.is_out = True
        del self._whole_since[collective.number]
        given.append(collective.reduced())
        finished = [other for other in self._open.values() if other.is_out]
        for other in finished[: -self._finished]:
            self._end(other)
        return given

    def _reserve(self, collective: _Collective, nbytes: int) -> list[Reduced]:
        """Room for so many bytes; the oldest others are given up where all take too much."""
        if nbytes <= len(collective.buffer.data):
            return []
        collective.buffer.reserve(nbytes)
        held = sum(len(other.buffer.data) for other in self._open.values())
        given = []
        for other in [*self._open.values()]:
            if held <= self._total_bytes:
                break
            if other is not collective and len(other.buffer.data):
                held -= len(other.buffer.data)
                if not other.is_out:
                    given.append(other.reduced())
                self._end(other)
        return given
