"""Whether the agent is to make the full checkpoints among deltas from its own copy of the state."""

from __future__ import annotations

import itertools
import logging

import torch

from everystep.agent.arena import available_bytes
from everystep.recovery.classes import elsewhere, unfit
from everystep.state.objects import Objects
from everystep.strategies import Deltas

_log = logging.getLogger("everystep")

WORTH_BYTES = 64 << 20
"""Of state, from which on it is worth a second process with torch: less is copied in a few
milliseconds."""

_BESIDE_BYTES = 1 << 30
"""Of host memory that torch, and whoever else there is, are to have besides the copy."""

_MOST_SLOTS = 3
"""Of an optimizer that has made none yet, each as large as its parameter."""


def compacts(objects: Objects, options: Deltas) -> bool:
    """Decide, and say why not where the user wants it."""
    if options.compact is False:
        return False
    reason = _unable(objects)
    if options.compact is True and reason is not None:
        _log.warning("the agent makes no full checkpoints, training takes them: %s", reason)
    return reason is None and (options.compact is True or _pays(objects, options))


def _unable(objects: Objects) -> str | None:
    """Why a copy in the agent would not be had, or not be the same."""
    return elsewhere(objects.parameters) or unfit(objects.kinds)


def _pays(objects: Objects, options: Deltas) -> bool:
    nbytes = _state_bytes(objects)
    available = available_bytes()
    if available is not None and available < nbytes + _BESIDE_BYTES:
        return False
    if options.staging_bytes is not None and options.staging_bytes < nbytes:
        return False
    return nbytes >= WORTH_BYTES


def _state_bytes(objects: Objects) -> int:
    """Of models and slots, or what slots may take that are not made yet."""
    held = {
        id(tensor): tensor.nbytes
        for model in objects.models.values()
        for tensor in itertools.chain(model.parameters(), model.buffers())
    }
    slots = 0
    for optimizer in objects.optimizers.values():
        values = [value for slot in optimizer.state.values() for value in slot.values()]
        made = sum(value.nbytes for value in values if isinstance(value, torch.Tensor))
        of_parameters = sum(p.nbytes for group in optimizer.param_groups for p in group["params"])
        slots += made or _MOST_SLOTS * of_parameters
    return sum(held.values()) + slots
