"""Which rank stores which bytes of a state that all ranks hold alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from everystep.types import Piece, TensorSpec, item_bytes


class Extent(NamedTuple):
    """Elements `start` to `stop` (exclusive) of the tensor at `position` of the input."""

    position: int
    start: int
    stop: int


def share_of(
    elements: Sequence[int], sizes: Sequence[int], rank: int, world_size: int
) -> list[Extent]:
    """The share of `rank` when `world_size` ranks split a list of tensors by bytes.

    The tensors are laid end to end and cut into `world_size` stretches of equal length in bytes,
    each cut moved down to the element that it falls into. The shares are contiguous, disjoint,
    cover everything, differ in length by less than one element from equal, and depend on nothing
    but the arguments, so that ranks need not talk. A tensor without elements goes to rank 0.

    Args:
        elements: number of elements of each tensor.
        sizes: bytes of one element of each tensor.
        rank: whose share, from 0.
        world_size: among how many.
    """
    total = sum(n * size for n, size in zip(elements, sizes, strict=True))
    first = total * rank // world_size
    last = total * (rank + 1) // world_size
    share: list[Extent] = []
    begin = 0
    for index, (n, size) in enumerate(zip(elements, sizes, strict=True)):
        if n == 0:
            if rank == 0:
                share.append(Extent(index, 0, 0))
            continue
        start = min(max(first - begin, 0) // size, n)
        stop = min(max(last - begin, 0) // size, n)
        if start < stop:
            share.append(Extent(index, start, stop))
        begin += n * size
    return share


def pieces_of(specs: Sequence[TensorSpec], rank: int, world_size: int) -> list[Piece]:
    """What a rank stores: all of its own tensors, and its share of the replicated ones."""
    own = [Piece(spec.key, 0, spec.elements) for spec in specs if not spec.replicated]
    shared = sorted((spec for spec in specs if spec.replicated), key=lambda spec: spec.key)
    extents = share_of(
        [spec.elements for spec in shared],
        [item_bytes(spec.dtype) or 1 for spec in shared],
        rank,
        world_size,
    )
    return own + [Piece(shared[e.position].key, e.start, e.stop) for e in extents]


def pieces_by_unit(
    specs: Sequence[TensorSpec],
    rank: int,
    world_size: int,
    unit_of: Callable[[str], str],
) -> list[Piece]:
    """What a rank stores where no unit is divided: all of its own tensors, and the replicated ones
    of some units.

    The largest unit that is left goes to the rank that has least: no rank has more than 4/3 of what
    the best division would give the fullest one (Graham 1969, "Bounds on multiprocessing timing
    anomalies"). Depends on nothing but the arguments.

    Args:
        unit_of: for a tensor's key the name of its unit: of a parameter and its slots, say.
    """
    own = [Piece(spec.key, 0, spec.elements) for spec in specs if not spec.replicated]
    units: dict[str, list[TensorSpec]] = {}
    for spec in sorted((spec for spec in specs if spec.replicated), key=lambda spec: spec.key):
        units.setdefault(unit_of(spec.key), []).append(spec)
    sizes = {name: sum(spec.nbytes for spec in members) for name, members in units.items()}
    loads = [0] * world_size
    mine: list[Piece] = []
    for name in sorted(units, key=lambda name: (-sizes[name], name)):
        least = loads.index(min(loads))
        loads[least] += sizes[name]
        if least == rank:
            mine += [Piece(spec.key, 0, spec.elements) for spec in units[name]]
    return own + mine
