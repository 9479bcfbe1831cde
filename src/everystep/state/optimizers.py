"""Optimizer slots and hyperparameters by parameter name, read and set without calling torch's
`state_dict`, which goes by position and casts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from everystep.errors import LayoutMismatch, Unsupported
from everystep.state import raw
from everystep.state.names import ModelNames
from everystep.state.tree import Decoder, Encoder
from everystep.types import Json, join_key, spoken

ELEMENTWISE = {
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam,
    torch.optim.RAdam, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop,
    torch.optim.Rprop, torch.optim.ASGD,
}  # fmt: skip
"""What they do to an element depends on no other one."""

ParameterName = tuple[str, str]
"""(name of the model, FQN in it)"""


class Owners:
    """Which model and FQN each live parameter has, and the reverse."""

    def __init__(self) -> None:
        self.name_of: dict[int, ParameterName] = {}
        self.parameter: dict[ParameterName, torch.Tensor] = {}
        self.replicated: set[ParameterName] = set()

    def add(self, model: str, names: ModelNames) -> None:
        """Record the parameters of one model, under all their names."""
        for fqn, parameter in names.parameters.items():
            self.name_of.setdefault(id(parameter), (model, fqn))
            self.parameter[model, fqn] = parameter
            if names.tied(fqn) in names.replicated:
                self.replicated.add((model, fqn))

    def here(self, stored: ParameterName) -> ParameterName:
        """The name that `require` would give here to a parameter of that stored name."""
        parameter = self.parameter.get(stored)
        return stored if parameter is None else self.name_of[id(parameter)]

    def require(self, parameter: torch.Tensor, optimizer: str, place: str) -> ParameterName:
        """The name of a parameter that an optimizer holds.

        Raises:
            Unsupported: it is in none of the models that were handed over.
        """
        name = self.name_of.get(id(parameter))
        if name is None:
            raise Unsupported(
                f"optimizers.{optimizer}: {place}, of shape {tuple(parameter.shape)}, "
                "is in none of the models",
                hint="hand over its module too: model={'name': module, …}",
            )
        return name


def capture_optimizer(name: str, optimizer: Optimizer, owners: Owners, encoder: Encoder) -> Json:
    """All that an optimizer will need to go on, as JSON and held tensors. Changes nothing.

    Raises:
        Unsupported: a slot or hyperparameter that is not plain, or a parameter without a name.
    """
    base = join_key("optimizers", name)
    shared = not is_zero(optimizer)  # which shards its slots
    slots: list[Json] = []
    others: dict[Any, Any] = {}
    states: dict[Any, Any] = inner_of(optimizer).state  # some keep more than parameters in it
    for parameter, slot in states.items():
        if not isinstance(parameter, torch.Tensor):
            others[parameter] = slot
            continue
        owner = owners.require(parameter, name, "a parameter with slots")
        key = base + join_key("state", *owner)
        replicated = shared and owner in owners.replicated
        slots.append([list(owner), encoder.encode(slot, key, replicated=replicated)])
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        names = [
            list(owners.require(parameter, name, f"parameter {i} of group {index}"))
            for i, parameter in enumerate(group["params"])
        ]
        options = capture_options(name, index, group, encoder)
        groups.append({"parameters": names, "options": options})
    return {
        "class": f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
        "groups": groups,
        "slots": slots,
        **capture_more(name, optimizer, others, encoder),
    }


def capture_options(name: str, index: int, group: Mapping[str, Any], encoder: Encoder) -> Json:
    """The hyperparameters of one group of an optimizer."""
    hyper = {option: value for option, value in group.items() if option != "params"}
    return encoder.encode(hyper, join_key("optimizers", name, "groups", str(index)))


def capture_more(
    name: str, optimizer: Optimizer, others: dict[Any, Any], encoder: Encoder
) -> dict[str, Json]:
    """What an optimizer keeps besides groups and the slots of parameters.

    Args:
        others: what its `state` holds under keys that are no parameters.
    """
    base = join_key("optimizers", name)
    encoded_others = _encode_dict(others, base + join_key("others"), encoder)
    encoder.new_section()  # a state_dict may hold the slots once more
    more = _encode_dict(_more_state(optimizer), base + join_key("more"), encoder)
    return {"others": encoded_others, "more": more}


def _encode_dict(value: dict[Any, Any], key: str, encoder: Encoder) -> Json:
    return encoder.encode(value, key) if value else {}


def is_zero(optimizer: Optimizer) -> bool:
    """Whether it is torch's ZeroRedundancyOptimizer, without importing that."""
    return type(optimizer).__name__ == "ZeroRedundancyOptimizer"


def inner_of(optimizer: Optimizer) -> Any:
    """The optimizer that holds the slots.

    Raises:
        Unsupported: there is none yet.
    """
    if not is_zero(optimizer):
        return optimizer
    inner = getattr(optimizer, "optim", None)
    if not isinstance(inner, Optimizer):
        raise Unsupported("ZeroRedundancyOptimizer with overlap_with_ddp=True")
    return inner


