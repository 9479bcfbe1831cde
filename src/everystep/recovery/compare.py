"""How two stored steps differ: tensors by their recorded hashes first, then bit by bit.

Only tensors whose hashes differ are read, one at a time from each side.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from msgspec import Struct

from everystep.recovery.stream import StoredStep
from everystep.state import raw
from everystep.store.format import StoredTensor
from everystep.types import Json, item_bytes


class TensorDifference(Struct, frozen=True, kw_only=True):
    """One tensor of the same dtype and shape on both sides, and other bits."""

    key: str
    rank: int | None
    """None: the same on all ranks, or put together from their parts."""
    dtype: str
    shape: list[int]
    elements: int
    differing: int
    """Elements with other bits."""
    max_abs: float | str | None
    """The largest difference in value of floats that are numbers on both sides; `inf` as a string;
    None: there is none, or the dtype has no arithmetic."""
    nan_a: int
    nan_b: int
    """How many elements are not a number."""
    first: int
    """The first that differs, counted in row-major order."""
    first_a: str
    first_b: str
    """Its bits, hexadecimal, most significant first."""


class FormDifference(Struct, frozen=True, kw_only=True):
    """One tensor of another dtype or shape."""

    key: str
    rank: int | None
    a: str
    b: str


class ValueDifference(Struct, frozen=True, kw_only=True):
    """One value that is not in a tensor: a hyperparameter, a part of an extra or of a generator."""

    place: str
    rank: int | None
    a: Json
    b: Json
    """As stored (docs/format.md); None also where there is none."""


class Differences(NamedTuple):
    """All differences between the states of two steps."""

    tensors: list[TensorDifference]
    forms: list[FormDifference]
    only_a: list[str]
    only_b: list[str]
    """Keys of tensors."""
    values: list[ValueDifference]

    @property
    def none(self) -> bool:
        """Whether the states are equal, bit for bit."""
        return not any(self)


def compare(a: StoredStep, b: StoredStep) -> Differences:
    """Compare two states, every rank with the same rank of the other side.

    Memory: one tensor of each side at a time.

    Raises:
        Damaged, Missing: what had to be read is not what was written.
    """
    found = Differences([], [], [], [], [])
    ranks = sorted(a.records.keys() & b.records.keys())
    done: set[str] = set()
    for rank in ranks:
        mine, theirs = a.tensors[rank], b.tensors[rank]
        found.only_a.extend(sorted(mine.keys() - theirs.keys() - set(found.only_a)))
        found.only_b.extend(sorted(theirs.keys() - mine.keys() - set(found.only_b)))
        for key in sorted(mine.keys() & theirs.keys()):
            if key not in done:
                _compare_tensor(a, b, key, rank, done, found)
    _compare_values(a, b, ranks, found)
    return found


def _compare_values(a: StoredStep, b: StoredStep, ranks: list[int], found: Differences) -> None:
    sizes = a.entry.world_size, b.entry.world_size
    if sizes[0] != sizes[1]:
        found.values.append(ValueDifference(place="world_size", rank=None, a=sizes[0], b=sizes[1]))
    seen: set[str] = set()
    for rank in ranks:
        for difference in _values(a.record(rank).tree, b.record(rank).tree):
            if repr(difference) not in seen:  # ranks mostly have the same
                seen.add(repr(difference))
                place, left, right = difference
                shown = rank if len(ranks) > 1 else None
                found.values.append(ValueDifference(place=place, rank=shown, a=left, b=right))


def _compare_tensor(
    a: StoredStep, b: StoredStep, key: str, rank: int, done: set[str], found: Differences
) -> None:
    mine, theirs = a.tensors[rank][key], b.tensors[rank][key]
    sharded = mine.spec.shard is not None or theirs.spec.shard is not None
    alone = not sharded and not (mine.spec.replicated and theirs.spec.replicated)
    if not alone:
        done.add(key)  # what the other ranks have is the same, or is put together here
    shown = rank if alone and len(a.records) > 1 else None
    form_a, form_b = _form(mine), _form(theirs)
    if form_a != form_b:
        found.forms.append(FormDifference(key=key, rank=shown, a=form_a, b=form_b))
    elif not (_same_shards(a, b, key) if sharded else mine.xxh3_128 == theirs.xxh3_128):
        difference = difference_of(key, shown, a.whole(key, rank), b.whole(key, rank))
        if difference is not None:
            found.tensors.append(difference)


def _form(stored: StoredTensor) -> str:
    spec = stored.spec
    shape = spec.shape if spec.shard is None else spec.shard.global_shape
    return f"{spec.dtype} {list(shape)}"


def _same_shards(a: StoredStep, b: StoredStep, key: str) -> bool:
    """Whether a sharded tensor is divided alike on both sides, and every part has one hash."""

    def parts(step: StoredStep) -> dict[int, tuple[object, ...]]:
        return {
            rank: (tensors[key].spec.shard, tensors[key].spec.shape, tensors[key].xxh3_128)
            for rank, tensors in step.tensors.items()
            if key in tensors
        }

    return parts(a) == parts(b)


def difference_of(
    key: str, rank: int | None, a: torch.Tensor, b: torch.Tensor
) -> TensorDifference | None:
    """Compare two host tensors of one dtype and shape; None if they are equal bit for bit."""
    flat_a, flat_b = a.reshape(-1), b.reshape(-1)
    item = item_bytes(raw.dtype_name(a.dtype)) or 1
    differing, first, nan_a, nan_b = 0, -1, 0, 0
    largest: float | None = None
    for start, stop in _ranges(a.numel(), raw.CHUNK_BYTES // item):
        part_a, part_b = flat_a[start:stop], flat_b[start:stop]
        other = (_bits(part_a, item) != _bits(part_b, item)).any(axis=1)
        count = int(other.sum())
        if count and first < 0:
            first = start + int(other.argmax())
        differing += count
        values_a, values_b = _values_of(part_a), _values_of(part_b)
        if values_a is None or values_b is None:
            continue
        nan_a, nan_b = nan_a + int(values_a.isnan().sum()), nan_b + int(values_b.isnan().sum())
        mask = torch.from_numpy(other)
        gaps = (values_a[mask] - values_b[mask]).abs()
        gaps = gaps[~gaps.isnan()]
        if gaps.numel():
            largest = max(largest or 0.0, float(gaps.max()))
    if not differing:
        return None
    return TensorDifference(
        key=key,
        rank=rank,
        dtype=raw.dtype_name(a.dtype),
        shape=list(a.shape),
        elements=a.numel(),
        differing=differing,
        max_abs="inf" if largest == float("inf") else largest,
        nan_a=nan_a,
        nan_b=nan_b,
        first=first,
        first_a=_hex(flat_a[first : first + 1], item),
        first_b=_hex(flat_b[first : first + 1], item),
    )


def _ranges(stop: int, length: int) -> Iterator[tuple[int, int]]:
    for start in range(0, stop, length):
        yield start, min(start + length, stop)


def _bits(flat: torch.Tensor, item: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    chunks = list(raw.host_chunks(flat, 0, flat.numel()))  # one view: the range is that short
    return np.frombuffer(b"".join(chunks), dtype=np.uint8).reshape(-1, item)


def _hex(flat: torch.Tensor, item: int) -> str:
    most_significant_first: bytes = _bits(flat, item)[0][::-1].tobytes()
    return most_significant_first.hex()


def _values_of(flat: torch.Tensor) -> torch.Tensor | None:
    """Floats as float64, complex numbers as complex128; None where a dtype is neither."""
    if not (flat.is_floating_point() or flat.is_complex()):
        return None
    try:
        return flat.to(torch.complex128 if flat.is_complex() else torch.float64)
    except (RuntimeError, NotImplementedError):
        return None  # torch can hold this dtype, and not convert it


def _values(a: Json, b: Json) -> Iterator[tuple[str, Json, Json]]:
    mine, theirs = dict(_leaves(_by_owner(a), "")), dict(_leaves(_by_owner(b), ""))
    for place in dict.fromkeys([*mine, *theirs]):
        left, right = mine.get(place), theirs.get(place)
        if repr(left) != repr(right):  # which tells -0.0 from 0.0, and 1 from 1.0 and True
            yield place, left, right


def _by_owner(tree: Json) -> Json:
    """The tree with slots of optimizers by the name of their parameter."""
    optimizers = {
        name: {**saved, "slots": {".".join(owner): slot for owner, slot in saved["slots"]}}
        for name, saved in tree["optimizers"].items()
    }
    return {**tree, "optimizers": optimizers}


def _leaves(node: Json, place: str) -> Iterator[tuple[str, Json]]:
    """Every value with its place."""
    if isinstance(node, dict) and node:
        for name, value in node.items():
            yield from _leaves(value, f"{place}.{name}" if place else str(name))
    elif isinstance(node, list) and node:
        for index, value in enumerate(node):
            yield from _leaves(value, f"{place}.{index}")
    else:
        yield place, node
