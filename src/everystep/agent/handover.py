"""What an agent that takes another one's place must be told of the steps in staging memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
from msgspec import Struct

from everystep.agent import protocol as p
from everystep.agent.arena import Arena
from everystep.agent.sink import Sealed
from everystep.store.run import now


class Lost(Struct):
    """The agent is gone, and what only it had in memory with it; another one is being started."""


class Kept(NamedTuple):
    """A step that is not known to be durable, and what its seal refers to."""

    seal: p.Seal
    described: p.Describe | None
    still: p.Still | None


def seal_of(sealed: Sealed) -> p.Seal:
    """The message that says so, and is said again to the next agent."""
    return p.Seal(
        slot=sealed.slot,
        layout=sealed.layout,
        step=sealed.step,
        created=now(),
        hashes=dict(sealed.hashes),
        whole=dict(sealed.whole),
        rest=list(sealed.rest),
        still=sealed.still,
        tree=sealed.tree,
        metrics=dict(sealed.metrics),
        every=sealed.every,
        owed=sealed.owed,
    )


def handed_over(
    kept: Sequence[Kept],
    still: p.Still | None,
    described: p.Describe | None,
    arena: Arena | None,
    taken: Sequence[int],
) -> Iterator[tuple[Struct, int | None]]:
    """Messages and their descriptors, in the order in which the first agent was told.

    Args:
        kept: the steps, oldest first.
        still: the newest word on tensors that do not change.
        described: the newest description.
        arena: the staging memory that all of them lie in.
        taken: its slots that may not be granted.
    """
    told_still: p.Still | None = None
    told: p.Describe | None = None
    for seal, its_described, its_still in [*kept, (None, described, still)]:
        if its_still is not None and its_still is not told_still:
            told_still = its_still
            yield its_still, None
        if its_described is not None and its_described is not told:
            if told is None and arena is not None:
                # nothing may be granted before all seals are there
                facts = (arena.slots, arena.slot_bytes)
                replaced = msgspec.structs.replace(its_described, arena=facts, taken=list(taken))
                yield replaced, arena.fd
            else:
                yield its_described, None
            told = its_described
        if seal is not None:
            yield seal, None
