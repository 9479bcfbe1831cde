"""What PyTorch's DDP sends besides gradients when it starts, recognised by its content.

On a fresh communicator: an all-gather of the number of parameters, then broadcasts from rank 0 of
their sizes and strides and of their values. After the first iteration, broadcasts of the order of
the parameters in the rebuilt buckets and of how many are in each. A link towards rank 0 carries the
all-gather only.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
from msgspec import Struct

from everystep.tap.collectives import Kind, Plan
from everystep.tap.connections import Connection
from everystep.tap.schedule import Protocol, Sent, Shape, wire_bytes
from everystep.tap.writes import Write

_MAX_PARAMETERS = 1 << 20
_MOST_DIMENSIONS = 8
_THREADS = 512

NOT_RING = -1
"""Ring step and chunk of a message that is of no all-reduce."""


class Found(Struct, frozen=True):
    """A collective of DDP's own at the base of its channels."""

    kind: Kind
    what: str
    plans: list[Plan]


class Grammar:
    """What DDP sends next on one ring."""

    def __init__(self) -> None:
        self._next = self._count
        self._parameters = 0
        self._elements = 0
        self._buckets = 0

    def next(self, first: Connection, channels: Sequence[Connection], shape: Shape) -> Found | None:
        """The collective that begins with the waiting messages, or None."""
        if self._parameters == 0 and (first.base != 0 or not first.from_start):
            return None
        write = first.pending.get(first.base or 0)
        if write is None:
            return None
        return self._next(write, first, channels, shape)

    def _count(
        self, write: Write, first: Connection, channels: Sequence[Connection], shape: Shape
    ) -> Found | None:
        """One int64 per rank; k - 1 of them pass each link."""
        values = []
        for position in range(shape.ranks - 1):
            values += _int64(first.pending.get(position), 1) or [0]
        after = first.pending.get(shape.ranks - 1)
        if len(set(values)) != 1 or not 0 < values[0] <= _MAX_PARAMETERS:
            return None
        if after is not None and after.length == 0:
            return None
        self._parameters = values[0]
        self._next = self._sizes
        return Found(
            "allgather",
            "DDP: number of parameters, one int64 per rank",
            [_plain(write, shape) for _ in range(1)]
            if shape.ranks == 2
            else [_repeated(write, shape, shape.ranks - 1)],
        )

    def _sizes(
        self, write: Write, first: Connection, channels: Sequence[Connection], shape: Shape
    ) -> Found | None:
        self._next = self._order
        most = 2 * _MOST_DIMENSIONS * self._parameters
        elements = _elements(_int64(write, most), self._parameters)
        if elements is None:
            return self._order(write, first, channels, shape)
        self._elements = elements
        self._next = self._values
        what = "DDP: int64 sizes then strides of each parameter"
        return Found("broadcast", what, [_plain(write, shape)])

    def _values(
        self, write: Write, first: Connection, channels: Sequence[Connection], shape: Shape
    ) -> Found | None:
        protocol = write.protocol
        if protocol == "LL":
            for used in range(len(channels), 0, -1):
                plans = _broadcast(shape, protocol, self._elements, used)
                fits = [
                    c.base is not None and c.fits(plan, c.base, c.base_psn) is not None
                    for c, plan in zip(channels, plans, strict=False)
                ]
                if all(fits):
                    self._next = self._order
                    return Found("broadcast", "DDP: initial parameter values", plans)
        self._next = self._order
        return None

    def _order(
        self, write: Write, first: Connection, channels: Sequence[Connection], shape: Shape
    ) -> Found | None:
        words = _int32(write, self._parameters + 1)
        if words is None or not 0 < words[-1] <= self._parameters:
            return None
        if not np.array_equal(np.sort(words[:-1]), np.arange(self._parameters)):
            return None
        self._buckets = int(words[-1])
        self._next = self._groups
        what = "DDP bucket rebuild: parameter order, then number of buckets, int32"
        return Found("broadcast", what, [_plain(write, shape)])

    def _groups(
        self, write: Write, first: Connection, channels: Sequence[Connection], shape: Shape
    ) -> Found | None:
        words = _int32(write, self._buckets)
        self._next = self._nothing
        if words is None or int(words.sum()) != self._parameters or int(words.min()) < 1:
            return None
        what = "DDP bucket rebuild: parameters in each bucket, int32"
        return Found("broadcast", what, [_plain(write, shape)])

    def _nothing(
        self, write: Write, first: Connection, channels: Sequence[Connection], shape: Shape
    ) -> Found | None:
        return None


def _plain(write: Write, shape: Shape) -> Plan:
    """One message that is of no buffer."""
    return _repeated(write, shape, 1)


def _repeated(write: Write, shape: Shape, times: int) -> Plan:
    protocol: Protocol = write.protocol or "LL"
    return Plan((None,) * times, (write.length,) * times, protocol, shape.element_bytes)


def _int64(write: Write | None, most: int) -> list[int]:
    """The numbers in a message; none where it is not whole, or holds more of them than this."""
    if write is None or not write.complete or len(write.data) % 8 or len(write.data) > 8 * most:
        return []
    return [int(value) for value in np.frombuffer(write.data.tobytes(), "<i8")]


def _int32(write: Write, number: int) -> np.ndarray[tuple[int], np.dtype[np.int32]] | None:
    protocol = write.protocol
    if protocol is None or not write.complete or len(write.data) < 4 * number:
        return None
    if write.length != wire_bytes(protocol, 4 * number):
        return None
    return np.frombuffer(write.data[: 4 * number].tobytes(), np.int32)


def _elements(values: list[int], parameters: int) -> int | None:
    """Elements of all parameters, from the sizes and strides of each; None if it is not that."""
    total = 0
    at = 0
    for _ in range(parameters):
        for dims in range(1, _MOST_DIMENSIONS + 1):
            sizes = values[at : at + dims]
            strides = values[at + dims : at + 2 * dims]
            if len(strides) == dims and strides == _contiguous(sizes):
                total += prod(sizes)
                at += 2 * dims
                break
        else:
            return None
    return total if at == len(values) else None


def _contiguous(sizes: list[int]) -> list[int]:
    """Strides in elements of a contiguous tensor."""
    return [prod(max(size, 1) for size in sizes[i + 1 :]) for i in range(len(sizes))]


def _broadcast(shape: Shape, protocol: Protocol, count: int, channels: int) -> list[Plan]:
    """An LL broadcast: loops of C*M elements, the channels beside each other in each."""
    e = shape.element_bytes
    largest = 32768 // e
    grain = 8 * _THREADS // e
    parts: list[list[Sent]] = [[] for _ in range(channels)]
    for at in range(0, count, channels * largest):
        rest = count - at
        size = min(largest, -(-rest // (channels * grain)) * grain)
        for channel in range(channels):
            start = min(at + channel * size, count)
            parts[channel].append(Sent(NOT_RING, NOT_RING, start, min(start + size, count), False))
    return [
        Plan(
            tuple(part),
            tuple(wire_bytes(protocol, (sent.stop - sent.start) * e) for sent in part),
            protocol,
            e,
        )
        for part in parts
    ]
