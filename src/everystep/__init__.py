"""Checkpoint deep-learning training at every step, and bring a dead run back bit for bit."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from everystep.types import VERSION

if TYPE_CHECKING:
    from everystep import errors
    from everystep.checkpointer import Checkpointer
    from everystep.deltas import compressors
    from everystep.deltas.hooks import compress
    from everystep.recovery.load import LoadedState, load
    from everystep.signals import SaveOnSignal
    from everystep.store.retention import Retention
    from everystep.strategies import Deltas, Full, Peers, Replica, Shadow
    from everystep.types import StepRef, StepStats

__version__ = VERSION

__all__ = [
    "Checkpointer",
    "Deltas",
    "Full",
    "LoadedState",
    "Peers",
    "Replica",
    "Retention",
    "SaveOnSignal",
    "Shadow",
    "StepRef",
    "StepStats",
    "compress",
    "compressors",
    "errors",
    "load",
]

_HOMES = {
    "Checkpointer": "everystep.checkpointer",
    "Deltas": "everystep.strategies",
    "Full": "everystep.strategies",
    "LoadedState": "everystep.recovery.load",
    "Peers": "everystep.strategies",
    "Replica": "everystep.strategies",
    "Retention": "everystep.store.retention",
    "SaveOnSignal": "everystep.signals",
    "Shadow": "everystep.strategies",
    "StepRef": "everystep.types",
    "StepStats": "everystep.types",
    "compress": "everystep.deltas.hooks",
    "load": "everystep.recovery.load",
}


_MODULES = {
    "compressors": "everystep.deltas.compressors",
    "errors": "everystep.errors",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: `everystep ls` must not load torch (PEP 562)."""
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'everystep' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
