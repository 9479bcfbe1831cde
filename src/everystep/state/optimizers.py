"""Optimizer slots and hyperparameters by parameter name, read and set without calling torch's
`state_dict`, which goes by position and casts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from everystep.errors import LayoutMismatch, Unsupported
from everystep.state import raw
from everystep.state.tree import Decoder, Encoder
from everystep.types import Json, join_key

ParameterName = tuple[str, str]
"""(name of the model, FQN in it)"""


class Owners:
    """Which model and FQN each live parameter has, and the reverse."""

    def __init__(self) -> None:
        self.name_of: dict[int, ParameterName] = {}
        self.parameter: dict[ParameterName, torch.Tensor] = {}
        self.replicated: set[ParameterName] = set()

    def add(self, name: ParameterName, parameter: torch.Tensor, replicated: bool) -> None:
        """Record one parameter."""
        self.name_of.setdefault(id(parameter), name)
        self.parameter[name] = parameter
        if replicated:
            self.replicated.add(name)

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
    encoder.new_section()
    base = join_key("optimizers", name)
    shared = type(optimizer).__name__ != "ZeroRedundancyOptimizer"  # which shards its slots
    slots: list[Json] = []
    others: dict[Any, Any] = {}
    states: dict[Any, Any] = optimizer.state  # some optimizers keep more than parameters in it
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
        hyper = {option: value for option, value in group.items() if option != "params"}
        key = base + join_key("groups", str(index))
        groups.append({"parameters": names, "options": encoder.encode(hyper, key)})
    return {
        "class": f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
        "groups": groups,
        "slots": slots,
        "others": encoder.encode(others, base + join_key("others")),
        "more": encoder.encode(_more_state(optimizer), base + join_key("more")),
    }


def _more_state(optimizer: Optimizer) -> dict[str, Any]:
    """What an optimizer with a `state_dict` of its own adds to torch's two entries."""
    if type(optimizer).state_dict is Optimizer.state_dict:
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
    if saved["class"] != live_class:
        problems.append(f"optimizers.{name}: stored from {saved['class']}, here is {live_class}")
    live_groups = [_live_names(name, group, owners) for group in optimizer.param_groups]
    live = {parameter for group in live_groups for parameter in group}
    stored: set[ParameterName] = set()
    for index, group in enumerate(saved["groups"]):
        names = _names(group)
        stored.update(names)
        if any(parameter not in owners.parameter for parameter in names):
            continue  # the model's own check names them
        present = [parameter for parameter in names if parameter in live]
        if present and set(names) not in [set(other) for other in live_groups]:
            missing = next((p for p in names if p not in live), None)
            reason = f"{_spoken(missing)} is not in it" if missing else "it is divided differently"
            problems.append(f"optimizers.{name}: stored group {index} is not here: {reason}")
    problems += [
        f"optimizers.{name}: {_spoken(parameter)} is in a group here and was not when stored"
        for parameter in sorted(live - stored)
    ]
    return problems


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
    decoder = Decoder(tensors)
    more = decoder.decode(saved["more"])
    if more:
        _load_more(optimizer, more)
    _apply_groups(name, optimizer, saved["groups"], tensors, owners)
    default = next(iter(owners.parameter.values())).device if owners.parameter else None
    optimizer.state.clear()
    for owner, slot in saved["slots"]:
        parameter = owners.parameter.get((owner[0], owner[1]))
        if parameter is not None:  # else strict=False has let it pass
            placed = Decoder(_Placed(tensors, devices, parameter.device))
            optimizer.state[parameter] = placed.decode(slot)
    others = Decoder(_Placed(tensors, devices, default)).decode(saved["others"])
    optimizer.state.update(others)


class _Placed(Mapping[str, torch.Tensor]):
    """Tensors by key, moved to where they belong when they are asked for."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        devices: Mapping[str, str],
        device: torch.device | None,
    ) -> None:
        self._tensors, self._devices, self._device = tensors, devices, device
        self._moved: dict[str, torch.Tensor] = {}

    def __getitem__(self, key: str) -> torch.Tensor:
        if key not in self._moved:
            stays = self._device is None or self._devices.get(key, "cpu") == "cpu"
            tensor = self._tensors[key]
            self._moved[key] = tensor if stays else tensor.to(self._device)
        return self._moved[key]

    def __iter__(self) -> Any:
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


def _apply_groups(
    name: str,
    optimizer: Optimizer,
    saved: Sequence[Json],
    tensors: Mapping[str, torch.Tensor],
    owners: Owners,
) -> None:
    live_groups = [(_live_names(name, group, owners), group) for group in optimizer.param_groups]
    holders = _live_tensor_counts(optimizer)
    ordered = []
    for stored in saved:
        names = [parameter for parameter in _names(stored) if parameter in owners.parameter]
        index = _best_match(names, [live for live, _ in live_groups])
        if index is None:
            optimizer.add_param_group({"params": [owners.parameter[p] for p in names]})
            live, group = names, optimizer.param_groups[-1]
        else:
            live, group = live_groups.pop(index)
        order = [p for p in names if p in live] + [p for p in live if p not in names]
        group["params"][:] = [owners.parameter[parameter] for parameter in order]
        _apply_options(group, Decoder(tensors).decode(stored["options"]), holders)
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


def _apply_options(
    group: dict[str, Any], options: dict[str, Any], holders: Mapping[int, int]
) -> None:
    """Set a group's options. A tensor that only this group holds is written in place, since a
    schedule or a captured graph may hold it too; one that is shared gets a tensor of its own."""
    for option in [o for o in group if o != "params" and o not in options]:
        del group[option]
    for option, value in options.items():
        live = group.get(option)
        if not isinstance(value, torch.Tensor):
            group[option] = value
        elif not isinstance(live, torch.Tensor):
            group[option] = value.clone()
        elif holders[id(live)] == 1 and (live.shape, live.dtype) == (value.shape, value.dtype):
            raw.write_into(live, value)
        else:
            group[option] = value.to(live.device, copy=True)


def _live_tensor_counts(optimizer: Optimizer) -> dict[int, int]:
    counts: dict[int, int] = {}
    for group in optimizer.param_groups:
        for option, value in group.items():
            if option != "params" and isinstance(value, torch.Tensor):
                counts[id(value)] = counts.get(id(value), 0) + 1
    return counts


def _names(group: Json) -> list[ParameterName]:
    return [(model, fqn) for model, fqn in group["parameters"]]


def _live_names(name: str, group: dict[str, Any], owners: Owners) -> list[ParameterName]:
    return [owners.require(p, name, "a parameter of a group") for p in group["params"]]


def _spoken(name: ParameterName) -> str:
    return ".".join(name)
