"""What is to be copied of every step, cut into tasks that two threads can share."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

import torch
import xxhash
from torch.optim import Optimizer

from everystep.agent.sink import Place
from everystep.engine.device import Device, Hash
from everystep.state import raw
from everystep.state.shards import shard_of
from everystep.state.tree import Held
from everystep.types import Piece

SMALL_BYTES = 256 << 10
"""Tensors below this are copied in groups: one call for many."""

_GROUP_BYTES = 8 << 20
_GROUP_TENSORS = 512


@dataclass
class Found:
    """Hashes that were taken on the way."""

    pieces: dict[int, str] = field(default_factory=dict)
    """By the number of the piece."""
    whole: dict[str, str] = field(default_factory=dict)
    """By the key of the tensor."""


def of_model(key: str) -> bool:
    """Whether it is the key of a parameter or buffer."""
    return key.startswith("/models/")


class Task(Protocol):
    """A part of the work."""

    writer: str | None
    """The optimizer that will overwrite the sources; None: anybody may at any time."""
    keys: list[str]
    live: list[torch.Tensor]
    """The tensors that are read, to see whether they were written meanwhile."""
    nbytes: int
    """To be copied to staging memory."""
    kept_bytes: int
    """What a snapshot takes."""

    def run(self, device: Device, slot: torch.Tensor, found: Found) -> None:
        """Copy to a slot (uint8, one-dimensional), from the snapshot where there is one."""
        ...

    def snapshot(self, device: Device) -> None:
        """Keep the values as they are now, for `run`."""
        ...

    def forget(self) -> None:
        """Let go of a snapshot that is not going to be copied."""
        ...


class Large:
    """One contiguous tensor: what this rank stores of it, and the hash of all of it if others
    store the rest."""

    def __init__(self, held: Held, writer: str | None, owned: _Owned | None, whole: bool) -> None:
        self.writer, self.keys, self.live = writer, [held.spec.key], [held.tensor]
        self._source = raw.plain_bits(held.tensor).reshape(-1)
        self._kept: torch.Tensor | None = None
        self._owned, self._whole = owned, whole
        length = 0 if owned is None else owned.piece.stop - owned.piece.start
        self.nbytes = length * self._source.element_size()
        self.kept_bytes = held.spec.nbytes

    def run(self, device: Device, slot: torch.Tensor, found: Found) -> None:
        """See `Task.run`."""
        source = self._source if self._kept is None else self._kept
        self._kept = None
        raw.check_storable(source, self.keys[0])  # its memory may have been freed since
        whole: list[Hash] = [xxhash.xxh3_128()] if self._whole else []
        start = stop = 0
        if self._owned is not None:
            start, stop = self._owned.piece.start, self._owned.piece.stop
            own: list[Hash] = [xxhash.xxh3_128()] if device.hashes else []
            target = slot[self._owned.offset : self._owned.offset + self.nbytes]
            if whole and start:
                device.copy(source[:start], None, whole)
            device.copy(source[start:stop], target.view(source.dtype), [*own, *whole])
            found.pieces.update((self._owned.number, state.hexdigest()) for state in own)
        if whole and stop < len(source):
            device.copy(source[stop:], None, whole)
        found.whole.update((self.keys[0], state.hexdigest()) for state in whole)

    def snapshot(self, device: Device) -> None:
        """See `Task.snapshot`."""
        (self._kept,) = device.snapshot([self._source])

    def forget(self) -> None:
        """See `Task.forget`."""
        self._kept = None


class Group:
    """Small tensors, all of each of them stored by this rank."""

    def __init__(self, members: Sequence[tuple[Held, _Owned]], writer: str | None) -> None:
        self.writer = writer
        self.keys = [held.spec.key for held, _ in members]
        self.live = [held.tensor for held, _ in members]
        self._sources = [raw.plain_bits(held.tensor) for held, _ in members]
        self._kept: list[torch.Tensor] | None = None
        self._offsets = [owned.offset for _, owned in members]
        self._targets: dict[int, list[torch.Tensor]] = {}
        self.nbytes = self.kept_bytes = sum(held.spec.nbytes for held, _ in members)

    def run(self, device: Device, slot: torch.Tensor, found: Found) -> None:
        """See `Task.run`."""
        address = slot.data_ptr()
        if address not in self._targets:
            self._targets[address] = [
                _target(slot, offset, source)
                for offset, source in zip(self._offsets, self._sources, strict=True)
            ]
        sources, self._kept = self._kept or self._sources, None
        device.copy_group(sources, self._targets[address])

    def snapshot(self, device: Device) -> None:
        """See `Task.snapshot`."""
        self._kept = device.snapshot(self._sources)

    def forget(self) -> None:
        """See `Task.forget`."""
        self._kept = None


def _target(slot: torch.Tensor, offset: int, source: torch.Tensor) -> torch.Tensor:
    nbytes = source.numel() * source.element_size()
    return slot[offset : offset + nbytes].view(source.dtype).view(source.shape)


class Awkward:
    """A tensor whose bytes do not lie in order, or that is conjugated or negated lazily: brought
    to the host in chunks."""

    def __init__(self, held: Held, writer: str | None, owned: _Owned | None, whole: bool) -> None:
        self.writer, self.keys, self.live = writer, [held.spec.key], [held.tensor]
        self._source = held.tensor
        self._kept: torch.Tensor | None = None
        self._owned, self._whole = owned, whole
        length = 0 if owned is None else owned.piece.stop - owned.piece.start
        self.nbytes = length * held.tensor.element_size()
        self.kept_bytes = held.spec.nbytes

    def run(self, device: Device, slot: torch.Tensor, found: Found) -> None:
        """See `Task.run`."""
        source: torch.Tensor = self._source if self._kept is None else self._kept
        self._kept = None
        with device.reading(source):
            self._read(source, slot, found)

    def _read(self, source: torch.Tensor, slot: torch.Tensor, found: Found) -> None:
        if self._owned is not None:
            view, at = _bytes(slot), self._owned.offset
            for chunk in raw.host_chunks(source, self._owned.piece.start, self._owned.piece.stop):
                view[at : at + len(chunk)] = chunk
                at += len(chunk)
        if self._whole:
            state = xxhash.xxh3_128()
            for chunk in raw.host_chunks(source, 0, source.numel()):
                state.update(chunk)
            found.whole[self.keys[0]] = state.hexdigest()

    def snapshot(self, device: Device) -> None:
        """See `Task.snapshot`."""
        (self._kept,) = device.snapshot([self._source])

    def forget(self) -> None:
        """See `Task.forget`."""
        self._kept = None


def _bytes(slot: torch.Tensor) -> memoryview:
    view: memoryview = slot.numpy().data
    return view


@dataclass(frozen=True)
class _Owned:
    """A piece that this rank stores, and where it goes."""

    piece: Piece
    number: int
    offset: int


def tasks_for(
    fixed: Sequence[Held],
    writers: Sequence[str | None],
    pieces: Sequence[Piece],
    place: Place,
    order: Callable[[str | None], int],
) -> list[Task]:
    """The tasks of every step, in the order in which they are to be done: what is overwritten
    first comes first, and of that the largest.

    Args:
        fixed: the tensors of this rank's state.
        writers: for each of them, the optimizer that writes it.
        pieces: what this rank stores of them.
        place: where each piece is to lie.
        order: ranks writers by when they write.
    """
    owned = {
        piece.key: _Owned(piece, number, offset)
        for number, (piece, offset) in enumerate(zip(pieces, place.offsets, strict=True))
    }
    small: dict[tuple[str | None, bool], list[tuple[Held, _Owned]]] = {}
    tasks: list[Task] = []
    for held, writer in zip(fixed, writers, strict=True):
        mine = owned.get(held.spec.key)
        if held.spec.elements == 0:
            continue
        whole = mine is None or mine.piece.stop - mine.piece.start < held.spec.elements
        awkward = held.tensor.is_conj() or held.tensor.is_neg()
        if mine is not None and not whole and not awkward and held.spec.nbytes < SMALL_BYTES:
            small.setdefault((writer, of_model(held.spec.key)), []).append((held, mine))
        elif awkward or not held.tensor.is_contiguous():
            tasks.append(Awkward(held, writer, mine, whole))
        else:
            tasks.append(Large(held, writer, mine, whole))
    for (writer, _), members in small.items():
        tasks += [Group(group, writer) for group in _groups(members)]
    return sorted(tasks, key=lambda task: (order(task.writer), -task.nbytes))


def _groups(members: Sequence[tuple[Held, _Owned]]) -> Iterator[list[tuple[Held, _Owned]]]:
    group: list[tuple[Held, _Owned]] = []
    nbytes = 0
    for held, owned in members:
        group.append((held, owned))
        nbytes += held.spec.nbytes
        if nbytes >= _GROUP_BYTES or len(group) >= _GROUP_TENSORS:
            yield group
            group, nbytes = [], 0
    if group:
        yield group


def written_by_several(optimizers: Iterable[Optimizer]) -> set[object]:
    """The memory of parameters that more than one optimizer writes."""
    found: collections.Counter[object] = collections.Counter()
    for optimizer in optimizers:
        groups = [group["params"] for group in optimizer.param_groups]
        found.update({raw.same_memory(shard_of(p)[0]) for p in chain.from_iterable(groups)})
    return {memory for memory, times in found.items() if times > 1} - {None}
