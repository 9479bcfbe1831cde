"""How fast captures of all-reduces are decoded on one core, from the frames to the reduced buffers.

Captures are made anew by the tests' own writers of NCCL and gloo, which share nothing with the
decoder, and lie in memory, as those of a live ring do. A pass is the product's own reader, new each
time: it indexes the frames, reads all headers, follows sequence numbers, checks and leaves out
flags, and gives out each reduced buffer; the first pass of each capture also compares every buffer
with what the ranks have. A rate is of the bytes of the frames, headers included, of both directions
of one port.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common import HOME, Setting, timed
from benchmarks.figures import Figure, median_of
from everystep.tap.capture import File
from everystep.tap.gloo import Gloo
from everystep.tap.nccl import Decoder, Options
from everystep.tap.packets import Parser
from everystep.tap.pieces import Bytes, Reduced
from everystep.tap.reduced import Reader
from everystep.tap.roce import Tracker
from everystep.tap.tcp import Reassembler

BUCKET = 25 * (1 << 20) // 4
"""Elements: DDP's usual bucket."""

CAPTURE_BYTES, QUICK_CAPTURE_BYTES = 400_000_000, 200_000_000

LARGE_MTU_REACH, SMALL_MTU_REACH = 3.0, 2.0
"""GB/s of wire on one core."""


class Case(NamedTuple):
    """One capture, and how it is read."""

    name: str
    wire: dict[str, Any]
    """Of tests/tap/generator.Wire; gloo: `ranks` and `mtu`."""
    reach: float | None = None
    is_checked: bool = True
    """By the ICRC, or the TCP checksum."""
    is_long: bool = False
    """Takes long to make: left out with `--quick`."""


ROCE = (
    Case("LL, MTU 4,096", {"mtu": 4096}, LARGE_MTU_REACH),
    Case("LL, MTU 4,096, ICRC not checked", {"mtu": 4096}, LARGE_MTU_REACH, is_checked=False),
    Case("LL, MTU 1,024", {"mtu": 1024}, SMALL_MTU_REACH),
    Case("LL, MTU 1,024, ICRC not checked", {"mtu": 1024}, SMALL_MTU_REACH, is_checked=False),
    Case(
        "LL, MTU 4,096, 8 ranks, 2 channels", {"mtu": 4096, "ranks": 8, "channels": 2}, is_long=True
    ),
    Case("LL128, MTU 4,096", {"mtu": 4096, "protocol": "LL128"}),
    Case("Simple, MTU 4,096", {"mtu": 4096, "protocol": "Simple"}),
    Case("Simple, MTU 1,024", {"mtu": 1024, "protocol": "Simple"}, is_long=True),
)

GLOO = (
    Case("segments of 1,448", {"ranks": 2, "mtu": 1448}, LARGE_MTU_REACH),
    Case(
        "segments of 1,448, not checked",
        {"ranks": 2, "mtu": 1448},
        LARGE_MTU_REACH,
        is_checked=False,
    ),
    Case("frames of 64 KB", {"ranks": 2, "mtu": 65_160}, LARGE_MTU_REACH),
    Case(
        "frames of 64 KB, not checked",
        {"ranks": 2, "mtu": 65_160},
        LARGE_MTU_REACH,
        is_checked=False,
    ),
    Case("segments of 1,448, 4 ranks", {"ranks": 4, "mtu": 1448}, is_long=True),
)

Take = Callable[[Reduced], None]
Read = Callable[[Take], None]
"""One pass over a capture; gives each buffer."""


class _Written(list[Any]):
    """Takes the packets that a port shows, and makes a pcap file in memory of them at once."""

    def __init__(self) -> None:
        super().__init__()
        self.file = bytearray(struct.pack("<IHHiIII", 0xA1B23C4D, 2, 4, 0, 0, 262_144, 1))
        self.wire_bytes = self.frames = 0

    def append(self, packet: Any) -> None:
        """Of the generator, or the bytes of a frame."""
        frame = packet
        if not isinstance(packet, bytes):
            if 0 not in (packet.source, packet.destination):
                return
            frame = packet.frame
        seconds, micros = divmod(self.frames, 10**6)
        self.file += struct.pack("<IIII", seconds, 1000 * micros, len(frame), len(frame))
        self.file += frame
        self.frames += 1
        self.wire_bytes += len(frame)


class Made(NamedTuple):
    """A capture, and what it holds."""

    file: Bytes
    wire_bytes: int
    truth: list[bytes]
    """Buffers in their order."""


def _made(packets: _Written, truth: list[bytes]) -> Made:
    return Made(np.frombuffer(packets.file, np.uint8), packets.wire_bytes, truth)


def _make_roce(case: Case, nbytes: int) -> Made:
    from tap.generator import Job, Wire, random_inputs

    packets = _Written()
    wire = Wire(**case.wire)
    job = Job(wire, packets=packets)
    inputs = random_inputs(wire, BUCKET, 1)
    truth = []
    while packets.wire_bytes < nbytes:
        inputs = [np.roll(values, 1) for values in inputs]
        truth.append(job.all_reduce(inputs).tobytes())
    return _made(packets, truth)


