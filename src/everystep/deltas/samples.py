"""A few elements of each gradient that is not written down: they show whether the one that was read
off a network is the one that the optimizer was given.

Where they lie follows from the step alone, and changes with every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from everystep.deltas.delta import Coded, Parameter
from everystep.errors import Damaged
from everystep.types import item_bytes

SAMPLES = 256
"""So many of all gradients of an update, spread by their sizes; of each at least `LEAST`."""

LEAST = 2

DTYPES = ("float32", "float16", "bfloat16", "float64")
"""Of gradients that may be read off a network."""


ON_WIRE = "on_wire"
"""In the tree of a delta on its way to a shadow: a `Reduced`."""


class Reduced(Struct, forbid_unknown_fields=True):
    """What the all-reduces of a step were."""

    through: Annotated[int, Meta(ge=0, le=1 << 62)]
    """The number of the last collective that had begun when the optimizer stepped."""
    buckets: list[tuple[list[str], list[Annotated[int, Meta(ge=0)]], str]] | None = None
    """Of each bucket, in the order in which they are reduced: keys and elements of its parameters,
    and its dtype. None: as they were in the step before."""


def sample_counts(pieces: Sequence[Parameter]) -> list[int]:
    """How many samples there are of the gradient of each piece, if it is there."""
    lengths = [piece.stop - piece.start for piece in pieces]
    total = max(1, sum(lengths))
    return [min(length, max(LEAST, -(-SAMPLES * length // total))) for length in lengths]


def sample_places(
    step: int, update: int, pieces: Sequence[Parameter]
) -> list[npt.NDArray[np.int64]]:
    """Where they lie: elements of each parameter in row-major order, ascending; one in each of as
    many equally long stretches as there are samples.

    Args:
        step: which one.
        update: the number of the update in it.
    """
    counts = sample_counts(pieces)
    drawn = np.random.PCG64([step, update]).random_raw(sum(counts))
    found, at = [], 0
    for piece, count in zip(pieces, counts, strict=True):
        bounds = (np.arange(count + 1) * (piece.stop - piece.start)) // max(1, count)
        own = drawn[at : at + count] % np.maximum(1, np.diff(bounds)).astype(np.uint64)
        found.append(piece.start + bounds[:-1] + own.astype(np.int64))
        at += count
    return found


def check_samples(coded: Coded, count: int) -> None:
    """Check what was read of a gradient that is not written down.

    Raises:
        Damaged: it is not so many samples.
    """
    width = item_bytes(coded.dtype) or 0
    fits = coded.dtype in DTYPES and coded.count == count and len(coded.values) == count * width
    if not fits or len(coded.gaps):
        raise Damaged(
            f"samples of a gradient of dtype {coded.dtype!r}: {coded.count:,} in "
            f"{len(coded.values):,} bytes",
            expected=f"{count:,}",
        )
