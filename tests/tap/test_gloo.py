"""gloo's streams from packets made here: what is whole is right, what is lost is told."""

from __future__ import annotations

import random
import struct

import numpy as np
import numpy.typing as npt
import pytest

from everystep.errors import UsageError
from everystep.tap.gloo import Gloo
from everystep.tap.packets import Parser
from everystep.tap.tcp import Reassembler
from tap.decoding import HARMLESS, Decoded, corrupt
from tap.gloo_wire import Group, operation

Floats = npt.NDArray[np.float32]

SIZES = [700, 901, 64, 901, 333]


def inputs(ranks: int, count: int, seed: int = 0) -> list[Floats]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(count, dtype=np.float32) for _ in range(ranks)]


def hosts(ranks: int) -> dict[str, int]:
    return {f"10.0.0.{rank + 1}": rank for rank in range(ranks)}


def job(
    ranks: int, *, mtu: int = 300, seen: int | None = 0, seed: int = 0
) -> tuple[Group, dict[int, Floats]]:
    """Ten rounds of all-reduces, of which two run at a time, and others between."""
    group = Group(ranks, mtu=mtu, seen=seen, seed=seed)
    truth: dict[int, Floats] = {}
    for i in range(10):
        first, second = SIZES[i % 5], SIZES[(i + 1) % 5]
        truth |= dict(group.all_reduce(inputs(ranks, first, i), inputs(ranks, second, 100 + i)))
        if i % 3 == 0:
            group.other()
    group.close()
    return group, truth


TOLD = [4 * size for size in SIZES]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("sizes", [TOLD, None], ids=["sizes told", "any size"])
@pytest.mark.parametrize("are_hosts_told", [True, False])
@pytest.mark.parametrize("batch", [1, 100_000])
def test_both_directions_of_one_port_give_every_buffer(
    ranks: int, sizes: list[int] | None, are_hosts_told: bool, batch: int
) -> None:
    group, truth = job(ranks)
    told = hosts(ranks) if are_hosts_told else None
    decoded = Decoded(ranks=ranks, sizes=sizes, hosts=told).feed(group.packets, batch=batch)
    assert decoded.settle(1 << 20).end().check(truth) == len(truth) == 20
    assert decoded.assembler.alarms == []


def test_all_ports_give_every_range_on_all_links_but_one_and_twins_agree() -> None:
    group, truth = job(4, seen=None)
    decoded = Decoded(ranks=4, sizes=TOLD, hosts=hosts(4)).feed(group.packets)
    assert decoded.end().check(truth) == 20
    copies = sum(source.stop - source.start for source in decoded.buffers[0].sources)
    # the twins that came after the buffer was whole are compared, and are no sources any more
    assert truth[0].nbytes < copies <= 3 * truth[0].nbytes
    assert decoded.assembler.alarms == []