def _more_state(optimizer: Optimizer) -> dict[str, Any]:
    """What an optimizer with a `state_dict` of its own adds to torch's two entries."""
    if type(optimizer).state_dict is Optimizer.state_dict or is_zero(optimizer):
        return {}
    known = ("state", "param_groups")
    return {name: value for name, value in optimizer.state_dict().items() if name not in known}


def check_optimizer(name: str, optimizer: Optimizer, saved: Json, owners: Owners) -> list[str]:
    """What does not fit between a stored optimizer and a live one, in words; changes nothing.

    A stored group of which the live optimizer has not one parameter is no problem: it was added
    during training, and is added again.
    """
    problems = []
    live_class = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    if _kind(saved["class"]) != _kind(live_class):
        problems.append(f"optimizers.{name}: stored from {saved['class']}, here is {live_class}")
    live_groups = [set(_live_names(name, group, owners)) for group in optimizer.param_groups]
    live = set().union(*live_groups)
    stored: set[ParameterName] = set()
    for index, group in enumerate(saved["groups"]):
        names = [owners.here(parameter) for parameter in _names(group)]
        if stored.intersection(names) or len(set(names)) != len(names):
            problems.append(f"optimizers.{name}: parameters of group {index} are one here")
        stored.update(names)
        if any(parameter not in owners.parameter for parameter in names):
            continue  # the model's own check names them
        present = [parameter for parameter in names if parameter in live]
        if present and set(names) not in live_groups:
            missing = next((p for p in names if p not in live), None)
            reason = f"{_spoken(missing)} is not in it" if missing else "it is divided differently"
            problems.append(f"optimizers.{name}: stored group {index} is not here: {reason}")
    problems += [
        f"optimizers.{name}: {_spoken(parameter)} is in a group here and was not when stored"
        for parameter in sorted(live - stored)
    ]
    return problems


def _kind(qualified: str) -> tuple[str, str]:
    """What of a class's full name does not change from one version of a library to the next."""
    return qualified.partition(".")[0], qualified.rpartition(".")[2]


def apply_optimizer(
    name: str,
    optimizer: Optimizer,
    saved: Json,
    tensors: Mapping[str, torch.Tensor],
    devices: Mapping[str, str],
    owners: Owners,
) -> None:
    """Give a live optimizer the stored groups, hyperparameters and slots, dtypes as stored.

    Args:
        tensors: the stored tensors by key, in host memory (DTensors where they were).
        devices: the device type of each tensor when it was stored; what was not on the CPU goes
            to its parameter's device.
        saved: what `capture_optimizer` gave; `check_optimizer` has found no problem in it.
    """
    inner = inner_of(optimizer)
    decoders = _Decoders(tensors, devices, owners)
    more = decoders.on(None).decode(saved["more"])
    if more:
        _load_more(optimizer, more)
    _apply_groups(name, optimizer, saved["groups"], decoders, owners)
    inner.state.clear()
    for owner, slot in saved["slots"]:
        parameter = owners.parameter.get((owner[0], owner[1]))
        if parameter is not None:  # else strict=False has let it pass
            inner.state[parameter] = decoders.on(parameter.device).decode(slot)
    inner.state.update(decoders.on(None).decode(saved["others"]))
    if inner is not optimizer:
        _sync_options(optimizer, inner)
    with contextlib.suppress(KeyError):  # where it misses an entry in a slot that has none
        inner.__setstate__({"state": inner.state, "param_groups": inner.param_groups})
    if more:
        _prove_more(name, optimizer, saved["more"], tensors)


def _sync_options(outer: Optimizer, inner: Optimizer) -> None:
    for source, target in zip(outer.param_groups, inner.param_groups, strict=True):
        target.update({option: value for option, value in source.items() if option != "params"})


