"""Compression of one parameter's gradient over all ranks, as slow and plain NumPy.

Written from the formulas, for comparison with the hooks; bit for bit but for the mean of
`SignScale`, which is a sum in torch's order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from everystep import errors
from everystep.deltas.compressors import (
    Compressor,
    Quantize8,
    RandomK,
    SignScale,
    Threshold,
    TopK,
)

ALL: list[Compressor] = [
    TopK(density=0.1),
    TopK(density=0.1, error_feedback=False),
    RandomK(density=0.1, seed=3),
    RandomK(density=0.1, error_feedback=False),
    Threshold(threshold=0.05),
    Threshold(threshold=0.05, error_feedback=False),
    Quantize8(block=16),
    Quantize8(error_feedback=False),
    SignScale(),
    SignScale(error_feedback=False),
]


def magnitudes(values: np.ndarray) -> np.ndarray:
    """Bits without the sign."""
    width = values.dtype.itemsize
    bits = values.view(f"i{width}")
    return bits & np.array((1 << (8 * width - 1)) - 1, bits.dtype)


def top(values: np.ndarray, k: int) -> np.ndarray:
    """Indices of the k largest, by a stable sort."""
    # the complement turns the order around without overflow
    return np.sort(np.argsort(~magnitudes(values), kind="stable")[:k])


def sent(options: Compressor, full: np.ndarray, step: int, number: int) -> np.ndarray:
    """C(full), dense."""
    n, out = full.size, np.zeros_like(full)
    if isinstance(options, Quantize8):
        for start in range(0, n, options.block):
            block = full[start : start + options.block]
            scale = np.abs(block).max() / np.float32(127)
            codes = np.clip(np.round(block / (scale or np.float32(1))), -127, 127)
            out[start : start + options.block] = codes * scale
        return out
    if isinstance(options, SignScale):
        scale = torch.from_numpy(full).abs().mean().numpy()
        return np.where(np.signbit(full), -scale, scale).astype(full.dtype)
    if isinstance(options, TopK):
        where = top(full, math.ceil(n * round(options.density * 1000) / 1000))
    elif isinstance(options, RandomK):
        k = math.ceil(n * round(options.density * 1000) / 1000)
        draws = np.random.default_rng((options.seed, step, number))
        where = draws.choice(n, k, replace=False, shuffle=False)
    elif isinstance(options, Threshold):
        where = np.flatnonzero(~(np.abs(full) < full.dtype.type(options.threshold)))
    else:
        raise errors.UsageError(repr(options))
    out[where] = full[where]
    return out


class Reference:
    """All ranks' residuals of all parameters."""

    def __init__(self, options: Compressor) -> None:
        self.options = options
        self.residuals: dict[tuple[int, int], np.ndarray] = {}
        self.steps = 0

    def mean(self, number: int, gradients: Sequence[np.ndarray]) -> np.ndarray:
        """What `p.grad` must be on every rank, flat.

        Args:
            gradients: of each rank, flat.
        """
        total = np.zeros_like(gradients[0])
        for rank, gradient in enumerate(gradients):
            old = self.residuals.get((number, rank), np.zeros_like(gradient))
            full = old + gradient if self.options.error_feedback else gradient
            part = sent(self.options, full, self.steps, number)
            self.residuals[number, rank] = full - part
            total += part / gradient.dtype.type(len(gradients))
        return total
