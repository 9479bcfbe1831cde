"""By what an optimizer's gradients were multiplied after they were reduced: clipping, unscaling.

The mirror shows gradients as the all-reduce left them. `torch.nn.utils.clip_grad_norm_` and
`GradScaler.unscale_` multiply all of them by one number before the optimizer consumes them. A few
consumed elements beside the reduced ones tell it to the last bit: from an element x that became
y, c lies within half a unit of the last place of y around y / x, and only a few numbers do.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

_NEAR = 4
"""Units of the last place of c, around the quotient, in which it is looked for: half a unit of y is
at most one unit of c (their leading bits may be one place apart), and the quotient is rounded."""

_MOST_QUOTIENTS = 8
"""Elements that a factor is guessed from, where one alone does not give it."""


def factors(reduced: torch.Tensor, consumed: torch.Tensor) -> list[torch.Tensor]:
    """All numbers c of the gradients' dtype for which `reduced * c` gives `consumed` bit for bit.

    Mostly there is one; with few elements, or such of few bits, there may be some beside it, and
    only more elements (or the state after the step) can tell. Exactly 1 is looked for first, and
    is the only one where it fits.

    Args:
        reduced: some elements after the all-reduce; shape (n,), a floating-point dtype, on the CPU.
        consumed: the same elements as the optimizer was given them.

    Returns:
        Tensors of no dimension, as they are to be multiplied by; none: it was no multiplication,
        or all of the elements have become subnormal.
    """
    if _same(reduced, consumed):
        return [torch.ones((), dtype=reduced.dtype)]
    tried: set[float] = set()
    for near in _quotients(reduced, consumed):
        new = [c for c in _neighbours(near) if c.item() not in tried]
        tried.update(c.item() for c in new)
        found = [c for c in new if _same(reduced * c, consumed)]
        if found:
            return found
    return []


def _quotients(reduced: torch.Tensor, consumed: torch.Tensor) -> Iterator[torch.Tensor]:
    """Guesses, from the elements that tell the most: those far from the subnormal numbers."""
    x, y = reduced.double(), consumed.double()
    tiny = torch.finfo(reduced.dtype).tiny
    usable = torch.isfinite(x) & torch.isfinite(y) & (x.abs() >= tiny) & (y.abs() >= tiny)
    order = y.abs().masked_fill(~usable, 0).argsort(descending=True)
    for index in order[: min(_MOST_QUOTIENTS, int(usable.sum()))].tolist():
        yield (y[index] / x[index]).to(reduced.dtype)


def _neighbours(near: torch.Tensor) -> list[torch.Tensor]:
    """The nearest numbers of its dtype, itself first."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[near.element_size()]
    offsets = sorted(range(-_NEAR, _NEAR + 1), key=abs)
    found = [(near.view(bits) + offset).view(near.dtype) for offset in offsets]
    return [c for c in found if torch.isfinite(c)]


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    return torch.equal(one.view(bits), other.view(bits))
