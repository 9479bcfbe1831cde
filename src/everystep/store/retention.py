"""Which steps may go: a pure decision from a listing and a policy, and the loop that acts on it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal

from msgspec import Struct

from everystep.errors import Damaged, Missing, StoreError, UsageError
from everystep.store.format import PartName
from everystep.store.logformat import Segment, log_directory
from everystep.store.references import (
    References,
    needed_steps,
    read_references,
    referrers_first,
)
from everystep.store.run import Run, StepEntry
from everystep.store.segments import older_segments
from everystep.types import StepRef


class Retention(Struct, frozen=True, kw_only=True):
    """Which full checkpoints to keep. A step is kept if any rule keeps it; the newest complete
    step (with several ranks: the newest two), the step that the run was resumed from, the steps
    that timelines fork from and those to whose files a step that is kept refers are kept always.
    `Retention(keep_last=None)` without another rule keeps everything.

    Raises:
        UsageError: a number below 1, or an unknown `best`.
    """

    keep_last: int | None = 3
    """The newest so many steps. None: no such rule."""
    keep_every: int | None = None
    """Steps whose number is a multiple of this. None: no such rule."""
    keep_best: str | None = None
    """The name of a metric given to `step()`: the best `best_count` steps by it, as rank 0 saw
    it. What is not finite is never best. None: no such rule."""
    best: Literal["min", "max"] = "min"
    """Whether small or large values of `keep_best` are good."""
    best_count: int = 1
    """How many steps `keep_best` keeps."""

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every", "best_count"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise UsageError(f"Retention({name}={value!r}): not a number of steps from 1 on")
        if self.best not in ("min", "max"):
            raise UsageError(f"Retention(best={self.best!r}): neither 'min' nor 'max'")

    @property
    def keeps_all(self) -> bool:
        """Whether no rule is set."""
        return self.keep_last is None and self.keep_every is None and self.keep_best is None


def plan_retention(
    entries: Iterable[StepEntry],
    policy: Retention,
    metrics: Mapping[StepRef, float],
    pinned: Collection[StepRef],
    references: References,
    folded: Collection[StepRef] = (),
) -> list[StepEntry]:
    """Which writings of steps may go, in an order in which they can: each after those that refer to
    it. Pure.

    Everything before the newest complete step that no rule keeps: complete steps, steps that
    never became complete, and older writings of a step that was written again. Nothing after the
    newest complete step is touched: it may be on its way. All writings of a step to which one that
    stays refers stay as well, whole or not.

    Args:
        entries: those of one timeline.
        policy: the rules.
        metrics: the value of `policy.keep_best` by step, where it is known.
        pinned: steps to keep whatever the rules say.
        references: the steps to whose files steps refer, those of other timelines (all of which
            stay) included.
        folded: steps to keep that are had by folding deltas: of each, the complete step before it
            stays.
    """
    entries = list(entries)
    complete = _complete(entries)
    kept = kept_by_rules(complete, policy, metrics)
    if policy.keeps_all or not complete:
        return []
    newest = max(complete, key=lambda ref: ref.step)
    kept |= {*pinned, *_bases(complete, folded).values()}
    unwanted = [
        entry
        for entry in entries
        if entry.ref.step <= newest.step
        and not (entry.ref in kept and complete.get(entry.ref) is entry)
        and not (entry.ref == newest and entry.session >= complete[newest].session)
    ]
    return unneeded(unwanted, entries, references)


def _complete(entries: Iterable[StepEntry]) -> dict[StepRef, StepEntry]:
    return {
        entry.ref: entry for entry in sorted(entries, key=lambda e: e.session) if entry.complete
    }


def _bases(complete: Iterable[StepRef], folded: Iterable[StepRef]) -> dict[StepRef, StepRef]:
    """For steps that are had by folding deltas, the newest complete step of their timeline before
    each."""
    found = {}
    for ref in folded:
        before = [r for r in complete if r.timeline == ref.timeline and r.step < ref.step]
        if before:
            found[ref] = max(before)
    return found


def kept_by_rules(
    complete: Mapping[StepRef, StepEntry], policy: Retention, metrics: Mapping[StepRef, float]
) -> set[StepRef]:
    """The complete steps of one timeline that the rules keep, and those that are not settled. Pure.

    Args:
        complete: the newest complete writing of each step.
        policy: the rules.
        metrics: the value of `policy.keep_best` by step, where it is known.
    """
    steps = sorted(complete, key=lambda ref: ref.step)
    if policy.keeps_all or not steps:
        return set(steps)
    # another rank's record may be seen before it is durable; that the rank has stored a later step
    # shows that the one before is
    kept = set(steps[-2:] if complete[steps[-1]].world_size > 1 else steps[-1:])
    if policy.keep_last is not None:
        kept.update(steps[-policy.keep_last :])
    if policy.keep_every is not None:
        kept.update(ref for ref in steps if ref.step % policy.keep_every == 0)
    if policy.keep_best is not None:
        kept.update(_best(steps, policy, metrics))
    return kept


def plan_segments(
    entries: Iterable[StepEntry],
    segments: Mapping[Segment, int],
    policy: Retention,
    metrics: Mapping[StepRef, float],
    folded: Collection[StepRef],
) -> list[Segment]:
    """Which segments of the log may go: those whose every delta is of a step up to the oldest that
    the rules keep, so that none is needed to get from one that is kept to a later one. Pure.

    A step that is pinned and not kept by a rule keeps no segment but those that are needed to get
    to it: otherwise the step that a session was restored from would keep all of the session's.

    Args:
        entries: those of one timeline, before any goes.
        segments: the last step of which each segment of that timeline holds a delta. Not one that
            is being written.
        policy: the rules.
        metrics: the value of `policy.keep_best` by step, where it is known.
        folded: steps to keep that are had by folding deltas.
    """
    complete = _complete(entries)
    kept = kept_by_rules(complete, policy, metrics)
    if policy.keeps_all or not kept:
        return []
    oldest = min(ref.step for ref in kept)
    spans = [(base.step, ref.step) for ref, base in _bases(complete, folded).items()]
    return [
        segment
        for segment, last in sorted(segments.items())
        if last <= oldest
        if not any(last > after and segment.base < until for after, until in spans)
    ]


def unneeded(
    unwanted: Iterable[StepEntry], entries: Iterable[StepEntry], references: References
) -> list[StepEntry]:
    """Those of the unwanted steps to which none that stays refers; referring ones first. Pure.

    Args:
        unwanted: what would go, were it not referred to.
        entries: all steps, the unwanted included.
        references: the steps to whose files they refer, and steps that are not among them, which
            stay.
    """
    unwanted = list(unwanted)
    going = {(entry.ref, entry.session, entry.world_size) for entry in unwanted}
    left = {e.ref for e in entries if (e.ref, e.session, e.world_size) not in going}
    elsewhere = references.keys() - {entry.ref for entry in unwanted}
    needed = needed_steps(left | elsewhere, references)
    return referrers_first([e for e in unwanted if e.ref not in needed], references)


_LOOKED_AT = 16
"""How many of the oldest and of the newest steps that are not complete are looked at again after
each step: a rank that never comes must not make every step slower than the one before."""


def _best(
    steps: Sequence[StepRef], policy: Retention, metrics: Mapping[StepRef, float]
) -> list[StepRef]:
    known = [ref for ref in steps if not math.isnan(metrics.get(ref, math.nan))]
    sign = 1 if policy.best == "min" else -1
    return sorted(known, key=lambda ref: (sign * metrics[ref], -ref.step))[: policy.best_count]


class Upkeep:
    """What one rank does after each of its steps: see which steps have become complete, and
    remove its own files of those that may go. It touches no other rank's and no other timeline's.

    A step to which one that stays refers stays too. Files refer only to files of the same rank, so
    each rank decides by its own records. Where those of two ranks refer to different steps, one may
    keep its files of a step of which the other has removed its own: the step is not complete any
    more, and the files that are left are those that are needed (`Run.clean_up` spares them too).

    Files are removed by a thread, since a large one can take longer to remove than to write; one
    removal is under way at most, so that a full disk is not outrun.
    """

    def __init__(
        self, run: Run, policy: Retention, rank: int, known: Iterable[StepEntry],
        pinned: Collection[StepRef],
    ) -> None:  # fmt: skip
        self._run, self._policy, self._rank = run, policy, rank
        self._known: dict[tuple[StepRef, int], StepEntry] = {(e.ref, e.session): e for e in known}
        self._open: dict[StepRef, int] = {}
        self._metrics: dict[StepRef, float] = {}
        self._pinned = set(pinned)
        self._references: dict[StepRef, set[StepRef]] = {}
        self._unread: dict[tuple[StepRef, int], StepEntry] | None = dict(self._known)
        self._logged: bool | None = None  # whether earlier sessions have left a log
        self._remover = ThreadPoolExecutor(1, thread_name_prefix="everystep-remove")
        self._removal: Future[tuple[list[StepEntry], StoreError | None]] | None = None

    def after_step(
        self, ref: StepRef, session: int, refers_to: Collection[StepRef] = ()
    ) -> list[StepEntry]:
        """Note a step that this rank has just stored; returns the entries of steps that are not
        yet complete, or cannot become so, oldest first.

        Args:
            ref: the step.
            session: the one that goes on.
            refers_to: the earlier steps to whose files this rank's record of it refers. They must
                be the step that this rank stored before or restored, or steps to which that one
                refers: any other may be on its way out already.

        Raises:
            StoreError: a file could not be looked at, or (by the call before) not be removed; the
                next call tries again.
        """
        self._open[ref] = session
        if refers_to:
            self._references.setdefault(ref, set()).update(refers_to)
        opened = sorted(self._open)
        for open_ref in opened[:_LOOKED_AT] + opened[_LOOKED_AT:][-_LOOKED_AT:]:
            for found in self._run.entries(open_ref):
                if found.session == self._open[open_ref]:
                    self._known[open_ref, found.session] = found
        for open_ref, open_session in list(self._open.items()):
            entry = self._known.get((open_ref, open_session))
            if entry is not None and entry.complete:
                del self._open[open_ref]
        if not self._policy.keeps_all:
            self.finish_removal()
            self._read_metrics()
            plan = self._plan()
            if plan and self._unread is not None:
                self._read_references(self._unread)
                plan = self._plan()
            if plan:
                known = {ref: frozenset(steps) for ref, steps in self._references.items()}
                self._removal = self._remover.submit(
                    self._remove_all, plan, known, list(self._known.values()), dict(self._metrics),
                    self._folded(),
                )  # fmt: skip
        waiting = (self._known.get((r, s)) for r, s in sorted(self._open.items()))
        return [entry for entry in waiting if entry is not None]

    def _plan(self) -> list[StepEntry]:
        return plan_retention(
            self._known.values(), self._policy, self._metrics, self._pinned, self._references,
            self._folded(),
        )  # fmt: skip

    def _folded(self) -> list[StepRef]:
        """What is pinned without being complete: where there is a log, it is had by deltas."""
        if self._logged is None:
            timelines = {log_directory(ref.timeline) for ref, _ in self._known}
            self._logged = any(any(self._run.backend.list(name)) for name in timelines)
        complete = _complete(self._known.values())
        return [ref for ref in self._pinned if ref not in complete] if self._logged else []

    def _remove_all(
        self, plan: list[StepEntry], references: References, entries: list[StepEntry],
        metrics: Mapping[StepRef, float], folded: Collection[StepRef],
    ) -> tuple[list[StepEntry], StoreError | None]:  # fmt: skip
        """Remove the steps of a plan, and this rank's segments of the log that nobody needs then:
        never its newest, which may be the one that is being written."""
        gone, failure = self._remove(plan, references)
        try:
            for timeline in {entry.ref.timeline for entry in plan}:
                mine = [entry for entry in entries if entry.ref.timeline == timeline]
                segments = older_segments(self._run.backend, self._run.id, timeline, self._rank)
                for segment in plan_segments(mine, segments, self._policy, metrics, folded):
                    self._run.backend.delete(segment.name)
        except StoreError as error:
            failure = failure or error
        return gone, failure

    def _remove(
        self, plan: list[StepEntry], references: References
    ) -> tuple[list[StepEntry], StoreError | None]:
        gone: list[StepEntry] = []
        stuck: set[StepRef] = set()
        failure: StoreError | None = None
        for entry in plan:  # one that cannot be removed must keep those only to which it refers
            if entry.ref in needed_steps(stuck, references):
                continue
            try:
                if self._rank < entry.world_size:
                    stem = PartName(entry.session, self._rank, entry.world_size, "").stem
                    self._run.delete_part(entry.ref, stem, reuse=True)
                gone.append(entry)
            except StoreError as error:
                stuck.add(entry.ref)
                failure = failure or error
        return gone, failure

    def finish_removal(self) -> None:
        """Wait until what is being removed is gone.

        Raises:
            StoreError: a file could not be removed; it stays in the plan.
        """
        removal, self._removal = self._removal, None
        gone, failure = ((), None) if removal is None else removal.result()
        for entry in gone:
            del self._known[entry.ref, entry.session]
            if self._open.get(entry.ref) == entry.session:
                del self._open[entry.ref]
            self._metrics.pop(entry.ref, None)
        for ref in {e.ref for e in gone} - {ref for ref, _ in self._known}:
            self._references.pop(ref, None)
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Finish, and end the thread.

        Raises:
            StoreError: as `finish_removal`.
        """
        with self._remover:
            self.finish_removal()

    def _read_references(self, unread: Mapping[tuple[StepRef, int], StepEntry]) -> None:
        """Learn once, before the first removal, what steps of earlier sessions refer to, and those
        of other timelines, which stay.

        Raises:
            StoreError: the store did not answer; it is tried again.
        """
        own = {ref.timeline for ref, _ in self._known}
        others = [e for e in self._run.listing().steps if e.ref.timeline not in own and e.whole]
        for entry in (*unread.values(), *others):
            steps = {step for step, _ in read_references(self._run, entry, self._rank)}
            if steps:
                self._references.setdefault(entry.ref, set()).update(steps)
        self._unread = None

    def _read_metrics(self) -> None:
        """All ranks decide by rank 0's value, so that they keep the same steps."""
        name = self._policy.keep_best
        if name is None:
            return
        for entry in self._known.values():
            if entry.complete and entry.ref not in self._metrics:
                self._metrics[entry.ref] = metric_of(self._run, entry, name)


def metric_of(run: Run, entry: StepEntry, name: str) -> float:
    """A metric of a step as rank 0 recorded it; NaN where there is none, it is not finite, or the
    record is gone or damaged.

    Raises:
        StoreError: the store did not answer, so that it is not known.
    """
    try:
        value = run.record(entry, 0).metrics.get(name)
    except (Damaged, Missing):
        return math.nan
    return float(value) if isinstance(value, int | float) else math.nan
