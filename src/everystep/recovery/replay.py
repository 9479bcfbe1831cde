"""Optimizers built again from a stored state, which step as those in training did."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch.optim import Optimizer

from everystep.errors import CannotRestore, Damaged
from everystep.recovery.gradients import Gradient
from everystep.state import raw
from everystep.state.tree import Decoder, Encoder
from everystep.types import Json, TensorSpec, join_key, spoken

Options = list[dict[str, Any]]
"""The hyperparameters of each group."""


class Call(NamedTuple):
    """One call of `step()`, ready to be done again."""

    optimizer: str
    options: Options | None
    """None: as they are."""
    gradients: list[Gradient]
    """Parallel to `Replay.parameters`."""
    scale: Json | None
    """As in `deltas.delta.Update`."""


class Replay:
    """One optimizer over tensors that stand for those of the training state.

    Args:
        name: of the optimizer.
        saved: its part of a stored tree.
        parameters: by key, shared by all optimizers of a state.
        keys: of the parameters, group after group.
        owners: keys of all parameters that it names, by model and FQN.
        decoder: of the stored values.
        classes: see `class_of`.
        foreign: keys of parameters that are somebody else's: their slots are left as they are.

    Raises:
        CannotRestore: there is no such class, or it is not built from its options.
    """

    def __init__(
        self,
        name: str,
        saved: Json,
        parameters: Mapping[str, torch.nn.Parameter],
        keys: Sequence[Sequence[str]],
        owners: Mapping[tuple[str, str], str],
        decoder: Decoder,
        classes: Mapping[str, type[Optimizer]],
        foreign: AbstractSet[str] = frozenset(),
    ) -> None:
        if saved["others"] or saved["more"]:
            raise CannotRestore(
                f"optimizers.{name} keeps more than options and the slots of parameters"
            )
        self.name = name
        self.keys = [key for group in keys for key in group]
        self.parameters = [parameters[key] for key in self.keys]
        self._owners = {id(parameters[key]): (owner, key) for owner, key in owners.items()}
        options = [decoder.decode(group["options"]) for group in saved["groups"]]
        kind = class_of(saved["class"], classes)
        groups = [[parameters[key] for key in group] for group in keys]
        self.optimizer = _construct(kind, groups, options)
        self.set_options(options)
        self.optimizer.state.clear()
        self._foreign: list[Json] = []
        self._order = {tuple(owner): place for place, (owner, _) in enumerate(saved["slots"])}
        for owner, slot in saved["slots"]:
            key = owners[owner[0], owner[1]]
            if key in foreign:
                self._foreign.append([owner, slot])
            else:
                self.optimizer.state[parameters[key]] = decoder.decode(slot)
        with contextlib.suppress(KeyError):  # where it misses an entry in a slot that has none
            self.optimizer.__setstate__(
                {"state": self.optimizer.state, "param_groups": self.optimizer.param_groups}
            )
        self._held_slots: list[Any] = []

    @property
    def groups(self) -> Options:
        """The live groups, parameters included."""
        groups: Options = self.optimizer.param_groups
        return groups

    def set_options(self, options: Options) -> None:
        """Give each group these options and no others.

        Raises:
            Damaged: there is another number of groups.
        """
        if len(options) != len(self.groups):
            raise Damaged(
                f"optimizers.{self.name}: groups", expected=len(self.groups), found=len(options)
            )
        for group, given in zip(self.groups, options, strict=True):
            replace_options(group, given)

    def step(self, call: Call) -> None:
        """Do one step over whole tensors.

        Raises:
            CannotRestore: the optimizer refuses.
        """
        if call.options is not None:
            self.set_options(call.options)
        for parameter, gradient in zip(self.parameters, call.gradients, strict=True):
            set_gradient(parameter, gradient.whole(parameter.detach()))
        with scaled(self.optimizer, call.scale, self.parameters):
            take_step(self.optimizer)
        for parameter in self.parameters:
            parameter.grad = None

    def slots_replaced(self) -> bool:
        """Whether there are other slots than when this was asked last."""
        now = [value for slot in self.optimizer.state.values() for value in slot.values()]
        same = len(now) == len(self._held_slots) and all(
            a is b and not _holds_others(a) for a, b in zip(now, self._held_slots, strict=True)
        )
        self._held_slots = now
        return not same

    def encode_slots(
        self, in_models: Mapping[object, str], specs: Mapping[str, TensorSpec]
    ) -> tuple[list[Json], dict[str, tuple[torch.Tensor, TensorSpec]]]:
        """The slots as JSON, and their tensors with descriptions by key, but for foreign ones.

        Args:
            in_models: the memory of models' tensors, with their keys.
            specs: of all tensors that were there before.
        """
        encoder = Encoder()
        encoder.new_section(in_models)
        slots: list[Json] = []
        found: dict[str, tuple[torch.Tensor, TensorSpec]] = {}
        for parameter, slot in self.optimizer.state.items():
            owner, its_key = self._owners[id(parameter)]
            above = specs[its_key]
            before = len(encoder.held)
            key = join_key("optimizers", self.name, "state", *owner)
            slots.append([list(owner), encoder.encode(slot, key, replicated=above.replicated)])
            for key, held in list(encoder.held.items())[before:]:
                found[key] = held.tensor, _as_before(held.spec, specs.get(key), above)
        slots += self._foreign
        slots.sort(key=lambda slot: self._order.get(tuple(slot[0]), len(slots)))
        return slots, found


def _holds_others(value: object) -> bool:
    """Whether it may hold other tensors while it stays the same object: a list, a deque, a dict, or
    a sparse tensor."""
    if isinstance(value, torch.Tensor):
        return value.layout != torch.strided
    return not isinstance(value, float | int | str | None)


def _as_before(spec: TensorSpec, known: TensorSpec | None, above: TensorSpec) -> TensorSpec:
    """The description of a slot; what its tensor here cannot tell is taken from the slot before,
    or from its parameter."""
    if known is not None and (known.shape, known.dtype) == (spec.shape, spec.dtype):
        return known
    shard = above.shard if spec.shape == above.shape and spec.shape else None
    return msgspec.structs.replace(spec, shard=shard, replicated=above.replicated and shard is None)


def class_of(qualified: str, classes: Mapping[str, type[Optimizer]]) -> type[Optimizer]:
    """The class of that full name: one of `classes`, or of torch.optim. Nothing is imported.

    Raises:
        CannotRestore: there is none.
    """
    if qualified in classes:
        return classes[qualified]
    module, _, name = qualified.rpartition(".")
    kind = getattr(torch.optim, name, None)
    if (
        module.startswith("torch.optim")
        and name.isidentifier()
        and isinstance(kind, type)
        and issubclass(kind, Optimizer)
    ):
        return kind
    raise CannotRestore(
        f"the steps were made by {qualified}, which is not here",
        hint="restore with the objects of training, whose optimizer has that class",
    )


def _construct(
    kind: type[Optimizer], groups: Sequence[Sequence[torch.nn.Parameter]], options: Options
) -> Optimizer:
    accepted = inspect.signature(kind).parameters
    given = {name: v for name, v in (options[0] if options else {}).items() if name in accepted}
    make: Callable[..., Optimizer] = kind
    try:
        return make([{"params": list(group)} for group in groups], **given)
    except Exception as error:
        raise CannotRestore(f"{kind.__qualname__} cannot be built again: {error}") from error


def replace_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Give a group these options and no others."""
    for name in [name for name in group if name != "params" and name not in options]:
        del group[name]
    group.update(options)


