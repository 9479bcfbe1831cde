"""A sink in this process that holds every law of `agent/sink.py` against the engine."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import xxhash

from everystep.agent.sink import Place, Room, Sealed
from everystep.types import Json, Piece, TensorSpec

_ALIGN = 64
_GUARD = 0xA5
"""What a slot is full of before it is granted: pieces do not touch each other."""


@dataclass
class Step:
    """What was sealed, copied out of the slot."""

    specs: dict[str, TensorSpec]
    pieces: dict[Piece, bytes]
    rest: dict[str, bytes]
    hashes: dict[Piece, str]
    """Those that came with it."""
    whole: Mapping[str, str]
    still: bool
    tree: Json
    metrics: Mapping[str, Json]

    @property
    def tensors(self) -> dict[str, bytes]:
        """By key, of those that one piece holds whole."""
        return {piece.key: data for piece, data in self.pieces.items()} | self.rest


@dataclass
class _Layout:
    specs: dict[str, TensorSpec]
    pieces: list[Piece]
    place: Place


class MemorySink:
    """Slots as plain memory.

    Args:
        slots: how many.
        keep: whether what is sealed is kept in `steps`.
    """

    def __init__(self, slots: int = 3, *, keep: bool = True) -> None:
        self.steps: dict[int, Step] = {}
        self.sealed: list[int] = []
        self.released = 0
        self.described = 0
        self.waits_s: list[float] = []
        """What `acquire` was asked to wait."""
        self.fail_seal: BaseException | None = None
        self._keep, self._slots = keep, slots
        self._layout: _Layout | None = None
        self._memory: list[bytearray] = []
        self._free: list[int] = []
        self._held_back = False
        self._taken: int | None = None
        self._changed = threading.Condition()

    def hold_back(self, held: bool = True) -> None:
        """Grant no slot from now on, or again."""
        with self._changed:
            self._held_back = held
            self._changed.notify_all()

    # ------------------------------------------------------------ the four verbs

    def describe(
        self, specs: Sequence[TensorSpec], pieces: Sequence[Piece], rest_bytes: int
    ) -> Place:
        """See `Sink.describe`."""
        assert self._taken is None, "a description while a slot is being filled"
        self.described += 1
        by_key = {spec.key: spec for spec in specs}
        assert len(by_key) == len(specs) and {piece.key for piece in pieces} <= set(by_key)
        offsets, end = [], _ALIGN
        for piece in pieces:
            offsets.append(end)
            end = _aligned(end + _nbytes(by_key[piece.key], piece) + 1)
        place = Place(self.described, offsets, end, _aligned(end + rest_bytes))
        self._layout = _Layout(by_key, list(pieces), place)
        self._memory = [bytearray([_GUARD]) * place.slot_bytes for _ in range(self._slots)]
        self._free = list(range(self._slots))
        return place

    def acquire(self, wait_s: float) -> Room | None:
        """See `Sink.acquire`."""
        assert self._taken is None, "two slots at once"
        self.waits_s.append(wait_s)
        until_s = time.monotonic() + wait_s
        with self._changed:
            while self._held_back or not self._free:
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    return None
                self._changed.wait(left_s)
            slot = self._free.pop(0)
            self._taken = slot
        memory = self._memory[slot]
        if self._keep:
            memory[:] = bytes([_GUARD]) * len(memory)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        return Room(slot, address, memoryview(memory))

    def release(self, slot: int) -> None:
        """See `Sink.release`."""
        with self._changed:
            assert self._taken == slot, "a slot that is not held"
            self._taken = None
            self.released += 1
            self._free.append(slot)
            self._changed.notify_all()

    def seal(self, sealed: Sealed) -> None:
        """See `Sink.seal`."""
        if self.fail_seal is not None:
            raise self.fail_seal
        layout = self._layout
        assert layout is not None and sealed.layout == layout.place.layout
        assert self._taken == sealed.slot, "a slot that is not held"
        assert not self.sealed or sealed.step > self.sealed[-1]
        if self._keep:
            self.steps[sealed.step] = self._read(sealed, layout)
        with self._changed:
            self.sealed.append(sealed.step)
            self._taken = None
            self._free.append(sealed.slot)
            self._changed.notify_all()

    # ------------------------------------------------------------ what was put there

    def _read(self, sealed: Sealed, layout: _Layout) -> Step:
        memory, place = self._memory[sealed.slot], layout.place
        pieces = {}
        for piece, offset in zip(layout.pieces, place.offsets, strict=True):
            nbytes = _nbytes(layout.specs[piece.key], piece)
            pieces[piece] = bytes(memory[offset : offset + nbytes])
            end = _aligned(offset + nbytes + 1)
            assert set(memory[offset + nbytes : end]) <= {_GUARD}, f"written beyond {piece}"
        rest, at = {}, place.rest_offset
        for spec in sealed.rest:
            rest[spec.key] = bytes(memory[at : at + spec.nbytes])
            at += spec.nbytes
        assert at <= place.slot_bytes
        assert set(memory[at:]) <= {_GUARD}, "written beyond the rest"
        hashes = {layout.pieces[number]: digest for number, digest in sealed.hashes.items()}
        for piece, digest in hashes.items():
            assert digest == xxhash.xxh3_128(pieces[piece]).hexdigest(), f"hash of {piece}"
        for key, digest in sealed.whole.items():
            assert key in layout.specs and len(digest) == 32
        specs = layout.specs | {spec.key: spec for spec in sealed.rest}
        tree: Any = msgspec.json.decode(sealed.tree)
        return Step(
            specs, pieces, rest, hashes, dict(sealed.whole), sealed.still, tree, sealed.metrics
        )


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def _nbytes(spec: TensorSpec, piece: Piece) -> int:
    return (piece.stop - piece.start) * (spec.nbytes // spec.elements if spec.elements else 0)
