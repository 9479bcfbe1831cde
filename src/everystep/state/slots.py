"""The slots and groups of one optimizer, captured again where numbers in them have changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec
import torch
from msgspec import Raw
from torch import nn
from torch.optim import Optimizer

from everystep.state import raw
from everystep.state.capture import State
from everystep.state.optimizers import capture_more, capture_options, inner_of, is_zero
from everystep.state.shards import shard_of
from everystep.state.tree import Encoder
from everystep.state.watch import DictWatch, same_objects
from everystep.types import Json, join_key

_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_encoded = msgspec.json.encode


class Changed(Exception):
    """What was captured last says nothing about the present."""


def by_memory_of(keys: Iterable[str], state: State) -> dict[object, str]:
    memory = ((raw.same_memory(state.held[key].tensor), key) for key in keys)
    return {place: key for place, key in memory if place is not None}


class _Recorder(Encoder):
    """Notes by what key each tensor of the slots is held, from the memory of those that are."""

    def __init__(self, by_memory: Mapping[object, str]) -> None:
        super().__init__()
        self._by_memory_held = by_memory
        self.tensors: list[torch.Tensor] = []
        self.used: dict[tuple[int, str], str] = {}
        """By the `id` of a tensor and the place where it is."""

    def tensor(self, value: torch.Tensor, key: str, *, replicated: bool = False) -> str:
        """The key under which a tensor is held; one without memory is held at every place."""
        self.tensors.append(value)
        held_at = self._by_memory_held.get(raw.same_memory(shard_of(value)[0]), key)
        self.used[id(value), key] = held_at
        return held_at


class _Replay(Encoder):
    """Encodes what holds only tensors that were at the same places when it was captured."""

    def __init__(self, used: Mapping[tuple[int, str], str]) -> None:
        super().__init__()
        self._used = used
        self.met = 0

    def tensor(self, value: torch.Tensor, key: str, *, replicated: bool = False) -> str:
        """The key under which a tensor was held."""
        self.met += 1
        held_at = self._used.get((id(value), key))
        if held_at is None:
            raise Changed
        return held_at


class Slots:
    """One optimizer as it was captured.

    The JSON of its slots is kept as text in segments. A number has a segment of its own, and so has
    a slot that is not a dict of tensors and numbers; these are written anew when they change.
    """

    def __init__(
        self, name: str, optimizer: Optimizer, state: State, in_models: Mapping[object, str]
    ) -> None:
        self._name, self._optimizer, self._kind = name, optimizer, type(optimizer)
        tree = state.tree["optimizers"][name]
        self._class = tree["class"]
        base = join_key("optimizers", name, "state")
        self.keys = {key for key in state.held if key.startswith(base + "/")}
        self.by_memory = by_memory_of(self.keys, state)
        self.known = {**in_models, **self.by_memory}
        states = inner_of(optimizer).state
        self._state_keys: list[object] = list(states)
        slots = [slot for key, slot in states.items() if isinstance(key, torch.Tensor)]
        self._all_owned = len(slots) == len(self._state_keys)
        self._slots: list[Any] = slots
        self._groups = list(map(_Group, optimizer.param_groups, tree["groups"]))
        self._plain: list[dict[str, Any]] = []
        self._deep: list[tuple[int, str, Any, int]] = []
        self._scalar_at: dict[int, int] = {}
        recorder = _Recorder(self.known)
        self._text = _Segments()
        self._faithful = self._lay_out(base, tree["slots"], recorder)
        self.tensors = recorder.tensors
        self.used = self.keys.union(recorder.used.values())
        self._replay = _Replay(recorder.used)
        self._values = list(chain.from_iterable(map(dict.values, self._plain)))
        self._names = list(chain.from_iterable(self._plain))
        self._lengths = list(map(len, self._plain))
        self._states, self._watch = states, DictWatch([states, *self._plain])

    def _lay_out(self, base: str, saved: Sequence[Json], recorder: _Recorder) -> bool:
        """Write the slots as segments; whether recording them tells what was captured."""
        faithful, values = True, 0
        for number, (slot, (owner, json)) in enumerate(zip(self._slots, saved, strict=True)):
            key = base + join_key(*owner)
            before = len(recorder.tensors)
            faithful &= recorder.encode(slot, key) == json
            self._text.fixed(b"," * (number > 0) + b"[" + _encoded(owner) + b",")
            if _is_plain(slot):
                self._plain.append(slot)
                self._text.fixed(b"{")
                for position, (name, item) in enumerate(slot.items()):
                    self._text.fixed(b"," * (position > 0) + _encoded(name) + b":")
                    if isinstance(item, torch.Tensor):
                        self._text.fixed(_encoded(json[name]))
                    else:
                        self._scalar_at[values + position] = self._text.own(_encoded(json[name]))
                values += len(slot)
                self._text.fixed(b"}]")
            else:
                met = len(recorder.tensors) - before
                self._deep.append((self._text.own(_encoded(json)), key, slot, met))
                self._text.fixed(b"]")
        return faithful

    @property
    def comparable(self) -> bool:
        """Whether a later state can be told from this one."""
        return self._faithful and not is_zero(self._optimizer)

    def again(self, encoder: Encoder) -> Json:
        """The optimizer's JSON now; raises Changed where only a full capture can tell."""
        states: dict[Any, Any] = inner_of(self._optimizer).state
        groups = self._optimizer.param_groups
        if type(self._optimizer) is not self._kind or len(groups) != len(self._groups):
            raise Changed
        if states is not self._states or not self._watch.surely_same():
            self._compare(states)
        self._renew_deep()
        others = {}
        if not self._all_owned:
            others = {k: v for k, v in states.items() if not isinstance(k, torch.Tensor)}
        return {
            "class": self._class,
            "groups": [
                known.again(self._name, index, group, encoder)
                for index, (known, group) in enumerate(zip(self._groups, groups, strict=True))
            ],
            "slots": self._text.joined(),
            **capture_more(self._name, self._optimizer, others, encoder),
        }

    def named_alike(self) -> bool:
        """Whether the values in the slots have the names that they had: `again` compares only the
        values, and their number."""
        return list(map(len, self._plain)) == self._lengths and same_objects(
            chain.from_iterable(self._plain), self._names
        )

    def _compare(self, states: dict[Any, Any]) -> None:
        """Raise Changed where other parameters have slots, or other tensors are in them; write
        anew the numbers that are others."""
        if len(states) != len(self._state_keys) or not same_objects(states, self._state_keys):
            raise Changed
        slots: Iterable[Any] = states.values()
        if not self._all_owned:
            slots = [v for k, v in states.items() if isinstance(k, torch.Tensor)]
        if not same_objects(slots, self._slots):
            raise Changed
        values = list(chain.from_iterable(map(dict.values, self._plain)))
        if len(values) != len(self._values):
            raise Changed
        if same_objects(values, self._values):
            self._states, self._watch = states, DictWatch([states, *self._plain])
            return
        for position, (now, then) in enumerate(zip(values, self._values, strict=True)):
            if now is not then:
                if position not in self._scalar_at or type(now) not in _SCALARS:
                    raise Changed
                text = _encoded(self._replay.encode(now, ""))
                self._text.replace(self._scalar_at[position], text)
        self._values = values

    def _renew_deep(self) -> None:
        """Write anew the slots that are no dicts of tensors and numbers."""
        for segment, key, slot, met in self._deep:
            self._replay.met = 0
            self._text.replace(segment, _encoded(self._replay.encode(slot, key)))
            if self._replay.met != met:
                raise Changed


