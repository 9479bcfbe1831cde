"""NCCL's socket transport, on synthetic captures: what is whole is right, what is lost is told."""

from __future__ import annotations

import dataclasses
import itertools
import random
from pathlib import Path

import numpy as np
import pytest

from everystep.cli.tap_report import DTYPES, Reader
from everystep.tap.nccl import Options
from everystep.tap.packets import Parser
from everystep.tap.socket_streams import MAX_MESSAGE_BYTES
from everystep.tap.sockets import Tracker
from tap.generator import Packet, Wire, damaged, mirrored, random_inputs, write
from tap.gloo_wire import Group
from tap.recording import frames_of
from tap.socket_wire import HANDSHAKE, SocketJob
from tap.test_generated import PROTOCOLS, SIZES, name, prove

WIRES = [
    *(
        Wire(ranks=k, channels=c, protocol=p, version=v, mtu=1448)
        for p, k, c, v in itertools.product(PROTOCOLS, (2, 3, 4), (1, 2), (19, 22))
        if (p, c, v) != ("LL128", 2, 22)
    ),
    *(Wire(protocol=p, dtype="bfloat16", mtu=8948) for p in PROTOCOLS),
    *(Wire(protocol=p, version=28, ranks=8, mtu=65_000) for p in PROTOCOLS),
]
"""The segments end anywhere in lines and elements."""


def job(wire: Wire, iterations: int = 2, *, sockets: int = 0) -> SocketJob:
    """A job that has reduced its buckets so often."""
    made = SocketJob(wire, sockets=sockets)
    for i in range(iterations):
        for b, n in enumerate(SIZES):
            made.all_reduce(random_inputs(wire, n, 100 * i + b))
    return made


def read(
    path: Path,
    wire: Wire,
    packets: list[Packet],
    *,
    are_hosts_told: bool = True,
    is_version_told: bool = True,
    check_tcp: bool = False,
) -> Reader:
    """Decode what a mirror has shown."""
    write(path / "x.pcap", packets)
    options = Options(
        ranks=wire.ranks,
        element_bytes=DTYPES[wire.dtype],
        minor=wire.version if is_version_told else None,
    )
    hosts = [f"10.0.0.{rank + 1}" for rank in range(wire.ranks)] if are_hosts_told else []
    reader = Reader(options, wire.dtype, check_icrc=True, check_tcp=check_tcp, hosts=hosts)
    reader.decoder.expect(0, SIZES)
    reader.read(path / "x.pcap")
    return reader


def counts(reader: Reader) -> dict[str, int]:
    return reader.sockets.counts()


@pytest.mark.parametrize("wire", WIRES, ids=name)
def test_a_port_shows_all(wire: Wire, tmp_path: Path) -> None:
    made = job(wire)
    reader = read(tmp_path, wire, mirrored(made.packets, 0))
    prove(made, reader, whole=True)
    assert reader.decoder.left_out == counts(reader)["holes"] == 0


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_one_direction_lacks_one_chunk(protocol: str, ranks: int, tmp_path: Path) -> None:
    wire = Wire(ranks=ranks, protocol=protocol, mtu=1448)
    made = job(wire)
    reader = read(tmp_path, wire, mirrored(made.packets, 1, "out"))
    there = prove(made, reader, whole=False)
    assert 0 < there < sum(len(reduction.reduced) for reduction in made.reductions)


def test_protocols_may_take_turns_on_a_connection(tmp_path: Path) -> None:
    wire = Wire(mtu=1448)
    made = SocketJob(wire)
    for i in range(3):
        for b, n in enumerate(SIZES):
            made.wire = dataclasses.replace(wire, protocol="Simple" if n > 10_000 else "LL")
            made.all_reduce(random_inputs(wire, n, 100 * i + b))
    prove(made, read(tmp_path, wire, mirrored(made.packets, 0)), whole=True)


