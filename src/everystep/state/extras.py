"""Whatever else a run needs to go on exactly: anything with `state_dict`, generators, dicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from everystep.errors import LayoutMismatch, Unsupported
from everystep.state import rng
from everystep.state.loaders import is_loader, loader_state
from everystep.state.tree import Encoder
from everystep.types import Json, join_key


def check_extra(name: str, extra: object) -> None:
    """Refuse an object that cannot be asked for its state.

    Raises:
        Unsupported: it has no `state_dict` and `load_state_dict`, and is no dict or generator; or
            it is an optimizer, whose own `state_dict` goes by position.
    """
    if not isinstance(name, str):
        raise Unsupported(f"extras: {name!r} is not a string")
    if isinstance(extra, Optimizer):
        raise Unsupported(
            f"extras.{name}: an optimizer", hint="hand it over in optimizer={'name': …}"
        )
    stateful = hasattr(extra, "state_dict") and hasattr(extra, "load_state_dict")
    if not stateful and type(extra) is not dict and not rng.is_generator(extra):
        raise Unsupported(
            f"extras.{name}: an object of type {type(extra).__qualname__} without state_dict()",
            hint="give it state_dict() and load_state_dict(), or hand over a dict or a generator",
        )


def capture_extras(extras: Mapping[str, Any], encoder: Encoder) -> dict[str, Json]:
    """The state of all extras by name.

    Raises:
        Unsupported: a value that is not plain, named by its place.
    """
    captured = {}
    for name, extra in extras.items():
        encoder.new_section()
        captured[name] = encoder.encode(_state_of(extra), join_key("extras", name))
    return captured


def _state_of(extra: Any) -> Any:
    if rng.is_generator(extra):
        return rng.generator_state(extra)
    if is_loader(extra):
        return loader_state(extra)
    return extra if type(extra) is dict else extra.state_dict()


def apply_extra(name: str, extra: Any, state: Any) -> None:
    """Give an extra the state that was captured.

    Raises:
        LayoutMismatch: the object refuses it.
    """
    try:
        if rng.is_generator(extra):
            rng.set_generator_state(extra, state)
        elif type(extra) is dict:
            extra.clear()
            extra.update(state)
        else:
            _refuse_casts(extra, state)
            extra.load_state_dict(state)
    except Exception as error:
        raise LayoutMismatch(
            f"extras.{name} refused its state: {type(error).__name__}: {error}",
            hint="make the object as it was when the step was stored",
        ) from error


def _refuse_casts(extra: Any, state: Any) -> None:
    """A module's own `load_state_dict` converts values of another dtype without a word."""
    if not isinstance(extra, nn.Module):
        return
    for name, live in extra.state_dict().items():
        stored = state.get(name)
        both = isinstance(stored, torch.Tensor) and isinstance(live, torch.Tensor)
        if both and stored.dtype != live.dtype:
            raise TypeError(f"{name}: dtype {stored.dtype} stored, {live.dtype} here")