def set_gradient(parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Let an optimizer find this gradient, of whatever dtype."""
    if gradient is not None:
        gradient = gradient.to(parameter.device)
        if gradient.dtype != parameter.dtype:
            parameter.grad_dtype = gradient.dtype
    try:
        parameter.grad = gradient
    except (RuntimeError, TypeError) as error:
        raise Damaged(f"a gradient does not fit its parameter: {error}") from error


@contextlib.contextmanager
def scaled(
    optimizer: Optimizer, scale: Json | None, parameters: Sequence[torch.Tensor]
) -> Iterator[None]:
    """What a gradient scaler leaves to an optimizer that unscales in its own kernel."""
    given: Any = optimizer
    if scale is None:
        yield
        return
    device = parameters[0].device if parameters else torch.device("cpu")
    given.grad_scale, given.found_inf = (
        None if bits is None else torch.from_numpy(np.uint32(bits).reshape(1).view(np.float32))
        .reshape(()).to(device)
        for bits in scale
    )  # fmt: skip
    try:
        yield
    finally:
        del given.grad_scale, given.found_inf


def take_step(optimizer: Optimizer) -> None:
    """Call `step()` without the hooks that are set on all optimizers of the process.

    Raises:
        CannotRestore: it fails.
    """
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    try:
        with torch.no_grad():
            step(optimizer)
    except Exception as error:
        raise CannotRestore(f"{type(optimizer).__qualname__}.step() failed: {error}") from error


def parameter_over(tensor: torch.Tensor, key: str) -> torch.nn.Parameter:
    """A parameter in the memory of a tensor.

    Raises:
        Damaged: its dtype has no gradient.
    """
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise Damaged(f"{spoken(key)}: a parameter of dtype {raw.dtype_name(tensor.dtype)}")
    return torch.nn.Parameter(tensor.detach())
