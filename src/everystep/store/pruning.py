"""What `prune` removes: a pure plan over the files of a run that nobody is training, and its loop.

The plan lists files, so that what is freed is known exactly; of every part of a step its record
comes first, so that a step ceases to exist before its data does, and a step comes before those to
whose files it refers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Literal

from msgspec import Struct

from everystep.store import format as fmt
from everystep.store.durable import is_temporary
from everystep.store.logformat import Segment
from everystep.store.references import References, needed_steps
from everystep.store.retention import Retention, plan_retention, plan_segments, unneeded
from everystep.store.run import SET_ASIDE, Listing, Run, StepEntry
from everystep.types import StepRef

Kind = Literal["step", "incomplete", "unrecorded", "log", "temporary", "damaged"]


class Removal(Struct, frozen=True, kw_only=True):
    """Files that go together."""

    kind: Kind
    """`step`: a checkpoint that no rule keeps; `incomplete`: a rank's part is missing, and its
    session is over; `unrecorded`: data without a record; `log`: deltas of steps before every
    checkpoint that a rule keeps; `temporary`: a file that was being written; `damaged`: a step that
    was set aside."""
    step: StepRef | None
    session: int | None
    names: tuple[str, ...]
    """In the order in which they go."""
    nbytes: int


class Spared(Struct, frozen=True, kw_only=True):
    """A step that would go, were its files not needed."""

    step: StepRef
    referred_by: tuple[StepRef, ...]
    """The steps that stay and refer to them."""


class PrunePlan(Struct, frozen=True, kw_only=True):
    """What goes, what stays, and what has to be proved before."""

    removals: tuple[Removal, ...]
    """Oldest steps first, but for those to which a later one refers."""
    kept: tuple[StepEntry, ...]
    """Complete steps of the chosen timelines that stay."""
    spared: tuple[Spared, ...]
    """Steps, some of them among the kept, that stay only since others refer to them."""
    prove: tuple[StepEntry, ...]
    """The newest complete step of each timeline that loses a step."""


def pins(listing: Listing) -> set[StepRef]:
    """Steps that stay whatever the rules say: those that timelines fork from, the newest complete
    one of each timeline, and the one that the newest session was restored from."""
    pinned = {t.parent for t in listing.timelines.values() if t.parent is not None}
    pinned.update(entry.ref for entry in _newest(listing).values())
    if listing.sessions and listing.sessions[-1].restored is not None:
        pinned.add(listing.sessions[-1].restored)
    return pinned


def _newest(listing: Listing) -> dict[str, StepEntry]:
    """The newest complete step of each timeline."""
    return {ref.timeline: entry for ref, entry in sorted(listing.complete().items())}


def plan_prune(
    listing: Listing,
    files: Mapping[str, int],
    policy: Retention,
    metrics: Mapping[StepRef, float],
    references: References,
    *,
    segments: Mapping[Segment, int] | None = None,
    timeline: str | None = None,
    set_aside: bool = False,
) -> PrunePlan:
    """Decide what goes from a run that no process owns. Pure.

    Args:
        files: the length of every file of the run by name.
        policy: the rules; one that keeps everything lets only leftovers go.
        metrics: the value of `policy.keep_best` by step, where it is known.
        references: the steps to whose files steps refer.
        segments: the last step in each segment of the log.
        timeline: plan for this one only; None: for all, and for temporary files anywhere.
        set_aside: let steps go that failed their proof and were set aside.
    """
    names = [name for name in sorted(listing.timelines) if timeline in (None, name)]
    pinned = pins(listing)
    folded = (pinned - listing.complete().keys()) if segments else set()
    unwanted: list[StepEntry] = []
    unneeded_segments: list[Segment] = []
    for name in names:
        entries = [entry for entry in listing.steps if entry.ref.timeline == name]
        unwanted += plan_retention(entries, policy, metrics, pinned, {}, folded)
        own = {s: last for s, last in (segments or {}).items() if s.timeline == name}
        unneeded_segments += plan_segments(entries, own, policy, metrics, folded)
        unwanted += [entry for entry in entries if not entry.whole]
    unwanted = list(dict.fromkeys(unwanted))
    gone = unneeded(unwanted, listing.steps, references)
    removed = set(gone)
    staying = [entry.ref for entry in listing.steps if entry not in removed]
    needed = needed_steps(staying, references)
    collect = _Collector(files)
    for entry in gone:
        collect.entry("step" if entry.whole else "incomplete", entry)
    collect.loose(listing, names, needed)
    for segment in unneeded_segments:
        collect.files("log", None, segment.session, [segment.name])
    if timeline is None:
        for file in sorted(filter(is_temporary, files)):
            collect.files("temporary", None, None, [file])
    if set_aside:
        collect.set_aside(SET_ASIDE + ("/" if timeline is None else f"/{timeline}/"))
    complete = listing.complete().values()
    kept = [entry for entry in complete if entry.ref.timeline in names and entry not in removed]
    losing = {entry.ref.timeline for entry in gone if entry.whole}
    newest = _newest(listing)
    return PrunePlan(
        removals=tuple(collect.removals),
        kept=tuple(sorted(kept, key=lambda entry: entry.ref)),
        spared=_spared({e.ref for e in unwanted if e not in removed}, staying, references),
        prove=tuple(newest[name] for name in sorted(losing)),
    )


def _spared(
    steps: Iterable[StepRef], staying: Iterable[StepRef], references: References
) -> tuple[Spared, ...]:
    referring = {
        step: sorted({ref for ref in staying if step in references.get(ref, ())}) for step in steps
    }
    return tuple(Spared(step=step, referred_by=tuple(by)) for step, by in sorted(referring.items()))


class _Collector:
    """Removals in order; a file goes once."""

    def __init__(self, files: Mapping[str, int]) -> None:
        self._files = files
        self._inside: dict[str, list[str]] = {}
        for name in files:
            directory, _, file = name.rpartition("/")
            self._inside.setdefault(directory, []).append(file)
        self._taken: set[str] = set()
        self.removals: list[Removal] = []

    def entry(self, kind: Kind, entry: StepEntry) -> None:
        """All files of one writing of a step, its loose parts included."""
        start, end = f"s{entry.session:06d}-r", f"of{entry.world_size:05d}"
        directory = fmt.step_directory(entry.ref)
        names = []
        for file in self._inside.get(directory, []):
            owner = fmt.owner_of(file) or ""
            if owner.startswith(start) and owner.endswith(end):
                names.append(f"{directory}/{file}")
        self.files(kind, entry.ref, entry.session, _record_first(names))

    def loose(
        self, listing: Listing, timelines: Collection[str], needed: Collection[StepRef]
    ) -> None:
        """The data files of parts that have no record, but of steps that are needed."""
        for ref, stem in listing.loose:
            if ref.timeline in timelines and ref not in needed:
                self._stem(ref, stem)

    def _stem(self, ref: StepRef, stem: str) -> None:
        directory = fmt.step_directory(ref)
        names = [file for file in self._inside.get(directory, []) if fmt.owner_of(file) == stem]
        paths = _record_first(f"{directory}/{file}" for file in names)
        self.files("unrecorded", ref, int(stem[1:].split("-")[0]), paths)

    def set_aside(self, root: str) -> None:
        """Steps below `root` that failed their proof."""
        for directory, files in sorted(self._inside.items()):
            if f"{directory}/".startswith(root):
                place = fmt.parse_step_path("steps" + directory.removeprefix(SET_ASIDE) + "/x")
                paths = _record_first(f"{directory}/{file}" for file in files)
                self.files("damaged", place[0] if place else None, None, paths)

    def files(
        self, kind: Kind, step: StepRef | None, session: int | None, names: Iterable[str]
    ) -> None:
        """Files in the order in which they go."""
        new = [name for name in names if name not in self._taken]
        self._taken.update(new)
        if new:
            nbytes = sum(self._files[name] for name in new)
            removal = Removal(
                kind=kind, step=step, session=session, names=tuple(new), nbytes=nbytes
            )
            self.removals.append(removal)


def _record_first(names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: (not name.endswith(".json"), name))


def carry_out(run: Run, plan: PrunePlan, sweep: Callable[[], None]) -> None:
    """Remove the files of a plan, for the owner of the run. What has gone already is no error.

    Args:
        sweep: removes temporary files, which a backend does not show under a name of its own.

    Raises:
        StoreFailed: a file could not be removed; those before it are gone.
    """
    if any(removal.kind == "temporary" for removal in plan.removals):
        sweep()  # first: with a step's last file its directory goes too
    for removal in plan.removals:
        for name in removal.names if removal.kind != "temporary" else ():
            run.backend.delete(name)
