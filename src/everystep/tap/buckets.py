"""Buckets of DDP, and their parameters out of reduced buffers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from everystep.tap.pieces import Bytes

DTYPES = {"float32": "<f4", "float64": "<f8", "float16": "<f2", "bfloat16": "<u2"}
"""As torch and as NumPy name them. NumPy has no bfloat16: its bits are given."""

Ranges = tuple[tuple[int, int], ...]
ByParameter = dict[str, npt.NDArray[np.generic]]


class Bucket(Struct, frozen=True):
    """One bucket of DDP: parameters one behind the other, without gaps."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    """Elements of each parameter."""
    dtype: str
    """A key of `DTYPES`."""

    @property
    def item_bytes(self) -> int:
        """Of one element."""
        return np.dtype(DTYPES[self.dtype]).itemsize

    @property
    def nbytes(self) -> int:
        """Of the whole."""
        return sum(self.sizes) * self.item_bytes


def parameters(bucket: Bucket, data: Bytes) -> ByParameter:
    """Views of a whole buffer: flat, read-only, in the dtype of the bucket."""
    values = data.view(DTYPES[bucket.dtype])
    values.flags.writeable = False
    found: ByParameter = {}
    at = 0
    for name, size in zip(bucket.names, bucket.sizes, strict=True):
        found[name] = values[at : at + size]
        at += size
    return found


def missing(bucket: Bucket, ranges: Iterable[tuple[int, int]]) -> dict[str, Ranges]:
    """Elements [start, stop) of each parameter that lie in these ranges of bytes, even if in part;
    parameters that are whole are left out."""
    e = bucket.item_bytes
    elements = _joined([(start // e, -(-stop // e)) for start, stop in ranges])
    found: dict[str, Ranges] = {}
    at = 0
    for name, size in zip(bucket.names, bucket.sizes, strict=True):
        parts = [(max(a - at, 0), min(b - at, size)) for a, b in elements]
        inside = tuple((a, b) for a, b in parts if a < b)
        if inside:
            found[name] = inside
        at += size
    return found


def _joined(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], stop)
        else:
            joined.append((start, stop))
    return joined