def test_one_direction_lacks_one_chunk_exactly() -> None:
    group, truth = job(2)
    packets = [p for p in group.packets if p[26:30] == bytes([10, 0, 0, 1])]  # sent by rank 0
    decoded = Decoded(ranks=2, sizes=TOLD, hosts=hosts(2)).feed(packets).end()
    decoded.check(truth)
    half = -(-700 // 4) * 4 * 2  # two of four segments
    assert decoded.buffers[0].present == ((0, half),)
    assert decoded.buffers[0].missing == ((half, 2800),)


def test_a_rank_that_cannot_be_known_gives_nothing() -> None:
    group = Group(2)
    truth = dict(group.all_reduce(inputs(2, 400)))  # divides evenly: no short segment
    decoded = Decoded(ranks=2, sizes=[1600]).feed(group.packets).end()
    assert decoded.buffers == {}
    decoded = Decoded(ranks=2, sizes=[1600], hosts=hosts(2)).feed(group.packets).end()
    assert decoded.check(truth) == 1


def test_a_capture_that_begins_in_the_middle() -> None:
    group, truth = job(3)
    for start in range(10, len(group.packets), 97):
        decoded = Decoded(ranks=3, sizes=TOLD, hosts=hosts(3), threads=2)
        decoded.feed(group.packets[start:]).settle(1 << 20).end()
        assert decoded.check(truth) >= 20 * (1 - start / len(group.packets)) - 4


def test_other_sizes_are_left_out_and_one_that_only_begins_like_a_told_one_is_refused() -> None:
    group = Group(2)
    truth = dict(group.all_reduce(inputs(2, 903)))
    group.all_reduce(inputs(2, 5000))
    longer, shorter = 903, 901  # the same segments but for the last
    group.all_reduce(inputs(2, shorter))
    decoded = Decoded(ranks=2, sizes=[4 * longer], hosts=hosts(2)).feed(group.packets).end()
    assert decoded.buffers[0].missing == ()
    assert 1 not in decoded.buffers
    assert decoded.buffers[2].present == ()
    del decoded.buffers[2]
    assert decoded.check(truth) == 1
    assert decoded.gloo.counts()["refused"] >= 1


def test_other_connections_are_told_apart_and_forgotten() -> None:
    group, truth = job(2)
    stranger = Group(2)
    connection, side = stranger._pairs[0, 1]
    connection._ports = (22, 2222)
    stranger.packets.clear()
    connection.open()
    connection.send(side, b"SSH-2.0" + bytes(6000))
    packets = stranger.packets + group.packets
    decoded = Decoded(ranks=2, sizes=TOLD, hosts=hosts(2)).feed(packets).end()
    assert decoded.check(truth) == 20
    assert decoded.gloo.counts()["foreign"] == 1


def test_two_groups_are_never_mixed() -> None:
    first, truth = job(2)
    second = Group(2, seed=1)
    connection, _ = second._pairs[0, 1]
    connection._ports = (41000, 6000)
    second.packets.clear()
    connection.open()
    for i in range(4):
        second.all_reduce(inputs(2, 901, 50 + i))
    packets = first.packets + second.packets
    decoded = Decoded(ranks=2, sizes=TOLD, hosts=hosts(2)).feed(packets).end()
    assert decoded.check(truth) == 20
    assert decoded.gloo.counts()["conflicts"] >= 1
    decoded = Decoded(ranks=2, sizes=TOLD, hosts=hosts(2), ports=[5001]).feed(packets).end()
    assert decoded.check(truth) == 20
    assert decoded.gloo.counts()["conflicts"] == 0


def _without(packets: list[bytes], lost: range) -> list[bytes]:
    return [packet for i, packet in enumerate(packets) if i not in lost]


def test_every_single_packet_lost_is_exact_or_told() -> None:
    group, truth = job(2, mtu=200)
    harmless = 0
    data = [i for i, packet in enumerate(group.packets[:1500]) if len(packet) > 60]
    for i in data[::7]:
        decoded = Decoded(ranks=2, sizes=TOLD, hosts=hosts(2))
        decoded.feed(_without(group.packets, range(i, i + 1))).settle(1 << 20).end()
        found = decoded.check(truth)
        assert found >= 18  # only the two under way can be hurt
        harmless += found == 20
    assert harmless > len(data[::7]) / 10  # what is lost of partial sums alone


@pytest.mark.parametrize("damage", HARMLESS)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_damage_on_the_way_is_exact_or_told(damage: str, ranks: int) -> None:
    group, truth = job(ranks)
    whole = 0
    for seed in range(24):
        rng = random.Random(seed)
        share = 10 ** rng.uniform(-3.5, -0.7)
        packets, lengths = HARMLESS[damage](group.packets, rng, share)
        sizes = rng.choice([TOLD, None])
        told = hosts(ranks) if rng.random() < 0.7 else None
        decoded = Decoded(ranks=ranks, sizes=sizes, hosts=told, threads=2)
        decoded.feed(packets, batch=rng.choice([7, 500]), lengths=lengths)
        if rng.random() < 0.7:
            decoded.settle(1 << 20)
        whole += decoded.end().check(truth)
        assert decoded.assembler.alarms == []
    assert whole > 24 * 20 / 5
    if damage in ("duplicate", "reorder"):
        assert whole > 24 * 20 * 0.9


@pytest.mark.parametrize("ranks", [2, 3])
def test_corrupt_packets_are_left_out_by_their_checksums(ranks: int) -> None:
    group, truth = job(ranks)
    for seed in range(20):
        packets, _ = corrupt(group.packets, random.Random(seed), 0.03)
        decoded = Decoded(
            ranks=ranks, sizes=TOLD, hosts=hosts(ranks), reassembler=Reassembler(checksums=True)
        )
        decoded.feed(packets).settle(1 << 20).end().check(truth)
        assert decoded.gloo.counts()["bad_checksums"] > 0
        assert decoded.assembler.alarms == []


def test_corrupt_packets_without_checksums_harm_nothing_else() -> None:
    """Bytes may be wrong then, but nothing breaks, and memory stays within its bounds."""
    group, _ = job(2)
    for seed in range(30):
        packets, _ = corrupt(group.packets, random.Random(seed), 0.05)
        decoded = Decoded(ranks=2, sizes=None, hosts=hosts(2), waiting_bytes=1 << 20)
        decoded.feed(packets).settle(1 << 20).end()


def test_hostile_preambles() -> None:
    group = Group(2)
    connection, side = group._pairs[0, 1]
    for length in (1 << 20, (1 << 20) + 1, 1 << 39, 1 << 41, (1 << 64) - 1):
        preamble = bytearray(operation(1, 5, b""))
        preamble[0:8] = struct.pack("<Q", length + 48 & (1 << 64) - 1)
        preamble[32:40] = struct.pack("<Q", length)
        connection.send(side, bytes(preamble) + b"x" * 100)
        for tag in range(600):
            connection.send(side, operation(1, tag, b"abcd"))
    decoded = Decoded(ranks=2, sizes=None, hosts=hosts(2)).feed(group.packets).end()
    assert decoded.buffers.keys() <= set(range(600))


def test_arguments_out_of_range_are_refused() -> None:
    for options in ({"ranks": 1}, {"ranks": 2, "sizes": [5]}, {"ranks": 2, "threads": 0}):
        with pytest.raises(UsageError):
            Gloo(Parser(), **options)  # type: ignore[arg-type]
