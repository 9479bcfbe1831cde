"""A stored state as a fold needs it: its parameters, its tensors where they were, what it refers
to."""

from __future__ import annotations

import msgspec
import torch

from everystep.errors import CannotRestore
from everystep.state import raw
from everystep.types import Json, TensorSpec, join_key, spoken

_REFERENCES = {"$tensor": 1, "$leaf": 1, "$parameter": 1, "$frozen": 1, "$array": 1, "$coo": 2}
"""How many keys stand first in the content of a tag."""


def plain(value: Json) -> Json:
    """JSON that may hold encoded parts, as plain values of its own."""
    return msgspec.json.decode(msgspec.json.encode(value))


def keys_of(tree: Json, saved: Json) -> dict[tuple[str, str], str]:
    """The keys of all parameters that an optimizer names, by model and FQN."""
    owners = [owner for group in saved["groups"] for owner in group["parameters"]]
    owners += [owner for owner, _ in saved["slots"]]
    found = {}
    for model, fqn in owners:
        aliases = tree["models"].get(model, {}).get("aliases", {})
        found[model, fqn] = join_key("models", model, aliases.get(fqn, fqn))
    return found


def placed(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """A tensor in the memory order, and on the device, that it had.

    Raises:
        CannotRestore: there is no such device.
    """
    ordered = raw.restrided(tensor.detach(), spec)
    moves = spec.key.startswith(("/models/", "/optimizers/")) and spec.device != "cpu"
    try:
        return ordered.to(spec.device) if moves else ordered
    except (RuntimeError, AssertionError) as error:
        raise CannotRestore(
            f"{spoken(spec.key)} was on {spec.device}, which is not here: {error}",
            hint="steps are done again where they were done",
        ) from error


def row_major(tensor: torch.Tensor) -> torch.Tensor:
    host = tensor.detach().cpu()
    return host if host.is_contiguous() else raw.plain_bits(host).contiguous().view(host.dtype)


def references(node: Json, found: set[str]) -> None:
    """Collect the keys of all tensors that a tree refers to."""
    if isinstance(node, list):
        for item in node:
            references(item, found)
    elif isinstance(node, dict):
        if len(node) == 1:
            ((tag, content),) = node.items()
            if tag in _REFERENCES:
                found.update([content] if isinstance(content, str) else content[: _REFERENCES[tag]])
                return
        for item in node.values():
            references(item, found)
