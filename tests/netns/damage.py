"""Ways in which a mirror may damage what it shows: of a recorded run, one for each seed; and of one
that goes on."""

from __future__ import annotations

import bisect
import random
import signal
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from types import FrameType

from msgspec import Struct
from msgspec.structs import replace

from everystep.tap.live import Live
from netns.cable import IP, Packet, summed, wired
from netns.replayed import MOST_LAG, Replay
from peers.hosts import move_to
from tap.frames import pcap

Way = Callable[[Packet, random.Random], list[Packet]]


def _lost(one: Packet, rng: random.Random) -> list[Packet]:
    return []


def _twice(one: Packet, rng: random.Random) -> list[Packet]:
    return [one, replace(one, at=one.at + rng.choice((0.0, 2.0, 20.0, 400.0)) * rng.random())]


def _late(one: Packet, rng: random.Random) -> list[Packet]:
    return [replace(one, at=one.at + rng.choice((2.0, 20.0, 200.0)) * rng.random())]


def _cut(one: Packet, rng: random.Random) -> list[Packet]:
    return [replace(one, data=one.data[: rng.randint(0, len(one.data))])]


def _flipped(one: Packet, rng: random.Random) -> list[Packet]:
    """One bit, in the headers as likely as behind them."""
    stop = rng.choice((min(len(one.data), IP + 52), len(one.data)))
    bit = rng.randrange(IP * 8, stop * 8)
    data = bytearray(one.data)
    data[bit // 8] ^= 1 << bit % 8
    return [replace(one, data=bytes(data))]


def _garbled(one: Packet, rng: random.Random) -> list[Packet]:
    """Any bytes in the place of some."""
    start = rng.randrange(IP, len(one.data))
    stop = min(len(one.data), start + rng.choice((2, 8, 64, 1500)))
    return [replace(one, data=one.data[:start] + rng.randbytes(stop - start) + one.data[stop:])]


def _unnoticed(way: Way) -> Way:
    """The same, and the checksum is right nevertheless."""

    def changed(one: Packet, rng: random.Random) -> list[Packet]:
        return [replace(each, data=summed(each.data)) for each in way(one, rng)]

    return changed


SEEN: list[Way] = [_lost, _twice, _late, _cut, _flipped, _garbled]
"""What checksums show, if anything does."""

UNSEEN = [_unnoticed(_flipped), _unnoticed(_garbled)]


class Damage:
    """Comes over some packets, one alone or several in a row.

    Args:
        share: of the packets that are damaged.
        longest: in a row, on average.
    """

    def __init__(self, ways: Sequence[Way], share: float, longest: int, rng: random.Random) -> None:
        self._ways, self._share, self._longest, self._rng = ways, share, longest, rng
        self._left, self._way = 0, ways[0]

    def over(self, one: Packet) -> list[Packet]:
        """What becomes of the next packet."""
        if not self._left and self._rng.random() < self._share / self._longest:
            self._left = self._rng.randint(1, 2 * self._longest - 1)
            self._way = self._rng.choice(self._ways)
        if not self._left:
            return [one]
        self._left -= 1
        return self._way(one, self._rng)


class Pattern(Struct):
    """What a mirror shows, and how it is told of."""

    packets: list[Packet]
    sound: range
    """The steps behind all damage."""
    lag: int
    pause: int
    """Both as `Replay.run` takes them."""


def pattern(replay: Replay, seed: int) -> Pattern:
    """What this seed stands for."""
    rng = random.Random(seed)
    packets = replay.packets if rng.random() < 0.2 else replay.wired
    steps = replay.steps
    first, last = rng.choice((steps[0], rng.choice(steps[:8]))), rng.choice(steps[8:14])
    begins, ends = replay.ends[first - 1], float(replay.ends[last])
    ways = rng.sample(SEEN, rng.randint(1, 3))
    if rng.random() < 0.3:
        ways.append(rng.choice(UNSEEN))
    damage = Damage(ways, 10 ** rng.uniform(-4, -1), rng.choice((1, 1, 4, 16, 64)), rng)
    source = rng.choice((None, None, socket.inet_aton(replay.hosts[0])))
    is_from = rng.random() < 0.5
    hole = rng.uniform(begins, ends)
    holes = [(hole, min(ends, hole + rng.choice((10, 100, 500))))] if rng.random() < 0.2 else []
    if rng.random() < 0.2:
        holes.append((packets[0].at, rng.uniform(begins, ends)))
    shown: list[Packet] = []
    for one in packets:
        if any(start <= one.at < stop for start, stop in holes):
            continue
        is_its = source is None or (one.data[26:30] == source) == is_from
        if not (begins <= one.at < ends and is_its):
            shown.append(one)
            continue
        shown += [replace(each, at=min(each.at, ends - 1e-9)) for each in damage.over(one)]
    shown.sort(key=lambda one: one.at)
    sound = range(last + 1, steps.stop)
    return Pattern(shown, sound, rng.choice((0, 0, 10, MOST_LAG)), rng.randint(0, 1))


def stand_between(host: str, interface: str, path: str, seed: int) -> None:
    """Write what an interface shows into a pipe, as a capture; damaged between two SIGUSR1."""
    move_to(host)
    rng = random.Random(seed)
    damage, is_on = Damage(SEEN, 0.03, 2, rng), threading.Event()

    def turn(number: int, frame: FrameType | None) -> None:
        is_on.clear() if is_on.is_set() else is_on.set()

    signal.signal(signal.SIGUSR1, turn)
    waiting: list[Packet] = []
    count = 0
    with Live(interface, roce=False, tcp_ports=None) as live, open(path, "wb") as out:
        out.write(pcap([]))
        while True:
            frames = live.next(0.1)
            for start, _, captured, length in [] if frames is None else frames.table.tolist():
                count += 1
                data = bytes(frames.data[start : start + captured])
                for one in wired([Packet(count, data, length)]):
                    waiting += damage.over(one) if is_on.is_set() else [one]
            waiting.sort(key=lambda one: one.at)
            stop = bisect.bisect(waiting, count, key=lambda one: one.at) if is_on.is_set() else None
            for one in waiting[:stop]:
                head = struct.pack("<4I", 0, 0, len(one.data), one.length)
                out.write(head + one.data)
            out.flush()
            del waiting[:stop]
