"""Which parameters DDP reduces together, and how many collectives its process group has begun.

A shadow that reads gradients off the wire is told both with each step. In the trainer, at the
optimizer's pre-step hook (after backward, before the next forward):

    names = names_of(ddp, world_size)
    told = layout(ddp, names), last_collective(ddp)

and in the shadow, for each told step:

    gradients.expect(step, [Bucket(b.names, b.sizes, b.dtype) for b in told[0]], through=told[1])

The layout changes once, in the forward after the first backward (with static_graph, the second;
with find_unused_parameters, never): it need only be sent when it differs from the one before.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from everystep.errors import Unsupported
from everystep.state.names import ModelNames


class BucketLayout(NamedTuple):
    """One bucket: parameters one behind the other, without gaps."""

    names: tuple[str, ...]
    """FQNs, each the one in `ModelNames.tensors`."""
    sizes: tuple[int, ...]
    """Elements of each parameter."""
    dtype: str
    """As torch writes it, such as `float32`."""


class _WithoutMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """`zeros_like` gives the tensor itself."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten.zeros_like.default:
            return args[0]
        return func(*args, **(kwargs or {}))


def layout(ddp: DistributedDataParallel, names: ModelNames) -> tuple[BucketLayout, ...]:
    """The buckets of the last backward, in the order in which their all-reduces are launched; of
    the next one, where no forward comes in between. About 3 µs for each parameter.

    Args:
        ddp: not in the middle of a backward.
        names: of a model that holds it.

    Raises:
        Unsupported: a parameter that `names` does not hold, or a torch that tells no buckets.
    """
    name_of = {id(parameter): names.tied(fqn) for fqn, parameter in names.parameters.items()}
    ask = getattr(ddp.reducer, "_get_zeros_like_grad_buckets", None)
    if ask is None:
        raise Unsupported("this torch does not tell DDP's buckets", hint="use torch 2.6 to 2.13")
    try:
        # torch makes zeros as large as all gradients only to be looked at
        with _WithoutMemory():  # type: ignore[no-untyped-call]  # torch has no types here
            buckets = ask()
    except RuntimeError as error:  # a sparse bucket has no tensor before its backward
        raise Unsupported(f"torch does not tell DDP's buckets: {error}") from error
    found = []
    for bucket in buckets:
        parameters = bucket.parameters()
        if any(id(parameter) not in name_of for parameter in parameters):
            raise Unsupported("DDP reduces a parameter that the checkpointed model does not hold")
        dtype = str(bucket.buffer().dtype).removeprefix("torch.")
        sizes = tuple(parameter.numel() for parameter in parameters)
        if bucket.buffer().is_sparse or bucket.buffer().numel() != sum(sizes):
            raise Unsupported("DDP reduces sparse gradients, which are not in its buckets")
        found.append(BucketLayout(tuple(name_of[id(p)] for p in parameters), sizes, dtype))
    reduced = [name for bucket in found for name in bucket.names]
    if len(set(reduced)) != len(reduced):
        raise Unsupported("DDP reduces two parameters that share their memory")
    return tuple(found)


def last_collective(ddp: DistributedDataParallel) -> int | None:
    """Number of the last collective that DDP's process group has begun, as gloo writes it on the
    wire (from 0 on); -1: none yet. None: the backend is not gloo, whose numbers are not there."""
    group = ddp.process_group
    if torch.distributed.get_backend(group) != "gloo":
        return None
    return int(group._get_sequence_number_for_group()) - 1  # type: ignore[attr-defined]  # of every group; torch's stubs lack it
