"""The deltas that all ranks have of one step, put together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from everystep.deltas.delta import Delta, Layout, Stored, Update
from everystep.deltas.encodings import encode
from everystep.errors import Damaged
from everystep.recovery.gradients import Gradient, Piece
from everystep.recovery.proof import Step
from everystep.recovery.replay import Call, Options, Replay
from everystep.state import raw
from everystep.state.tree import Decoder
from everystep.types import TensorSpec, spoken

_UPDATES = "/updates/"
"""Begins the keys of tensors that only an update's options refer to."""


_NOBODYS = Piece(0, 0, encode(None, 0, 0))


class Ready(NamedTuple):
    """A step whose pieces have been put together."""

    step: Step
    layout: Layout
    delta: Delta
    """The rank's own."""
    calls: list[Call]
    nbytes: int
    """What holding the gradients takes."""


def join(
    step: Step,
    replays: Mapping[str, Replay],
    specs: Mapping[str, TensorSpec],
    tensors: Mapping[str, torch.Tensor],
) -> Ready:
    """Put the pieces of a step's gradients together.

    Args:
        replays: the optimizers by name.
        specs: of the state's tensors.
        tensors: of the state, to which options may refer.

    Raises:
        Damaged: the ranks' parts do not fit each other or the state.
    """
    layout, delta = step.own
    others = [part for part in step.parts if part[0] is not layout]
    if any(len(other.updates) != len(delta.updates) for _, other in others):
        raise Damaged("ranks differ in how often optimizers stepped", step=step.step)
    beside = {s.spec.key: tensor_of(s) for s in delta.tensors if is_beside(s)}
    decoder = Decoder({**tensors, **beside})
    calls = []
    for number, update in enumerate(delta.updates):
        parts = [(layout, update), *((of, other.updates[number]) for of, other in others)]
        replay = replays.get(update.optimizer)
        if replay is None or any(part.optimizer != update.optimizer for _, part in parts):
            raise Damaged(f"an update of optimizer {update.optimizer!r}", step=step.step)
        gradients = _gradients(step.step, replay, parts, specs, tensors)
        options = _options(step.step, replay, update, decoder)
        calls.append(Call(update.optimizer, options, gradients, update.scale))
    nbytes = sum(gradient.nbytes for call in calls for gradient in call.gradients)
    return Ready(step, layout, delta, calls, nbytes)


def _gradients(
    step: int,
    replay: Replay,
    parts: list[tuple[Layout, Update]],
    specs: Mapping[str, TensorSpec],
    tensors: Mapping[str, torch.Tensor],
) -> list[Gradient]:
    """Parallel to the optimizer's parameters, absent where those are somebody else's; the first of
    the parts is the rank's own."""
    pieces: dict[str, list[Piece]] = {key: [] for key in replay.keys}
    for layout, part in parts:
        parameters = layout.optimizers.get(replay.name, [])
        if len(parameters) != len(part.gradients):
            raise Damaged("gradients of other parameters", step=step, rank=layout.rank)
        for one, coded in zip(parameters, part.gradients, strict=True):
            spec = specs.get(one.key)
            if one.key not in pieces or spec is None:
                raise Damaged(f"a gradient of {spoken(one.key)}", step=step)
            if layout is parts[0][0] or spec.replicated:
                pieces[one.key].append(Piece(one.start, one.stop, coded))
    return [
        Gradient(key, specs[key].elements, pieces[key])
        if key in tensors
        else Gradient(key, 0, [_NOBODYS])
        for key in replay.keys
    ]


def _options(step: int, replay: Replay, update: Update, decoder: Decoder) -> Options | None:
    if update.options is None:
        return None
    options: Options = decoder.decode(update.options)
    if not isinstance(options, list) or len(options) != len(replay.groups):
        raise Damaged(f"options of {update.optimizer!r}", step=step)
    return options


def is_beside(stored: Stored) -> bool:
    """Whether a tensor is no part of the state, but only of an update's options."""
    return stored.spec.key.startswith(_UPDATES)


def tensor_of(stored: Stored) -> torch.Tensor:
    """A tensor of its own with the bytes that were written down.

    Raises:
        Damaged: their number is not that of the description.
    """
    tensor, view = raw.empty_for(stored.spec)
    if len(view) != len(stored.data):
        raise Damaged(f"{spoken(stored.spec.key)}: {len(stored.data)} bytes", expected=len(view))
    view[:] = stored.data.data
    return tensor