class _Decoders:
    """Decoders that move tensors to where they belong: what was stored from an accelerator goes to
    the device that is asked for, the rest stays in host memory. One tensor stays one tensor."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], devices: Mapping[str, str], owners: Owners
    ) -> None:
        self._tensors, self._devices = tensors, devices
        self._default = next((p.device for p in owners.parameter.values()), torch.device("cpu"))
        self._by_device: dict[torch.device, Decoder] = {}

    def on(self, device: torch.device | None) -> Decoder:
        """The decoder for a device; None: where the first parameter is."""
        device = device or self._default
        if device not in self._by_device:
            placed = _Placed(self._tensors, self._devices, device)
            self._by_device[device] = Decoder(placed)
        return self._by_device[device]


class _Placed(Mapping[str, torch.Tensor]):
    """Tensors by key, moved to a device when they are asked for."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        devices: Mapping[str, str],
        device: torch.device,
    ) -> None:
        self._tensors, self._devices, self._device = tensors, devices, device
        self._moved: dict[str, torch.Tensor] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._tensors

    def __getitem__(self, key: str) -> torch.Tensor:
        if key not in self._moved:
            stays = self._devices.get(key, "cpu") == "cpu"
            tensor = self._tensors[key]
            self._moved[key] = tensor if stays else tensor.to(self._device)
        return self._moved[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _load_more(optimizer: Optimizer, more: dict[str, Any]) -> None:
    """Let the optimizer's own `load_state_dict` take its own entries; slots are set afterwards."""
    own = optimizer.state_dict()
    try:
        optimizer.load_state_dict({**own, **more})
    except Exception as error:
        raise LayoutMismatch(f"{type(optimizer).__name__} refused its state: {error}") from error


def _prove_more(
    name: str, optimizer: Optimizer, saved: Json, tensors: Mapping[str, torch.Tensor]
) -> None:
    """What an optimizer's own `load_state_dict` took is what it gives: many cast, or go by
    position."""
    encoder = Encoder()
    now = encoder.encode(_more_state(optimizer), join_key("optimizers", name, "more"))
    differing = None if now == saved else "a value"
    for key, held in encoder.held.items():
        stored = tensors.get(key)
        alike = stored is not None and (stored.dtype, stored.shape) == (
            held.tensor.dtype,
            held.tensor.shape,
        )
        if differing is None and not (alike and raw.same_bits(held.tensor, tensors[key])):
            differing = spoken(key)
    if differing is not None:
        raise LayoutMismatch(
            f"optimizers.{name}: {type(optimizer).__qualname__}.load_state_dict changed {differing}"
        )


def _apply_groups(
    name: str, optimizer: Optimizer, saved: Sequence[Json], decoders: _Decoders, owners: Owners
) -> None:
    live_groups = [(_live_names(name, group, owners), group) for group in optimizer.param_groups]
    options = _Options(getattr(optimizer, "defaults", {}))
    ordered = []
    for stored in saved:
        names = [owners.here(p) for p in _names(stored) if p in owners.parameter]
        index = _best_match(names, [live for live, _ in live_groups])
        if index is None:
            optimizer.add_param_group({"params": [owners.parameter[p] for p in names]})
            live, group = names, optimizer.param_groups[-1]
        else:
            live, group = live_groups.pop(index)
        order = [p for p in names if p in live] + [p for p in live if p not in names]
        group["params"][:] = [owners.parameter[parameter] for parameter in order]
        device = owners.parameter[order[0]].device if order else None
        options.set(group, decoders.on(device).decode(stored["options"]))
        ordered.append(group)
    optimizer.param_groups[:] = ordered + [group for _, group in live_groups]


def _best_match(
    names: Sequence[ParameterName], live_groups: Sequence[Sequence[ParameterName]]
) -> int | None:
    """The live group with the most of these parameters; None if the group was added later."""
    common = [len(set(names).intersection(live)) for live in live_groups]
    if not names:
        return next((i for i, live in enumerate(live_groups) if not live), None)
    best = max(range(len(common)), key=common.__getitem__, default=None)
    return best if best is not None and common[best] > 0 else None


class _Options:
    """Sets the options of one group after the other.

    A tensor (such as a learning rate) is written in place, since a schedule or a captured graph may
    hold it too. Groups that shared one tensor share one again, and no others do.
    """

    def __init__(self, defaults: Mapping[str, Any]) -> None:
        self._defaults = defaults
        self._placed: dict[int, torch.Tensor] = {}
        self._used: set[int] = set()

    def set(self, group: dict[str, Any], options: dict[str, Any]) -> None:
        """Give a live group the stored options. One that is stored nowhere goes, unless the
        optimizer always has it: then it is younger than the checkpoint."""
        for option in [o for o in group if o not in options]:
            if option != "params" and option not in self._defaults:
                del group[option]
        for option, value in options.items():
            is_tensor = isinstance(value, torch.Tensor)
            group[option] = self._place(value, group.get(option)) if is_tensor else value

    def _place(self, value: torch.Tensor, live: object) -> torch.Tensor:
        if id(value) not in self._placed:
            target = value
            if isinstance(live, torch.Tensor) and self._may_take(live, value):
                target = live
            self._placed[id(value)] = target
            self._used.add(id(target))
        return self._placed[id(value)]

    def _may_take(self, live: torch.Tensor, value: torch.Tensor) -> bool:
        fits = (live.shape, live.dtype) == (value.shape, value.dtype)
        return fits and id(live) not in self._used and raw.write_into(live, value)


def _names(group: Json) -> list[ParameterName]:
    return [(model, fqn) for model, fqn in group["parameters"]]


def _live_names(name: str, group: dict[str, Any], owners: Owners) -> list[ParameterName]:
    return [owners.require(p, name, "a parameter of a group") for p in group["params"]]


def _spoken(name: ParameterName) -> str:
    return ".".join(name)
