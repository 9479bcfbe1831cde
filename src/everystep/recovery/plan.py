"""Which stored step to restore, and which timeline goes on from there. Pure."""

from __future__ import annotations

from msgspec import Struct

from everystep.errors import NothingToRestore
from everystep.store.format import TimelineRecord
from everystep.store.run import Listing, StepEntry, fork_name
from everystep.types import StepRef


class Plan(Struct, frozen=True, kw_only=True):
    """What to try, in this order."""

    candidates: tuple[StepEntry, ...]
    """Complete steps; the first that is proved is the one. Empty: a fresh run."""
    timeline: TimelineRecord
    """Where training goes on."""
    asked: bool = False
    """A step was asked for by number: no other will do."""


def plan_restore(listing: Listing, step: int | StepRef | None) -> Plan:
    """Decide what to restore.

    Args:
        listing: one scan of the run.
        step: None for the newest complete step of the current timeline; a number on the line of
            the current timeline; or a step of any timeline.

    Raises:
        NothingToRestore: the step that was asked for is not there; names its neighbours.
    """
    if step is None:
        timeline = listing.current_timeline()
        line = listing.line(timeline) if timeline in listing.timelines else []
        record = listing.timelines.get(timeline) or TimelineRecord(name=timeline, parent=None)
        return Plan(candidates=tuple(reversed(line)), timeline=record)
    ref = step if isinstance(step, StepRef) else None
    line = listing.line(ref.timeline if ref else listing.current_timeline())
    number = ref.step if ref else step
    entry = next((entry for entry in line if entry.ref.step == number), None)
    if entry is None:
        raise NothingToRestore(
            f"step {step} is not there, or not complete", hint=_neighbours(line, number)
        )
    return Plan(candidates=(entry,), timeline=_continued(listing, entry.ref), asked=True)


def _continued(listing: Listing, ref: StepRef) -> TimelineRecord:
    """The timeline itself if nothing comes after this step on it, else a new fork."""
    later = any(
        entry.complete and entry.ref.timeline == ref.timeline and entry.ref.step > ref.step
        for entry in listing.steps
    )
    if not later:
        return listing.timelines[ref.timeline]
    return TimelineRecord(name=fork_name(listing, ref), parent=ref)


def _neighbours(line: list[StepEntry], number: object) -> str:
    if not line or not isinstance(number, int):
        return "everystep ls RUN shows what is there"
    nearest = sorted(line, key=lambda entry: abs(entry.ref.step - number))[:3]
    steps = ", ".join(str(step) for step in sorted(entry.ref.step for entry in nearest))
    return f"the nearest that can be restored: {steps}"
