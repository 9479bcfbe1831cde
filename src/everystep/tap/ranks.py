"""Which rank sends from which address, as far as it was told or receivers' records tell."""

from __future__ import annotations

from everystep.tap.cts import ClearToSend
from everystep.tap.sendrecv import MAX_MESSAGE_BYTES


class Ranks:
    """The ranks of one ring."""

    def __init__(self, ring: tuple[int, ...]) -> None:
        """`ring`: the ranks along it, beginning with rank 0."""
        self.of: dict[int, int] = {}
        """By index into the table of addresses."""
        self._ring = ring

    def record(self, source: int, destination: int, record: ClearToSend) -> None:
        """A record names its receiver's rank, and that of its neighbour on the ring."""
        if destination in self.of or record.tag not in self._ring:
            return
        ring = self._ring
        self.of[destination] = record.tag
        if source not in self.of and (record.size != MAX_MESSAGE_BYTES or len(ring) == 2):
            self.of[source] = ring[(ring.index(record.tag) + 1) % len(ring)]

    def index(self, sender: int, receiver: int) -> int | None:
        """Ring index of a sender, where its rank is known, or that of its neighbour."""
        for end, behind in ((sender, 0), (receiver, 1)):
            if end in self.of:
                return (self._ring.index(self.of[end]) - behind) % len(self._ring)
        return None

    def same(self, a: int, b: int) -> bool:
        """Whether two addresses are known to be of one rank."""
        return a == b or (a in self.of and self.of[a] == self.of.get(b))
