"""What is to be copied of every step, cut into tasks that two threads can share."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple, Protocol

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
_LARGE_BYTES = 4 << 20
"""An optimizer may have to wait for one task; each costs the interpreter some 0.1 ms."""

_MOST_TENSORS = 512


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


@dataclass(frozen=True)
class Owned:
    """A piece that this rank stores, and where it goes."""

    piece: Piece
    number: int
    offset: int


class Member(NamedTuple):
    """One of the tensors of a task."""

    held: Held
    owned: Owned | None
    """None: this rank stores nothing of it."""
    whole: bool
    """Whether the hash of all of it is wanted: others store a part of it."""

    @property
    def nbytes(self) -> int:
        """What this rank stores of it."""
        if self.owned is None:
            return 0
        return (self.owned.piece.stop - self.owned.piece.start) * self.held.tensor.element_size()


class Large:
    """Contiguous tensors: what this rank stores of each, and the hash of all of it if others store
    the rest."""

    def __init__(self, members: Sequence[Member], writer: str | None) -> None:
        self.writer = writer
        self.keys = [member.held.spec.key for member in members]
        self.live = [member.held.tensor for member in members]
        self._members = members
        self._sources = [raw.plain_bits(tensor).reshape(-1) for tensor in self.live]
        self._addresses = [source.data_ptr() for source in self._sources]
        self._kept: list[torch.Tensor] | None = None
        self._targets: dict[int, list[torch.Tensor | None]] = {}
        self.nbytes = sum(member.nbytes for member in members)
        self.kept_bytes = sum(member.held.spec.nbytes for member in members)

    def run(self, device: Device, slot: torch.Tensor, found: Found) -> None:
        """See `Task.run`."""
        address = slot.data_ptr()
        if address not in self._targets:
            self._targets[address] = [
                _target(slot, m.owned.offset, source[m.owned.piece.start : m.owned.piece.stop])
                if m.owned is not None
                else None
                for m, source in zip(self._members, self._sources, strict=True)
            ]
        sources, self._kept = self._kept or self._alive(), None
        for member, source, target in zip(
            self._members, sources, self._targets[address], strict=True
        ):
            _run(member, source, target, device, found)

    def _alive(self) -> list[torch.Tensor]:
        """The sources. Memory that has been freed since is refused; another address is what shows
        that it may have been."""
        for index, source in enumerate(self._sources):
            address = source.data_ptr()
            if address != self._addresses[index]:
                raw.check_storable(source, self.keys[index])
                self._addresses[index] = address
        return self._sources

    def snapshot(self, device: Device) -> None:
        """See `Task.snapshot`."""
        self._kept = device.snapshot(self._sources)

    def forget(self) -> None:
        """See `Task.forget`."""
        self._kept = None


def _run(
    member: Member,
    source: torch.Tensor,
    target: torch.Tensor | None,
    device: Device,
    found: Found,
) -> None:
    """Copy and hash one contiguous tensor.

    Args:
        source: all of it.
        target: where its piece goes; None: this rank stores nothing of it.
    """
    owned, key = member.owned, member.held.spec.key
    if owned is None or target is None:
        if member.whole:
            found.whole[key] = device.digest(source, None)
    elif member.whole:
        found.whole[key] = _run_part(owned, source, target, device, found)
    elif device.hashes:
        found.pieces[owned.number] = device.digest(source, target)
    else:
        device.copy(source, target, [])


def _run_part(
    owned: Owned, source: torch.Tensor, target: torch.Tensor, device: Device, found: Found
) -> str:
    """Copy a piece, and return the hash of all of the tensor."""
    start, stop = owned.piece.start, owned.piece.stop
    whole = xxhash.xxh3_128()
    own: list[Hash] = [xxhash.xxh3_128()] if device.hashes else []
    if start:
        device.copy(source[:start], None, [whole])
    device.copy(source[start:stop], target, [*own, whole])
    if stop < len(source):
        device.copy(source[stop:], None, [whole])
    found.pieces.update((owned.number, state.hexdigest()) for state in own)
    return whole.hexdigest()


class Group:
    """Small tensors, all of each of them stored by this rank."""

    def __init__(self, members: Sequence[Member], writer: str | None) -> None:
        self.writer = writer
        self.keys = [member.held.spec.key for member in members]
        self.live = [member.held.tensor for member in members]
        self._sources = [raw.plain_bits(tensor) for tensor in self.live]
        self._kept: list[torch.Tensor] | None = None
        self._offsets = [member.owned.offset for member in members if member.owned is not None]
        self._targets: dict[int, list[torch.Tensor]] = {}
        self.nbytes = self.kept_bytes = sum(member.nbytes for member in members)

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

    def __init__(self, member: Member, writer: str | None) -> None:
        held = member.held
        self.writer, self.keys, self.live = writer, [held.spec.key], [held.tensor]
        self._source = held.tensor
        self._kept: torch.Tensor | None = None
        self._owned, self._whole = member.owned, member.whole
        self.nbytes, self.kept_bytes = member.nbytes, held.spec.nbytes

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
        piece.key: Owned(piece, number, offset)
        for number, (piece, offset) in enumerate(zip(pieces, place.offsets, strict=True))
    }
    small: dict[tuple[str | None, bool], list[Member]] = {}
    large: dict[tuple[str | None, bool, bool], list[Member]] = {}
    tasks: list[Task] = []
    for held, writer in zip(fixed, writers, strict=True):
        mine = owned.get(held.spec.key)
        if held.spec.elements == 0:
            continue
        whole = mine is None or mine.piece.stop - mine.piece.start < held.spec.elements
        member = Member(held, mine, whole)
        awkward = held.tensor.is_conj() or held.tensor.is_neg()
        if not whole and not awkward and held.spec.nbytes < SMALL_BYTES:
            small.setdefault((writer, of_model(held.spec.key)), []).append(member)
        elif awkward or not held.tensor.is_contiguous():
            tasks.append(Awkward(member, writer))
        else:
            kind = (writer, of_model(held.spec.key), mine is None)
            large.setdefault(kind, []).append(member)
    for (writer, _), members in small.items():
        tasks += [Group(some, writer) for some in _divided(members, _GROUP_BYTES)]
    for (writer, _, _), members in large.items():
        tasks += [Large(some, writer) for some in _divided(members, _LARGE_BYTES)]
    return sorted(tasks, key=lambda task: (order(task.writer), -task.nbytes))


def _divided(members: Sequence[Member], most_bytes: int) -> Iterator[list[Member]]:
    """Stretches of so many bytes; only what is larger by itself is more."""
    group: list[Member] = []
    nbytes = 0
    for member in members:
        if group and (nbytes + member.held.spec.nbytes > most_bytes or len(group) == _MOST_TENSORS):
            yield group
            group, nbytes = [], 0
        group.append(member)
        nbytes += member.held.spec.nbytes
    if group:
        yield group


def written_by_several(optimizers: Iterable[Optimizer]) -> set[object]:
    """The memory of parameters that more than one optimizer writes."""
    found: collections.Counter[object] = collections.Counter()
    for optimizer in optimizers:
        groups = [group["params"] for group in optimizer.param_groups]
        found.update({raw.same_memory(shard_of(p)[0]) for p in chain.from_iterable(groups)})
    return {memory for memory, times in found.items() if times > 1} - {None}
