"""From packets to reduced buffers, as a shadow would do it; and damage on the way."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from everystep.tap.gloo import Gloo
from everystep.tap.packets import Parser
from everystep.tap.pieces import Reduced
from everystep.tap.reduced import Reader
from everystep.tap.ring import Assembler
from tap.recording import frames_of

Floats = npt.NDArray[np.float32]


class Decoded:
    """Reduced buffers by their number, copied as they came."""

    def __init__(self, **options: Any) -> None:
        parser = Parser()
        self.gloo = Gloo(parser, **options)
        self.assembler = Assembler(behind=1000)
        self.buffers: dict[int, Reduced] = {}
        self.data: dict[int, bytes] = {}
        self._reader = Reader(parser, self.gloo, self.assembler)
        self._frames = 0

    def feed(
        self, packets: list[bytes], *, batch: int = 512, lengths: list[int] | None = None
    ) -> Decoded:
        for at in range(0, len(packets), batch):
            cut = None if lengths is None else lengths[at : at + batch]
            frames = frames_of(packets[at : at + batch], self._frames + 1, cut)
            self._frames += len(frames.table)
            self._keep(self._reader.feed(frames))
        return self

    def settle(self, through: int) -> Decoded:
        self._keep(self._reader.settle(through))
        return self

    def end(self) -> Decoded:
        """Nothing more comes."""
        self._keep(self._reader.end())
        return self

    def _keep(self, buffers: list[Reduced]) -> None:
        for buffer in buffers:
            self.buffers[buffer.collective] = buffer
            self.data[buffer.collective] = buffer.data.tobytes()

    def check(self, truth: Mapping[int, Floats]) -> int:
        """Every byte that is said to be present is right, and the rest is said to be missing;
        returns how many are whole."""
        whole = 0
        for number, buffer in self.buffers.items():
            right, data = truth[number].tobytes(), self.data[number]
            ranges = sorted(buffer.present + buffer.missing)
            assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges)][:-1]
            assert all(start < stop for start, stop in ranges)
            for start, stop in buffer.present:
                assert data[start:stop] == right[start:stop], (number, start, stop)
            for start, stop in buffer.missing:
                assert data[start:stop] == b"\xff" * (stop - start)
            if buffer.sized:
                assert len(data) == len(right)
            whole += buffer.sized and not buffer.missing
        return whole


Damage = Callable[[list[bytes], random.Random, float], tuple[list[bytes], list[int] | None]]


def drop(packets: list[bytes], rng: random.Random, share: float) -> tuple[list[bytes], None]:
    return [packet for packet in packets if rng.random() >= share], None


def drop_bursts(packets: list[bytes], rng: random.Random, share: float) -> tuple[list[bytes], None]:
    kept, left = [], 0
    for packet in packets:
        if left == 0 and rng.random() < share / 8:
            left = rng.randint(1, 16)
        left = max(0, left - 1)
        if not left:
            kept.append(packet)
    return kept, None


def duplicate(packets: list[bytes], rng: random.Random, share: float) -> tuple[list[bytes], None]:
    return [p for packet in packets for p in [packet] * (1 + (rng.random() < share))], None


def reorder(packets: list[bytes], rng: random.Random, share: float) -> tuple[list[bytes], None]:
    moved = [
        (i + rng.random() * 6 * (rng.random() < share), packet) for i, packet in enumerate(packets)
    ]
    return [packet for _, packet in sorted(moved, key=lambda pair: pair[0])], None


def truncate(
    packets: list[bytes], rng: random.Random, share: float
) -> tuple[list[bytes], list[int]]:
    cut = [
        packet[: rng.randint(20, len(packet))] if rng.random() < share else packet
        for packet in packets
    ]
    return cut, [len(packet) for packet in packets]


def corrupt(packets: list[bytes], rng: random.Random, share: float) -> tuple[list[bytes], None]:
    """One bit of some packets, from the addresses of IP on: the rest has checksums of its own."""
    changed = []
    for packet in packets:
        if rng.random() < share:
            bit = rng.randrange(26 * 8, len(packet) * 8)
            as_list = bytearray(packet)
            as_list[bit // 8] ^= 1 << bit % 8
            packet = bytes(as_list)
        changed.append(packet)
    return changed, None


HARMLESS: dict[str, Damage] = {
    "drop": drop,
    "bursts": drop_bursts,
    "duplicate": duplicate,
    "reorder": reorder,
    "truncate": truncate,
}
"""What changes no byte of a packet."""
