"""`everystep tap stats`: what passes a live interface, and how much of it is understood."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Annotated, Literal

import typer
from msgspec import Struct

from everystep.cli.figures import quantity, read_seconds, spoken_time
from everystep.cli.output import Block, Line, Output, counted, size
from everystep.cli.target import AsJson
from everystep.errors import UsageError

EXAMPLE = "Example: everystep tap stats eth1 --ranks 4 --seconds 30"

_WAIT_S = 0.1


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
    # loaded when it is called: the help of all commands must not wait for NumPy
    from everystep.cli.tap_report import DTYPES
    from everystep.cli.tap_watched import Watched
    from everystep.tap.live import Live

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
