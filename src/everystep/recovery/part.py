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
from everystep.store.reading import Located, StepReader, locate
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
        fits: called with the record before any tensor is read; raises if it is of no use.
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
    if fits is not None:
        fits(record)
    tensors: dict[str, torch.Tensor] = {}
    located = [place for place in locate(records, rank) if wanted(place.tensor.spec)]
    reader = StepReader(run.backend, entry, records)
    targets = {} if lend is None else standing(record)
    lent = {} if lend is None else _lent(reader, located, lend, targets)

    def buffer_for(spec: TensorSpec) -> memoryview:
        if spec.key in lent:
            view = lent[spec.key]
            tensors[spec.key] = raw.over(view, spec)
        else:
            tensors[spec.key], view = raw.empty_for(spec)
        return view

    reader.read(located, buffer_for, progress)
    return Proved(record, tensors, {key: targets[key] for key in lent if key in targets})


def _lent(
    reader: StepReader,
    located: Sequence[Located],
    lend: Lend,
    standing: Mapping[str, torch.Tensor],
) -> dict[str, memoryview]:
    """Bytes of parameters, buffers and what is standing that are in memory already, by key."""
    lent = {}
    for one in located:
        spec = one.tensor.spec
        is_copied = spec.key.startswith("/models/") or spec.key in standing
        place = reader.place_of(one) if is_copied and spec.nbytes else None
        view = None if place is None else lend(*place, spec.nbytes)
        if view is not None:
            lent[spec.key] = view
    return lent
