"""What a hook knows of a gradient that it wrote, and the proof that nobody has changed it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from everystep.deltas.exchange import Merged, Segment
from everystep.deltas.selection import bits_of

_LOOKED_AT = 32
"""Elements of a gradient at which a change behind torch's back (`p.grad.data`) is looked for."""


class Known(NamedTuple):
    """All of a gradient: everywhere but at `indices` its bits are zero."""

    indices: torch.Tensor
    """Ascending, each once, into the gradient in row-major order; int32, or int64 where the bucket
    has 2^31 elements or more. On the gradient's device. The values there may be zero."""
    values: torch.Tensor
    """The gradient at these indices, of its dtype."""
    memory: StorageWeakRef
    version: int
    offset: int

    def holds(self, grad: torch.Tensor | None) -> bool:
        """Whether a gradient is still the one that was written.

        Any in-place operation on it, or on memory that it shares with others, and any other
        tensor in its place, make this False. What is written through `.data` leaves no trace for
        torch: that nothing was added to zeros is then looked at in a few places only, so take
        values from the gradient itself.
        """
        if grad is None or grad._version != self.version or grad.storage_offset() != self.offset:
            return False
        # the weak reference keeps the address from being used again
        if grad.untyped_storage()._cdata != self.memory.cdata:
            return False
        return self._zero_elsewhere(grad)

    def _zero_elsewhere(self, grad: torch.Tensor) -> bool:
        n = grad.numel()
        if n == 0:
            return True
        step = max(1, n // _LOOKED_AT)
        first = self.version % step
        if grad.is_contiguous():
            there = grad.detach().view(-1)[first::step]
        else:
            at = torch.arange(first, n, step, device=grad.device)
            there = grad.detach()[torch.unravel_index(at, grad.shape)]
        loud = first + step * np.flatnonzero(bits_of(there).cpu().numpy())
        if not len(loud):
            return True
        if self.indices.numel() == 0:
            return False
        sought = torch.from_numpy(loud).to(self.indices)
        place = torch.searchsorted(self.indices, sought).clamp_(max=self.indices.numel() - 1)
        return torch.equal(self.indices[place], sought)


def _memory(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # torch has no types here


def known_of(
    merged: Merged,
    segments: Sequence[Segment],
    grads: Sequence[torch.Tensor | None],
    likes: Sequence[torch.Tensor],
) -> list[Known | None]:
    """What a bucket's result says of each parameter's gradient.

    Args:
        grads: each segment's gradient, as it was finally written; None: unknown.
        likes: tensors with the shape and strides that each gradient has in the bucket.
    """
    bounds = torch.tensor(
        [segment.start for segment in segments] + [segments[-1].stop],
        dtype=merged.positions.dtype,
        device=merged.positions.device,
    )
    cuts = torch.searchsorted(merged.positions, bounds).tolist()
    found: list[Known | None] = []
    for number, (segment, grad, like) in enumerate(zip(segments, grads, likes, strict=True)):
        if grad is None or grad.layout is not torch.strided or grad.shape != like.shape:
            found.append(None)
            continue
        own = slice(cuts[number], cuts[number + 1])
        indices = merged.positions[own] - segment.start
        values = merged.values[own]
        if not like.is_contiguous():
            indices, order = _row_major(indices, like).sort()
            values = values[order]
        offset = int(grad.storage_offset())
        found.append(Known(indices, values, _memory(grad), grad._version, offset))
    return found


def _row_major(indices: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Indices into a tensor's memory, turned into indices in row-major order."""
    weights = torch.empty(like.shape, device="meta").stride()
    left, out = indices, torch.zeros_like(indices)
    for size, stride, weight in sorted(
        zip(like.shape, like.stride(), weights, strict=True), key=lambda its: -its[1]
    ):
        if size > 1:
            coordinate = torch.div(left, stride, rounding_mode="floor")
            out = out + coordinate * weight
            left = left - coordinate * stride
    return out
