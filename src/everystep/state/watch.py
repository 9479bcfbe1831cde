"""Notice that tensors and modules are what they were, by comparisons that run in C."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import is_, itemgetter, methodcaller
from typing import Any

import torch
from torch import nn

from everystep.errors import Unsupported
from everystep.state.names import refuse_hidden_state
from everystep.state.shards import is_dtensor

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # they are no part of torch's public interface
    TensorGuards = None  # type: ignore[assignment,misc]

try:
    from everystep.state import _same as compiled
except ImportError:  # it was built without a compiler
    compiled = None  # type: ignore[assignment]

_AT_ONCE = 500
"""Tensors per comparison: so few stay in the processor's cache from one property to the next."""

_HOLDERS = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
"""Of a module's attributes."""

_HELD = itemgetter(*_HOLDERS)

_VALUES = methodcaller("values")


def same_objects(now: Iterable[object], then: Iterable[object]) -> bool:
    """Whether two series of equal length are of the same objects."""
    return all(map(is_, now, then))


class DictWatch:
    """The keys and values of dicts, compared by identity, without a look at the things themselves.

    Args:
        dicts: of anything else than a dict it is never sure.
    """

    def __init__(self, dicts: Iterable[Any]) -> None:
        self._dicts = list(dicts) if compiled is not None else []
        self._held: list[object] = []
        for held in self._dicts:
            items = held.items() if isinstance(held, dict) else ()
            self._held += [held, *chain.from_iterable(items)]

    def surely_same(self) -> bool:
        """Whether each holds what it did when this was made, in that order; False: it may yet."""
        return compiled is not None and compiled.same_held(self._dicts, self._held)


class TensorWatch:
    """Tensors, and where and how their elements lie in memory."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        unique = {id(tensor): tensor for tensor in tensors}.values()
        self._sharded = [tensor for tensor in unique if is_dtensor(tensor)]
        self._places = _places(self._sharded)
        local = {id(tensor): tensor for tensor in unique if not is_dtensor(tensor)}
        local |= {id(tensor._local_tensor): tensor._local_tensor for tensor in self._sharded}
        whole = list(local.values())
        self._parts = [
            _Part(whole[start : start + _AT_ONCE]) for start in range(0, len(whole), _AT_ONCE)
        ]

    def same(self) -> bool:
        """Whether all are as they were."""
        return _places(self._sharded) == self._places and all(part.same() for part in self._parts)


class _Part:
    """Some tensors at once.

    torch.compile's guards compare in one call what `_facts` tells of many tensors. They also
    fail when nothing but the mode has changed (autocast, inference), and may one day be gone: the
    facts themselves decide then.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        self._addresses = list(map(torch.Tensor.data_ptr, tensors))
        self._facts = list(map(_facts, tensors))
        self._guards = _guards(tensors)

    def same(self) -> bool:
        if list(map(torch.Tensor.data_ptr, self._tensors)) != self._addresses:
            return False
        if self._guards is not None and self._guards.check(*self._tensors):
            return True
        if list(map(_facts, self._tensors)) != self._facts:
            return False
        self._guards = _guards(self._tensors)
        return True


def _guards(tensors: list[torch.Tensor]) -> TensorGuards | None:
    if TensorGuards is None:
        return None
    return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)