# ---------------------------------------------------------------- what a mirror may lose


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize(
    "damage",
    [
        {"lost": 1e-3}, {"lost": 0.01}, {"lost": 0.1}, {"doubled": 0.05}, {"delayed": 0.05},
        {"cut": 0.01}, {"lost": 0.01, "doubled": 0.01, "delayed": 0.02, "cut": 0.005},
    ],
    ids=lambda damage: "+".join(f"{k}={v}" for k, v in damage.items()),
)  # fmt: skip
def test_damage_is_known(
    protocol: str, channels: int, damage: dict[str, float], tmp_path: Path
) -> None:
    """What is lost is missing, and nothing is invented."""
    wire = Wire(ranks=3, channels=channels, protocol=protocol, mtu=1448)
    made = job(wire, 4)
    draw = random.Random(f"{protocol} {channels} {damage}")
    seen = mirrored(made.packets, 0)
    handshakes = 2 * channels * HANDSHAKE
    seen = seen[:handshakes] + damaged(seen[handshakes:], draw, **damage)
    there = prove(made, read(tmp_path, wire, seen), whole=False)
    if set(damage) == {"doubled"}:
        assert there == sum(len(reduction.reduced) for reduction in made.reductions)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_order_of_packets_does_not_matter(protocol: str, tmp_path: Path) -> None:
    wire = Wire(ranks=3, channels=2, protocol=protocol, mtu=1448)
    made = job(wire)
    seen, draw = mirrored(made.packets, 0), random.Random(protocol)
    places = {place + draw.uniform(0, 4): packet for place, packet in enumerate(seen)}
    mixed = [packet for _, packet in sorted(places.items())]
    handshakes = 4 * HANDSHAKE
    late = [packet for packet in mixed if packet not in seen[:handshakes]]
    prove(made, read(tmp_path, wire, seen[:handshakes] + late), whole=True)


def test_damaged_segments_are_dropped_by_their_checksums(tmp_path: Path) -> None:
    wire = Wire(ranks=3, protocol="Simple", mtu=1448)
    made = job(wire, 4)
    packets = damaged(mirrored(made.packets, 0), random.Random(1), flipped=0.01)
    assert prove(made, read(tmp_path, wire, packets, check_tcp=True), whole=False) > 0