def _make_gloo(case: Case, nbytes: int) -> Made:
    from tap.gloo_wire import Group

    group = Group(case.wire["ranks"], mtu=case.wire["mtu"])
    draw = np.random.default_rng(1)
    inputs = [draw.standard_normal(BUCKET).astype(np.float32) for _ in range(group.ranks)]
    truth = []
    while sum(map(len, group.packets)) < nbytes:
        inputs = [np.roll(values, 1) for values in inputs]
        truth += [reduced.tobytes() for _, reduced in group.all_reduce(inputs)]
    group.close()
    packets = _Written()
    for frame in group.packets:
        packets.append(frame)
    return _made(packets, truth)


# ---------------------------------------------------------------- passes


def read_roce(file: Bytes, take: Take, *, ranks: int, check_icrc: bool) -> None:
    """One pass over NCCL's all-reduces of buckets. What a trainer would tell is known: sizes, and
    that the ring has no added step."""
    tracker = Tracker(check_icrc=check_icrc)
    decoder = Decoder(tracker, Options(ranks=ranks, element_bytes=4, added_step=False))
    decoder.expect(0, [BUCKET])
    _read(Reader(Parser(), (tracker, decoder)), file, take)


def read_gloo(file: Bytes, take: Take, *, ranks: int, checksums: bool) -> None:
    """One pass over gloo's all-reduces of buckets."""
    parser, reassembler = Parser(), Reassembler(checksums=checksums)
    gloo = Gloo(parser, ranks=ranks, sizes=[4 * BUCKET], reassembler=reassembler)
    _read(Reader(parser, gloo), file, take)


def _read(reader: Reader, file: Bytes, take: Take) -> None:
    for frames in File(file):
        for reduced in reader.feed(frames):
            take(reduced)
    for reduced in reader.end():
        take(reduced)
    if reader.buffers.is_doubted:
        raise ValueError("the decoder is in doubt, though nothing was lost")


def plain_pass(file: Bytes) -> int:
    """Add up a file's bytes, eight at a time."""
    return int(file[: len(file) // 8 * 8].view(np.uint64).sum())


# ---------------------------------------------------------------- figures


def _compare(read: Read, truth: Sequence[bytes], name: str) -> None:
    """Every buffer is what the ranks have, bit for bit; else the benchmark ends."""
    found: set[int] = set()

    def take(reduced: Reduced) -> None:
        if reduced.missing or reduced.mismatches or reduced.data.tobytes() != truth[
            reduced.collective
        ]:  # fmt: skip
            raise ValueError(f"{name}: buffer {reduced.collective} is not what the ranks have")
        found.add(reduced.collective)

    read(take)
    if found != set(range(len(truth))):
        raise ValueError(f"{name}: {len(truth) - len(found)} buffers are not there")


def _figure(head: str, case: Case, made: Made, read: Read, runs: int) -> Figure:
    _compare(read, made.truth, head)
    rates = [made.wire_bytes / timed(lambda: read(_ignore)) / 1e9 for _ in range(runs)]
    return median_of(
        f"{head}{case.name}", rates, "GB/s", case.reach, at_least=case.reach is not None
    )


def _ignore(_: Reduced) -> None:
    """Nothing."""


def _limits(head: str, made: Made, runs: int) -> Iterator[Figure]:
    """What one core can do with these bytes at most."""
    passes = [len(made.file) / timed(lambda: plain_pass(made.file)) / 1e9 for _ in range(runs)]
    yield median_of(f"{head}a plain pass over the file", passes, "GB/s")
    source = np.ones(made.wire_bytes // 8, np.uint64)
    to = np.zeros_like(source)
    copies = [source.nbytes / timed(lambda: np.copyto(to, source)) / 1e9 for _ in range(runs)]
    yield median_of(f"{head}a copy in memory", copies, "GB/s")


def measure_roce(setting: Setting) -> list[Figure]:
    """NCCL over RoCEv2."""

    def reader(case: Case, file: Bytes) -> Read:
        ranks = int(case.wire.get("ranks", 2))
        return lambda take: read_roce(file, take, ranks=ranks, check_icrc=case.is_checked)

    return _measure(setting, "RoCEv2: ", ROCE, _make_roce, reader)


def measure_gloo(setting: Setting) -> list[Figure]:
    """gloo over TCP."""

    def reader(case: Case, file: Bytes) -> Read:
        ranks = int(case.wire["ranks"])
        return lambda take: read_gloo(file, take, ranks=ranks, checksums=case.is_checked)

    return _measure(setting, "gloo: ", GLOO, _make_gloo, reader)


def _measure(
    setting: Setting,
    head: str,
    cases: Sequence[Case],
    make: Callable[[Case, int], Made],
    reader: Callable[[Case, Bytes], Read],
) -> list[Figure]:
    sys.path.insert(0, str(HOME / "tests"))
    nbytes = QUICK_CAPTURE_BYTES if setting.quick else CAPTURE_BYTES
    runs = max(5, setting.runs)
    cases = [case for case in cases if not (setting.quick and case.is_long)]
    figures: list[Figure] = []
    everywhere = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(everywhere)})
    made: Made | None = None
    try:
        for i, case in enumerate(cases):
            if made is None or case.wire != cases[i - 1].wire:
                made = None  # before the next one: both need not be in memory
                made = make(case, nbytes)
                if i == 0:
                    figures += _limits(head, made, runs)
            figures.append(_figure(head, case, made, reader(case, made.file), runs))
    finally:
        os.sched_setaffinity(0, everywhere)
    return figures
