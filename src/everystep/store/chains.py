"""Which steps can be had, and from what: a full checkpoint and the deltas after it. Pure.

A timeline's line is made of stretches, each written by one session: a session that restored step R
goes on from R, and what earlier sessions of the timeline wrote after R is no part of the line any
more. A fork goes on from its parent's line as that was when the fork began. On the line a step can
be had if it has a full checkpoint, or if the step before it can be had and every rank of the
session that wrote it has its delta, each following that rank's delta before. So a gap ends what can
be had until the next full checkpoint; nothing bridges it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from everystep.errors import Damaged
from everystep.store import logformat as lf
from everystep.store.entries import StepEntry, ranks_text
from everystep.store.run import Listing
from everystep.store.segments import Found, Scanned
from everystep.types import StepRef


class Place(NamedTuple):
    """Where the delta of one rank lies."""

    scanned: Scanned
    """Of the segment that holds it: its name, the layout."""
    found: Found

    @property
    def name(self) -> str:
        """The path of the segment."""
        return self.scanned.segment.name


class Link(NamedTuple):
    """The deltas of one step."""

    ref: StepRef
    session: int
    world_size: int
    places: tuple[Place, ...]
    """By rank; all ranks."""


class Chain(NamedTuple):
    """How to get the state of a step."""

    full: StepEntry
    """Begin from this one."""
    links: tuple[Link, ...]
    """Then fold these, one for each step."""

    @property
    def ref(self) -> StepRef:
        """The step."""
        return self.links[-1].ref if self.links else self.full.ref


class Gap(NamedTuple):
    """Steps that were recorded and cannot be had."""

    ref: StepRef
    """The first: what is missing is missing here."""
    last: int
    """The last step that this costs, as far as anything of it is there."""
    what: str
    unfit: bool
    """What is missing is there, and damaged, or does not follow the delta before it."""
    damage: Damaged | None
    """Where reading the segment ended that should hold it."""


class Excluded(NamedTuple):
    """What has been found to be damaged: to plan as if it were not there."""

    deltas: Collection[tuple[str, int]] = ()
    """Paths of segments, and offsets of records in them: `Place.name`, `Found.offset`."""
    fulls: Collection[tuple[StepRef, int]] = ()
    """Steps, and the sessions that wrote them."""


class Chains:
    """What can be had on the line of one timeline."""

    def __init__(self, timeline: str) -> None:
        self.timeline = timeline
        self.refs: list[StepRef] = []
        """Every step that can be had, oldest first."""
        self.gaps: list[Gap] = []
        """By step."""
        self._from: dict[int, StepEntry | Link] = {}
        self._links: dict[int, Link] = {}

    def to(self, step: int) -> Chain | None:
        """The shortest way to a step; None: it cannot be had."""
        links: list[Link] = []
        found = self._from.get(step)
        while isinstance(found, Link):
            links.append(found)
            found = self._from[found.ref.step - 1]
        return None if found is None else Chain(found, tuple(reversed(links)))

    def proof(self, step: int) -> Chain | None:
        """The way to a step that has a full checkpoint without that one: what proves both. None:
        there is none."""
        link, before = self._links.get(step), self.to(step - 1)
        if link is None or before is None:
            return None
        return before._replace(links=(*before.links, link))


class _Stretch(NamedTuple):
    """Steps of a line that one session wrote."""

    timeline: str
    session: int
    after: int
    """The step that the session restored: its first is the next one."""
    until: int | None
    """Its last step that counts; None: there is no limit."""

    def holds(self, step: int) -> bool:
        return self.after < step and (self.until is None or step <= self.until)


def plan_chains(
    listing: Listing,
    segments: Iterable[Scanned],
    timeline: str,
    excluded: Excluded = Excluded(),  # noqa: B008
) -> Chains:
    """Find what can be had on the line of a timeline.

    Args:
        listing: of the run.
        segments: the log, all of it or at least what the line needs.
        timeline: whose line; of an unknown one nothing can be had.
        excluded: full checkpoints and deltas that are not to be used.
    """
    logs: dict[tuple[str, int], list[Scanned]] = {}
    for scanned in segments:
        logs.setdefault((scanned.segment.timeline, scanned.segment.session), []).append(scanned)
    chains = Chains(timeline)
    fold = _Fold(chains)
    for stretch in _line(listing, logs, timeline):
        fulls = {
            entry.ref.step: entry
            for entry in listing.steps
            if entry.complete and (entry.ref, entry.session) not in excluded.fulls
            if (entry.ref.timeline, entry.session) == (stretch.timeline, stretch.session)
            # what a session restored it may store again
            if stretch.holds(entry.ref.step) or entry.ref.step == stretch.after
        }
        known = [s.world_size for s in listing.sessions if s.session == stretch.session]
        scans = logs.get((stretch.timeline, stretch.session), [])
        deltas = _Deltas(stretch, scans, known, excluded.deltas)
        for step in sorted(fulls.keys() | deltas.places.keys()):
            fold.take(step, fulls.get(step), deltas)
    fold.end_gap()
    return chains


def _line(
    listing: Listing,
    logs: Mapping[tuple[str, int], list[Scanned]],
    timeline: str,
    before: int | None = None,
    seen: frozenset[str] = frozenset(),
) -> list[_Stretch]:
    """The stretches of a line in order, as they were before a session began."""
    record = listing.timelines.get(timeline)
    if record is None or timeline in seen:
        return []
    fulls: dict[int, list[int]] = {}
    for entry in listing.steps:
        if entry.ref.timeline == timeline and entry.whole:
            fulls.setdefault(entry.session, []).append(entry.ref.step)
    bases = {
        session: [scanned.segment.base for scanned in found]
        for (owner, session), found in logs.items()
        if owner == timeline and any(scanned.records for scanned in found)
    }
    own = {s.session: s for s in listing.sessions if s.timeline == timeline}
    line: list[_Stretch] = []
    if record.parent is not None:
        first = min([*own, *fulls, *bases], default=before)
        line = _line(listing, logs, record.parent.timeline, first, seen | {timeline})
        line = _cut(line, record.parent.step)
    for session in sorted(fulls.keys() | bases.keys()):  # one that has stored nothing is no matter
        if before is not None and session >= before:
            continue
        if session in own:
            restored = own[session].restored
            after = 0 if restored is None else restored.step
        else:  # its record is lost
            after = min([*bases.get(session, []), *(s - 1 for s in fulls.get(session, []))])
        line = [*_cut(line, after), _Stretch(timeline, session, after, None)]
    return line


def _cut(line: list[_Stretch], last: int) -> list[_Stretch]:
    """A line up to a step."""
    return [
        stretch._replace(until=last if stretch.until is None else min(stretch.until, last))
        for stretch in line
        if stretch.after <= last
    ]


class _Deltas:
    """The deltas of a stretch, by step and rank."""

    def __init__(
        self,
        stretch: _Stretch,
        scans: list[Scanned],
        world_sizes: list[int],
        excluded: Collection[tuple[str, int]],
    ) -> None:
        self.stretch = stretch
        sizes = [scanned.segment.world_size for scanned in scans]
        self.world_size = max(world_sizes or sizes, default=0)
        self._scans = [s for s in scans if s.segment.world_size == self.world_size]
        self.places: dict[int, dict[int, list[Place]]] = {}
        """By step and rank; of a record that was written twice, the newer one first."""
        for scanned in sorted(self._scans, key=lambda s: s.segment.number, reverse=True):
            for found in scanned.records:
                if stretch.holds(found.step):
                    by_rank = self.places.setdefault(found.step, {})
                    by_rank.setdefault(scanned.segment.rank, []).append(Place(scanned, found))
        self._excluded = excluded
        self._digests: dict[int, set[bytes]] = {}
        self._step = -1
        self.unfit: list[int] = []
        """The ranks whose delta of the step that was asked for last is there and no use."""

    def link(self, step: int) -> Link | None:
        """The deltas of a step, if they are all there; to be asked for each step in order."""
        candidates = self.places.get(step, {})
        before = self._digests if step == self._step + 1 else {}
        chosen: dict[int, Place] = {}
        for rank, places in candidates.items():
            follows = before.get(rank)
            fit = [p for p in places if not self._is_excluded(p) and _follows(p.found, follows)]
            if fit:
                chosen[rank] = fit[0]
        self._digests = {
            rank: {
                place.found.digest
                for place in places
                if rank not in chosen or place.found.xxh3_128 == chosen[rank].found.xxh3_128
            }
            for rank, places in candidates.items()
        }
        self._step = step
        self.unfit = sorted(candidates.keys() - chosen.keys())
        if not chosen or len(chosen) < self.world_size:  # a name has no rank beyond it
            return None
        places_by_rank = tuple(chosen[rank] for rank in sorted(chosen))
        ref = StepRef(self.stretch.timeline, step)
        return Link(ref, self.stretch.session, self.world_size, places_by_rank)

    def _is_excluded(self, place: Place) -> bool:
        return (place.name, place.found.offset) in self._excluded

    def complaint(self) -> str:
        """What is wrong with the step that was asked for last."""
        if self.unfit:
            places = [p for rank in self.unfit for p in self.places[self._step][rank]]
            damaged = all(self._is_excluded(place) for place in places)
            what = "is damaged" if damaged else "does not follow the one before"
            return f"the delta of rank {ranks_text(self.unfit)} {what}"
        there = self.places.get(self._step, {})
        missing = [rank for rank in range(self.world_size) if rank not in there]
        return f"there is no delta of rank {ranks_text(missing)}" if there else "there is no delta"

    def damage(self, step: int) -> Damaged | None:
        """Where reading the log ended before the delta of this step, of a rank that lacks it."""
        there = self.places.get(step, {})
        ends = [
            s
            for s in self._scans
            if s.torn is not None and s.segment.rank not in there and s.segment.base < step
            if not s.records or s.records[-1].step < step
        ]
        newest = max(ends, key=lambda s: (s.segment.number, -s.segment.rank), default=None)
        return None if newest is None else newest.torn


def _follows(found: Found, before: Collection[bytes] | None) -> bool:
    return before is None or found.previous == lf.NO_DIGEST or found.previous in before


class _Fold:
    """Goes along a line, and sees what can be had."""

    def __init__(self, chains: Chains) -> None:
        self._chains = chains
        self._gap: Gap | None = None

    def take(self, step: int, full: StepEntry | None, deltas: _Deltas) -> None:
        """Look at the next step of which anything is there."""
        chains = self._chains
        link = deltas.link(step)
        if link is not None:
            chains._links[step] = link
        ref = StepRef(deltas.stretch.timeline, step)
        way = full or (link if step - 1 in chains._from else None)
        if way is not None:
            self.end_gap()
            if not chains.refs or chains.refs[-1].step != step:
                chains.refs.append(ref)
            else:
                chains.refs[-1] = ref
            chains._from[step] = way
        elif self._gap is not None:
            self._gap = self._gap._replace(last=step)
        else:
            self._open_gap(step, deltas)

    def _open_gap(self, step: int, deltas: _Deltas) -> None:
        first, unfit = step, False
        if step - 1 in self._chains._from:
            what, unfit = deltas.complaint(), bool(deltas.unfit)
        elif self._chains.refs:
            what, first = "there is no delta", self._chains.refs[-1].step + 1
        else:
            what = "there is no full checkpoint before"
        ref = StepRef(deltas.stretch.timeline, first)
        self._gap = Gap(ref, step, what, unfit, deltas.damage(first))

    def end_gap(self) -> None:
        """Nothing more is lost by the gap that is open."""
        if self._gap is not None:
            self._chains.gaps.append(self._gap)
            self._gap = None
