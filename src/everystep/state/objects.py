"""The live objects whose state a run stores, under the user's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from everystep.errors import Unsupported
from everystep.state.extras import check_extra


@dataclass(frozen=True)
class Objects:
    """What a run is made of. Each mapping is from the user's name to the live object."""

    models: Mapping[str, nn.Module]
    optimizers: Mapping[str, Optimizer]
    extras: Mapping[str, Any]

    @staticmethod
    def of(
        model: nn.Module | Mapping[str, nn.Module],
        optimizer: Optimizer | Mapping[str, Optimizer] | None,
        extras: Mapping[str, Any] | None,
    ) -> Objects:
        """Name single objects `model` and `optimizer`, and refuse what cannot be stored.

        Raises:
            Unsupported: an argument is of the wrong type.
        """
        models = _named(model, "model", nn.Module)
        optimizers = {} if optimizer is None else _named(optimizer, "optimizer", Optimizer)
        for name, extra in (extras or {}).items():
            check_extra(name, extra)
        return Objects(models, optimizers, dict(extras or {}))

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Of all models."""
        return [p for model in self.models.values() for p in model.parameters()]

    @property
    def kinds(self) -> set[type[Optimizer]]:
        """Of optimizers."""
        return {type(optimizer) for optimizer in self.optimizers.values()}


def _named(given: Any, name: str, kind: type) -> dict[str, Any]:
    named = dict(given) if isinstance(given, Mapping) else {name: given}
    for key, thing in named.items():
        if not isinstance(thing, kind) or not isinstance(key, str) or not key:
            raise Unsupported(
                f"{name}={type(thing).__qualname__}: not a {kind.__name__}",
                hint="hand over what is neither model nor optimizer in extras={…}",
            )
    return named
