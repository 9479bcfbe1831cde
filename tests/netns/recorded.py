"""A run and its shadow, recorded: the frames of the mirrored port, and all that agents told."""

from __future__ import annotations

import collections
import logging
import os
import threading
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from everystep.agent import protocol as p
from everystep.agent import shadow as process
from everystep.agent import wire as w
from everystep.agent.image import Image
from everystep.agent.shadow_copy import Keeping, ShadowCopy
from everystep.agent.shadow_wire import WireSource
from everystep.errors import StoreFailed
from everystep.store import addresses as at
from everystep.tap.live import Live
from everystep.tap.pieces import Frames
from netns.job import tell
from peers.hosts import move_to

STEPS = 24
"""That are recorded, one after the other."""

_MANY = STEPS + 10
"""Ranks may begin with different ones."""
_EARLY = 5
"""Of a state after one of the first steps, the end is not seen: buckets are made anew after it."""

_NEVER_S = 3600.0


class State(Struct):
    """That a rank's agent gave."""

    rank: int
    describe: p.Describe
    seal: p.Seal
    data: bytes


class Told(Struct):
    """What a rank's agent told of a step."""

    rank: int
    record: p.Record
    layout: bytes
    data: bytes
    found: bytes
    """The same with the gradients."""


class Recording(Struct):
    """All frames, and from a state of each rank on what its agent told."""

    begins: dict[int, p.Begin]
    """By rank."""
    states: dict[int, State]
    told: list[Told]
    """In the order in which they came."""
    frames: list[bytes]

    @property
    def is_whole(self) -> bool:
        """Whether enough steps in a row were had of all ranks."""
        counts = collections.Counter(one.rank for one in self.told)
        ranks = {rank for begin in self.begins.values() for rank in range(begin.world_size)}
        return bool(ranks) and all(counts[rank] >= _MANY for rank in ranks)


class _Seen(Live):
    """A mirror that keeps what it shows."""

    def __init__(self, interface: str) -> None:
        # room for whatever comes while this process stands still
        super().__init__(interface, roce=False, tcp_ports=None, block_bytes=1 << 17, blocks=1024)
        self.frames: list[bytes] = []

    def next(self, timeout_s: float) -> Frames | None:
        frames = super().next(timeout_s)
        if frames is not None:
            for start, _, captured, length in frames.table.tolist():
                assert captured == length
                self.frames.append(frames.data[start : start + captured].tobytes())
        return frames


def shadow(
    folder: str, address: str, port: int, token_file: str, host: str, interface: str
) -> None:
    """A shadow that leaves a recording, once it has had enough steps in a row."""
    move_to(host)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    seen, guard = _Seen(interface), threading.Condition()
    kept = Recording({}, {}, [], seen.frames)

    class Copy(ShadowCopy):
        """One that keeps what it is given."""

        def __init__(self, keeping: Keeping, begin: p.Begin, *others: Any) -> None:
            super().__init__(keeping, begin, *others)
            with guard:
                kept.begins[begin.rank] = begin

        def _image(self, base: w.Base) -> Image:
            made, rank = super()._image(base), self.begin.rank
            data = bytes(made.slot[: base.nbytes])
            with guard:
                kept.states[rank] = State(rank, base.describe, base.seal, data)
                kept.told = [one for one in kept.told if one.rank != rank]
            return made

        def _whole(self, record: p.Record, data: memoryview, opened: p.OpenLog) -> memoryview:
            if record.step <= _EARLY:
                raise StoreFailed("not recorded")
            rank, given = self.begin.rank, bytes(data)
            found = super()._whole(record, data, opened)
            with guard:
                kept.told.append(Told(rank, record, opened.layout, given, bytes(found)))
                guard.notify_all()
            return found

    def say(level: int, text: str) -> None:
        tell("said", 0, level=level, text=text)

    process.ShadowCopy = Copy  # type: ignore[misc]
    process.Shadow(
        Keeping(path=Path(folder) / "shadow", persist_every=1000, keep_last=2),
        address, port, at.read_secret(Path(token_file)),
        WireSource(seen, say, wait_s=_NEVER_S), say,
    )  # fmt: skip
    tell("listens", port)
    with guard:
        guard.wait_for(lambda: kept.is_whole)
        (Path(folder) / "recording").write_bytes(msgspec.msgpack.encode(kept))
    os._exit(0)  # training goes on, and there is nothing to be rescued
