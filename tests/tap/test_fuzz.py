"""Mutated packets through every parser to the end: no error but ours, no hang, bounded memory.

The file, the frames, TCP and gloo, RoCE and NCCL, assembly. Checksums are not looked at, so that
what was changed gets as far as it can. More by hand, with the number of mutated packets and the
first seed: `PYTHONPATH=tests python tests/tap/test_fuzz.py 1000000 0`
"""

from __future__ import annotations

import contextlib
import random
import resource
import sys
import time
from collections.abc import Iterable, Iterator

import numpy as np
import pytest

from everystep.errors import NotACapture
from everystep.tap import capture
from everystep.tap.gloo import Gloo
from everystep.tap.nccl import Decoder, Options
from everystep.tap.packets import Parser
from everystep.tap.pieces import Frames, Packets, Reduced
from everystep.tap.ring import Assembler, Event
from everystep.tap.rings import Doubt
from everystep.tap.roce import Tracker
from tap import frames as f
from tap.generator import Job, Wire, mirrored, random_inputs
from tap.gloo_wire import Group

COUNT = 20_000
"""Mutated packets in the ordinary tests."""

LARGEST_BYTES = 1 << 20
"""Of a buffer that mutated packets can make an assembler keep."""

MOST_S = 20.0
"""For one capture of a few hundred packets, on a machine that does other things too."""

TELLING = (0, 1, 2, 0x7F, 0x80, 0xFE, 0xFF)


def _nccl(wire: Wire) -> list[bytes]:
    made = Job(wire, seed=1)
    for number, size in enumerate((3, 500, 3000)):
        made.all_reduce(random_inputs(wire, size, number))
    return [packet.frame for packet in mirrored(made.packets, 0)]


def _gloo(ranks: int) -> list[bytes]:
    group = Group(ranks, mtu=1448)
    for size in (10, 1000):
        values = [np.full(size, rank, np.float32) for rank in range(ranks)]
        list(group.all_reduce(values))
    group.close()
    return list(group.packets)


NCCL = [
    _nccl(wire)
    for wire in (
        Wire(mtu=1024),
        Wire(ranks=3, protocol="LL128", mtu=1024),
        Wire(ranks=3, protocol="Simple", mtu=1024, ip=4, vlan=3, channels=2),
        Wire(mtu=1024, adaptive=True, queue_pairs=2, version=24),
    )
]
CUT = [_nccl(Wire(mtu=1024, queue_pairs=q, split=True, adaptive=q > 2)) for q in (2, 3)]
GLOO = [_gloo(2), _gloo(3)]


def mutated(frames: list[bytes], draw: random.Random) -> tuple[list[bytes], int]:
    """Bytes changed (headers most of all), inserted and cut off; frames lost, doubled, swapped and
    spliced; and how many packets that hit."""
    share = draw.choice((0.02, 0.2, 0.7))
    out: list[bytes] = []
    hit = 0
    for frame in frames:
        if draw.random() >= share:
            out.append(frame)
            continue
        hit += 1
        changed = bytearray(frame)
        for _ in range(draw.choice((1, 1, 3, 10))):
            kind = draw.random()
            at = draw.randrange(min(len(changed), 120) if draw.random() < 0.9 else len(changed))
            if kind < 0.7:
                changed[at] = draw.choice(TELLING) if draw.random() < 0.6 else draw.randrange(256)
            elif kind < 0.8:
                changed[at : at + 4] = draw.randbytes(4)
            elif kind < 0.9:
                del changed[max(1, at) :]
            else:
                other = draw.choice(frames)
                changed[at:] = other[at:] or b"\0"
        out += [bytes(changed)] * draw.choice((1, 1, 1, 0, 2))
    if draw.random() < 0.3 and out:
        at = draw.randrange(len(out))
        out[at : at + 20] = reversed(out[at : at + 20])
    return out, hit


