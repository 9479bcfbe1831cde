"""Capture again at the cost of noticing that nothing has changed.

`capture` walks every module and slot and describes every tensor. Here that is done once; afterwards
whole lists of objects, names and addresses are compared with those of last time, by loops that run
in C. Whatever does not compare equal is answered by a full capture.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import msgspec
import torch
from msgspec import Raw
from torch import nn
from torch.optim import Optimizer

from everystep.state import raw, rng
from everystep.state.capture import (
    State,
    capture,
    capture_beside,
    capture_extra_state,
)
from everystep.state.names import ModelNames, names_of
from everystep.state.objects import Objects
from everystep.state.shards import is_dtensor, shard_of
from everystep.state.slots import Changed, Slots, by_memory_of
from everystep.state.tree import Encoder, Held
from everystep.state.watch import ModuleWatch, TensorWatch
from everystep.types import Json, join_key

_encoded = msgspec.json.encode


class Captured(NamedTuple):
    """A training state, as `capture` would describe it at the same moment."""

    version: int
    """Increases whenever `fixed` is another list."""
    fixed: Sequence[Held]
    """Parameters, buffers and optimizer slots; the same list while `version` is the same."""
    writers: Sequence[str | None]
    """Parallel to `fixed`: the optimizer whose `step()` writes the tensor. None: buffers, frozen
    parameters, and parameters in no optimizer."""
    rest: Sequence[Held]
    """All other tensors, captured anew each time; one that is the same object as the time before
    has the same bytes."""
    versions: Sequence[int | None]
    """Parallel to `fixed`: of parameters and buffers, what rises with every write in place; None
    where it was not read (slots, parts of DTensors, and if it was not asked for)."""
    tree: Json
    """As in `State`; parts that have not changed are `msgspec.Raw`."""
    unmoved: Callable[[], bool]
    """Whether every fixed tensor has the memory and form that `fixed` says, and requires grad as
    `tree` says. Any thread may ask, and somebody must before relying on it: `now` compares objects
    only, since to look at all tensors takes longer than everything else, until `Recapture.forget`
    has been called once."""


class Recapture:
    """Captures the same objects again and again, fully only where something has changed.

    It holds references to what it compares, until the next `now()` finds it replaced.

    Args:
        versions: whether `Captured.versions` is asked for.
        left_out: beginnings of keys in extras: such tensors need not be in `Captured.rest`.
    """

    def __init__(
        self,
        objects: Objects,
        world_size: int,
        *,
        versions: bool = True,
        left_out: Sequence[str] = (),
    ) -> None:
        self._objects, self._world_size, self._versions = objects, world_size, versions
        self._left_out = tuple(left_out)
        self._version = 0
        self._watchful = False
        self._known: _Known | None = None

    def forget(self) -> None:
        """A tensor has moved while it stayed the same object: capture fully the next time, and
        look at all tensors from then on."""
        self._known, self._watchful = None, True

    def now(self) -> Captured:
        """The state at this moment; the tensors alias live memory.

        Raises:
            Unsupported: something in the state cannot be stored exactly; the message names it.
        """
        known, self._known = self._known, None
        if known is not None:
            moved = self._watchful and not known.unmoved()
            captured = None if moved else known.again()
            if captured is not None:
                self._known = known
                return captured
            del known  # before the walk: what was replaced can be freed
        state = capture(self._objects, self._world_size)
        self._version += 1
        known = _Known(
            self._objects, self._world_size, state, self._version, self._versions, self._left_out
        )
        if known.comparable:
            self._known = known
        rest = [held for key, held in state.held.items() if key not in known.keys]
        return known.captured(rest, state.tree)


class _Known:
    """A full capture, and all by which a change since then is noticed."""

    def __init__(
        self,
        objects: Objects,
        world_size: int,
        state: State,
        version: int,
        versions: bool,
        left_out: tuple[str, ...],
    ) -> None:
        self._objects, self._version, self._left_out = objects, version, left_out
        self._random = _Random()
        names = {name: names_of(model, world_size) for name, model in objects.models.items()}
        self._models = {
            name: _Model(name, model, names[name], state, versions)
            for name, model in objects.models.items()
        }
        in_models: dict[object, str] = {}
        for model in self._models.values():
            in_models |= model.by_memory
        self._optimizers = {
            name: Slots(name, optimizer, state, in_models)
            for name, optimizer in objects.optimizers.items()
        }
        parts: list[_Model | Slots] = [*self._models.values(), *self._optimizers.values()]
        self.keys = {key for part in parts for key in part.keys}
        self.fixed = [held for key, held in state.held.items() if key in self.keys]
        self._no_versions: list[int | None] = [None] * len(self.fixed)
        places = {held.spec.key: position for position, held in enumerate(self.fixed)}
        for model in self._models.values():
            model.find_versions(places)
        self.writers = _writers(objects.optimizers, names, self._optimizers, self.fixed)
        self._all_memory = {memory: key for part in parts for memory, key in part.by_memory.items()}
        self._watch = TensorWatch(chain.from_iterable(part.tensors for part in parts))
        self._asks = bool(objects.extras) or not all(
            [
                *(not its.extra_state for its in names.values()),
                *(type(o).state_dict is Optimizer.state_dict for o in objects.optimizers.values()),
            ]
        )
        self.comparable = all(slots.comparable for slots in self._optimizers.values())

    def unmoved(self) -> bool:
        """See `Captured.unmoved`."""
        return self._watch.same() and all(o.named_alike() for o in self._optimizers.values())

    def again(self) -> Captured | None:
        """The state now, None where only a full capture can tell."""
        random_state = self._random.now()
        if not all(model.same() for model in self._models.values()):
            return None
        encoder = _Rest(self._random, self._left_out)
        try:
            tree: dict[str, Json] = {"models": {}, "optimizers": {}}
            in_models: dict[object, str] = {}
            for name, model in self._models.items():
                encoder.new_section(among=model.by_memory, apart_from=self._all_memory)
                tree["models"][name] = model.again(encoder)
                in_models |= encoder.seen
            for name, slots in self._optimizers.items():
                encoder.new_section(in_models, among=slots.known)
                tree["optimizers"][name] = slots.again(encoder)
        except Changed:
            self._put_back(random_state)
            return None
        encoder.new_section()
        tree |= capture_beside(self._objects, random_state, encoder, asked=False)
        if self._asks:
            self._put_back(random_state)
        return self.captured(list(encoder.held.values()), tree)

    def _put_back(self, random_state: dict[str, Any]) -> None:
        """Undo what those have drawn who were asked for their state."""
        if self._random.drawn():
            rng.set_global_state(random_state)

    def captured(self, rest: Sequence[Held], tree: Json) -> Captured:
        """The state, whose models have just been looked at."""
        versions = self._no_versions.copy()
        for model in self._models.values():
            for position, version in zip(model.positions, model.versions, strict=True):
                versions[position] = version
        return Captured(self._version, self.fixed, self.writers, rest, versions, tree, self.unmoved)


def _writers(
    optimizers: Mapping[str, Optimizer],
    names: Mapping[str, ModelNames],
    slots: Mapping[str, Slots],
    fixed: Sequence[Held],
) -> list[str | None]:
    """For each fixed tensor the optimizer that writes it, by key, and by memory for a parameter
    that another model holds as another tensor."""
    by_id: dict[int, str] = {}
    by_key: dict[str, str] = {}
    by_memory: dict[object, str] = {}
    for name, optimizer in optimizers.items():
        for parameter in chain.from_iterable(group["params"] for group in optimizer.param_groups):
            if parameter.requires_grad:
                by_id.setdefault(id(parameter), name)
                by_memory.setdefault(raw.same_memory(shard_of(parameter)[0]), name)
        for key in slots[name].used:
            by_key.setdefault(key, name)
    by_memory.pop(None, None)
    for model, its in names.items():
        for fqn, parameter in its.parameters.items():
            if id(parameter) in by_id:
                by_key[join_key("models", model, its.tied(fqn))] = by_id[id(parameter)]
    return [
        by_key.get(held.spec.key) or by_memory.get(raw.same_memory(held.tensor)) for held in fixed
    ]


class _Random:
    """The states of the global generators, encoded anew only where somebody has drawn."""

    def __init__(self) -> None:
        self._watched = rng.Watched()
        self.state: dict[str, Any] = {}
        self.json: Json = None
        self.held: dict[str, Held] = {}

    def now(self) -> dict[str, Any]:
        """See `rng.Watched.now`."""
        state = self._watched.now()
        if state is not self.state:
            encoder = Encoder()
            self.json = Raw(_encoded(encoder.encode(state, join_key("rng"))))
            self.state, self.held = state, encoder.held
        return state

    def drawn(self) -> bool:
        """See `rng.Watched.drawn`."""
        return self._watched.drawn()


class _Rest(Encoder):
    """Collects only tensors that are none of the fixed ones.

    Args:
        random: what its state is encoded to is known.
        left_out: beginnings of keys of tensors that are not collected either.
    """

    def __init__(self, random: _Random, left_out: tuple[str, ...]) -> None:
        super().__init__()
        self._random, self._left_out = random, left_out

    def encode(self, value: object, key: str, *, replicated: bool = False, depth: int = 0) -> Json:
        """As in `Encoder`."""
        if value is self._random.state:
            self.held |= self._random.held
            return self._random.json
        return super().encode(value, key, replicated=replicated, depth=depth)

    def new_section(
        self,
        known: Mapping[object, str] | None = None,
        *,
        among: Mapping[object, str] | None = None,
        apart_from: Mapping[object, str] | None = None,
    ) -> None:
        """Forget what was seen.

        Args:
            known: memory to start the section with.
            among: fixed memory that may be met in this section.
            apart_from: memory that decides under which key something else is held, if met here.
        """
        super().new_section(known)
        self._among, self._apart_from = among or {}, apart_from or {}

    def tensor(self, value: torch.Tensor, key: str, *, replicated: bool = False) -> str:
        """As in `Encoder`; one that is fixed or left out is only referred to."""
        if key.startswith(self._left_out):
            return key
        memory = raw.same_memory(shard_of(value)[0])
        if memory in self._among:
            return self._among[memory]
        if memory in self._apart_from:
            raise Changed
        return super().tensor(value, key, replicated=replicated)


_TRAINED = operator.attrgetter("requires_grad")
_WRITTEN = operator.attrgetter("_version")
_AT_ONCE = 500
"""Tensors at a time: so few stay in the processor's cache from one property to the next."""


