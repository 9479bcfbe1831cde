"""Single tensors of one step, each read and proved when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from everystep.errors import Damaged, LayoutMismatch
from everystep.state import raw
from everystep.state.form import check_form
from everystep.store.format import RankRecord, StoredTensor
from everystep.store.reading import Located, StepReader, locate
from everystep.store.run import Run, StepEntry
from everystep.store.wellformed import Region, tiles
from everystep.types import StepRef, TensorSpec, spoken


class Whole:
    """A tensor that is sharded over the ranks, put together from their parts."""

    def __init__(self, spec: TensorSpec) -> None:
        shape = spec.shape if spec.shard is None else tuple(spec.shard.global_shape)
        self._key = spec.key
        self._tensor = raw.empty_for(TensorSpec(key=spec.key, dtype=spec.dtype, shape=shape))[0]
        self._filled: set[Region] = set()

    def add(self, spec: TensorSpec, part: torch.Tensor) -> None:
        """Put in one rank's part.

        Raises:
            Damaged: it does not lie in the whole.
        """
        if spec.shard is None:
            raise Damaged(f"{spoken(self._key)}: sharded on some ranks, and whole on another")
        where = tuple(
            slice(offset, offset + length)
            for offset, length in zip(spec.shard.offsets, spec.shape, strict=True)
        )
        target = self._tensor[where]
        if target.shape != part.shape or target.dtype != part.dtype:
            raise Damaged(f"{spoken(self._key)}: a rank's shard does not lie in the whole tensor")
        raw.write_into(target, part)
        if spec.elements:
            self._filled.add(tuple(zip(spec.shard.offsets, spec.shape, strict=True)))

    def tensor(self) -> torch.Tensor:
        """The whole.

        Raises:
            Damaged: parts are missing.
        """
        if not tiles(self._filled, tuple(self._tensor.shape)):
            raise Damaged(f"{spoken(self._key)}: the ranks' shards do not make the whole tensor")
        return self._tensor


class OpenStep:
    """A step, opened to have single tensors of any rank.

    Args:
        ref: the step.
        world_size: how many ranks trained.
        records: of the ranks that are open.

    Raises:
        Damaged: a record does not hold what a state is made of.
    """

    def __init__(self, ref: StepRef, world_size: int, records: Mapping[int, RankRecord]) -> None:
        self.ref, self.world_size = ref, world_size
        self.records = records
        self.tensors: dict[int, dict[str, StoredTensor]] = {
            rank: {stored.spec.key: stored for stored in record.tensors}
            for rank, record in records.items()
        }
        for rank, record in records.items():
            check_form(record.tree, self.tensors[rank])

    def record(self, rank: int) -> RankRecord:
        """A rank's record.

        Raises:
            LayoutMismatch: there is no such rank.
        """
        if rank not in self.records:
            raise LayoutMismatch(f"step {self.ref} has no rank {rank}", found=sorted(self.records))
        return self.records[rank]

    def local(self, key: str, rank: int) -> torch.Tensor:
        """A rank's tensor, row-major, in host memory; its own part where it is sharded.

        Raises:
            Damaged, Missing, ReplicasDiffer: it is not what was written.
        """
        raise NotImplementedError

    def whole(self, key: str, rank: int) -> torch.Tensor:
        """A rank's tensor; put together from all ranks' parts where it is sharded.

        Raises:
            Damaged, Missing, ReplicasDiffer: it is not what was written.
        """
        if self.tensors[rank][key].spec.shard is None:
            return self.local(key, rank)
        parts = [other for other in self.records if key in self.tensors[other]]
        whole = Whole(self.tensors[rank][key].spec)
        for other in parts:
            whole.add(self.tensors[other][key].spec, self.local(key, other))
        return whole.tensor()


class StoredStep(OpenStep):
    """A full checkpoint of which each tensor is read and proved when it is asked for.

    Raises:
        Damaged, Missing: a record is not what was written.
    """

    def __init__(
        self, run: Run, entry: StepEntry, progress: Callable[[int], None] | None = None
    ) -> None:
        super().__init__(entry.ref, entry.world_size, run.records(entry))
        self._progress = progress
        self._reader = StepReader(run.backend, entry, self.records)
        self._located: dict[int, dict[str, Located]] = {}

    def local(self, key: str, rank: int) -> torch.Tensor:
        """See `OpenStep.local`."""
        if rank not in self._located:
            self._located[rank] = {
                place.tensor.spec.key: place for place in locate(self.records, rank)
            }
        place = self._located[rank][key]
        tensor, view = raw.empty_for(place.tensor.spec)
        self._reader.read([place], lambda spec: view, self._progress)
        return tensor