def batches(data: bytes, draw: random.Random) -> Iterator[Frames]:
    """The frames of a capture file in batches of any size; the file may be damaged itself."""
    if draw.random() < 0.2:
        spoiled = bytearray(data)
        for _ in range(draw.choice((1, 10))):
            spoiled[draw.randrange(len(spoiled))] = draw.choice(TELLING)
        data = bytes(spoiled)
    for frames in capture.File(np.frombuffer(data, np.uint8)):
        size = draw.choice((7, 100, 10_000))
        for at in range(0, len(frames.table), size):
            yield Frames(frames.data, frames.table[at : at + size], frames.first + at)


def assemble(assembler: Assembler, events: Iterable[Event | Doubt]) -> int:
    """Bytes that are said to be there; every range lies in its buffer."""
    there = 0
    for event in events:
        if not isinstance(event, Doubt):
            there += sum(map(_checked, assembler.add(event)))
    return there


def _checked(reduced: Reduced) -> int:
    edges = [edge for run in reduced.present for edge in run]
    assert edges == sorted(edges)
    assert not edges or edges[-1] <= len(reduced.data) <= LARGEST_BYTES
    return sum(b - a for a, b in reduced.present)


def through_nccl(data: bytes, draw: random.Random) -> None:
    parser, tracker = Parser(), Tracker(check_icrc=False, arena_bytes=16 << 20)
    options = Options(
        ranks=draw.choice((2, 3)), element_bytes=4, added_step=draw.choice((None, False)),
        record=draw.random() < 0.2,
    )  # fmt: skip
    decoder = Decoder(tracker, options)
    if draw.random() < 0.6:
        decoder.expect(0, (3, 500, 3000))
    assembler = Assembler(largest_bytes=LARGEST_BYTES, total_bytes=16 * LARGEST_BYTES)
    for frames in batches(data, draw):
        for messages in tracker.feed(parser.parse(frames)):
            assemble(assembler, decoder.feed(messages))
    assemble(assembler, decoder.feed(tracker.flush()))
    assemble(assembler, decoder.finish())
    for reduced in assembler.give_up():
        _checked(reduced)


def through_gloo(data: bytes, draw: random.Random) -> None:
    parser = Parser()
    sizes = draw.choice(([40, 4000], None))
    gloo = Gloo(parser, ranks=draw.choice((2, 3)), **({} if sizes is None else {"sizes": sizes}))
    assembler = Assembler(largest_bytes=LARGEST_BYTES, total_bytes=16 * LARGEST_BYTES)
    for frames in batches(data, draw):
        packets: Packets = parser.parse(frames)
        assemble(assembler, gloo.feed(packets))
    assemble(assembler, gloo.flush(final=True))
    for reduced in assembler.give_up():
        _checked(reduced)


def one(seed: int) -> int:
    """One mutated capture; how many packets were mutated."""
    draw = random.Random(seed)
    through, bases = ((through_nccl, NCCL), (through_gloo, GLOO))[seed % 3 == 0]
    bases = CUT if bases is NCCL and seed % 7 == 1 else bases
    frames, hit = mutated(draw.choice(bases), draw)
    began_s = time.process_time()
    with contextlib.suppress(NotACapture):
        through(f.pcap(frames, big=draw.random() < 0.3, ns=draw.random() < 0.5), draw)
    assert time.process_time() - began_s < MOST_S, seed
    return hit


@pytest.mark.parametrize("part", range(4))
def test_mutated_packets_break_nothing(part: int) -> None:
    done, seed = 0, part
    while done < COUNT // 4:
        done += one(seed)
        seed += 4


@pytest.mark.parametrize("seed", [1462, 1_000_561, 1_003_021, 2_019_745])
def test_what_once_broke_the_decoder_does_not(seed: int) -> None:
    one(seed)


def main(wanted: int, seed: int = 0) -> None:
    done, first, slowest = 0, seed, 0.0
    while done < wanted:
        began_s = time.monotonic()
        done += one(seed)
        slowest = max(slowest, time.monotonic() - began_s)
        seed += 1
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"{done:,} mutated packets, seeds {first} to {seed - 1}")
    print(f"the slowest capture took {slowest:.2f} s, at most {peak} MiB in memory")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
