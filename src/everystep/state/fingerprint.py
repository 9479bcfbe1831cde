"""The rotating fingerprint of a state: at each step one slice is hashed, and a round covers all.

A tensor of LARGE_BYTES or more gives a slice of its elements at every step, the next one each time;
a smaller one is hashed whole, once in a round. What is hashed at a step follows from the step, the
sizes and the order of the tensors alone, so that two processes need not agree on anything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from everystep.state import raw
from everystep.state.shards import shard_of

SLICES = 16
"""Steps in a round."""

LARGE_BYTES = 1 << 16

CUT_ELEMENTS = 64
"""Slices begin at multiples of it, where an optimizer's work may be divided (docs/exactness.md)."""


class Turns(NamedTuple):
    """What is hashed at one step: three int64 arrays of one length."""

    position: npt.NDArray[np.int64]
    """Of the tensor in its sequence, ascending."""
    start: npt.NDArray[np.int64]
    """From this element, in row-major order …"""
    stop: npt.NDArray[np.int64]
    """… to this one, exclusive; start < stop."""


class Rota:
    """Whose turn it is at which step, for tensors of given sizes."""

    def __init__(
        self, elements: Sequence[int], item_bytes: Sequence[int], slices: int = SLICES
    ) -> None:
        self._slices = slices
        self._elements = np.asarray(elements, np.int64)
        large = self._elements * np.asarray(item_bytes, np.int64) >= LARGE_BYTES
        of_slice = -(-self._elements // slices)
        self._length = np.where(large, -(-of_slice // CUT_ELEMENTS) * CUT_ELEMENTS, 0)
        small_first = np.cumsum(~large) - 1
        self._turn = np.where(large, -1, small_first % slices)
        """Of a small tensor; -1: every step."""

    @staticmethod
    def of(tensors: Sequence[torch.Tensor], slices: int = SLICES) -> Rota:
        """The rota of these (local) tensors."""
        return Rota([t.numel() for t in tensors], [t.element_size() for t in tensors], slices)

    def turns(self, step: int) -> Turns:
        """What is hashed after step `step`. Tensors without elements never are."""
        now = step % self._slices
        position = np.flatnonzero((self._turn == now) | (self._turn < 0))
        elements, length = self._elements[position], self._length[position]
        start = np.minimum(now * length, elements)
        stop = np.where(length > 0, np.minimum(start + length, elements), elements)
        there = start < stop
        return Turns(position[there], start[there], stop[there])


def fingerprint(
    tensors: Sequence[torch.Tensor], step: int, slices: int = SLICES, rota: Rota | None = None
) -> npt.NDArray[np.uint64]:
    """The fingerprint of a state after a step.

    Args:
        tensors: of the state, in a fixed order, on any device; of a DTensor the local part counts.
        step: which one.
        slices: steps in a round.
        rota: of these tensors, if it is at hand: then only those are looked at whose turn it is.

    Returns:
        uint64, one xxh3-64 (seed 0) of row-major bytes for each of the `turns`, in their order.
    """
    if rota is None:
        rota = Rota.of([shard_of(tensor)[0] for tensor in tensors], slices)
    due = rota.turns(step)
    return np.array(
        [
            digest(shard_of(tensors[position])[0], start, stop)
            for position, start, stop in zip(*(array.tolist() for array in due), strict=True)
        ],
        dtype=np.uint64,
    )


def digest(tensor: torch.Tensor, start: int, stop: int) -> int:
    """The xxh3-64 of elements `start` to `stop`, in row-major order, of a local tensor."""
    state = xxhash.xxh3_64()
    for chunk in raw.host_chunks(tensor, start, stop):
        state.update(chunk)
    return state.intdigest()
