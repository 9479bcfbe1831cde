"""Which keys parameters have, what of the state this rank stores, where it lives, and which
optimizers cannot be recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec
import torch
from torch.optim import Optimizer

from everystep.deltas.delta import Parameter
from everystep.engine.device import Device, device_for
from everystep.engine.gradients import parameters_of
from everystep.planning.partition import pieces_by_unit, pieces_of
from everystep.state.names import names_of
from everystep.state.objects import Objects
from everystep.state.optimizers import ELEMENTWISE, is_zero
from everystep.state.ranks import Ranks
from everystep.state.shards import is_dtensor, shard_of
from everystep.types import Piece, TensorSpec, join_key, split_key


def keys_of(objects: Objects, world_size: int) -> dict[int, str]:
    """The key of every live parameter, by its `id`."""
    keys: dict[int, str] = {}
    for name, model in objects.models.items():
        names = names_of(model, world_size)
        for fqn, parameter in names.parameters.items():
            keys[id(parameter)] = join_key("models", name, names.tied(fqn))
    return keys


def unit_of(objects: Objects, world_size: int) -> Callable[[str], str]:
    """Names what belongs together: the key of a parameter for its own key and those of its slots,
    and any other key for itself."""
    names = {name: names_of(model, world_size) for name, model in objects.models.items()}

    def unit(key: str) -> str:
        parts = split_key(key)
        if parts[0] != "optimizers" or len(parts) < 5 or parts[3] not in names:
            return key
        return join_key("models", parts[3], names[parts[3]].tied(parts[4]))

    return unit


class Shares:
    """How ranks share out what all of them hold alike.

    Args:
        objects: the state's owners.
        ranks: this process's place in the job.
        whole: a parameter and its slots all go to one rank, as a replica needs it; else all ranks
            have equally much.
    """

    def __init__(self, objects: Objects, ranks: Ranks, *, whole: bool = False) -> None:
        self._objects, self._ranks, self._whole = objects, ranks, whole

    def of(self, specs: Sequence[TensorSpec]) -> list[Piece]:
        """What this rank stores of a state."""
        rank, size = self._ranks.rank, self._ranks.world_size
        if not self._whole or size == 1:
            return pieces_of(specs, rank, size)
        return pieces_by_unit(specs, rank, size, unit_of(self._objects, size))

    def of_gradients(
        self, specs: Sequence[TensorSpec], parameters: Sequence[str], share_replicas: bool
    ) -> list[Parameter]:
        """What this rank's deltas hold of the gradients of an optimizer's parameters.

        Args:
            specs: of the whole state.
            parameters: keys.
            share_replicas: False: every rank has all.
        """
        by_key = {spec.key: spec for spec in specs}
        its = [by_key[key] for key in parameters]
        shared = specs if self._whole else its
        if not share_replicas:
            shared = [msgspec.structs.replace(spec, replicated=False) for spec in shared]
        mine = {piece.key: (piece.start, piece.stop) for piece in self.of(shared)}
        return [Parameter(s.key, s.shape, *mine.get(s.key, (0, 0))) for s in its]


def accelerator(objects: Objects) -> Device | None:
    """How bytes leave the device that holds the parameters; None: they are in host memory."""
    parameters = objects.parameters
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
