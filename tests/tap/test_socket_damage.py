"""Random damage to synthetic captures of NCCL's sockets: what is given is exact, or is not given.

As `test_damage` for RoCE, with segments of any size, and with hosts and version told or not. More
of it by hand, with the first seed and how many: `PYTHONPATH=tests python
tests/tap/test_socket_damage.py 1000 5000`
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path

import pytest
from msgspec import Struct

from everystep.cli.tap_report import DTYPES, Reader
from everystep.tap.nccl import Options
from tap.generator import Wire, random_inputs, write
from tap.socket_wire import SocketJob
from tap.test_damage import Pattern, agrees, mirrored_and_damaged

SEEDS = 200

PARTS = 4
"""Tests that share them."""


class Shown(Struct, frozen=True):
    """A pattern, and what else is told."""

    pattern: Pattern
    are_hosts_told: bool
    is_version_told: bool


def shown(seed: int) -> Shown:
    """What this seed stands for."""
    draw = random.Random(f"sockets {seed}")
    wire = Wire(
        ranks=draw.choice((2, 3, 4)),
        protocol=draw.choice(("LL", "LL128", "Simple")),
        mtu=draw.choice((100, 300, 1448, 8948)),
        channels=draw.choice((1, 1, 2)),
        version=draw.choice((19, 19, 19, 22)),
        dtype=draw.choice(("float32", "float32", "bfloat16")),
    )
    sizes = tuple(draw.choice((3, 3, 17, 500, 1000, 2500)) for _ in range(draw.choice((1, 2, 3))))
    made = SocketJob(wire, seed=seed)
    for number in range(draw.choice((2, 3, 4, 8)) * len(sizes)):
        made.all_reduce(random_inputs(wire, sizes[number % len(sizes)], 1000 * seed + number))
    packets, _ = mirrored_and_damaged(made.packets, wire.ranks, draw)
    pattern = Pattern(
        made=made,
        packets=packets,
        sizes=sizes if draw.random() < 0.7 else None,
        is_whole=False,  # where the beginnings of connections are lost, it begins in the middle
        finds_added_step=draw.random() < 0.5,
    )
    return Shown(pattern, draw.random() < 0.7, draw.random() < 0.7)


def check(seed: int, path: Path) -> int:
    """That nothing of this pattern is wrong; returns the bytes that were there."""
    told = shown(seed)
    pattern, wire = told.pattern, told.pattern.made.wire
    write(path, pattern.packets)
    options = Options(
        ranks=wire.ranks,
        element_bytes=DTYPES[wire.dtype],
        added_step=None if pattern.finds_added_step else False,
        minor=wire.version if told.is_version_told else None,
    )
    hosts = [f"10.0.0.{rank + 1}" for rank in range(wire.ranks)] if told.are_hosts_told else []
    reader = Reader(options, wire.dtype, check_icrc=True, check_tcp=True, hosts=hosts)
    if pattern.sizes is not None:
        reader.decoder.expect(0, pattern.sizes)
    reader.read(path)
    begun = all(c.from_start for ring in reader.decoder.sorted.rings for c in ring.channels)
    shifts = [0] if begun else range(len(pattern.made.reductions))
    assert any(agrees(pattern, reader, shift) for shift in shifts)
    return sum(b - a for found in reader.buffers.values() for a, b in found.present)


@pytest.mark.parametrize("part", range(PARTS))
def test_whatever_is_damaged_nothing_is_wrong(part: int, tmp_path: Path) -> None:
    there = sum(check(seed, tmp_path / "x.pcap") for seed in range(part, SEEDS, PARTS))
    assert there > 10_000  # else nothing was compared


def main(first: int, count: int) -> None:
    there, wrong = 0, []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for seed in range(first, first + count):
            try:
                there += check(seed, Path(folder) / "x.pcap")
            except AssertionError:
                wrong.append(seed)
    print(f"{count:,} patterns: {there:,} bytes exact; wrong: {wrong}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
