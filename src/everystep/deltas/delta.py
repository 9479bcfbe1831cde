"""The delta: what takes the state of one training step to the next."""

from __future__ import annotations

import enum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from everystep.types import Json, TensorSpec, element_count

Bytes = npt.NDArray[np.uint8]
"""One-dimensional, contiguous."""


class Form(enum.IntEnum):
    """How the gradient of one parameter is written down; every form gives back every bit."""

    ABSENT = 0
    """There was none (`None`): the optimizer passed the parameter over."""
    ZERO = 1
    """All bits are zero."""
    SPARSE = 2
    """Elements whose bits are not all zero, and the gaps between them."""
    BFLOAT16 = 3
    """A float32 gradient whose values all are bfloat16 ones."""
    FLOAT16 = 4
    """A float32 gradient whose values all are float16 ones."""
    DENSE = 5
    """Every element as it is."""
    COO = 6
    """A `torch.sparse_coo` tensor: indices and values as they are."""
    SPARSE_BFLOAT16 = 7
    """SPARSE, with values as in BFLOAT16."""
    SPARSE_FLOAT16 = 8
    """SPARSE, with values as in FLOAT16."""
    ON_WIRE = 9
    """Not here: it is what an all-reduce gave, times one number. The values are those of a few
    elements (`samples`). Only on its way to a shadow, never in a log."""


class Coded(NamedTuple):
    """The gradient of one piece of one parameter."""

    form: Form
    dtype: str
    """torch's name of the gradient's dtype; empty if absent."""
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody calls here
    """How many values are stored."""
    gaps: Bytes
    """Where they are: SPARSE, else empty (COO: the int64 indices, row-major, then the shape of
    the indices and whether it is coalesced, as `encodings` says)."""
    values: Bytes
    """The values in order."""


class Parameter(Struct, frozen=True):
    """One parameter of an optimizer, and what of its gradient a rank's deltas hold."""

    key: str
    """As in full checkpoints: `/models/model/fc.weight`."""
    shape: tuple[int, ...]
    """Of this rank's local tensor."""
    start: int
    """From this element of it in row-major order …"""
    stop: int
    """… to this one, exclusive. Several ranks may hold pieces of one replicated parameter."""

    @property
    def elements(self) -> int:
        """Of this rank's local tensor."""
        return element_count(self.shape)


class Layout(Struct, frozen=True, kw_only=True):
    """What deltas refer to by position; the same for a whole segment of the log."""

    rank: int
    world_size: int
    optimizers: dict[str, list[Parameter]]
    """Parameters of each optimizer, group after group."""
    state: list[str]
    """Keys of the tensors that fingerprints cover, in their order."""
    left_out: list[str] = []
    """Beginnings of keys that deltas do not hold: what belongs to a state, and is kept in full
    checkpoints only. Folding leaves nothing there."""
    slices: int = 16
    """So many consecutive fingerprints cover the state once."""
    threads: int
    """`torch.get_num_threads()` where it was trained: some kernels depend on it."""
    versions: dict[str, str]


class Update(NamedTuple):
    """One call of an optimizer's `step()`."""

    optimizer: str
    options: Json | None
    """The hyperparameters of each group at that moment, as a list of the `options` in the tree
    of a full checkpoint; tensors in them stand in `Delta.tensors`. None: as they were before."""
    gradients: list[Coded]
    """Parallel to `Layout.optimizers[optimizer]`."""
    scale: Json | None = None
    """What a gradient scaler had left to a fused optimizer: [scale or None, found_inf or None],
    each the float32 bits as an unsigned integer. None: nothing."""


class Stored(NamedTuple):
    """A tensor that is written down whole."""

    spec: TensorSpec
    data: Bytes
    """Row-major."""


class Delta(NamedTuple):
    """All that a step changed: folding it onto the state before gives the state after."""

    step: int
    updates: list[Update]
    """In the order in which they happened; none in a step whose update was skipped."""
    tensors: list[Stored]
    """Buffers, and tensors of extras, options and generators, that differ from the step before."""
    tree: dict[str, Json]
    """What differs from the step before in the tree of a full checkpoint: any of `extras`,
    `loaders`, `rng`, each whole; `extra_state`: {model: whole}; `options`: {optimizer: list of
    every group's options after the step, where they differ from those of its last update}."""
    metrics: dict[str, Json]
    fingerprint: npt.NDArray[np.uint64]
    """Of the state after the step: see `state.fingerprint`."""
