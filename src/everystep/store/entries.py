"""What the names of files say about steps and about segments of the log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec import Struct

from everystep.store import format as fmt
from everystep.store.backend import Entry
from everystep.store.format import PartName
from everystep.store.logformat import Segment
from everystep.types import StepRef


class LogEntry(NamedTuple):
    """A segment of the log that is there."""

    segment: Segment
    nbytes: int


class StepEntry(Struct, frozen=True, kw_only=True):
    """What the names of files say about one writing of one step."""

    ref: StepRef
    session: int
    world_size: int
    parts: tuple[PartName, ...]
    """The ranks whose record is there, in order."""
    nbytes: int
    """Of all files, records included."""

    @property
    def complete(self) -> bool:
        """Every rank's part is there, and their replicas agree."""
        return len(self.parts) == self.world_size and not self.diverged

    @property
    def diverged(self) -> bool:
        """Ranks hold different bits of what they must hold alike."""
        return len({part.replica for part in self.parts} - {fmt.UNKNOWN[:16]}) > 1

    @property
    def whole(self) -> bool:
        """It is complete, or would be if its replicas agreed: what crashes leave is not."""
        return self.complete or self.diverged

    @property
    def missing_ranks(self) -> list[int]:
        """The ranks whose record is not there."""
        there = {part.rank for part in self.parts}
        return [rank for rank in range(self.world_size) if rank not in there]

    @property
    def missing(self) -> str:
        """The ranks whose record is not there, for a message."""
        return ranks_text(self.missing_ranks)


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks for a message: `1, 2 and 40 more`."""
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return ", ".join(map(str, ranks[:8])) + more


def step_entries(
    ref: StepRef, files: list[Entry]
) -> tuple[list[StepEntry], list[tuple[StepRef, str]]]:
    """One step's files as entries, and the stems of parts that have no record."""
    parts: dict[tuple[int, int], list[PartName]] = {}
    nbytes: dict[str, int] = {}
    stems: set[str] = set()
    for name, length in files:
        file = name.rsplit("/", 1)[1]
        owner = fmt.owner_of(file)
        if owner is None:
            continue
        stems.add(owner)
        session = owner.split("-")[0]
        nbytes[session] = nbytes.get(session, 0) + length
        marker = fmt.parse_marker(file)
        if marker is not None:
            parts.setdefault((marker.session, marker.world_size), []).append(marker)
            stems.discard(owner)
    with_record = {part.stem for found in parts.values() for part in found}
    entries = [
        StepEntry(
            ref=ref,
            session=session,
            world_size=world_size,
            parts=tuple(sorted(found, key=lambda part: part.rank)),
            nbytes=nbytes[f"s{session:06d}"],
        )
        for (session, world_size), found in parts.items()
    ]
    return entries, [(ref, stem) for stem in sorted(stems - with_record)]
