"""Which files of earlier steps the record of a step refers to, and what must stay for their sake.

A reference names the step in whose directory the bytes lie, so one never leads to another. Should
a chain or a circle of them be there all the same, everything on it stays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, TypeVar

from everystep.errors import Damaged, Missing
from everystep.store import format as fmt
from everystep.store.format import RankRecord
from everystep.types import StepRef

if TYPE_CHECKING:
    from everystep.store.run import Listing, Run, StepEntry

Place = tuple[StepRef, str]
"""A step, and the name of a file in its directory."""

References = Mapping[StepRef, AbstractSet[StepRef]]
"""For each step those to whose files its records refer; a step without any may be left out."""

_Node = TypeVar("_Node")


def references(record: RankRecord) -> frozenset[Place]:
    """The files of earlier steps that a record refers to. Pure."""
    return frozenset((file.step, file.name) for file in record.files if file.step is not None)


def read_references(run: Run, entry: StepEntry, rank: int) -> frozenset[Place]:
    """What one rank's record of a step refers to; nothing where it is damaged, or is not there.

    Raises:
        StoreError: the store did not answer, so that it is not known.
    """
    try:
        return references(run.record(entry, rank))
    except (Damaged, Missing):
        return frozenset()


def references_of(run: Run, entries: Iterable[StepEntry]) -> dict[StepRef, set[StepRef]]:
    """The references of all ranks' records, read.

    Raises:
        StoreError: as `read_references`.
    """
    found: dict[StepRef, set[StepRef]] = {}
    for entry in entries:
        for part in entry.parts:
            steps = {step for step, _ in read_references(run, entry, part.rank)}
            if steps:
                found.setdefault(entry.ref, set()).update(steps)
    return found


def reachable(start: Iterable[_Node], after: Callable[[_Node], Iterable[_Node]]) -> set[_Node]:
    """All that `start` leads to, in any number of steps. Pure where `after` is."""
    found: set[_Node] = set()
    waiting = list(start)
    while waiting:
        new = set(after(waiting.pop())) - found
        found |= new
        waiting += new
    return found


def needed_steps(staying: Iterable[StepRef], references: References) -> set[StepRef]:
    """The steps of which something must stay, since steps that stay refer to it. Pure."""
    nothing: frozenset[StepRef] = frozenset()
    return reachable(staying, lambda ref: references.get(ref, nothing))


def needed_places(run: Run, entries: Sequence[StepEntry]) -> set[Place]:
    """The files to which records of whole steps refer, so that they must stay.

    Args:
        entries: steps, whole or not; an incomplete one counts if a whole one refers to it.

    Raises:
        StoreError: as `read_references`.
    """
    parts = {
        (entry.ref, part.stem): (entry, part.rank) for entry in entries for part in entry.parts
    }

    @functools.cache
    def of_part(ref: StepRef, stem: str | None) -> frozenset[Place]:
        part = parts.get((ref, stem or ""))
        return frozenset() if part is None else read_references(run, *part)

    markers = [(e.ref, part.marker) for e in entries if e.whole for part in e.parts]
    return reachable(markers, lambda place: of_part(place[0], fmt.owner_of(place[1])))


def leftovers(run: Run, listing: Listing) -> list[tuple[StepRef, str]]:
    """Parts, as (step, stem), that the sessions so far have left behind and nothing needs: those of
    steps that are not whole, and data without a record. Where there is none, no record is read.

    Raises:
        StoreError: as `read_references`.
    """
    torn = [(e.ref, part.stem) for e in listing.steps if not e.whole for part in e.parts]
    found = [*torn, *listing.loose]
    places = needed_places(run, listing.steps) if found else ()
    needed = {(ref, fmt.owner_of(name)) for ref, name in places}
    return [part for part in found if part not in needed]


def referrers_first(entries: Iterable[StepEntry], references: References) -> list[StepEntry]:
    """Steps in an order in which they can be removed: none goes while another still refers to it.
    Apart from that, in the order given. Pure."""
    by_ref: dict[StepRef, list[StepEntry]] = {}
    for entry in entries:
        by_ref.setdefault(entry.ref, []).append(entry)
    referrers: dict[StepRef, list[StepRef]] = {}
    for ref in by_ref:
        for step in references.get(ref, ()):
            referrers.setdefault(step, []).append(ref)
    ordered: dict[StepRef, None] = {}
    begun: set[StepRef] = set()
    waiting = list(reversed(by_ref))
    while waiting:
        ref = waiting[-1]
        ahead = [] if ref in begun else [r for r in referrers.get(ref, ()) if r not in begun]
        begun.add(ref)
        if ahead:
            waiting += reversed(ahead)
        else:
            ordered.setdefault(waiting.pop())
    return [entry for ref in ordered for entry in by_ref[ref]]
