"""How often a mirrored step lacks something, by how often packets are lost and what is mirrored.

Links are numbered by who sends: link i goes from rank i to rank i+1, in the direction of the ring
(gloo's runs the other way round: the counts are the same). A ring all-reduce sends k-1 of the k
reduced chunks over each link: all but chunk i+1 over link i, which arrives there last and is not
sent on. So a chunk has as many copies on the mirror as links that carry it, and copies are cut into
packets at the same places: a packet's bytes are missing where it is lost from every copy.

With packets lost independently with probability p, m packets per chunk and n(c) copies of chunk c,
a step is whole with probability `prod over c of (1 - p^n(c))^m`. FlowCheck (EuroSys 2025) has the
like for m streams of different ports, `N [(m/k) p^(m-1) + ((k-m)/k) p^m]` for small p: this is its
first order. Real loss comes in bursts, which take copies that share a monitor port together: the
model is a bound from below there.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from everystep.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

Protocol = Literal["ll", "ll128", "simple", "gloo"]

WIRE_PER_BYTE: dict[Protocol, float] = {"ll": 2.0, "ll128": 16 / 15, "simple": 1.0, "gloo": 1.0}
"""Bytes of payload on the wire for one of the buffer: LL sends a flag with each word of four, LL128
one word of eight in 128."""

Links = Literal["one", "both", "two-ports", "neighbours"]


class Mirror(Struct, frozen=True):
    """Which links a mirror shows.

    Raises:
        UsageError: numbers that make no sense.
    """

    ranks: int
    """In the ring: k."""
    links: tuple[int, ...]
    """The mirrored ones, by who sends; one that is seen at two ports stands twice."""
    added_step: bool = False
    """Whether each mirrored link also carries the chunk that a ring does not send over it: the
    'added step' of the paper, or a send of that chunk after the all-reduce."""

    def __post_init__(self) -> None:
        if self.ranks < 2 or not all(0 <= link < self.ranks for link in self.links):
            raise UsageError(f"links {self.links} of a ring of {self.ranks} ranks: makes no sense")
        if not self.links:
            raise UsageError("no link is mirrored", hint="mirror a port of one host at least")

    @classmethod
    def of(cls, ranks: int, links: Links, *, added_step: bool = False) -> Mirror:
        """By what is mirrored: `one` direction of a port, `both` directions, or both directions of
        two ports, `neighbours` in the ring or not (`two-ports`).

        Raises:
            UsageError: a ring has not so many ports.
        """
        least = {"one": 2, "both": 2, "neighbours": 2, "two-ports": 4}[links]
        if ranks < least:
            raise UsageError(f"{links} needs a ring of at least {least} ranks, not {ranks}")
        last = ranks - 1
        found = {
            "one": (0,), "both": (last, 0),
            "neighbours": (last, 0, 0, 1), "two-ports": (last, 0, 1, 2),
        }[links]  # fmt: skip
        return cls(ranks, tuple(link % ranks for link in found), added_step)

    @property
    def copies(self) -> list[int]:
        """Of each chunk, how many are seen; shape (ranks,)."""
        found = []
        for chunk in range(self.ranks):
            without = sum((link + 1) % self.ranks == chunk for link in self.links)
            found.append(len(self.links) - (0 if self.added_step else without))
        return found


class Traffic(Struct, frozen=True, kw_only=True):
    """What a step sends over each link.

    Raises:
        UsageError: numbers that make no sense.
    """

    gradient_bytes: int
    """Of all buckets of a step, as they are reduced."""
    payload_bytes: int = 4096
    """Of a packet: the path MTU, without headers."""
    protocol: Protocol = "ll"

    def __post_init__(self) -> None:
        if self.gradient_bytes < 1 or self.payload_bytes < 1:
            sizes = f"{self.gradient_bytes} bytes in packets of {self.payload_bytes}"
            raise UsageError(f"{sizes}: makes no sense")

    def packets(self, ranks: int) -> int:
        """Of one chunk."""
        wire_bytes = self.gradient_bytes / ranks * WIRE_PER_BYTE[self.protocol]
        return max(1, math.ceil(wire_bytes / self.payload_bytes))

    def link_bytes(self, ranks: int) -> float:
        """Payload that a link carries in a step: k-1 partial chunks and k-1 reduced ones."""
        return 2 * (ranks - 1) / ranks * self.gradient_bytes * WIRE_PER_BYTE[self.protocol]


class Loss(Struct, frozen=True, kw_only=True):
    """How often a step lacks something, and how much."""

    remedy_probability: float
    """That a step is not whole from the mirror alone, and something must be asked for."""
    missing_share: float
    """Of the bytes of a step, on the mean."""

    @property
    def steps_between(self) -> float:
        """From one step that lacks something to the next, on the mean; infinite: none does."""
        return math.inf if self.remedy_probability == 0 else 1 / self.remedy_probability


def predict(mirror: Mirror, traffic: Traffic, loss_share: float) -> Loss:
    """What a loss of packets on the mirror means for a step.

    Args:
        loss_share: the probability that a packet is not seen, independent of the others.

    Raises:
        UsageError: it is no probability.
    """
    _must_be_probability(loss_share)
    m = traffic.packets(mirror.ranks)
    gone = [loss_share**copies for copies in mirror.copies]
    if max(gone) >= 1.0:
        probability = 1.0
    else:
        probability = -math.expm1(math.fsum(m * math.log1p(-share) for share in gone))
    return Loss(remedy_probability=probability, missing_share=math.fsum(gone) / mirror.ranks)


def simulate(
    mirror: Mirror, traffic: Traffic, loss_share: float, steps: int, draw: np.random.Generator
) -> Loss:
    """The same, counted: each packet of each link is lost or not, and each chunk put together from
    what is left, link by link.

    Args:
        steps: how many to go through.
        draw: where chance comes from.

    Raises:
        UsageError: `loss_share` is no probability.
    """
    _must_be_probability(loss_share)
    m = traffic.packets(mirror.ranks)
    lacking = missing = 0
    for _ in range(steps):
        seen = [[False] * m for _ in range(mirror.ranks)]
        for sender in mirror.links:
            # a ring from `sender` on: what it has reduced itself first, then what it is sent
            sent = [(sender - s) % mirror.ranks for s in range(mirror.ranks - 1)]
            sent += [(sender + 1) % mirror.ranks] if mirror.added_step else []
            for chunk in sent:
                arrived = (draw.random(m) >= loss_share).tolist()
                seen[chunk] = [old or new for old, new in zip(seen[chunk], arrived, strict=True)]
        holes = sum(not packet for chunk in seen for packet in chunk)
        lacking += holes > 0
        missing += holes
    return Loss(
        remedy_probability=lacking / steps, missing_share=missing / (steps * m * mirror.ranks)
    )


def _must_be_probability(share: float) -> None:
    if not 0 <= share <= 1:
        raise UsageError(f"a packet loss of {share}: not between 0 and 1")


# ---------------------------------------------------------------- how large a shadow must be


class Host(Struct, frozen=True, kw_only=True):
    """A machine that shadows run on, and what its parts do.

    Raises:
        UsageError: a figure that is not above zero.
    """

    cores: int = 32
    memory_bytes: int = 256 * 10**9
    port_bytes_per_s: float = 12.5e9
    """Of one port that mirrored packets come in by."""
    decode_bytes_per_s: float = 3e9
    """Payload on the wire that one core decodes."""
    fold_bytes_per_s: float = 4e9
    """State that one core takes a step on."""

    def __post_init__(self) -> None:
        rates = (self.port_bytes_per_s, self.decode_bytes_per_s, self.fold_bytes_per_s)
        if min(self.cores, self.memory_bytes, *rates) <= 0:
            raise UsageError("a shadow's host needs cores, memory, and rates above zero")


class Sizing(Struct, frozen=True, kw_only=True):
    """What shadows need in all, and how many hosts have it."""

    wire_bytes: float
    """Payload mirrored per step."""
    ports: int
    """So many at the hosts take what is mirrored while all links are busy."""
    decode_cores: int
    fold_cores: int
    memory_bytes: int
    """The state, two sets of reduced buckets, and what arrives faster than it is decoded."""
    hosts: int
    """Each holds a range of the parameters."""


def size(
    mirror: Mirror,
    traffic: Traffic,
    *,
    state_bytes: int,
    step_s: float,
    link_bytes_per_s: float,
    host: Host = Host(),  # noqa: B008 - immutable
) -> Sizing:
    """What it takes to follow a run.

    All that a step sends must be decoded and folded before the next step has sent as much. While
    the links are busy it comes at their rate, and what is not decoded meanwhile waits in memory.

    Args:
        state_bytes: of parameters and slots that are folded.
        step_s: length of a training step.
        link_bytes_per_s: of a training host's port, in one direction.

    Raises:
        UsageError: a figure that makes no sense, or a step too short for what it sends.
    """
    if state_bytes < 1 or not 0 < step_s < math.inf or not 0 < link_bytes_per_s < math.inf:
        raise UsageError(f"{state_bytes} bytes, {step_s} s, {link_bytes_per_s} B/s: no sense")
    per_link = traffic.link_bytes(mirror.ranks)
    if mirror.added_step:
        per_link += traffic.link_bytes(mirror.ranks) / (2 * (mirror.ranks - 1))
    busy_s = per_link / link_bytes_per_s
    if busy_s > step_s:
        raise UsageError(
            f"a step of {step_s:g} s is too short: its links are busy for {busy_s:.3g} s",
            hint="a longer step, or the rate of the links",
        )
    wire_bytes = per_link * len(mirror.links)
    decode_cores = math.ceil(wire_bytes / step_s / host.decode_bytes_per_s)
    fold_cores = math.ceil(state_bytes / step_s / host.fold_bytes_per_s)
    waiting = max(0.0, wire_bytes - decode_cores * host.decode_bytes_per_s * busy_s)
    memory_bytes = math.ceil(state_bytes + 2 * traffic.gradient_bytes + waiting)
    hosts = max(
        math.ceil((decode_cores + fold_cores) / host.cores),
        math.ceil(memory_bytes / host.memory_bytes),
    )
    return Sizing(
        wire_bytes=wire_bytes,
        ports=math.ceil(len(mirror.links) * link_bytes_per_s / host.port_bytes_per_s),
        decode_cores=decode_cores,
        fold_cores=fold_cores,
        memory_bytes=memory_bytes,
        hosts=hosts,
    )
