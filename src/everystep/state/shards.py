"""DTensor to (this rank's part, where it lies in the global tensor), and back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeGuard

import torch

from everystep.errors import LayoutMismatch, Unsupported
from everystep.types import Shard

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Whether it is a DTensor, without importing that (slow) module where nobody uses it."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):  # nearly always, and asked often
        return False
    return any(
        kind.__name__ == "DTensor" and kind.__module__.startswith("torch.distributed.")
        for kind in type(tensor).__mro__
    )


def shard_of(tensor: torch.Tensor) -> tuple[torch.Tensor, Shard | None]:
    """The local tensor, and which part of which global tensor it is (None: not a DTensor).

    Raises:
        Unsupported: a placement other than plain sharding or replication, such as a pending sum.
    """
    if not is_dtensor(tensor):
        return tensor, None
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor import Shard as ShardedAlong
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = tensor.device_mesh, tensor.placements
    for placement in placements:
        if type(placement) not in (ShardedAlong, Replicate):
            raise Unsupported(f"a DTensor with placement {placement}")
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    names = mesh.mesh_dim_names
    return tensor.to_local(), Shard(
        global_shape=tuple(tensor.shape),
        offsets=tuple(offsets),
        mesh_shape=tuple(mesh.shape),
        mesh_dim_names=None if names is None else tuple(names),
        placements=tuple(f"S({p.dim})" if isinstance(p, ShardedAlong) else "R" for p in placements),
    )


def mesh_facts(shard: Shard) -> tuple[object, ...]:
    """What two shards on one mesh have in common."""
    return shard.mesh_shape, shard.mesh_dim_names


class Meshes:
    """The device meshes that live tensors are on, to rebuild DTensors that do not exist yet."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._templates: dict[tuple[object, ...], DTensor] = {}
        for tensor in tensors:
            if is_dtensor(tensor):
                _, shard = shard_of(tensor)
                if shard is not None:
                    self._templates.setdefault(mesh_facts(shard), tensor)

    def rebuild(self, local: torch.Tensor, shard: Shard, key: str) -> torch.Tensor:
        """A DTensor whose part on this rank is `local`.

        Raises:
            LayoutMismatch: no live tensor is on a mesh of that shape.
        """
        from torch.distributed.tensor import DTensor, Replicate
        from torch.distributed.tensor import Shard as ShardedAlong

        template = self._templates.get(mesh_facts(shard))
        if template is None:
            raise LayoutMismatch(
                f"{key} was stored on a device mesh of shape {shard.mesh_shape}",
                hint="restore into objects that are sharded over the same mesh",
            )
        mesh = template.device_mesh
        placements = [
            Replicate() if name == "R" else ShardedAlong(int(name[2:-1]))
            for name in shard.placements
        ]
        return DTensor.from_local(
            local.to(mesh.device_type),
            mesh,
            placements,
            run_check=False,
            shape=torch.Size(shard.global_shape),
            stride=_row_major(shard.global_shape),
        )


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    stride: list[int] = []
    step = 1
    for length in reversed(shape):
        stride.append(step)
        step *= max(length, 1)
    return tuple(reversed(stride))