def lost(made: SocketJob, reader: Reader) -> dict[int, list[tuple[int, int]]]:
    """What is missing of each buffer, where something is."""
    prove(made, reader, whole=False)
    assert len(reader.buffers) == len(made.reductions)
    found = {number: [*buffer.missing] for number, buffer in reader.buffers.items()}
    return {number: missing for number, missing in found.items() if missing}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_hole_inside_a_message_costs_its_own_bytes(protocol: str, tmp_path: Path) -> None:
    wire = Wire(protocol=protocol, mtu=1448)
    made = job(wire, 3)
    seen = mirrored(made.packets, 0)
    largest = [i for i, p in enumerate(seen) if len(p.frame) == 54 + 1448]
    middle = seen[largest[len(largest) // 2]]
    reader = read(tmp_path, wire, [p for p in seen if p is not middle])
    gaps = [stop - start for missing in lost(made, reader).values() for start, stop in missing]
    assert sum(gaps) <= 1920 * 2 and counts(reader)["holes"] == 0


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_hole_that_takes_a_size_costs_no_other_message(protocol: str, tmp_path: Path) -> None:
    """Each of the messages of the third iteration, one after the other, loses its first segment."""
    wire = Wire(protocol=protocol, mtu=1448)
    made = job(wire, 5)
    third = made.reductions[6]
    first = [i for i in range(third.first, third.stop) if made.is_first[i]]
    for i in first:
        packets = made.packets[:i] + made.packets[i + 1 :]
        reader = read(tmp_path, wire, mirrored(packets, 0))
        missing = lost(made, reader)
        assert set(missing) <= {6, 7}, "the message whose beginning is gone, or what it ended"
        assert counts(reader)["holes"] == 1


# ---------------------------------------------------------------- what is not read


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_capture_from_the_middle_is_read_on_one_channel(protocol: str, tmp_path: Path) -> None:
    wire = Wire(protocol=protocol, mtu=1448, ranks=3)
    made = job(wire, 8)
    begun = made.reductions[4]  # not at the beginning of an iteration
    packets = made.packets[(begun.first + begun.stop) // 2 :]
    reader = read(tmp_path, wire, mirrored(packets, 0))
    assert len(reader.buffers) >= 9 and not reader.decoder.doubts
    later = made.reductions[-len(reader.buffers) :]
    for number, reduction in zip(sorted(reader.buffers), later, strict=True):
        buffer = reader.buffers[number]
        assert not buffer.missing and np.array_equal(buffer.data, reduction.reduced)


def test_channels_from_before_the_capture_have_no_order_and_are_not_read(tmp_path: Path) -> None:
    wire = Wire(channels=2, mtu=1448)
    made = job(wire, 4)
    packets = mirrored(made.packets[made.reductions[0].stop :], 0)
    reader = read(tmp_path, wire, packets)
    assert not reader.buffers
    assert counts(reader)["unordered"] == 4


@pytest.mark.parametrize("sockets", [1, 4])
def test_data_over_several_sockets_is_not_read(sockets: int, tmp_path: Path) -> None:
    wire = Wire(mtu=1448)
    made = job(wire, sockets=sockets)
    reader = read(tmp_path, wire, mirrored(made.packets, 0))
    assert not reader.buffers
    assert counts(reader)["split"] == 2 * (sockets + 1)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_is_not_told_is_not_guessed(protocol: str, tmp_path: Path) -> None:
    """Without the version, or without hosts where chunks are alike, there is nothing or the
    truth."""
    for version, told in itertools.product((19, 22), ((True, False), (False, True))):
        wire = Wire(protocol=protocol, version=version, channels=2, mtu=1448)
        made = job(wire)
        packets = mirrored(made.packets, 0)
        reader = read(tmp_path, wire, packets, are_hosts_told=told[0], is_version_told=told[1])
        prove(made, reader, whole=False)


def test_other_connections_are_left_alone(tmp_path: Path) -> None:
    wire = Wire(mtu=1448)
    made = job(wire)
    group = Group(2, mtu=1448)
    for i in range(3):
        group.all_reduce(random_inputs(wire, 50_000, i))
    noise = [Packet(0, 1, frame, is_data=False) for frame in group.packets]
    seen = mirrored(made.packets, 0)
    mixed = [p for pair in itertools.zip_longest(seen, noise) for p in pair if p is not None]
    reader = read(tmp_path, wire, mixed)
    prove(made, reader, whole=True)
    assert counts(reader)["foreign"] >= 1


def test_a_stream_of_nothing_but_empty_messages_is_not_nccls() -> None:
    made = SocketJob(Wire(mtu=60_000))
    made.stream(made.sides[0, 0][0], bytes(1 << 20))
    tracker = Tracker()
    (messages,) = tracker.feed(Parser().parse(frames_of([p.frame for p in made.packets])))
    assert not len(messages.table)
    assert tracker.counts()["foreign"] == 1


def test_garbage_is_bounded_and_gives_nothing() -> None:
    """Streams of NCCL's with sizes that are none, or the largest, or text; cut and changed."""
    draw = random.Random(0)
    wire = Wire(protocol="Simple", mtu=1448)
    for trial in range(60):
        made = SocketJob(wire)
        side = made.sides[0, 0][0]
        for _ in range(draw.randrange(1, 40)):
            kind = draw.randrange(5)
            if kind == 0:
                made.stream(side, draw.randbytes(draw.randrange(1, 9000)))
            elif kind == 1:
                made.stream(side, bytes(draw.randrange(1, 9000)))
            elif kind == 2:
                made.stream(side, (b"%d\0\0\0" % draw.randrange(10)) * draw.randrange(1, 2000))
            elif kind == 3:
                made.stream(side, MAX_MESSAGE_BYTES.to_bytes(4, "little"))
            else:
                made.all_reduce(random_inputs(wire, draw.randrange(1, 3000), trial))
        packets = damaged(made.packets, draw, lost=0.02, doubled=0.02, delayed=0.02, cut=0.02)
        parser, tracker = Parser(), Tracker()
        for at in range(0, len(packets), 50):
            frames = frames_of([p.frame for p in packets[at : at + 50]], at + 1)
            for messages in tracker.feed(parser.parse(frames)):
                assert (messages.table["length"] <= MAX_MESSAGE_BYTES).all()
        tracker.flush()
