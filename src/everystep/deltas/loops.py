"""The loops over the elements of gradients, in NumPy: for where `_codec.c` could not be compiled.

Both give the same bytes. Buffers are flat arrays of bytes of any alignment unless it is said
otherwise; `width` is the bytes of one element (1, 2, 4, 8 or 16); numbers are little-endian.

A gap is the number of elements between one that is kept and the one before it (or the start). Its
first byte says all up to 239; 240 to 252 stand for 240 + 256 times what they are beyond 240, plus
the value of 1 more byte; 253, 254 and 255 for 3,568, 69,104 and 16,846,320 plus the value of 2, 3
and 6 more bytes. So each gap has one spelling. The first bytes of all gaps come first, then all
other bytes, so that they can be read side by side.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_Array = npt.NDArray[Any]

_LEAST = (240, 3568, 69104, 16846320)
"""The least gap that takes 1, 2, 3 and 6 more bytes."""

_MORE = (1, 2, 3, 6)

_MORE_BYTES = np.zeros(256, np.int64)
_MORE_BYTES[240:] = [*[1] * 13, 2, 3, 6]

_MIN_OF_FIRST = np.arange(256, dtype=np.int64)
_MIN_OF_FIRST[240:] = [*(240 + 256 * i for i in range(13)), *_LEAST[1:]]

_INTEGERS: dict[int, Any] = {
    1: np.uint8,
    2: np.uint16,
    4: np.uint32,
    8: np.uint64,
    16: np.complex128,
}


def gap_room(count: int, length: int) -> int:
    """The most bytes that `count` gaps take among `length` elements: a gap of n bytes is at least
    240 (n - 1) long. One is to spare."""
    return count + min(6 * count, length // 240) + 1


def _is_set(data: _Array, width: int) -> npt.NDArray[np.bool_]:
    """Which elements have a bit that is not zero."""
    items = data.view(np.uint64).reshape(-1, 2) if width == 16 else data.view(_INTEGERS[width])
    found: npt.NDArray[np.bool_] = items != 0
    return found[:, 0] | found[:, 1] if width == 16 else found


def survey(data: _Array, width: int) -> tuple[int, int]:
    """How many elements have a bit that is not zero, and, for width 4, the union of all bits."""
    seen = np.bitwise_or.reduce(data.view(np.uint32)) if width == 4 else 0
    return int(np.count_nonzero(_is_set(data, width))), int(seen)


def extract(data: _Array, width: int, gaps: _Array, values: _Array) -> int:
    """Find the elements with a bit that is not zero.

    Args:
        data: the elements.
        width: of one, in bytes.
        gaps: of `gap_room` bytes; filled from the start.
        values: with room for exactly these elements.

    Returns:
        how many bytes of `gaps` were filled; -1 if `values` has another number of elements.
    """
    found = np.flatnonzero(_is_set(data, width))
    kept: _Array = values.view(_INTEGERS[width])
    if len(found) != len(kept):
        return -1
    kept[:] = data.view(_INTEGERS[width])[found]
    return _put(np.diff(found, prepend=-1) - 1, gaps)


def gather(data: _Array, width: int, indices: _Array, index_bytes: int, values: _Array) -> bool:
    """Fill `values` with the elements at `indices` (int32 or int64); False if one is not there."""
    places = indices.view(f"<i{index_bytes}")
    items: _Array = data.view(_INTEGERS[width])
    if len(places) and not 0 <= places.min() <= places.max() < len(items):
        return False
    values.view(_INTEGERS[width])[:] = items[places]
    return True


def gaps(indices: _Array, index_bytes: int, start: int, stop: int, gaps: _Array) -> int:
    """Write down indices (int32 or int64) as the gaps between them, from `start` on.

    Returns:
        how many bytes of `gaps` (of `gap_room`) were filled; -1 unless the indices ascend and all
        lie from `start` to `stop`, exclusive.
    """
    places = indices.view(f"<i{index_bytes}").astype(np.int64)
    if len(places) and not start <= places.min() <= places.max() < stop:
        return -1
    between = np.diff(places, prepend=start - 1) - 1
    return _put(between, gaps) if not len(between) or between.min() >= 0 else -1


def _put(between: npt.NDArray[np.int64], to: _Array) -> int:
    kind = np.searchsorted(_LEAST, between, side="right")
    lengths = np.take((0, *_MORE), kind)
    rest = between - np.take((0, *_LEAST), kind)
    first = np.where(kind == 0, rest, np.where(kind == 1, 240 + (rest >> 8), 251 + kind))
    to[: len(between)] = first
    ends = np.cumsum(lengths) + len(between)
    for byte in range(max(_MORE)):
        chosen = lengths > byte
        places = (ends - lengths)[chosen] + byte
        to[places] = rest[chosen] >> (8 * byte) & 255
    return int(ends[-1]) if len(between) else 0


def positions(gaps: _Array, limit: int, out: _Array) -> bool:
    """Read gaps.

    Args:
        gaps: exactly all of their bytes.
        limit: every position must be below it.
        out: int64; filled with the positions, ascending.

    Returns:
        whether the gaps are well formed and all positions within the limit.
    """
    count = len(out)
    first, more = gaps[:count], gaps[count:]
    lengths = _MORE_BYTES[first]
    if int(lengths.sum()) != len(more):
        return False
    between = _MIN_OF_FIRST[first]
    starts = np.cumsum(lengths) - lengths
    for byte in range(max(_MORE)):
        chosen = lengths > byte
        between[chosen] += more[starts[chosen] + byte].astype(np.int64) << (8 * byte)
    if not count:
        return True
    # a sum of so many gaps below the limit may wrap, and then it falls below the one before it
    if between.max() >= limit:
        return False
    np.cumsum(between + 1, out=out)
    np.subtract(out, 1, out=out)
    return bool(out[0] >= 0 and (np.diff(out) > 0).all() and out[-1] < limit)


def scatter(gaps: _Array, values: _Array, width: int, out: _Array) -> bool:
    """Overwrite `out` with `values` where the gaps say, and zero bits elsewhere.

    Returns:
        whether the gaps are well formed and all positions in `out`; else `out` holds anything.
    """
    items: _Array = out.view(_INTEGERS[width])
    places = np.empty(len(values) // width, np.int64)
    if not positions(gaps, len(items), places):
        return False
    out[:] = 0
    items[places] = values.view(_INTEGERS[width])
    return True


def narrow(data: _Array, half: bool, out: _Array) -> bool:
    """Fill `out` with the float16 (else bfloat16) numbers that have the bits of float32 ones.

    Returns:
        whether all have one; else `out` holds anything. A NaN keeps sign and payload.
    """
    single = data.view(np.uint32)
    if not half:
        out.view(np.uint16)[:] = single >> 16
        return not (single & 0xFFFF).any()
    exponent = (single >> 23 & 255).astype(np.int64)
    small = (exponent > 102) & (exponent < 113)  # below the least normal float16 number
    shift = np.where(small, 126 - exponent, 13)
    mantissa = (single & 0x7FFFFF) | np.where(small, 0x800000, 0)
    upper = np.where((exponent > 112) & (exponent < 143), exponent - 112, 0)
    upper = np.where(exponent == 255, 31, upper)
    out.view(np.uint16)[:] = (single >> 16 & 0x8000) | upper << 10 | mantissa >> shift
    is_zero = single & 0x7FFFFFFF == 0
    fits = ((exponent > 102) & (exponent < 143)) | (exponent == 255) | is_zero
    return bool((fits & (mantissa & ((1 << shift) - 1) == 0)).all())


def widen(data: _Array, half: bool, out: _Array) -> None:
    """Fill `out` with the float32 numbers of the same values; undoes `narrow`."""
    bits, single = data.view(np.uint16).astype(np.uint32), out.view(np.uint32)
    if not half:
        single[:] = bits << 16
        return
    sign, exponent, mantissa = (bits & 0x8000) << 16, bits >> 10 & 31, bits & 0x3FF
    normal = np.where(exponent == 31, 255, exponent + 112) << 23 | mantissa << 13
    small = (mantissa.astype(np.float32) * np.float32(2.0**-24)).view(np.uint32)  # exact
    single[:] = sign | np.where(exponent == 0, small, normal)
