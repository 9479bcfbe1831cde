"""What is known of one direction of a gloo connection: its place, its flows, its gaps."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from everystep.tap.gloo_flows import Flow

NO_TAG = 1 << 32
"""Greater than any tag."""


class Body:
    """The bytes of one message, in positions of the stream, and where they go."""

    def __init__(self, position: int, stop: int, start: int, flow: Flow, *, waits: bool) -> None:
        self.position, self.stop, self.start = position, stop, start
        self.flow, self.waits = flow, waits


class Stream:
    """One direction of one connection."""

    def __init__(self, row: np.void, rank: int | None) -> None:
        self.number, self.reverse = int(row["stream"]), int(row["reverse"])
        self.from_start = bool(row["from_start"])
        self.rank = rank
        self.is_certain = self.from_start  # no message can have been lost yet
        self.is_found = False  # a preamble has been seen
        self.position, self.hunting, self.carry = 0, True, b""  # of `_tcp.walk`
        self.seen_bytes = 0  # before the first preamble
        self.body: Body | None = None  # what the next batch may go on with
        self.flows: OrderedDict[int, Flow] = OrderedDict()
        self.gaps = 0
        self.newest = -1  # greatest tag seen since the last gap
        self.settled = -1  # flows up to this tag have been concluded
        self._tags: list[int] = []  # the smallest seen since the last gap
        self.ended: list[tuple[Flow, bool]] = []  # whether their last message was seen

    def gap(self) -> None:
        """Preambles may have been lost."""
        self.gaps += 1
        self.newest = -1
        self.is_certain = False
        self._tags = []
        for flow in self.flows.values():
            flow.gap()

    def end_flows(self, settled: int) -> None:
        """Those up to this tag are over, if the stream has gone on to a greater one."""
        if self.newest > settled > self.settled:
            self.settled = settled
            for flow in [flow for flow in self.flows.values() if flow.number <= settled]:
                self.ended.append((flow, flow.gaps == self.gaps))
                del self.flows[flow.number]

    def begins(self, tag: int, threads: int) -> bool:
        """Whether the first message of this tag has certainly not been lost."""
        return self.is_certain or (len(self._tags) == threads and self._tags[-1] < tag)

    def note(self, tag: int, threads: int) -> None:
        """The tag is under way."""
        self.newest = max(self.newest, tag)
        if not self.is_certain and tag not in self._tags:
            self._tags = sorted([*self._tags, tag])[:threads]
