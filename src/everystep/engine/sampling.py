"""How large the gradients of a step are, and what they would take as deltas, from a sample."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from everystep.deltas.encodings import encode
from everystep.engine.gradients import parameters_of
from everystep.errors import EverystepError
from everystep.state.shards import shard_of
from everystep.state.uncompiled import uncompiled

_BLOCKS = 64
"""So many are looked at, evenly spread over all gradients of an optimizer."""

_BLOCK_ELEMENTS = 4096


class Gradients(NamedTuple):
    """Of one step of this process."""

    nbytes: int
    coded_bytes: int
    """In the exact encodings of deltas, as far as a sample tells."""
    lasting: bool
    """Each step makes new ones (`zero_grad` sets them to None), so that nobody need wait while they
    are copied."""


class Sampler:
    """Looks at the gradients of a step, the one after the next, when it is asked to.

    Args:
        optimizers: hooks are set on them until `close`. Make it before anybody else who sets
            some: a recorder must come last.
    """

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._asked = False
        self._seen: list[Gradients] = []
        self._before: dict[int, weakref.ref[torch.Tensor]] = {}
        """By the id of an optimizer, a gradient of the step before."""
        self._handles = [one.register_step_pre_hook(self._pre) for one in optimizers]

    @uncompiled
    def _pre(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._asked:
            return
        before = self._before.get(id(optimizer))
        gradient = next((p.grad for p in parameters_of(optimizer) if p.grad is not None), None)
        if before is not None:
            self._seen.append(_look(optimizer, lasting=before() is not gradient))
        elif gradient is not None:
            self._before[id(optimizer)] = weakref.ref(gradient)

    def ask(self) -> None:
        """Look at gradients."""
        self._asked, self._seen, self._before = True, [], {}

    def answer(self) -> Gradients | None:
        """What was seen since it was asked; None: it was not asked, or no optimizer has used a
        gradient."""
        nbytes = sum(one.nbytes for one in self._seen)
        if not self._asked or not nbytes:
            return None
        self._asked = False
        return Gradients(
            nbytes,
            sum(one.coded_bytes for one in self._seen),
            all(one.lasting for one in self._seen),
        )

    def close(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()


def _look(optimizer: Optimizer, *, lasting: bool) -> Gradients:
    found = [p.grad for p in parameters_of(optimizer) if p.grad is not None]
    local = [shard_of(gradient)[0].detach() for gradient in found]
    strided = [g for g in local if g.layout is torch.strided and g.numel()]
    apart = [_values_of(g) for g in local if g.layout is torch.sparse_coo]
    nbytes = sum(g.nbytes for g in strided)
    as_they_are = sum(t.nbytes for pair in apart for t in pair)
    coded = round(nbytes * _share(strided))
    return Gradients(nbytes + as_they_are, coded + as_they_are, lasting)


def _values_of(gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return gradient._indices(), gradient._values()


def _share(gradients: list[torch.Tensor]) -> float:
    """What the encodings leave of a sample."""
    total = sum(g.numel() for g in gradients)
    length = min(_BLOCK_ELEMENTS, -(-total // _BLOCKS))
    places = sorted({total * number // _BLOCKS for number in range(_BLOCKS)}) if total else []
    before, seen, coded = 0, 0, 0
    for gradient in gradients:
        here = [place - before for place in places if before <= place < before + gradient.numel()]
        before += gradient.numel()
        if not here:
            continue
        flat = _in_memory_order(gradient)
        for place in here:
            block = flat[place : place + length].cpu()
            seen += block.nbytes
            coded += _coded_bytes(block)
    return coded / seen if seen else 1.0


def _in_memory_order(gradient: torch.Tensor) -> torch.Tensor:
    if gradient.is_contiguous():
        return gradient.view(-1)
    order = sorted(range(gradient.dim()), key=gradient.stride, reverse=True)
    turned = gradient.permute(order)
    return turned.view(-1) if turned.is_contiguous() else gradient.reshape(-1)


def _coded_bytes(block: torch.Tensor) -> int:
    try:
        coded = encode(block, 0, block.numel())
    except EverystepError:  # no encoding has its dtype: no delta will either
        return block.nbytes
    return len(coded.gaps) + len(coded.values)
