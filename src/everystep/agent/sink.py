"""What the engine fills: staging memory somewhere, and somebody who empties it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from everystep.types import Json, Piece, TensorSpec


class Place(NamedTuple):
    """Where a step's tensors are to lie in a slot, in bytes from its beginning."""

    layout: int
    """The number of the description."""
    offsets: Sequence[int]
    """Of the pieces."""
    rest_offset: int
    """From here to the end of the slot is room for tensors whose form may change."""
    slot_bytes: int


class Room(NamedTuple):
    """A slot to fill."""

    slot: int
    address: int
    """Of its first byte in this process."""
    view: memoryview
    """Its bytes, writable."""


class Sealed(NamedTuple):
    """All that the sink must know of a step whose tensors are in a slot."""

    slot: int
    layout: int
    step: int
    hashes: Mapping[int, str]
    """xxh3-128 of pieces, by their number in the description; those that are not here are hashed
    by the sink."""
    whole: Mapping[str, str]
    """xxh3-128 of whole replicated tensors, by key."""
    rest: Sequence[TensorSpec]
    """Tensors whose bytes lie one after the other at `Place.rest_offset`."""
    still: bool
    """The tensors that do not change belong to it."""
    tree: bytes
    """JSON of all that is not a tensor."""
    metrics: Mapping[str, Json]
    every: int = 1
    """A checkpoint is being taken at every so many steps."""
    owed: bool = False
    """It must become durable, whatever comes after it."""


class Sink(Protocol):
    """Four verbs. `describe` and `acquire` are for the training thread; any thread may call the
    others. After `seal` returns, the step outlives this process."""

    def describe(
        self, specs: Sequence[TensorSpec], pieces: Sequence[Piece], rest_bytes: int
    ) -> Place:
        """Say what every step will hold from now on, and learn where it is to lie.

        Args:
            specs: the tensors whose form stays.
            pieces: what is stored of them.
            rest_bytes: how much room to leave for the other ones.

        Raises:
            StoreError: there is no such memory, or nobody to empty it.
        """
        ...

    def acquire(self, wait_s: float) -> Room | None:
        """A slot to fill; it is the caller's until it is sealed or released. None: there was none
        in that time.

        Args:
            wait_s: how long to wait for one.
        """
        ...

    def release(self, slot: int) -> None:
        """Give back a slot that is not going to be filled."""
        ...

    def seal(self, sealed: Sealed) -> None:
        """Say that a slot holds all of a step. It must not be touched from here on."""
        ...


class RecordSink(Protocol):
    """Takes the records of a log, one after another. One thread at a time may call it. After
    `publish` returns, the record outlives this process."""

    def open_log(self, base: int, layout: bytes) -> None:
        """Say of what layout the records of the steps after `base` are, until the next call."""
        ...

    def set_batch(self, records: int) -> None:
        """Say how many records are to become durable at once; fewer, where training ends or
        memory is short."""
        ...

    def reserve(self, nbytes: int, wait_s: float) -> memoryview | None:
        """Memory for the next record, to be filled; None: there was none in that time.

        Raises:
            StoreError: there is no such memory.
        """
        ...

    def publish(self, step: int, safe: int | None = None) -> None:
        """Say that the memory reserved last holds the record of a step. It must not be touched
        from here on.

        Args:
            safe: the newest step of which every rank has published its record; None: this one.

        Raises:
            StoreFailed: the memory was lost.
        """
        ...

    def withdraw(self) -> None:
        """Give back memory that is not going to be filled."""
        ...
