"""A line of steps cut at its full checkpoints: what is folded in one go. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from everystep.store.chains import Chain, Chains, Excluded, Gap, Link, plan_chains
from everystep.store.run import Listing, StepEntry
from everystep.store.segments import Scanned
from everystep.types import StepRef


class Stretch(NamedTuple):
    """A full checkpoint and the deltas after it, up to that of the next full one."""

    chain: Chain
    proves: StepEntry | None
    """The full checkpoint of the last step: the fold must give it. None: there is none."""


class Had(NamedTuple):
    """A step that can be had, from what is stored of it alone."""

    full: StepEntry | None
    link: Link | None
    """Its deltas, if they follow a step that can be had."""


class Line(NamedTuple):
    """What can be had of one timeline, the steps of its ancestors left aside."""

    had: dict[StepRef, Had]
    """By step."""
    gaps: list[Gap]


def stretches(chains: Chains) -> list[Stretch]:
    """All that can be had, the oldest first; every full checkpoint begins one, if only its own."""
    steps = [ref.step for ref in chains.refs]
    found: list[Stretch] = []
    chain = chains.to(steps[-1]) if steps else None
    proves: StepEntry | None = None
    while chain is not None:
        found.append(Stretch(chain, proves))
        full = chain.full
        chain, proves = chains.proof(full.ref.step), full
        if chain is None:
            before = bisect_left(steps, full.ref.step) - 1
            chain, proves = (chains.to(steps[before]) if before >= 0 else None), None
    return found[::-1]


def line_of(
    listing: Listing,
    segments: Iterable[Scanned],
    timeline: str,
    excluded: Excluded = Excluded(),  # noqa: B008
) -> Line:
    """What can be had of a timeline.

    Args:
        listing: of the run.
        segments: its log.
        timeline: which one.
        excluded: what is known to be damaged.
    """
    chains = plan_chains(listing, segments, timeline, excluded)
    fulls: dict[StepRef, StepEntry] = {}
    links: dict[StepRef, Link] = {}
    for chain, _ in stretches(chains):
        fulls[chain.full.ref] = chain.full
        links |= {link.ref: link for link in chain.links}
    refs = [ref for ref in chains.refs if ref.timeline == timeline]
    had = {ref: Had(fulls.get(ref), links.get(ref)) for ref in refs}
    return Line(had, [gap for gap in chains.gaps if gap.ref.timeline == timeline])


def lines_of(
    listing: Listing,
    segments: Iterable[Scanned],
    excluded: Excluded = Excluded(),  # noqa: B008
) -> Iterator[tuple[str, Line]]:
    """What can be had of each timeline, by name."""
    segments = list(segments)
    for timeline in sorted(listing.timelines):
        yield timeline, line_of(listing, segments, timeline, excluded)
