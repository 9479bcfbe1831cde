"""Parameters and buffers of a model by name, without the names that wrappers add."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from everystep.errors import Unsupported
from everystep.state import raw
from everystep.state.shards import shard_of

_WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "ActivationWrapper": "_checkpoint_wrapped_module",
}
"""torch's wrapper classes by name (importing some of them is slow), and the child they wrap."""


@dataclass
class ModelNames:
    """What a model holds, by FQN. A parameter or buffer with several names has one entry."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """Parameters and persistent buffers; live, not detached."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Further names of a tied tensor, each to the name in `tensors`."""
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    """Every live parameter under each of its FQNs, those in `aliases` too."""
    replicated: set[str] = field(default_factory=set)
    """FQNs of parameters that DistributedDataParallel keeps alike on all ranks."""
    extra_state: dict[str, nn.Module] = field(default_factory=dict)
    """Modules that define `get_extra_state`, by the FQN of that state."""

    def tied(self, fqn: str) -> str:
        """The name in `tensors` of what has this name."""
        return self.aliases.get(fqn, fqn)


def names_of(model: nn.Module, world_size: int) -> ModelNames:
    """Walk a model and name all that a checkpoint must hold.

    Non-persistent buffers are left out, as torch does.

    Args:
        model: any module, wrapped by DDP, torch.compile or activation checkpointing or not.
        world_size: how many ranks train; parameters count as replicated only where a DDP wrapper
            spans all of them.

    Raises:
        Unsupported: FSDP1, a lazy module that has no parameters yet, two tensors of one name, or
            a module that keeps more in its `state_dict` than can be seen from outside.
    """
    names = ModelNames()
    _Walk(names, world_size).visit(model, prefix="", replicated=False, ignored=frozenset())
    return names


class _Walk:
    def __init__(self, names: ModelNames, world_size: int) -> None:
        self._names = names
        self._world_size = world_size
        self._first_name: dict[object, str] = {}

    def visit(
        self, module: nn.Module, prefix: str, replicated: bool, ignored: frozenset[str]
    ) -> None:
        wrapped = _wrapped(module)
        while wrapped is not None:
            if isinstance(module, nn.parallel.DistributedDataParallel):
                group_size: int = module.process_group.size()
                replicated = group_size == self._world_size
                ignored = frozenset(prefix + name for name in module.parameters_to_ignore)
            module, wrapped = wrapped, _wrapped(wrapped)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                first = self._add(prefix + name, parameter)
                self._names.parameters[prefix + name] = parameter
                self._names.replicated.update({first} - ignored if replicated else ())
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                self._add(prefix + name, buffer)
        refuse_hidden_state(module, prefix)
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            self._names.extra_state[prefix + "_extra_state"] = module
        for name, child in module._modules.items():
            if child is not None:
                self.visit(child, f"{prefix}{name}.", replicated, ignored)

    def _add(self, fqn: str, tensor: torch.Tensor) -> str:
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
            raise Unsupported(
                f"{fqn} is a lazy parameter without a shape",
                hint="run one forward pass before you make the Checkpointer",
            )
        if fqn in self._names.tensors or fqn in self._names.aliases:
            raise Unsupported(f"two parameters or buffers have the name {fqn}")
        memory = raw.same_memory(shard_of(tensor)[0]) or id(tensor)
        first = self._first_name.setdefault(memory, fqn)
        if first != fqn:
            self._names.aliases[fqn] = first
        else:
            self._names.tensors[fqn] = tensor
        return first


def _wrapped(module: nn.Module) -> nn.Module | None:
    """The module inside one of torch's wrappers, None if this is no wrapper."""
    for kind in type(module).__mro__:
        if not kind.__module__.startswith("torch."):
            continue
        if kind.__name__ == "FullyShardedDataParallel":
            raise Unsupported(
                "FullyShardedDataParallel (FSDP1) flattens parameters and hides their names",
                hint="use torch.distributed.fsdp.fully_shard (FSDP2)",
            )
        inner = _WRAPPERS.get(kind.__name__)
        if inner is not None and inner in module._modules:
            return module._modules[inner]
    return None


def refuse_hidden_state(module: nn.Module, prefix: str) -> None:
    """A module with a `_save_to_state_dict` of its own may store what is no parameter or buffer."""
    if type(module)._save_to_state_dict is nn.Module._save_to_state_dict:
        return
    stored: dict[str, object] = {}
    module._save_to_state_dict(stored, "", False)
    hidden = stored.keys() - module._parameters.keys() - module._buffers.keys() - {"_extra_state"}
    if hidden:
        raise Unsupported(
            f"{prefix}{min(hidden)} is in the state_dict of a {type(module).__qualname__}, and is "
            "neither parameter nor buffer",
            hint="make it one, or return it from get_extra_state() (and take it in "
            "set_extra_state())",
        )
