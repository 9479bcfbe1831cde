"""What differs from one step to the next beside parameters and slots: buffers, extras, options,
random numbers."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import xxhash
from msgspec import Raw

from everystep.deltas.delta import Bytes, Stored
from everystep.engine.gradients import Source
from everystep.state import raw
from everystep.state.recapture import Captured
from everystep.state.tree import Encoder, Held
from everystep.types import Json, TensorSpec, join_key

_encoded = msgspec.json.encode

_BESIDE = ("extras", "loaders", "rng")


class Changes(NamedTuple):
    """The parts of a `Delta` that are not gradients."""

    tensors: list[Stored]
    tree: dict[str, Json]
    problem: str | None
    """Why they do not tell all that has changed."""


class Beside:
    """Compares each step's state with the one before."""

    def __init__(self, extras: Mapping[str, Any]) -> None:
        self._left_out = {
            name: tuple(getattr(extra, "kept_in_fulls", ())) for name, extra in extras.items()
        }
        self.left_out = [
            join_key("extras", name, entry) + "/"
            for name, entries in self._left_out.items()
            for entry in entries
        ]
        """Beginnings of keys of what only full checkpoints hold."""
        self._version = -1
        self._frozen: list[Held] = []
        self._buffers: list[Held] = []
        self._facts: dict[str, tuple[int, int, TensorSpec]] = {}
        self._prints: dict[str, tuple[int, TensorSpec]] = {}
        self._rest: dict[str, Held] = {}
        self._texts: dict[tuple[str, str], bytes] = {}
        self._fixed_text = b""

    def since(
        self, captured: Captured, sources: Sequence[Source], parameters: Container[str]
    ) -> Changes:
        """What differs from the state at the call before; the first time it is everything.

        Args:
            sources: the optimizers.
            parameters: keys of tensors of which every write is taken to raise the version; of
                buffers it does not (batch norm), so that these are read each time.
        """
        problem = None
        if captured.version != self._version:
            problem = self._look_anew(captured, parameters)
        rest = [h for h in captured.rest if not h.spec.key.startswith(tuple(self.left_out))]
        tensors = [*self._written(), *self._differing(self._buffers, rest)]
        tree: dict[str, Json] = {}
        for name in _BESIDE:
            value = captured.tree[name]
            text = self._changed(name, "", self._without(value) if name == "extras" else value)
            if text is not None:
                tree[name] = text
        extra_state = {
            name: self._changed("extra_state", name, model["extra_state"])
            for name, model in captured.tree["models"].items()
        }
        options = {source.name: source.options.changed(Encoder()) for source in sources}
        for part, found in (("extra_state", extra_state), ("options", options)):
            changed = {name: value for name, value in found.items() if value is not None}
            if changed:
                tree[part] = changed
        return Changes(tensors, tree, problem or _more(captured.tree))

    def _look_anew(self, captured: Captured, parameters: Container[str]) -> str | None:
        """Other tensors, or others of their properties."""
        self._version = captured.version
        pairs = zip(captured.fixed, captured.writers, strict=True)
        unwritten = [held for held, writer in pairs if writer is None]
        self._frozen = [held for held in unwritten if held.spec.key in parameters]
        self._buffers = [held for held in unwritten if held.spec.key not in parameters]
        models = captured.tree["models"].items()
        optimizers = captured.tree["optimizers"].items()
        fixed = [
            [(name, model["aliases"], model["frozen"]) for name, model in models],
            [(name, its["class"], _parameters(its["groups"])) for name, its in optimizers],
        ]
        before, self._fixed_text = self._fixed_text, _encoded(fixed)
        if before and before != self._fixed_text:
            return "parameters were frozen, freed, tied, or given to another optimizer"
        return None

    def _written(self) -> list[Stored]:
        """Parameters that no optimizer writes, where somebody wrote them."""
        found = []
        for held in self._frozen:
            facts = (held.tensor.data_ptr(), held.tensor._version, held.spec)
            if self._facts.get(held.spec.key) != facts:
                self._facts[held.spec.key] = facts
                found.append(Stored(held.spec, bytes_of(held.tensor)))
        return found

    def _differing(self, buffers: Sequence[Held], rest: Sequence[Held]) -> list[Stored]:
        """Those whose bytes or form are not those of the last time."""
        before = self._rest
        self._rest = {held.spec.key: held for held in rest}
        found, prints = [], {}
        for held in (*buffers, *rest):
            key = held.spec.key
            if before.get(key) is held:
                prints[key] = self._prints[key]
                continue
            state = xxhash.xxh3_128()
            for chunk in raw.host_chunks(held.tensor, 0, held.tensor.numel()):
                state.update(chunk)
            prints[key] = state.intdigest(), held.spec
            if self._prints.get(key) != prints[key]:
                found.append(Stored(held.spec, bytes_of(held.tensor)))
        self._prints = prints
        return found

    def _without(self, extras: Json) -> Json:
        """The JSON of the extras without what only full checkpoints hold."""
        return {
            name: {**value, **{entry: {} for entry in self._left_out[name]}}
            if self._left_out.get(name)
            else value
            for name, value in extras.items()
        }

    def _changed(self, part: str, name: str, value: Json) -> Raw | None:
        text = _encoded(value)
        if self._texts.get((part, name)) == text:
            return None
        self._texts[part, name] = text
        return Raw(text)


def _parameters(groups: Json) -> list[Json]:
    """The names in each group; a group may be text already."""
    return [
        (msgspec.json.decode(group) if isinstance(group, Raw) else group)["parameters"]
        for group in groups
    ]


def _more(tree: Json) -> str | None:
    for name, optimizer in tree["optimizers"].items():
        if optimizer["others"] or optimizer["more"]:
            return f"optimizers.{name} keeps more than options and the slots of parameters"
    return None


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """A copy of a tensor's bytes, row-major."""
    data = b"".join(raw.host_chunks(tensor, 0, tensor.numel()))
    return np.frombuffer(data, np.uint8)
