"""One rank's part of a full checkpoint, read and proved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch

from everystep.errors import LayoutMismatch
from everystep.state import raw
from everystep.state.form import check_form
from everystep.store.format import RankRecord
from everystep.store.reading import Located, Reading, StepReader, locate
from everystep.store.run import Run, StepEntry
from everystep.types import TensorSpec

Lend = Callable[[str, int, int], memoryview | None]
"""Gives the bytes of a file (name, offset, length) where they are in memory anyway."""


class Proved(NamedTuple):
    """A rank's part of a step, read and equal to what was written."""

    record: RankRecord
    tensors: dict[str, torch.Tensor]
    """By key, in host memory, local parts where sharded."""
    standing: Mapping[str, torch.Tensor] = MappingProxyType({})
    """Where to write those that have been lent and are no model's."""

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Descriptions of the tensors by key."""
        return {tensor.spec.key: tensor.spec for tensor in self.record.tensors}


def read_part(
    run: Run,
    entry: StepEntry,
    rank: int,
    fits: Callable[[RankRecord], None] | None = None,
    progress: Callable[[int], None] | None = None,
    wanted: Callable[[TensorSpec], bool] = lambda spec: True,
    lend: Lend | None = None,
    standing: Callable[[RankRecord], Mapping[str, torch.Tensor]] = lambda record: {},
) -> Proved:
    """Read one rank's state of a step and prove every byte of it.

    Args:
        fits: called with the record before a tensor is made or read from the store; raises if it
            is of no use.
        progress: called with the number of bytes just read, from any thread.
        wanted: which tensors to read.
        lend: may give bytes of what is only copied from here: parameters, buffers and what is
            `standing`; the backend must not copy what it reads to where it has lent it.
        standing: live tensors into which to write, by key.

    Raises:
        Damaged, Missing, ReplicasDiffer: it is not what was written.
        StoreFailed: it cannot be read.
    """
    records = run.records(entry)
    if rank not in records:
        raise LayoutMismatch(f"step {entry.ref} has no rank {rank}", found=sorted(records))
    record = records[rank]
    check_form(record.tree, {tensor.spec.key for tensor in record.tensors})
    tensors: dict[str, torch.Tensor] = {}

    def new(spec: TensorSpec) -> memoryview:
        tensors[spec.key], view = raw.empty_for(spec)
        return view

    left = [place for place in locate(records, rank) if wanted(place.tensor.spec)]
    targets: Mapping[str, torch.Tensor] = {}
    with StepReader(run.backend, entry, records).reading(progress) as reading:
        if lend is not None:  # what lies in memory is being proved while the rest is thought about
            left = _prove_lent(reading, left, lend, _is_of_model, tensors)
        if fits is not None:
            fits(record)
        if lend is not None:
            targets = standing(record)
            left = _prove_lent(reading, left, lend, targets.__contains__, tensors)
            targets = {key: target for key, target in targets.items() if key in tensors}
        reading.begin(left, new)
    return Proved(record, tensors, targets)


def _is_of_model(key: str) -> bool:
    return key.startswith("/models/")


def _prove_lent(
    reading: Reading,
    located: Sequence[Located],
    lend: Lend,
    is_copied: Callable[[str], bool],
    tensors: dict[str, torch.Tensor],
) -> list[Located]:
    """Begin to prove what is in memory already where it lies; returns what is left to be read.

    Args:
        is_copied: whether the tensor of a key is only copied from there.
        tensors: gets those that are lent, by key.
    """
    asked: list[Located] = []
    others: list[Located] = []
    for one in located:
        (asked if is_copied(one.tensor.spec.key) else others).append(one)
    lent, left = reading.begin_in_place(asked, lend)
    for one in asked:
        spec = one.tensor.spec
        if spec.key in lent:
            tensors[spec.key] = raw.over(lent[spec.key], spec)
    return others + left
