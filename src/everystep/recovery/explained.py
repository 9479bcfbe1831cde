"""Gradients that were read off a network, as the optimizer was given them: times one number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from everystep.deltas.delta import Bytes, Coded, Delta, Form, Layout, Parameter, Update
from everystep.deltas.factors import factors
from everystep.deltas.samples import sample_places
from everystep.state import raw

_NOTHING = np.empty(0, np.uint8)

Array = npt.NDArray[Any]


def explained(delta: Delta, layout: Layout, reduced: Mapping[str, Array]) -> Delta | None:
    """A delta with its gradients, where each update's are what was reduced times one number.

    Args:
        delta: with gradients of form ON_WIRE.
        layout: of it.
        reduced: flat, by the keys of parameters; bfloat16 as its bits.

    Returns:
        It with gradients of form DENSE; None: samples do not fit, or a parameter was not reduced.
    """
    updates = []
    for number, update in enumerate(delta.updates):
        pieces = layout.optimizers[update.optimizer]
        places = sample_places(delta.step, number, pieces)
        its = _factors(update, pieces, places, reduced)
        if its is None:
            return None
        gradients = [
            _dense(coded, piece, reduced[piece.key], its[coded.dtype])
            if coded.form == Form.ON_WIRE
            else coded
            for coded, piece in zip(update.gradients, pieces, strict=True)
        ]
        updates.append(update._replace(gradients=gradients))
    return delta._replace(updates=updates)


def _factors(
    update: Update,
    pieces: Sequence[Parameter],
    places: Sequence[npt.NDArray[np.int64]],
    reduced: Mapping[str, Array],
) -> dict[str, torch.Tensor] | None:
    """The number for each dtype; None: there is none."""
    seen: dict[str, list[Array]] = {}
    used: dict[str, list[Bytes]] = {}
    for coded, piece, at in zip(update.gradients, pieces, places, strict=True):
        if coded.form != Form.ON_WIRE:
            continue
        array = reduced.get(piece.key)
        dtype = raw.dtype_of(coded.dtype)
        if array is None or array.itemsize != dtype.itemsize or len(array) != piece.elements:
            return None
        seen.setdefault(coded.dtype, []).append(array[at])
        used.setdefault(coded.dtype, []).append(coded.values)
    found = {}
    for name in seen:
        before = _tensor(np.concatenate(seen[name]).view(np.uint8), name)
        after = _tensor(np.concatenate(used[name]), name)
        fitting = factors(before, after)
        if not fitting:
            return None
        found[name] = fitting[0]  # where there are more, the fingerprint tells
    return found


def _dense(coded: Coded, piece: Parameter, array: Array, factor: torch.Tensor) -> Coded:
    part = array[piece.start : piece.stop].view(np.uint8)
    if factor.item() != 1.0:
        product = _tensor(part.copy(), coded.dtype).mul_(factor)
        part = raw.plain_bits(product).numpy().view(np.uint8)
    return Coded(Form.DENSE, coded.dtype, piece.stop - piece.start, _NOTHING, part)


def _tensor(data: Bytes, dtype: str) -> torch.Tensor:
    return torch.from_numpy(data).view(raw.dtype_of(dtype))
