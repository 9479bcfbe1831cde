"""Reduced buffers by number, kept until a step claims them, within a budget."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from everystep.tap.pieces import Bytes, Reduced
from everystep.tap.reduced import Withdrawn

_REMEMBERED = 1 << 14  # buffers, though not their bytes


class Buffer:
    """One that was given, whole or not."""

    def __init__(self, reduced: Reduced) -> None:
        self.data: Bytes | None = reduced.data
        """None: dropped for want of room."""
        self.nbytes = len(reduced.data) if reduced.sized else None
        self.missing = list(reduced.missing)
        """Ranges of bytes, also those that were withdrawn later."""

    def is_whole(self, nbytes: int) -> bool:
        """Whether it has this size, and every byte."""
        return self.data is not None and not self.missing and self.nbytes == nbytes


class Kept:
    """Buffers with numbers above `floor`."""

    def __init__(self, budget_bytes: int) -> None:
        """None yet."""
        self._buffers: OrderedDict[int, Buffer] = OrderedDict()
        self._budget_bytes = budget_bytes
        self.nbytes = 0
        """Kept now."""
        self.floor = -1
        """Numbers up to this one are of no use any more."""
        self.newest = -1
        """Greatest number that was given."""
        self.dropped = 0
        """Buffers whose bytes were let go for want of room."""

    def put(self, given: Iterable[Reduced]) -> None:
        """Keep them, each in the place of an earlier one of its number."""
        for reduced in given:
            number = reduced.collective
            self.newest = max(self.newest, number)
            if number > self.floor:
                self._drop(self._buffers.pop(number, None))
                self._buffers[number] = Buffer(reduced)
                self.nbytes += len(reduced.data)
        for buffer in self._buffers.values():
            if self.nbytes <= self._budget_bytes:
                break
            self.dropped += self._drop(buffer)
        while len(self._buffers) > _REMEMBERED:
            self._drop(self._buffers.popitem(last=False)[1])

    def withdraw(self, ranges: Iterable[Withdrawn]) -> None:
        """These are not to be trusted."""
        for range_ in ranges:
            buffer = self._buffers.get(range_.collective)
            if buffer is not None:
                stop = buffer.nbytes if range_.stop is None else range_.stop
                if stop is None:
                    buffer.nbytes = None  # refused, and of unknown size
                else:
                    buffer.missing.append((range_.start, stop))

    def get(self, number: int) -> Buffer | None:
        """The one of this number."""
        return self._buffers.get(number)

    def beyond(self, number: int) -> int:
        """How many have greater numbers."""
        return sum(other > number for other in self._buffers)

    def release(self, floor: int) -> None:
        """Those up to this number are of no use any more."""
        self.floor = max(self.floor, floor)
        for number in [number for number in self._buffers if number <= self.floor]:
            self._drop(self._buffers.pop(number))

    def counts(self) -> dict[str, int]:
        """Buffers that are `waiting`, `waiting_bytes`, and those `dropped`."""
        waiting = sum(buffer.data is not None for buffer in self._buffers.values())
        return {"waiting": waiting, "waiting_bytes": self.nbytes, "dropped": self.dropped}

    def _drop(self, buffer: Buffer | None) -> bool:
        if buffer is None or buffer.data is None:
            return False
        self.nbytes -= len(buffer.data)
        buffer.data = None
        return True
