"""A step that is had by folding deltas, in memory, opened like one that is stored in full."""

from __future__ import annotations

import torch
import xxhash
from msgspec.structs import replace

from everystep.errors import LayoutMismatch
from everystep.recovery.reach import How, read_chain
from everystep.recovery.stream import OpenStep, StoredStep
from everystep.state import raw
from everystep.store.chains import Chain
from everystep.store.format import RankRecord, StoredTensor
from everystep.store.run import Run


class FoldedStep(OpenStep):
    """A step of which the ranks' states have been read and folded; what all ranks hold alike is in
    memory once.

    Args:
        run: the run.
        chain: how the step is had.
        rank: whose tensors are wanted; None: all ranks'. Other ranks are folded too where a tensor
            is sharded.
        how: see `read_chain`.

    Raises:
        LayoutMismatch: there is no such rank.
        Damaged, Missing, ReplicasDiffer: something is not what was written, or does not fold to
            what it was in training.
        CannotRestore: an optimizer cannot be built here.
    """

    def __init__(
        self,
        run: Run,
        chain: Chain,
        rank: int | None = None,
        how: How = How(),  # noqa: B008
    ) -> None:
        size = chain.full.world_size
        if rank is not None and rank >= size:
            raise LayoutMismatch(f"step {chain.ref} has no rank {rank}", found=list(range(size)))
        self._values: dict[int, dict[str, torch.Tensor]] = {}
        self._shared: dict[tuple[str, str], torch.Tensor] = {}
        records: dict[int, RankRecord] = {}
        for one in range(size) if rank is None else [rank]:
            records[one] = self._fold(run, chain, one, how)
        if rank is not None and any(t.spec.shard is not None for t in records[rank].tensors):
            for other in range(size):
                if other != rank:
                    records[other] = self._fold(run, chain, other, how)
        super().__init__(chain.ref, size, dict(sorted(records.items())))

    def _fold(self, run: Run, chain: Chain, rank: int, how: How) -> RankRecord:
        record, tensors, _ = read_chain(run, chain, rank, how)
        stored, own = [], {}
        for one in record.tensors:
            tensor = tensors[one.spec.key]
            hashed = StoredTensor(spec=one.spec, xxh3_128=hash_of(tensor))
            stored.append(hashed)
            own[one.spec.key] = tensor
            if one.spec.replicated:
                place = one.spec.key, hashed.xxh3_128
                own[one.spec.key] = self._shared.setdefault(place, tensor)
        self._values[rank] = own
        return replace(record, tensors=stored)

    def local(self, key: str, rank: int) -> torch.Tensor:
        """See `OpenStep.local`."""
        return self._values[rank][key]


def hash_of(tensor: torch.Tensor) -> str:
    """The hash of a host tensor's bytes in row-major order, as records have it."""
    state = xxhash.xxh3_128()
    for chunk in raw.host_chunks(tensor, 0, tensor.numel()):
        state.update(chunk)
    return state.hexdigest()


def open_step(
    run: Run,
    chain: Chain,
    rank: int | None = None,
    how: How = How(),  # noqa: B008
) -> OpenStep:
    """Open a step, however it is had; see `FoldedStep`.

    Raises:
        EverystepError: as there, and of a full checkpoint only what its records show.
    """
    if chain.links:
        return FoldedStep(run, chain, rank, how)
    return StoredStep(run, chain.full, how.progress)
