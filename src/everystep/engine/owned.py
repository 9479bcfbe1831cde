"""Which keys parameters have, what of them this rank's deltas hold, where they live, and which
optimizers cannot be recorded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import torch
from torch.optim import Optimizer

from everystep.deltas.delta import Parameter
from everystep.engine.device import Device, device_for
from everystep.engine.gradients import parameters_of
from everystep.planning.partition import pieces_of
from everystep.state.capture import Objects
from everystep.state.names import names_of
from everystep.state.optimizers import ELEMENTWISE, is_zero
from everystep.state.ranks import Ranks
from everystep.state.shards import is_dtensor, shard_of
from everystep.types import TensorSpec, join_key


def keys_of(objects: Objects, world_size: int) -> dict[int, str]:
    """The key of every live parameter, by its `id`."""
    keys: dict[int, str] = {}
    for name, model in objects.models.items():
        names = names_of(model, world_size)
        for fqn, parameter in names.parameters.items():
            keys[id(parameter)] = join_key("models", name, names.tied(fqn))
    return keys


def pieces(specs: Sequence[TensorSpec], ranks: Ranks, share_replicas: bool) -> list[Parameter]:
    """What a rank's deltas hold of each parameter of an optimizer."""
    if not share_replicas:
        specs = [msgspec.structs.replace(spec, replicated=False) for spec in specs]
    mine = {
        piece.key: (piece.start, piece.stop)
        for piece in pieces_of(specs, ranks.rank, ranks.world_size)
    }
    return [Parameter(s.key, s.shape, *mine.get(s.key, (0, 0))) for s in specs]


def accelerator(objects: Objects) -> Device | None:
    """How bytes leave the device that holds the parameters; None: they are in host memory."""
    parameters = [p for model in objects.models.values() for p in model.parameters()]
    if all(parameter.device.type == "cpu" for parameter in parameters):
        return None
    return device_for([shard_of(parameter)[0] for parameter in parameters])


def unrepeatable(optimizer: Optimizer) -> str | None:
    """Why what an optimizer does cannot be done again from its gradients; None: nothing is known
    that speaks against it."""
    if is_zero(optimizer):
        return "a ZeroRedundancyOptimizer"
    if type(optimizer) not in ELEMENTWISE and any(map(is_dtensor, parameters_of(optimizer))):
        return "it may compute with whole parameters, of which this rank has a shard"
    if type(optimizer) is torch.optim.SGD and any(
        group["fused"] and group["momentum"] and _has_bfloat16(group["params"])
        for group in optimizer.param_groups
    ):  # docs/exactness.md
        return "torch's fused SGD with momentum computes with what lies behind a bfloat16 buffer"
    return None


def _has_bfloat16(tensors: Iterable[torch.Tensor]) -> bool:
    return any(tensor.dtype == torch.bfloat16 for tensor in tensors)
