"""Plan, read, prove, apply: bring live objects to a stored step, on every rank or on none."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from everystep.errors import (
    CannotRestore,
    Damaged,
    EverystepError,
    LayoutMismatch,
    Missing,
    ReplicasDiffer,
)
from everystep.recovery.agree import as_json, from_json, on_first_rank
from everystep.recovery.plan import Plan
from everystep.state import capture, raw
from everystep.state.buckets import cold_wrappers
from everystep.state.capture import Objects
from everystep.state.form import check_form
from everystep.state.ranks import Ranks
from everystep.state.tree import Decoder
from everystep.store.format import RankRecord
from everystep.store.reading import Located, StepReader, locate
from everystep.store.run import Listing, Run, StepEntry
from everystep.types import Json, TensorSpec

_log = logging.getLogger("everystep")

_DAMAGE = (Damaged, Missing, ReplicasDiffer)
"""What makes an older step the better one; anything else (no permission, a layout that does not
fit) would be the same for every step, and is raised."""


Lend = Callable[[str, int, int], memoryview | None]
"""Gives the bytes of a file (name, offset, length) where they are in memory anyway."""


class Proved(NamedTuple):
    """A rank's part of a step, read and equal to what was written."""

    record: RankRecord
    tensors: dict[str, torch.Tensor]
    """By key, in host memory, local parts where sharded."""

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Descriptions of the tensors by key."""
        return {tensor.spec.key: tensor.spec for tensor in self.record.tensors}


def read_part(
    run: Run,
    entry: StepEntry,
    rank: int,
    fits: Callable[[RankRecord], None] | None = None,
    progress: Callable[[int], None] | None = None,
    wanted: Callable[[TensorSpec], bool] = lambda spec: True,
    lend: Lend | None = None,
) -> Proved:
    """Read one rank's state of a step and prove every byte of it.

    Args:
        fits: called with the record before any tensor is read; raises if it is of no use.
        progress: called with the number of bytes just read, from any thread.
        wanted: which tensors to read.
        lend: may give bytes of parameters and buffers, which are only copied from here; the
            backend must not copy what it reads to where it has lent it.

    Raises:
        Damaged, Missing, ReplicasDiffer: it is not what was written.
        StoreFailed: it cannot be read.
    """
    records = run.records(entry)
    if rank not in records:
        raise LayoutMismatch(f"step {entry.ref} has no rank {rank}", found=sorted(records))
    record = records[rank]
    check_form(record.tree, {tensor.spec.key for tensor in record.tensors})
    if fits is not None:
        fits(record)
    tensors: dict[str, torch.Tensor] = {}
    located = [place for place in locate(records, rank) if wanted(place.tensor.spec)]
    reader = StepReader(run.backend, entry, records)
    lent = {} if lend is None else _lent(reader, located, lend)

    def buffer_for(spec: TensorSpec) -> memoryview:
        if spec.key in lent:
            view = lent[spec.key]
            tensors[spec.key] = raw.over(view, spec)
        else:
            tensors[spec.key], view = raw.empty_for(spec)
        return view

    reader.read(located, buffer_for, progress)
    return Proved(record, tensors)


def _lent(reader: StepReader, located: Sequence[Located], lend: Lend) -> dict[str, memoryview]:
    """Bytes of parameters and buffers that are in memory already, by key."""
    lent = {}
    for one in located:
        spec = one.tensor.spec
        place = reader.place_of(one) if spec.key.startswith("/models/") and spec.nbytes else None
        view = None if place is None else lend(*place, spec.nbytes)
        if view is not None:
            lent[spec.key] = view
    return lent


def restore(
    run: Run,
    plan: Plan,
    objects: Objects,
    ranks: Ranks,
    *,
    strict: bool = True,
    lend: Lend | None = None,
) -> StepEntry:
    """Bring the objects to the first step of the plan that every rank can prove. Collective.

    Nothing live is changed before every rank has proved its part. Steps that failed are set aside
    afterwards, once an older one is known to be good.

    Args:
        lend: see `read_part`.

    Raises:
        CannotRestore: no step of the plan can be proved; all files are left as they are.
        LayoutMismatch: the stored state does not fit the objects.
    """
    failed: list[tuple[StepEntry, str]] = []
    for entry in plan.candidates:
        proved, error = _try(run, entry, objects, ranks, strict, lend)
        reasons = _agree(ranks, error)
        if not any(reasons):
            _apply(objects, proved, ranks, strict)
            _set_aside(run, failed, entry, ranks)
            return entry
        reason = _first(reasons)
        _log.warning("step %s cannot be used: %s", entry.ref, reason)
        failed.append((entry, reason))
    tried = "".join(f"\n  {entry.ref}: {reason}" for entry, reason in failed)
    raise CannotRestore(
        f"{'the step' if plan.asked else 'every complete step'} failed its proof:{tried}",
        hint="everystep verify RUN shows what is damaged"
        + ("; restore() without a step takes the newest that is whole" if plan.asked else ""),
    )


def _try(
    run: Run, entry: StepEntry, objects: Objects, ranks: Ranks, strict: bool, lend: Lend | None
) -> tuple[Proved | None, EverystepError | None]:
    def fits(record: RankRecord) -> None:
        specs = {tensor.spec.key: tensor.spec for tensor in record.tensors}
        _check_world(record, ranks)
        misfit = capture.check(objects, record.tree, specs, ranks.world_size)
        misfit.raise_if(strict=strict)

    try:
        proved = read_part(run, entry, ranks.rank, fits, lend=lend)
        _prove_values(proved)
        return proved, None
    except EverystepError as error:
        return None, error


def _prove_values(proved: Proved) -> None:
    """Decode all that is not a tensor once, before anything live is changed.

    Raises:
        Damaged: a value is not what an encoder writes.
    """
    tree, decoder = proved.record.tree, Decoder(proved.tensors)
    values = [*tree["extras"].values(), tree["rng"]]
    for loader in tree["loaders"].values():
        values.append(loader["generators"])
    for model in tree["models"].values():
        values += model["extra_state"].values()
    for optimizer in tree["optimizers"].values():
        values += [optimizer["others"], optimizer["more"]]
        values += [group["options"] for group in optimizer["groups"]]
        values += [slot for _, slot in optimizer["slots"]]
    for value in values:
        decoder.decode(value)


def _check_world(record: RankRecord, ranks: Ranks) -> None:
    if record.world_size != ranks.world_size:
        raise LayoutMismatch(
            "the step was stored by another number of ranks",
            expected=record.world_size,
            found=ranks.world_size,
            hint=f"start {record.world_size} processes",
        )


def _agree(ranks: Ranks, error: EverystepError | None) -> Sequence[Json]:
    """Every rank's reason why this step cannot be used (None: it can).

    Raises:
        EverystepError: a rank's failure is not damage to this step; on every rank.
    """
    reasons = ranks.gather([as_json(error), isinstance(error, _DAMAGE)])
    for rank, (reason, damage) in enumerate(reasons):
        if reason is not None and not damage:
            if error is not None and rank == ranks.rank:
                raise error
            raise from_json(rank, reason)
    return [reason for reason, _ in reasons]


def _first(reasons: Sequence[Json]) -> str:
    return next(f"rank {rank}: {r[1]}" for rank, r in enumerate(reasons) if r is not None)


def _apply(objects: Objects, proved: Proved | None, ranks: Ranks, strict: bool) -> None:
    error: EverystepError | None = None
    if proved is not None:
        record, specs = proved.record, proved.specs
        if not strict:
            misfit = capture.check(objects, record.tree, specs, ranks.world_size)
            for kind in ("missing", "unexpected"):
                for name in getattr(misfit, kind):
                    _log.warning("restored without %s (%s)", name, kind)
        for line in capture.quiet_differences(objects, record.tree, specs, ranks.world_size):
            _log.warning("%s: training may go another way than before", line)
        for name in cold_wrappers(objects.models.values()):
            _log.warning(
                "%s: DDP over more than two ranks arranges its buckets after its first backward; "
                "the next step may differ in the last bit: run one forward and backward before "
                "restore() (docs/exactness.md)", name,
            )  # fmt: skip
        try:
            capture.apply(objects, record.tree, specs, proved.tensors, ranks.world_size)
        except EverystepError as failure:
            error = failure
    reasons = _agree(ranks, error)
    if any(reasons):  # too late for another step: something live has been changed
        raise error or from_json(*next((r, told) for r, told in enumerate(reasons) if told))


def _set_aside(
    run: Run, failed: Sequence[tuple[StepEntry, str]], good: StepEntry, ranks: Ranks
) -> None:
    def move() -> Json:
        for entry, reason in failed:
            where = run.set_aside(entry)
            _log.warning(
                "step %s is set aside in %s (%s); step %s is restored instead",
                entry.ref, where, reason, good.ref,
            )  # fmt: skip

    if failed:
        on_first_rank(ranks, move)


def require_fresh(listing: Listing) -> None:
    """Check that a run without a complete step is one that has not begun.

    A start that was cut off in its first step is fresh. Anything more is not: training from the
    beginning over it would be a silent loss. That a session was restored, or a timeline forked,
    shows that there were steps, even where not one file of them is left.

    Raises:
        CannotRestore: there are files that belong to later steps, or to something else.
    """
    begun = [entry.ref for entry in listing.steps] + [ref for ref, _ in listing.loose]
    later = [ref for ref in begun if ref.step > 1]
    strangers = [name for name in listing.strangers if "/." not in "/" + name]
    if later:
        ref = max(later, key=lambda ref: ref.step)
        entry = next((entry for entry in listing.steps if entry.ref == ref), None)
        missing = f" (nothing of rank {entry.missing})" if entry and entry.missing else ""
        raise CannotRestore(
            f"steps up to {ref} are there, and not one of them is complete{missing}",
            hint="look at everystep verify RUN, or begin in another directory",
        )
    if strangers:
        raise CannotRestore(
            f"the run has no complete step and holds {strangers[0]}, which is not ours",
            hint="begin in another directory",
        )
    had = [session.restored for session in listing.sessions if session.restored is not None]
    had += [timeline.parent for timeline in listing.timelines.values() if timeline.parent]
    had += [entry.ref for entry in listing.steps if entry.complete]
    if had:
        raise CannotRestore(
            f"the run has had step {had[-1]}, and the current timeline has no complete step",
            hint="look at everystep verify RUN, or begin in another directory",
        )
