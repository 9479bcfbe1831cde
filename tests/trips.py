"""A training state from one set of objects to another, in memory or through a run directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import torch

from everystep import Checkpointer, Full
from everystep.state import capture, raw
from everystep.state.capture import Misfit, State
from everystep.state.form import check_form
from everystep.state.objects import Objects
from everystep.types import Json, TensorSpec

BLOCKING = Full(blocking=True)
"""Steps are durable when `step()` returns: for tests of something else than how they get there."""


class Holder:
    """An extra that holds whatever it was given."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class Stored:
    """What would be on disk: JSON and bytes, copied out of the live state."""

    def __init__(self, state: State) -> None:
        self.json = msgspec.json.encode(state.tree)
        self.specs: dict[str, TensorSpec] = {key: h.spec for key, h in state.held.items()}
        self.data = {
            key: b"".join(raw.host_chunks(h.tensor, 0, h.tensor.numel()))
            for key, h in state.held.items()
        }

    @property
    def tree(self) -> Json:
        return msgspec.json.decode(self.json)

    def tensors(self) -> dict[str, torch.Tensor]:
        tensors = {}
        for key, spec in self.specs.items():
            tensors[key], view = raw.empty_for(spec)
            view[:] = self.data[key]
        return tensors


def stored(model: Any, optimizer: Any = None, extras: Any = None) -> Stored:
    """Capture the state of these objects."""
    return Stored(capture.capture(Objects.of(model, optimizer, extras), 1))


def misfit(state: Stored, model: Any, optimizer: Any = None, extras: Any = None) -> Misfit:
    """What does not fit between a stored state and these objects."""
    return capture.check(Objects.of(model, optimizer, extras), state.tree, state.specs, 1)


def restore(
    state: Stored, model: Any, optimizer: Any = None, extras: Any = None, *, strict: bool = True
) -> None:
    """Check and apply, as a restore does."""
    check_form(state.tree, state.specs)
    misfit(state, model, optimizer, extras).raise_if(strict=strict)
    objects = Objects.of(model, optimizer, extras)
    capture.apply(objects, state.tree, state.specs, state.tensors(), 1)


def save_run(run: Path, model: Any, optimizer: Any = None, extras: Any = None) -> None:
    """Store one step in a new run directory."""
    with Checkpointer(
        run, model=model, optimizer=optimizer, extras=extras, strategy=BLOCKING
    ) as ck:
        ck.step()


def restore_run(run: Path, model: Any, optimizer: Any = None, extras: Any = None) -> int:
    """Restore the newest step of a run directory."""
    with Checkpointer(
        run, model=model, optimizer=optimizer, extras=extras, strategy=BLOCKING
    ) as ck:
        return ck.restore(required=True)
