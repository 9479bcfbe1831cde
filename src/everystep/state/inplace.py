"""What is written into live memory: which slots can be, and whether shared memory was."""

from __future__ import annotations

import collections
from collections.abc import Mapping

import torch
from torch import nn
from torch.optim import Optimizer

from everystep.errors import LayoutMismatch
from everystep.state import raw
from everystep.state.names import names_of
from everystep.state.optimizers import Owners, inner_of
from everystep.state.shards import shard_of
from everystep.types import Json, TensorSpec, spoken

_FEW_BYTES = 64 << 10
"""New memory for less costs nothing worth saving."""


def standing_slots(
    models: Mapping[str, nn.Module],
    optimizers: Mapping[str, Optimizer],
    tree: Json,
    specs: Mapping[str, TensorSpec],
    world_size: int,
) -> dict[str, torch.Tensor]:
    """Live slots by the keys of the stored tensors that have the same form.

    Only whole, row-major tensors in host memory are taken, and none that shares its memory with
    another slot or with a tensor of a model.

    Args:
        tree: of a stored state that `capture.check` has compared with the objects.
        specs: its tensors, by key.
    """
    owners = Owners()
    uses: collections.Counter[int] = collections.Counter()
    for name, module in models.items():
        names = names_of(module, world_size)
        owners.add(name, names)
        uses.update(_memory_of(tensor) for tensor in names.tensors.values())
    states = {name: inner_of(optimizer).state for name, optimizer in optimizers.items()}
    for state in states.values():
        for slots in state.values():
            values = slots.values() if isinstance(slots, dict) else [slots]
            uses.update(_memory_of(value) for value in values if isinstance(value, torch.Tensor))
    found: dict[str, torch.Tensor] = {}
    for name, state in states.items():
        for (model, fqn), stored in tree["optimizers"].get(name, {"slots": []})["slots"]:
            live_slots = state.get(owners.parameter.get((model, fqn)))
            if not isinstance(live_slots, dict) or not isinstance(stored, dict):
                continue
            for option, value in stored.items():
                live = live_slots.get(option)
                key = value.get("$tensor") if isinstance(value, dict) else None
                if not isinstance(key, str) or not isinstance(live, torch.Tensor):
                    continue
                if key in specs and _fits(live, specs[key]) and uses[_memory_of(live)] == 1:
                    found.setdefault(key, live)
    return found


def _memory_of(tensor: torch.Tensor) -> int:
    """The address of its storage; 0 where it has none of its own."""
    local = shard_of(tensor)[0]
    return local.untyped_storage().data_ptr() if local.layout == torch.strided else 0


def _fits(live: object, spec: TensorSpec) -> bool:
    return (
        type(live) is torch.Tensor
        and spec.nbytes >= _FEW_BYTES
        and (spec.device, spec.stride, spec.shard) == ("cpu", None, None)
        and (raw.dtype_name(live.dtype), tuple(live.shape)) == (spec.dtype, spec.shape)
        and raw.is_plain(live)
        and not live.requires_grad
        and live.untyped_storage().nbytes() == live.nbytes
    )


def prove_shared(written: Mapping[str, torch.Tensor], sources: Mapping[str, torch.Tensor]) -> None:
    """Tensors in one storage may overlap: then writing one may have changed another.

    Args:
        written: live tensors by key.
        sources: what has been written, by the same keys.

    Raises:
        LayoutMismatch: it has.
    """
    by_storage: dict[int, list[str]] = {}
    for key, live in written.items():
        address = shard_of(live)[0].untyped_storage().data_ptr()
        by_storage.setdefault(address, []).append(key)
    for keys in by_storage.values():
        for key in keys if len(keys) > 1 else ():
            if not raw.same_bits(shard_of(written[key])[0], sources[key]):
                raise LayoutMismatch(f"{spoken(key)} overlaps another here, and not when stored")
