"""The decoder against synthetic captures: any ring, protocol, version, and what a mirror may lose.

`generator` walks the device loop of every rank and knows nothing of the decoder.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from pathlib import Path

import numpy as np
import pytest

from everystep.cli.tap_report import DTYPES, Reader
from everystep.tap.nccl import Options
from tap.generator import Job, Packet, Wire, damaged, mirrored, random_inputs, write

SIZES = (5_000, 3, 40_001)
"""Elements of the buckets of an iteration."""


def job(wire: Wire, iterations: int = 2, *, seed: int = 0, sizes: tuple[int, ...] = SIZES) -> Job:
    """A job that has reduced its buckets so often."""
    made = Job(wire, seed=seed)
    for i in range(iterations):
        for b, n in enumerate(sizes):
            made.all_reduce(random_inputs(wire, n, 100 * i + b))
    return made


def read(path: Path, wire: Wire, packets: list[Packet], sizes: tuple[int, ...] = SIZES) -> Reader:
    """Decode what a mirror has shown."""
    write(path / "x.pcap", packets)
    options = Options(ranks=wire.ranks, element_bytes=DTYPES[wire.dtype])
    reader = Reader(options, wire.dtype, check_icrc=wire.check_sums)
    reader.decoder.expect(0, sizes)
    reader.read(path / "x.pcap")
    return reader


def prove(made: Job, reader: Reader, *, whole: bool) -> int:
    """Every range that is said to be there is what the ranks have; returns the bytes there."""
    there = 0
    for reduction in made.reductions:
        found = reader.buffers.get(reduction.number)
        if found is None:
            assert not whole, f"all-reduce {reduction.number} is not there"
            continue
        assert not found.mismatches
        for start, stop in found.present:
            assert stop <= len(reduction.reduced)
            assert np.array_equal(found.data[start:stop], reduction.reduced[start:stop])
            there += stop - start
        if whole:
            assert not found.missing
            assert len(found.data) == len(reduction.reduced)
    assert not set(reader.buffers) - {reduction.number for reduction in made.reductions}
    return there


PROTOCOLS = ("LL", "LL128", "Simple")
WIRES = [
    *(
        Wire(ranks=k, channels=c, protocol=p, version=v)
        for p, k, c, v in itertools.product(PROTOCOLS, (2, 3, 4, 8), (1, 2), (19, 22))
        if (p, v) != ("LL128", 22)
    ),
    *(Wire(protocol=p, dtype=d) for p in PROTOCOLS for d in ("float16", "bfloat16", "int32")),
    *(Wire(protocol=p, mtu=1024, ip=4, vlan=7) for p in PROTOCOLS),
    *(Wire(protocol=p, queue_pairs=2) for p in PROTOCOLS),
    *(Wire(protocol=p, adaptive=True) for p in PROTOCOLS),
    *(
        Wire(protocol=p, queue_pairs=q, split=True, ranks=k, adaptive=a)
        for p, q, k, a in itertools.product(PROTOCOLS, (2, 3, 4), (2, 3), (False, True))
    ),
    *(Wire(protocol=p, queue_pairs=2, split=True, version=24, mtu=1024) for p in PROTOCOLS),
    *(Wire(protocol=p, queue_pairs=2, split=True, channels=2) for p in ("LL", "Simple")),
    *(Wire(protocol=p, version=v) for p in PROTOCOLS for v in (24, 29, 30)),
    *(Wire(protocol=p, version=20) for p in ("LL", "Simple")),
]
REFUSED = [
    *(Wire(protocol="LL128", version=v) for v in (20, 22)),
    *(Wire(protocol="LL128", version=v, channels=2) for v in (22, 24, 30)),
]
"""What the wire does not tell enough of, or is not put together."""


def name(wire: Wire) -> str:
    """What is not as by default."""
    plain = Wire()
    parts = {k: v for k, v in vars(wire).items() if v != getattr(plain, k)}
    return "-".join(f"{key}={value}" for key, value in parts.items()) or "default"


@pytest.mark.parametrize("wire", WIRES, ids=name)
def test_a_port_shows_all(wire: Wire, tmp_path: Path) -> None:
    made = job(wire)
    reader = read(tmp_path, wire, mirrored(made.packets, 0))
    prove(made, reader, whole=True)


@pytest.mark.parametrize("wire", REFUSED, ids=name)
def test_what_cannot_be_read_is_left_out_and_counted(wire: Wire, tmp_path: Path) -> None:
    made = job(wire, sizes=(5_000, 40_001))
    reader = read(tmp_path, wire, mirrored(made.packets, 0), (5_000, 40_001))
    assert not reader.buffers
    assert reader.decoder.left_out


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_one_direction_lacks_one_chunk(protocol: str, ranks: int, tmp_path: Path) -> None:
    wire = Wire(ranks=ranks, protocol=protocol)
    made = job(wire)
    reader = read(tmp_path, wire, mirrored(made.packets, 1, "out"))
    there = prove(made, reader, whole=False)
    nbytes = sum(len(reduction.reduced) for reduction in made.reductions)
    assert 0 < there < nbytes


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    "damage",
    [
        {"lost": 1e-3}, {"lost": 0.01}, {"lost": 0.1}, {"doubled": 0.05}, {"delayed": 0.05},
        {"cut": 0.01}, {"flipped": 0.01},
        {"lost": 0.01, "doubled": 0.01, "delayed": 0.02, "cut": 0.005, "flipped": 0.005},
    ],
    ids=lambda damage: "+".join(f"{k}={v}" for k, v in damage.items()),
)  # fmt: skip
def test_damage_is_known(protocol: str, damage: dict[str, float], tmp_path: Path) -> None:
    """What is lost is missing, and nothing is invented."""
    wire = Wire(ranks=3, protocol=protocol, mtu=1024)
    made = job(wire, 4)
    draw = random.Random(f"{protocol} {damage}")
    packets = damaged(mirrored(made.packets, 0), draw, **damage)
    reader = read(tmp_path, wire, packets)
    there = prove(made, reader, whole=False)
    harmless = set(damage) <= {"doubled", "delayed"}
    if harmless:
        assert there == sum(len(reduction.reduced) for reduction in made.reductions)


def test_protocols_may_take_turns_on_a_connection(tmp_path: Path) -> None:
    """Simple takes two steps for a message, so that flags run ahead of the count."""
    wire = Wire()
    made = Job(wire)
    for i in range(3):
        for b, n in enumerate(SIZES):
            made.wire = dataclasses.replace(wire, protocol="Simple" if n > 10_000 else "LL")
            made.all_reduce(random_inputs(wire, n, 100 * i + b))
    reader = read(tmp_path, wire, mirrored(made.packets, 0))
    prove(made, reader, whole=True)
    assert reader.decoder.contradicted == 0


@pytest.mark.parametrize("version", [22, 24])
def test_channels_that_begin_one_after_the_other_are_not_of_one_all_reduce(
    version: int, tmp_path: Path
) -> None:
    """Small buffers go over the first channel alone; sizes are not told, chunks are all alike."""
    wire = Wire(channels=2, protocol="Simple", version=version)
    made = job(wire)
    write(tmp_path / "x.pcap", mirrored(made.packets, 0))
    reader = Reader(Options(ranks=2, element_bytes=4), wire.dtype, check_icrc=True)
    reader.read(tmp_path / "x.pcap")
    prove(made, reader, whole=False)