def _is_plain(slot: object) -> bool:
    """Whether it is a dict of names with tensors and numbers, that may be compared item by item."""
    if type(slot) is not dict:
        return False
    return all(
        type(name) is str
        and name.isascii()
        and name[:1] != "$"
        and (type(item) in _SCALARS or _is_plain_tensor(item))
        for name, item in slot.items()
    )


def _is_plain_tensor(item: object) -> bool:
    """Whether it stays the same kind of tensor in JSON while it is the same tensor in memory."""
    if not isinstance(item, torch.Tensor) or item.layout != torch.strided:
        return False
    return isinstance(item, nn.Parameter) or not item.requires_grad


class _Segments:
    """A JSON list as text, of which some parts can be replaced."""

    def __init__(self) -> None:
        self._segments: list[bytes] = []
        self._pending = bytearray(b"[")
        self._whole: Raw | None = None

    def fixed(self, text: bytes) -> None:
        """Append what stays."""
        self._pending += text

    def own(self, text: bytes) -> int:
        """Append what may be replaced; the number to replace it by."""
        self._segments += [bytes(self._pending), text]
        self._pending.clear()
        return len(self._segments) - 1

    def replace(self, segment: int, text: bytes) -> None:
        """Put another text in the place of one."""
        if self._segments[segment] != text:
            self._segments[segment] = text
            self._whole = None

    def joined(self) -> Raw:
        """The whole list."""
        if self._whole is None:
            self._whole = Raw(b"".join([*self._segments, self._pending, b"]"]))
        return self._whole


class _Group:
    """One group of an optimizer as it was captured."""

    def __init__(self, group: Mapping[str, Any], saved: Json) -> None:
        self._parameters = list(group["params"])
        self._names = Raw(_encoded(saved["parameters"]))
        self._options: list[object] = []
        self._json: Json = None

    def again(self, name: str, index: int, group: Mapping[str, Any], encoder: Encoder) -> Json:
        """The group's JSON now; raises Changed where its parameters are others."""
        parameters = group["params"]
        if len(parameters) != len(self._parameters) or not same_objects(
            parameters, self._parameters
        ):
            raise Changed
        options = [*group, *group.values()]
        if (
            self._json is None
            or len(options) != len(self._options)
            or not same_objects(options, self._options)
        ):
            encoded = capture_options(name, index, group, encoder)
            json = {"parameters": self._names, "options": encoded}
            if not all(is_immutable(v) for option, v in group.items() if option != "params"):
                return json
            self._options, self._json = options, Raw(_encoded(json))
        return self._json


def is_immutable(value: object) -> bool:
    """Whether a value, or each of a tuple's, is a scalar, and so cannot change by itself."""
    parts = value if type(value) is tuple else (value,)
    return all(type(part) in _SCALARS for part in parts)