def _facts(tensor: torch.Tensor) -> tuple[object, ...]:
    """All but the address of what decides how a tensor is captured."""
    return (
        type(tensor),
        tensor.dtype,
        tensor.device,
        tensor.layout,
        tuple(tensor.shape),
        tensor.stride() if tensor.layout == torch.strided else None,
        tensor.requires_grad,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _places(sharded: Iterable[Any]) -> list[tuple[object, ...]]:
    """Of DTensors: which local tensor is which part of what."""
    return [
        (
            id(tensor._local_tensor),  # kept alive by the watch, as is the mesh by the tensor
            id(tensor.device_mesh),
            tensor.placements,
            tensor.shape,
            tensor.requires_grad,
        )
        for tensor in sharded
    ]


class ModuleWatch:
    """All modules of a model, wrappers too, with the names and identities of what they hold."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(_reachable(model))
        self._kinds = list(map(type, self._modules))
        self._classes = set(self._kinds)
        self._class_facts = _class_facts(self._classes)
        self._saving = [
            module
            for module in self._modules
            if type(module)._save_to_state_dict is not nn.Module._save_to_state_dict
        ]
        self._wrappers = [
            m for m in self._modules if isinstance(m, nn.parallel.DistributedDataParallel)
        ]
        self._wrapper_facts = _wrapper_facts(self._wrappers)
        self._attributes = list(map(vars, self._modules))
        held = _held(self._attributes)
        self._lengths = list(map(len, held))
        self._take_up(held)
        self._names, self._things = self._contents()
        self._non_persistent = list(map(frozenset, self._sets))
        self._loose = set(_loose_positions(self._modules))
        self._watch = self._watched()

    def _watched(self) -> DictWatch:
        return DictWatch(part for part in self._containers if not isinstance(part, set))

    def _take_up(self, held: list[Any]) -> None:
        """Remember the containers themselves, and which of them are to be looked into."""
        self._containers = held
        filled = [part for part, length in zip(held, self._lengths, strict=True) if length]
        self._dicts = [part for part in filled if not isinstance(part, set)]
        self._sets = [part for part in filled if isinstance(part, set)]
        pairs = zip(held, self._lengths, strict=True)
        self._empty_sets = [part for part, length in pairs if isinstance(part, set) and not length]

    def _contents(self) -> tuple[list[str], list[object]]:
        """The names of all that the modules hold, and the things themselves."""
        names = list(chain.from_iterable(self._dicts))
        return names, list(chain.from_iterable(map(_VALUES, self._dicts)))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Parameters and persistent buffers, under each of their names."""
        return [
            thing
            for position, thing in enumerate(self._things)
            if isinstance(thing, torch.Tensor) and position not in self._loose
        ]

    def same(self) -> bool:
        """Whether all modules hold the same objects under the same names as they did."""
        return (
            (self._untouched() or self._alike())
            and self._sets == self._non_persistent
            and same_objects(map(type, self._modules), self._kinds)
            and _class_facts(self._classes) == self._class_facts
            and _wrapper_facts(self._wrappers) == self._wrapper_facts
            and not any(map(_hides, self._saving))
        )

    def _untouched(self) -> bool:
        """Whether the modules hold the same in the very same containers; False: they may yet."""
        return (
            compiled is not None
            and compiled.same_items(self._attributes, _HOLDERS, self._containers)
            and self._watch.surely_same()
            and not any(self._empty_sets)
        )

    def _alike(self) -> bool:
        """Whether they hold the same, but for containers and things that are not captured."""
        held = _held(self._attributes)
        if list(map(len, held)) != self._lengths:
            return False
        if not same_objects(held, self._containers):
            self._take_up(held)
        names, things = self._contents()
        if names != self._names:
            return False
        if not (same_objects(things, self._things) or self._only_loose(things)):
            return False
        self._watch = self._watched()
        return True

    def _only_loose(self, things: list[object]) -> bool:
        """Whether nothing but non-persistent buffers were replaced, which are not captured."""
        pairs = enumerate(zip(things, self._things, strict=True))
        differing = (position for position, (now, then) in pairs if now is not then)
        same = self._loose.issuperset(differing)
        if same:
            self._things = things
        return same


def _reachable(model: nn.Module) -> dict[nn.Module, None]:
    """All modules, wrappers too, each once."""
    found: dict[nn.Module, None] = {}
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if module not in found:
            found[module] = None
            waiting += [child for child in module._modules.values() if child is not None]
    return found


def _held(attributes: Sequence[dict[str, Any]]) -> list[Any]:
    """Of each module the dicts of what it holds, and the set of names that are not stored.

    Args:
        attributes: of each.
    """
    return list(chain.from_iterable(map(_HELD, attributes)))


def _loose_positions(modules: Sequence[nn.Module]) -> Iterable[int]:
    position = 0
    for module in modules:
        position += len(module._parameters)
        for name in module._buffers:
            if name in module._non_persistent_buffers_set:
                yield position
            position += 1
        position += len(module._modules)


def _class_facts(kinds: set[type[nn.Module]]) -> dict[type[nn.Module], tuple[object, ...]]:
    return {kind: (kind.get_extra_state, kind._save_to_state_dict, kind.__mro__) for kind in kinds}


def _wrapper_facts(wrappers: Iterable[nn.parallel.DistributedDataParallel]) -> list[object]:
    return [(w.process_group.size(), frozenset(w.parameters_to_ignore)) for w in wrappers]


def _hides(module: nn.Module) -> bool:
    """Whether a full capture may refuse it; that one says where it is."""
    try:
        refuse_hidden_state(module, "")
    except Unsupported:
        return True
    return False
