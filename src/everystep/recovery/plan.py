"""Which stored step to restore, from what, and which timeline goes on from there. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from everystep.errors import NothingToRestore
from everystep.store.chains import Chain, Chains, Excluded, plan_chains
from everystep.store.format import TimelineRecord
from everystep.store.run import Listing, fork_name
from everystep.store.segments import Scanned
from everystep.types import StepRef


class Plan(NamedTuple):
    """What to restore, as far as names and heads tell."""

    chain: Chain | None
    """How; None: a fresh run, or nothing is left to try."""
    timeline: TimelineRecord
    """Where training goes on."""
    asked: bool
    """A step was asked for by number: no other will do."""


def plan_restore(
    listing: Listing,
    segments: Iterable[Scanned],
    step: int | StepRef | None,
    excluded: Excluded = Excluded(),  # noqa: B008
) -> Plan:
    """Decide what to restore.

    Args:
        listing: one scan of the run.
        segments: its log.
        step: None for the newest step of the current timeline that can be had; a number on the
            line of the current timeline; or a step of any timeline.
        excluded: what has been tried in vain.

    Raises:
        NothingToRestore: the step that was asked for is not there; names its neighbours.
    """
    name = step.timeline if isinstance(step, StepRef) else listing.current_timeline()
    chains = plan_chains(listing, segments, name, excluded)
    if step is None:
        record = listing.timelines.get(name) or TimelineRecord(name=name, parent=None)
        return Plan(chains.to(chains.refs[-1].step) if chains.refs else None, record, False)
    number = step.step if isinstance(step, StepRef) else step
    chain = chains.to(number)
    ref = next((ref for ref in chains.refs if ref.step == number), None)
    if chain is None or ref is None:
        if excluded != Excluded():
            return Plan(None, listing.timelines[name], True)
        raise NothingToRestore(
            f"step {step} is not there, or not complete", hint=_neighbours(chains, number)
        )
    return Plan(chain, _continued(listing, chains, ref), True)


def _continued(listing: Listing, chains: Chains, ref: StepRef) -> TimelineRecord:
    """The timeline itself if nothing comes after this step on it, else a new fork."""
    later = any(
        entry.complete and entry.ref.timeline == ref.timeline and entry.ref.step > ref.step
        for entry in listing.steps
    )
    if not later and not any(other.step > ref.step for other in chains.refs):
        return listing.timelines[ref.timeline]
    return TimelineRecord(name=fork_name(listing, ref), parent=ref)


def _neighbours(chains: Chains, number: object) -> str:
    if not chains.refs or not isinstance(number, int):
        return "everystep ls RUN shows what is there"
    nearest = sorted(chains.refs, key=lambda ref: abs(ref.step - number))[:3]
    steps = ", ".join(str(step) for step in sorted(ref.step for ref in nearest))
    gap = next((gap for gap in chains.gaps if gap.ref.step <= number <= gap.last), None)
    missing = "" if gap is None else f"; {gap.what} at step {gap.ref.step}"
    return f"the nearest that can be restored: {steps}{missing}"
