"""Buckets of DDP, seen the moment their all-reduce has ended: a communication hook of our own."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from everystep.errors import Unsupported
from everystep.state.uncompiled import uncompiled

_known: weakref.WeakKeyDictionary[DistributedDataParallel, Reduced] = weakref.WeakKeyDictionary()
"""Hooks stay for as long as their model, and may be set once."""


class Listener(Protocol):
    """Is told of reduced gradients."""

    def arrived(self, parameter: torch.Tensor, gradient: torch.Tensor, task: int) -> None:
        """A gradient is reduced; in whatever thread has reduced it. Must not raise.

        Args:
            gradient: one-dimensional, in a bucket, where it stays as it is until the next pass.
            task: the number of the backward pass.
        """
        ...

    def finished(self, task: int) -> None:
        """DDP has written `p.grad` of all parameters; in the thread of the backward pass."""
        ...


class Reduced:
    """Does what DDP does without a hook, bit for bit, and tells its listeners."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = weakref.ref(ddp)
        self.parameters = [p for p in ddp.parameters() if p.requires_grad]
        self.listeners: list[Listener] = []

    def on_bucket(self, bucket: Any) -> Future[torch.Tensor]:
        """The communication hook.

        Args:
            bucket: a `torch.distributed.GradBucket`.

        Raises:
            Unsupported: inside of `Join(divide_by_initial_world_size=False)`.
        """
        ddp = self._ddp()
        if ddp is None or (ddp._join_config.enable and not ddp._divide_by_initial_world_size):
            raise Unsupported(
                "how many ranks have joined is not known to a communication hook",
                hint="Replica(layerwise=False)",
            )
        buffer: torch.Tensor = bucket.buffer()
        # without a hook, DDP multiplies while it copies gradients to the bucket
        buffer.mul_(1.0 / ddp.process_group.size())
        work: Any = dist.all_reduce(buffer, group=ddp.process_group, async_op=True)
        future: Any = work.get_future()
        if not self.listeners:
            return future.then(_first)  # type: ignore[no-any-return]
        task = int(torch._C._current_graph_task_id())
        parameters = bucket.parameters()
        if bucket.is_last():
            # DDP queues its own callback, which writes p.grad, after this one and before the next
            _queue(lambda: _queue(lambda: self._finished(task)))
        return future.then(lambda done: self._arrived(_first(done), parameters, task))  # type: ignore[no-any-return]

    def _arrived(
        self, buffer: torch.Tensor, parameters: Sequence[torch.Tensor], task: int
    ) -> torch.Tensor:
        at = 0
        for parameter in parameters:
            end = at + parameter.numel()
            if parameter.is_contiguous():  # others do not lie in row-major order
                for one in list(self.listeners):
                    one.arrived(parameter, buffer[at:end], task)
            at = end
        return buffer

    def _finished(self, task: int) -> None:
        for one in list(self.listeners):
            one.finished(task)


def _first(done: Any) -> torch.Tensor:
    tensor: torch.Tensor = done.value()[0]
    return tensor


def _queue(callback: Any) -> None:
    """Call back at the end of the backward pass that is running."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def reduced_of(models: Sequence[nn.Module]) -> tuple[list[Reduced], str | None]:
    """The hooks of all DDP modules, set where there is none yet.

    Returns:
        The hooks; and, in words, why one could not be set.
    """
    found: list[Reduced] = []
    problem = None
    for ddp in (m for model in models for m in model.modules()):
        if not isinstance(ddp, DistributedDataParallel):
            continue
        one = _known.get(ddp)
        if one is None:
            one = Reduced(ddp)
            why = unfit(ddp) or _set(ddp, one)
            if why is not None:
                problem = why
                continue
            _known[ddp] = one
        found.append(one)
    return found, problem


def unfit(ddp: DistributedDataParallel) -> str | None:
    """Why a hook of ours would not compute what DDP computes without one, in words."""
    size = ddp.process_group.size()
    if ddp._comm_hooks or ddp.mixed_precision is not None:
        return "the model has a communication hook"
    if ddp.gradient_as_bucket_view and size & (size - 1):
        # gradients that lie in their bucket are divided, which rounds in another way
        return "gradients are views of buckets, and the number of ranks is no power of two"
    if any(isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse for m in ddp.modules()):
        return "the model has sparse gradients"
    return None


def _set(ddp: DistributedDataParallel, one: Reduced) -> str | None:
    try:
        # torch reads annotations as objects, and here they are strings
        ddp.register_comm_hook(one, uncompiled(lambda state, bucket: state.on_bucket(bucket)))
    except RuntimeError as error:  # torch's own, in C++, are known to nobody but the reducer
        ddp._comm_hooks.clear()  # it was added before it was refused
        return f"no communication hook can be set: {error}"
    return None