class _Model:
    """One model as it was captured."""

    def __init__(
        self, name: str, model: nn.Module, names: ModelNames, state: State, versions: bool
    ) -> None:
        self._name, self._names = name, names
        self._watch = ModuleWatch(model)
        self.tensors = self._watch.tensors
        keys = [join_key("models", name, fqn) for fqn in names.tensors]
        self._counted = {  # those whose writes are counted where they are seen
            key: tensor
            for key, tensor in zip(keys, names.tensors.values(), strict=True)
            if versions and not is_dtensor(tensor) and not tensor.is_inference()
        }
        self.positions: list[int] = []
        """Where in `fixed` those are of which `versions` tells."""
        self.versions: list[int] = []
        """As `same` has found them last."""
        self.keys = set(keys)
        self.by_memory = by_memory_of(keys, state)
        tree = state.tree["models"][name]
        self._unchanged = {part: Raw(_encoded(tree[part])) for part in ("aliases", "frozen")}

    def find_versions(self, places: Mapping[str, int]) -> None:
        """Prepare to look at all tensors, and do it.

        Args:
            places: where in `fixed` a key is.
        """
        own = {id(tensor): key for key, tensor in self._counted.items() if key in places}
        rest = [tensor for tensor in self.tensors if id(tensor) not in own]
        counted = [self._counted[key] for key in own.values()]
        self.positions = [places[key] for key in own.values()]
        parts = [counted[at : at + _AT_ONCE] for at in range(0, len(counted), _AT_ONCE)]
        self._parts = [(part, list(map(_TRAINED, part))) for part in parts]
        self._rest = (rest, list(map(_TRAINED, rest)))
        self._look()

    def same(self) -> bool:
        """Whether it is made as it was, and the same parameters are trained."""
        return self._watch.same() and self._look()

    def _look(self) -> bool:
        """Whether the same parameters are trained; notes how often they have been written."""
        versions: list[int] = []
        for part, trained in self._parts:
            if list(map(_TRAINED, part)) != trained:
                return False
            versions += map(_WRITTEN, part)
        self.versions = versions
        rest, trained = self._rest
        return list(map(_TRAINED, rest)) == trained

    def again(self, encoder: Encoder) -> Json:
        extra_state = capture_extra_state(self._name, self._names, encoder)
        return {**self._unchanged, "extra_state": extra_state}
