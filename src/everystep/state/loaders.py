"""The place of a data loader, read and set without drawing a random number at another moment.

torchdata's StatefulDataLoader draws from its generator (torch's global one by default) whenever it
makes an iterator, and makes one when it is asked for its state before the first batch, or at the
first batch after its state was loaded. Here it is never asked too early, and its iterator is made
while restoring, before the random number generators are set.
"""

from __future__ import annotations

from typing import Any

import torch

from everystep.state.tree import Decoder, Encoder
from everystep.types import Json, join_key


def is_loader(extra: object) -> bool:
    """Whether it is a StatefulDataLoader, without importing torchdata."""
    return isinstance(extra, torch.utils.data.DataLoader) and hasattr(extra, "next_iter_state")


def loader_state(loader: Any) -> Any:
    """Its own `state_dict`, or what it is to begin with; None if that is the beginning."""
    return loader.state_dict() if _has_begun(loader) else loader.next_iter_state


def capture_loader(name: str, loader: Any, encoder: Encoder) -> Json:
    """What must be known besides its own state."""
    states = {label: generator.get_state() for label, generator in _generators(loader).items()}
    return {
        "begun": _has_begun(loader),
        "generators": encoder.encode(states, join_key("loaders", name)),
    }


def apply_loader(loader: Any, state: Any, facts: Json, decoder: Decoder) -> None:
    """Put a loader where it was; with workers, this starts them."""
    loader.load_state_dict({} if state is None else state)
    if facts["begun"]:
        loader.state_dict()
    states = decoder.decode(facts["generators"])
    for label, generator in _generators(loader).items():
        if label in states:
            generator.set_state(states[label])


def _has_begun(loader: Any) -> bool:
    return loader._iterator is not None


def _generators(loader: Any) -> dict[str, torch.Generator]:
    found = {
        "loader": loader.generator,
        "sampler": getattr(loader.sampler, "generator", None),
        "batch_sampler": getattr(loader.batch_sampler, "generator", None),
    }
    return {label: g for label, g in found.items() if isinstance(g, torch.Generator)}
