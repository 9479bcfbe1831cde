"""How two steps differ: tensors by their hashes first, then bit by bit.

Of full checkpoints only tensors whose hashes differ are read, one at a time from each side.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from msgspec import Struct

from everystep.recovery.stream import OpenStep
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
    l2: float | str | None
    """The Euclidean norm of the difference of floats that are numbers on both sides; as above."""
    relative_l2: float | str | None
    """The same as a multiple of the norm of a; as above."""
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


def compare(a: OpenStep, b: OpenStep) -> Differences:
    """Compare two states, every rank with the same rank of the other side.

    Memory: one tensor of each side at a time, besides what the steps hold themselves.

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


def _compare_values(a: OpenStep, b: OpenStep, ranks: list[int], found: Differences) -> None:
    sizes = a.world_size, b.world_size
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
    a: OpenStep, b: OpenStep, key: str, rank: int, done: set[str], found: Differences
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


def _same_shards(a: OpenStep, b: OpenStep, key: str) -> bool:
    """Whether a sharded tensor is divided alike on both sides, and every part has one hash."""

    def parts(step: OpenStep) -> dict[int, tuple[object, ...]]:
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
    differing, first = 0, -1
    sums = _Sums()
    for start, stop in _ranges(a.numel(), raw.CHUNK_BYTES // item):
        part_a, part_b = flat_a[start:stop], flat_b[start:stop]
        other = (_bits(part_a, item) != _bits(part_b, item)).any(axis=1)
        count = int(other.sum())
        if count and first < 0:
            first = start + int(other.argmax())
        differing += count
        sums.add(_values_of(part_a), _values_of(part_b), torch.from_numpy(other))
    if not differing:
        return None
    return TensorDifference(
        key=key,
        rank=rank,
        dtype=raw.dtype_name(a.dtype),
        shape=list(a.shape),
        elements=a.numel(),
        differing=differing,
        max_abs=_finite(sums.largest),
        l2=_finite(sums.l2),
        relative_l2=_finite(sums.relative_l2),
        nan_a=sums.nan_a,
        nan_b=sums.nan_b,
        first=first,
        first_a=_hex(flat_a[first : first + 1], item),
        first_b=_hex(flat_b[first : first + 1], item),
    )


class _Sums:
    """What is summed up over the parts of two tensors of floats."""

    def __init__(self) -> None:
        self.nan_a = self.nan_b = 0
        self.largest: float | None = None
        self._change = self._norm = 0.0  # squared

    def add(self, a: torch.Tensor | None, b: torch.Tensor | None, other: torch.Tensor) -> None:
        """Take one part: both sides, and which elements have other bits."""
        if a is None or b is None:
            return
        self.nan_a, self.nan_b = (
            self.nan_a + int(a.isnan().sum()),
            self.nan_b + int(b.isnan().sum()),
        )
        gaps = (a[other] - b[other]).abs()
        gaps = gaps[~gaps.isnan()]
        if gaps.numel():
            self.largest = max(self.largest or 0.0, float(gaps.max()))
            self._change += float(gaps.square().sum())
        self._norm += float(a.abs().square().nansum())

    @property
    def l2(self) -> float | None:
        """The norm of the difference; None: there is none."""
        return None if self.largest is None else math.sqrt(self._change)

    @property
    def relative_l2(self) -> float | None:
        """The norm of the difference as a multiple of that of a; None: there is none."""
        if self.l2 is None or not self._norm:
            return self.l2 and math.inf  # 0 and None stay what they are
        return self.l2 / math.sqrt(self._norm) if math.isfinite(self.l2) else math.inf


def _finite(value: float | None) -> float | str | None:
    return "inf" if value == math.inf else value


def most_moved(tensors: list[TensorDifference]) -> list[TensorDifference]:
    """Parameters and buffers of models, by the relative norm of the change, then by the largest
    difference, greatest first; those without arithmetic are left out."""
    ranked = [t for t in tensors if t.key.startswith("/models/") and t.relative_l2 is not None]
    return sorted(ranked, key=lambda t: (-_as_float(t.relative_l2), -_as_float(t.max_abs), t.key))


def _as_float(value: float | str | None) -> float:
    return 0.0 if value is None else float(value)


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
