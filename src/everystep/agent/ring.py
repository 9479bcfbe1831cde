"""Shared memory in which records wait for the agent, freed in the order in which they came."""

from __future__ import annotations

import collections

from everystep.agent.arena import Arena, whole_pages


class Stretches:
    """Which parts of `nbytes` bytes are taken: first in, first out, each in one piece."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._taken: collections.deque[tuple[int, int]] = collections.deque()

    def __len__(self) -> int:
        """How many are taken."""
        return len(self._taken)

    def take(self, nbytes: int) -> int | None:
        """Where a new stretch begins; None: there is no room for it now."""
        if not self._taken:
            if nbytes > self.nbytes:
                return None
            offset = 0
        else:
            first = self._taken[0][0]
            last, length = self._taken[-1]
            offset = last + length
            if last >= first and offset + nbytes > self.nbytes:
                offset = 0  # the end is too short: on from the beginning
            if offset <= first and offset + nbytes > first:
                return None
        self._taken.append((offset, nbytes))
        return offset

    def take_back(self) -> None:
        """The newest is not needed after all."""
        self._taken.pop()

    def free(self) -> None:
        """The oldest is not needed any more."""
        self._taken.popleft()


class Ring:
    """A memfd, and what of it is taken.

    Args:
        record_bytes: room for two such records there must be.
        nbytes: in all, where there is so much memory; else less.

    Raises:
        StoreFailed: the memory is not to be had.
    """

    def __init__(self, number: int, record_bytes: int, nbytes: int) -> None:
        self.number = number
        slot_bytes = whole_pages(record_bytes)
        self.arena = Arena.most(max(2, nbytes // slot_bytes), slot_bytes)
        self.arena.populate()
        self.stretches = Stretches(len(self.arena))

    @property
    def facts(self) -> tuple[int, int]:
        """How another process maps it; see `Arena`."""
        return self.arena.slots, self.arena.slot_bytes

    def close(self) -> None:
        """Unmap it; the agent has a mapping of its own."""
        self.arena.close()
