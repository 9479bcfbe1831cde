"""The form of the JSON part of a state, checked before any of it is used."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import msgspec
from msgspec import Struct

from everystep.errors import Damaged
from everystep.types import Json, join_key


class _Model(Struct):
    aliases: dict[str, str]
    frozen: list[str]
    extra_state: dict[str, Any]


class _Group(Struct):
    parameters: list[tuple[str, str]]
    options: dict[str, Any]


class _Optimizer(Struct, rename={"qualified_class": "class"}):
    qualified_class: str
    groups: list[_Group]
    slots: list[tuple[tuple[str, str], Any]]
    others: dict[str, Any]
    more: dict[str, Any]


class _Loader(Struct):
    begun: bool
    generators: dict[str, Any]


class _Tree(Struct):
    models: dict[str, _Model]
    optimizers: dict[str, _Optimizer]
    extras: dict[str, Any]
    loaders: dict[str, _Loader]
    rng: dict[str, Any]


def check_form(tree: Json, keys: Container[str]) -> None:
    """Check that a stored tree has all the entries that restoring will look for.

    Args:
        tree: the JSON part of a state.
        keys: of the tensors that are stored with it.

    Raises:
        Damaged: it is not what `capture` makes.
    """
    try:
        checked = msgspec.convert(tree, _Tree)
    except msgspec.ValidationError as error:
        raise Damaged(f"the state is not well formed: {error}") from error
    for name, model in checked.models.items():
        for alias, fqn in model.aliases.items():
            if join_key("models", name, fqn) not in keys:
                raise Damaged(f"{name}.{alias} is tied to {fqn}, which is not stored")
