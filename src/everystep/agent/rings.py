"""The agent's view of the memory in which the trainer's records lie."""

from __future__ import annotations

import collections
import os
from typing import NamedTuple, Protocol

from everystep.agent import protocol as p
from everystep.agent.arena import Arena
from everystep.errors import StoreFailed


class Queued(NamedTuple):
    """A record that waits, and what was said of those like it."""

    record: p.Record
    opened: p.OpenLog


class Memory(Protocol):
    """Where records lie, for one that folds them."""

    def view(self, record: p.Record) -> memoryview:
        """The bytes of a record."""
        ...

    def free(self, record: p.Record) -> None:
        """A record is not needed any more."""
        ...


class Rings:
    """Rings by number, each mapped while records lie in it. Every method is called with the agent's
    guard held."""

    def __init__(self) -> None:
        self._arenas: dict[int, Arena] = {}
        self._records: collections.Counter[int] = collections.Counter()
        self._opened: p.OpenLog | None = None

    def open(self, message: p.OpenRing, fd: int | None) -> None:
        """Map one.

        Args:
            fd: came along; it is taken over.

        Raises:
            StoreFailed: it is there already, or cannot be mapped.
        """
        if fd is None or message.ring in self._arenas:
            if fd is not None:
                os.close(fd)
            raise StoreFailed("memory for records that is none", found=str(message))
        self._arenas[message.ring] = Arena(fd, *message.arena)
        self._drop()

    def describe(self, opened: p.OpenLog) -> None:
        """What the records that follow are."""
        self._opened = opened

    def add(self, record: p.Record) -> Queued:
        """A record has come; its ring stays until it is freed.

        Raises:
            StoreFailed: nothing was said of what it is.
        """
        if self._opened is None:
            raise StoreFailed("a record of no layout", found=str(record))
        self._records[record.ring] += 1
        return Queued(record, self._opened)

    def free(self, record: p.Record) -> None:
        """A record is not needed any more."""
        self._records[record.ring] -= 1
        self._drop()

    def view(self, record: p.Record) -> memoryview:
        """The bytes of a record; release it before its ring may go.

        Raises:
            StoreFailed: it lies nowhere.
        """
        arena = self._arenas.get(record.ring)
        if arena is None or record.offset + record.nbytes > len(arena):
            raise StoreFailed("a record lies outside of its memory", found=str(record))
        return arena.view(record.offset, record.nbytes)

    def _drop(self) -> None:
        """Unmap those but the newest in which no record lies."""
        newest = max(self._arenas, default=0)
        for ring in [n for n in self._arenas if n != newest and self._records[n] <= 0]:
            self._arenas.pop(ring).close()
            del self._records[ring]

    def close(self) -> None:
        """Unmap all."""
        while self._arenas:
            self._arenas.popitem()[1].close()
