"""What `everystep tap stats` counts of the frames that pass an interface."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from everystep.cli.tap_stats import Stats
from everystep.tap.bpf import ROCE_PORT
from everystep.tap.gloo import Gloo
from everystep.tap.live import Live
from everystep.tap.nccl import Decoder, Options
from everystep.tap.packets import Parser
from everystep.tap.pieces import Announced, Frames
from everystep.tap.ring import Scattered
from everystep.tap.rings import Doubt
from everystep.tap.roce import Tracker

_UDP, _TCP = 17, 6
_WAITING_BYTES = 256 << 20
"""Of gloo's messages whose places are not known yet."""


class Watched:
    """What was seen so far. Buffers are not put together: collectives are only counted."""

    def __init__(self, ranks: int, element_bytes: int, counts: Sequence[int] | None) -> None:
        """Nothing seen yet.

        Args:
            ranks: in the ring.
            element_bytes: of the gradients.
            counts: elements of the buckets of an iteration, in order; None: not known.

        Raises:
            Unsupported: without compiled loops.
        """
        self._parser = Parser()
        self._tracker = Tracker()
        self._decoder = Decoder(self._tracker, Options(ranks=ranks, element_bytes=element_bytes))
        sizes = None
        if counts is not None:
            self._decoder.expect(0, counts)
            sizes = [element_bytes * count for count in counts]
        self._gloo = Gloo(
            self._parser,
            ranks=ranks,
            item_bytes=element_bytes,
            sizes=sizes,
            waiting_bytes=_WAITING_BYTES,
        )
        self._frames = self._wire_bytes = self._roce = self._tcp = 0
        self._nccl_collectives = self._gloo_collectives = self._doubts = 0
        self._gloo_streams: set[int] = set()
        self._newest: deque[int] = deque(maxlen=256)

    def take(self, frames: Frames) -> None:
        """The next batch."""
        self._frames += len(frames.table)
        self._wire_bytes += int(frames.table["length"].sum(dtype="u8"))
        packets = self._parser.parse(frames)
        protocol = packets.table["protocol"]
        to_roce = (protocol == _UDP) & (packets.table["destination_port"] == ROCE_PORT)
        self._roce += int(to_roce.sum())
        self._tcp += int((protocol == _TCP).sum())
        for messages in self._tracker.feed(packets):
            found = self._decoder.feed(messages)
            self._nccl_collectives += sum(isinstance(event, Announced) for event in found)
            self._doubts += sum(isinstance(event, Doubt) for event in found)
        for event in self._gloo.feed(packets):
            if isinstance(event, Scattered):
                self._gloo_streams.update(np.unique(event.table["stream"]).tolist())
            elif isinstance(event, Announced) and event.collective not in self._newest:
                self._newest.append(event.collective)  # each direction announces it
                self._gloo_collectives += 1

    def record(self, live: Live, seconds: float) -> Stats:
        """All of it."""
        drops = live.drops()
        rings = [c for c in self._decoder.sorted.connections if c.messages]
        collectives = self._nccl_collectives + self._gloo_collectives
        return Stats(
            interface=live.interface,
            seconds=seconds,
            frames=self._frames,
            wire_bytes=self._wire_bytes,
            roce_packets=self._roce,
            tcp_packets=self._tcp,
            dropped=drops.dropped,
            freezes=drops.freezes,
            roce_connections=len(rings),
            gloo_streams=len(self._gloo_streams),
            nccl_collectives=self._nccl_collectives,
            gloo_collectives=self._gloo_collectives,
            collectives_per_s=collectives / seconds,
            doubts=self._doubts,
            roce=self._tracker.counts(),
            tcp=self._gloo.counts(),
            skipped=self._parser.skipped(),
        )
