"""Which elements are the largest: exact selection by magnitude, ties by lowest index.

Magnitudes are compared as the bits without the sign, taken as an integer: for IEEE numbers that
is the order of absolute values, infinity above all numbers, and every NaN above infinity (among
NaNs the payload decides). Nothing is rounded, and no two different magnitudes tie.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from everystep.errors import Unsupported

_CHUNK = 1 << 18
"""Elements looked at in one go: their keys stay in the cache."""

_MAX_SAMPLE = 1 << 18
_SIGMAS = 4.0
"""How far below its expectation the sampled threshold is put, in standard deviations."""

_INTEGERS = {
    torch.float64: (torch.int64, (1 << 63) - 1),
    torch.float32: (torch.int32, (1 << 31) - 1),
    torch.bfloat16: (torch.int16, (1 << 15) - 1),
    torch.float16: (torch.int16, (1 << 15) - 1),
}


def check_dtype(dtype: torch.dtype) -> None:
    """Refuse numbers that have no magnitude here.

    Raises:
        Unsupported: not float16, bfloat16, float32 or float64.
    """
    if dtype not in _INTEGERS:
        raise Unsupported(f"gradients of dtype {dtype} cannot be compressed")


def bits_of(values: torch.Tensor) -> torch.Tensor:
    """The bits as integers of the same width; shape, device and memory as `values`.

    Raises:
        Unsupported: see `check_dtype`.
    """
    check_dtype(values.dtype)
    return values.view(_INTEGERS[values.dtype][0])


def keys_of(values: torch.Tensor) -> torch.Tensor:
    """Magnitudes as integers of the same width; shape and device as `values`.

    Raises:
        Unsupported: see `check_dtype`.
    """
    return bits_of(values) & _INTEGERS[values.dtype][1]


def largest(values: torch.Tensor, k: int) -> torch.Tensor:
    """Indices of the k largest magnitudes, exactly; of equal ones, those with the lowest index.

    On a CPU, a threshold slightly below the k-th magnitude is guessed from a sample, and one pass
    collects what reaches it. Whatever the guess was, the result is exact: too low a guess is
    raised on the way, and one that was too high is found out by the count.

    Args:
        values: one-dimensional, contiguous, a floating dtype.
        k: from 0 to the number of elements.

    Returns:
        int64, ascending, k elements, on the device of `values`.

    Raises:
        Unsupported: see `check_dtype`.
    """
    check_dtype(values.dtype)
    n = values.numel()
    if k >= n:
        return torch.arange(n, device=values.device)
    if k <= 0:
        return torch.empty(0, dtype=torch.int64, device=values.device)
    if values.device.type != "cpu":
        return _among_on_device(keys_of(values), k)
    bits, mask = bits_of(values.detach()), _INTEGERS[values.dtype][1]
    if n <= _CHUNK or k > n // 4:
        return torch.from_numpy(_among((bits & mask).numpy(), k))
    for floor in (_sampled_floor(bits, mask, k), 0):
        collector = _Collector(k, floor)
        _pass(bits, mask, collector)
        found = collector.finish()
        if found is not None:
            return torch.from_numpy(found)
    return torch.from_numpy(_among((bits & mask).numpy(), k))  # not reached: all keys reach 0


def reaching(values: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    """Indices of all magnitudes that are at least that of `least`; NaNs are.

    Args:
        values: one-dimensional, contiguous.
        least: one element of the same dtype.

    Returns:
        int64, ascending, on the device of `values`.

    Raises:
        Unsupported: see `check_dtype`.
    """
    floor = int(keys_of(least.reshape(1)).item())
    if values.device.type != "cpu":
        return (keys_of(values) >= floor).nonzero()[:, 0]
    collector = _Collector(values.numel(), floor)
    _pass(bits_of(values.detach()), _INTEGERS[values.dtype][1], collector)
    return torch.from_numpy(collector.collected()[1])


def _pass(bits: torch.Tensor, mask: int, collector: _Collector) -> None:
    keys = torch.empty(min(_CHUNK, bits.numel()), dtype=bits.dtype)
    reached = torch.empty(keys.shape, dtype=torch.bool)
    for start in range(0, bits.numel(), _CHUNK):
        if collector.floor > mask:  # nothing is larger than what was found
            break
        chunk = bits[start : start + _CHUNK]
        size = chunk.numel()
        torch.bitwise_and(chunk, mask, out=keys[:size])
        torch.ge(keys[:size], collector.floor, out=reached[:size])
        where = np.flatnonzero(reached[:size].numpy())
        if where.size:
            collector.add(keys.numpy()[where], where + start)


class _Collector:
    """Candidates in the order of their indices, never many more than k and a chunk.

    When there are too many, all but the k best are dropped, and from then on only what is
    strictly larger than the least of them can count: what ties with it comes later.
    """

    def __init__(self, k: int, floor: int) -> None:
        self.floor = floor
        self._k = k
        self._most = 2 * k + _CHUNK
        self._count = 0
        self._keys: list[npt.NDArray[Any]] = []
        self._indices: list[npt.NDArray[Any]] = []

    def add(self, keys: npt.NDArray[Any], indices: npt.NDArray[Any]) -> None:
        """More candidates, whose indices are above all that were added before."""
        self._keys.append(keys)
        self._indices.append(indices)
        self._count += keys.size
        if self._count > self._most:
            self._prune()

    def collected(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """The keys and indices of all candidates."""
        if not self._keys:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        return np.concatenate(self._keys), np.concatenate(self._indices)

    def finish(self) -> npt.NDArray[Any] | None:
        """The indices of the k largest; None if the floor was too high to reach so many."""
        if self._count < self._k:
            return None
        keys, indices = self.collected()
        chosen: npt.NDArray[Any] = indices[_among(keys, self._k)]
        return chosen

    def _prune(self) -> None:
        keys, indices = self.collected()
        best = _among(keys, self._k)
        self._keys, self._indices, self._count = [keys[best]], [indices[best]], self._k
        self.floor = max(self.floor, int(self._keys[0].min()) + 1)


def _sampled_floor(bits: torch.Tensor, mask: int, k: int) -> int:
    """A key that a little more than k elements reach, in all likelihood."""
    generator = torch.Generator().manual_seed(bits.numel())
    size = min(_MAX_SAMPLE, bits.numel() // 8)
    where = torch.randint(bits.numel(), (size,), generator=generator)
    sample = (bits[where] & mask).numpy()
    expected = size * k / bits.numel()
    rank = math.ceil(expected + _SIGMAS * math.sqrt(expected) + _SIGMAS)
    if rank >= size:
        return 0
    return int(np.sort(sample)[size - rank])  # a partition is slow where most are equal


def _among(keys: npt.NDArray[Any], k: int) -> npt.NDArray[Any]:
    """Positions of the k largest keys, ascending; of equal ones, the first. k is not 0."""
    if k >= keys.size:
        return np.arange(keys.size)
    least = np.partition(keys, keys.size - k)[keys.size - k]
    chosen = keys > least
    ties = np.flatnonzero(keys == least)
    chosen[ties[: k - np.count_nonzero(chosen)]] = True
    return np.flatnonzero(chosen)


def _among_on_device(keys: torch.Tensor, k: int) -> torch.Tensor:
    """As `_among`, with torch's own kernels."""
    # not every device sorts 16-bit integers
    keys = keys.to(torch.int32) if keys.dtype is torch.int16 else keys
    least = keys.topk(k, sorted=False).values.min()
    chosen = keys > least
    ties = (keys == least).nonzero()[:, 0]
    chosen[ties[: k - int(chosen.sum())]] = True
    return chosen.nonzero()[:, 0]
