"""Sparse COO gradients: where their values are, as bytes and back.

The bytes are int64 numbers: the indices, dimension after dimension; the size; then the number of
dimensions, of sparse dimensions, of columns of the indices, and 1 if coalesced, else 0.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from everystep.deltas.delta import Bytes, Coded
from everystep.errors import Damaged
from everystep.types import element_count

MOST_ELEMENTS = 1 << 47
"""No tensor has more: addresses of host memory end there."""

_MOST_DIMENSIONS = 64
"""torch's own limit."""

_TRAILER_NUMBERS = 4


class Parts(NamedTuple):
    """What is known of a sparse tensor but its values."""

    size: tuple[int, ...]
    indices: npt.NDArray[np.int64]
    """One row for each sparse dimension."""
    coalesced: bool


def numbers_of(gradient: torch.Tensor) -> Bytes:
    """All but the values of a sparse COO tensor in host memory."""
    indices = gradient._indices().detach().contiguous()
    shape = (gradient.dim(), *indices.shape, int(gradient.is_coalesced()))
    trailer = np.array([*gradient.shape, *shape], np.int64)
    return np.concatenate([indices.reshape(-1).numpy(), trailer]).view(np.uint8)


def parts_of(coded: Coded) -> Parts:
    """Read what `numbers_of` gives.

    Raises:
        Damaged: it is not that, or the indices lie outside the size, or a tensor is said to be
            coalesced that is not, or there are not as many values.
    """
    damaged = Damaged("a sparse COO gradient is not well formed")
    if len(coded.gaps) % 8 or len(coded.gaps) < 8 * _TRAILER_NUMBERS:
        raise damaged
    numbers = coded.gaps.copy().view(np.int64)
    dims, sparse_dims, columns, coalesced = map(int, numbers[-_TRAILER_NUMBERS:])
    if not 0 <= sparse_dims <= dims <= _MOST_DIMENSIONS or columns < 0:
        raise damaged
    if len(numbers) != sparse_dims * columns + dims + _TRAILER_NUMBERS or coalesced not in (0, 1):
        raise damaged
    if sparse_dims == 0 and columns > 1:  # a claim that no index pays for
        raise damaged
    size = tuple(map(int, numbers[-_TRAILER_NUMBERS - dims : -_TRAILER_NUMBERS]))
    if any(n < 0 for n in size) or element_count(size) > MOST_ELEMENTS:
        raise damaged
    if coded.count != columns * element_count(size[sparse_dims:]):
        raise damaged
    indices = numbers[: sparse_dims * columns].reshape(sparse_dims, columns)
    if not _well_placed(indices, size, bool(coalesced)):
        raise damaged
    return Parts(size, indices, bool(coalesced))


def _well_placed(indices: npt.NDArray[np.int64], size: tuple[int, ...], ascending: bool) -> bool:
    flat = np.zeros(indices.shape[1], np.int64)
    for row, length in zip(indices, size, strict=False):  # dense dimensions follow
        if len(row) and not 0 <= row.min() <= row.max() < length:
            return False
        flat = flat * length + row
    return not ascending or bool((np.diff(flat) > 0).all())
