"""`everystep tap stats`: what passes a live interface, and how much of it is understood."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

import numpy as np
import typer
from msgspec import Struct

from everystep.cli.figures import quantity, read_seconds, spoken_time
from everystep.cli.output import Block, Line, Output, counted, size
from everystep.cli.tap_report import DTYPES
from everystep.cli.target import AsJson
from everystep.errors import UsageError
from everystep.tap.bpf import ROCE_PORT
from everystep.tap.gloo import Gloo
from everystep.tap.live import Live
from everystep.tap.nccl import Decoder, Options
from everystep.tap.packets import Parser
from everystep.tap.pieces import Announced, Frames
from everystep.tap.ring import Scattered
from everystep.tap.rings import Doubt
from everystep.tap.roce import Tracker

EXAMPLE = "Example: everystep tap stats eth1 --ranks 4 --seconds 30"

_UDP, _TCP = 17, 6
_WAIT_S = 0.1
_WAITING_BYTES = 256 << 20
"""Of gloo's messages whose places are not known yet."""


class Stats(Struct, frozen=True, kw_only=True):
    """The record that `everystep tap stats` prints."""

    interface: str
    seconds: float
    """Measured."""
    frames: int
    wire_bytes: int
    roce_packets: int
    """To the RoCE port."""
    tcp_packets: int
    dropped: int
    """Frames for which the kernel had no room."""
    freezes: int
    """How often the ring was full."""
    roce_connections: int
    """One direction of one channel between two ranks, each."""
    gloo_streams: int
    """One direction of a TCP connection that carries reduced buffers, each."""
    nccl_collectives: int
    """All-reduces of NCCL's that began."""
    gloo_collectives: int
    collectives_per_s: float
    doubts: int
    """How often loss made the numbers of NCCL's all-reduces uncertain."""
    roce: dict[str, int]
    """What the tracker of RoCE counted: see `everystep.tap.roce.COUNTS`."""
    tcp: dict[str, int]
    """What gloo's decoder and the reassembly counted."""
    skipped: dict[str, int]
    """Frames that gave no packet, by reason."""


def stats(
    interface: Annotated[str, typer.Argument(metavar="IFACE", help="An Ethernet interface.")],
    seconds: Annotated[str, quantity("--seconds", "How long to look.", "TIME")] = "10",
    ranks: Annotated[int, typer.Option("--ranks", help="Ranks in the ring.", min=2)] = 2,
    dtype: Annotated[
        Literal["float32", "float16", "bfloat16", "int32"],
        typer.Option("--dtype", help="Of the gradients: it is not on the wire."),
    ] = "float32",
    counts: Annotated[
        str | None,
        typer.Option(
            "--counts",
            metavar="N[,N...]",
            help="Elements of the buckets of an iteration, in order. Default: guessed; a large "
            "buffer may then be counted as several.",
        ),
    ] = None,
    ports: Annotated[
        str | None,
        typer.Option("--ports", metavar="N[,N...]", help="TCP ports that gloo uses. Default: all."),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Look at a live interface for a while: frames, kernel drops, connections, collectives.

    Needs root (CAP_NET_RAW). Exit status 1 where the kernel dropped frames.
    """
    duration_s = read_seconds("--seconds", seconds) or 0.0
    if duration_s <= 0:
        raise UsageError("--seconds is more than nothing", hint="--seconds 10")
    told = None if counts is None else read_numbers("--counts", counts)
    tcp_ports = None if ports is None else read_numbers("--ports", ports)
    watched = Watched(ranks, DTYPES[dtype], told)
    with Live(interface, tcp_ports=tcp_ports) as live:
        started_s = time.monotonic()
        while (left_s := started_s + duration_s - time.monotonic()) > 0:
            frames = live.next(min(_WAIT_S, left_s))
            if frames is not None:
                watched.take(frames)
        record = watched.record(live, time.monotonic() - started_s)
    Output(as_json).show(record, _blocks(record))
    return 1 if record.dropped else 0


def read_numbers(option: str, text: str) -> list[int]:
    """Of an option such as `5000,700`.

    Raises:
        UsageError: they are no positive numbers.
    """
    words = text.split(",")
    found = [int(word) for word in words if word.isascii() and word.isdigit()]
    if len(found) < len(words) or min(found) < 1:
        raise UsageError(f"{option} takes positive numbers, not {text!r}", hint=f"{option} 5000")
    return found


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


def _blocks(record: Stats) -> Iterator[Block]:
    rate = size(round(record.wire_bytes / record.seconds))
    yield Line(
        f"{record.interface}: {counted(record.frames, 'frame')} in "
        f"{spoken_time(record.seconds)}, {rate}/s"
    )
    lost = f"{counted(record.dropped, 'frame')} dropped by the kernel"
    yield Line(lost, "red" if record.dropped else "green")
    yield Line(
        f"RoCE: {counted(record.roce_packets, 'packet')}, "
        f"{counted(record.roce_connections, 'connection')}, "
        f"{counted(record.nccl_collectives, 'all-reduce')}"
    )
    yield Line(
        f"TCP: {counted(record.tcp_packets, 'packet')}, "
        f"{counted(record.gloo_streams, 'stream')} of gloo's, "
        f"{counted(record.gloo_collectives, 'all-reduce')}"
    )
    yield Line(f"{record.collectives_per_s:,.1f} all-reduces per second")
    if record.doubts:
        yield Line(f"{counted(record.doubts, 'time')} loss made numbers uncertain", "red")
