"""Plan, read, prove, apply: bring live objects to a stored step, on every rank or on none."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import torch

from everystep.errors import (
    CannotRestore,
    Damaged,
    EverystepError,
    LayoutMismatch,
    Missing,
    NothingToRestore,
    RanksDisagree,
    ReplicasDiffer,
)
from everystep.recovery.agree import as_json, from_json, on_first_rank, raise_together
from everystep.recovery.part import Lend, Proved
from everystep.recovery.plan import Plan, plan_restore
from everystep.recovery.reach import How, blamed, by_name, read_chain
from everystep.state import capture, raw
from everystep.state.buckets import cold_wrappers
from everystep.state.inplace import standing_slots
from everystep.state.objects import Objects
from everystep.state.ranks import Ranks
from everystep.state.tree import Decoder
from everystep.store import format as fmt
from everystep.store.chains import Chain, Excluded
from everystep.store.format import RankRecord, TimelineRecord
from everystep.store.run import Listing, Run
from everystep.types import Json, StepRef

_log = logging.getLogger("everystep")

_DAMAGE = (Damaged, Missing, ReplicasDiffer)
"""What makes an older step the better one; anything else (no permission, a layout that does not
fit) would be the same for every step, and is raised."""

_LOOKS = 20
_LOOK_AGAIN_S = 0.1
"""How often, and how far apart, a rank looks for the files that rank 0 sees."""


class Restored(NamedTuple):
    """What `restore` has done."""

    chain: Chain | None
    """What the state was made of; None: the run is fresh, and nothing was changed."""
    timeline: TimelineRecord
    """Where training goes on."""


def restore(
    run: Run,
    step: int | StepRef | None,
    objects: Objects,
    ranks: Ranks,
    *,
    strict: bool = True,
    lend: Lend | None = None,
    copy: raw.Copy = ctypes.memmove,
) -> Restored:
    """Bring the objects to the newest step, or the one asked for, that every rank can prove.
    Collective.

    Nothing live is changed before every rank has proved its part. Full checkpoints that failed
    are set aside afterwards, once another state is known to be good.

    Args:
        step: see `plan_restore`.
        lend: see `read_part`.
        copy: how to copy memory.

    Raises:
        NothingToRestore: the step that was asked for is not there.
        CannotRestore: no step can be proved; all files are left as they are.
        LayoutMismatch: the stored state does not fit the objects.
    """
    failed: list[tuple[Chain, str]] = []
    excluded = Excluded()
    while True:
        plan = _agreed_plan(run, step, excluded, ranks)
        chain = plan.chain
        if chain is None:
            break
        with _uncollected(chain):
            proved, error = _try(run, chain, objects, ranks, strict, lend)
        reasons = _agree(ranks, error, blamed(chain, error, Excluded()) if error else Excluded())
        if not any(reason for reason, _ in reasons):
            with _uncollected(chain):
                _apply(objects, proved, ranks, strict, copy)
            _set_aside(run, failed, excluded, chain, ranks)
            return Restored(chain, plan.timeline)
        proved = None  # another state comes in its place
        _let_go(error)
        reason = _first(reasons)
        _log.warning("step %s cannot be used: %s", chain.ref, reason)
        failed.append((chain, reason))
        for _, guilty in reasons:
            excluded = Excluded(
                {*excluded.deltas, *guilty.deltas}, {*excluded.fulls, *guilty.fulls}
            )
    if not failed:
        return Restored(None, plan.timeline)
    tried = "".join(f"\n  {chain.ref}: {reason}" for chain, reason in failed)
    raise CannotRestore(
        f"{'the step' if plan.asked else 'every complete step'} failed its proof:{tried}",
        hint="everystep verify RUN shows what is damaged"
        + ("; restore() without a step takes the newest that is whole" if plan.asked else ""),
    )


@contextlib.contextmanager
def _uncollected(chain: Chain) -> Iterator[None]:
    """Look for no garbage among all objects of the process: in one that has just imported torch
    that can take as long as copying a full checkpoint. Not while deltas are folded, which may make
    garbage."""
    was_on = gc.isenabled() and not chain.links
    if was_on:
        gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _agreed_plan(run: Run, step: int | StepRef | None, excluded: Excluded, ranks: Ranks) -> Plan:
    """What rank 0 has decided, as this rank finds it in the directory.

    Raises:
        RanksDisagree: the files are not there for this rank.
    """
    mine: list[Plan] = []

    def decide() -> Json:
        listing = run.listing()
        plan = plan_restore(listing, run.segments(listing), step, excluded)
        if plan.chain is None and excluded == Excluded():
            require_fresh(listing)
        mine.append(plan)
        return _spoken(plan)

    wanted = on_first_rank(ranks, decide)
    error: EverystepError | None = None
    for _ in range(_LOOKS):
        if mine and _spoken(mine[-1]) == wanted:
            break
        try:
            listing = run.listing()
            mine.append(plan_restore(listing, run.segments(listing), step, excluded))
        except NothingToRestore as failure:
            error = failure
            time.sleep(_LOOK_AGAIN_S)
    else:
        error = error or RanksDisagree(
            "the run directory does not show the same steps on all ranks",
            expected=wanted,
            found=_spoken(mine[-1]) if mine else None,
            hint="use a path on a file system that all hosts share",
        )
    raise_together(ranks, error if not mine or _spoken(mine[-1]) != wanted else None)
    return mine[-1]


def _spoken(plan: Plan) -> Json:
    """What ranks must agree on."""
    chain = plan.chain
    way = None
    if chain is not None:
        links = [[str(link.ref), link.session, link.world_size] for link in chain.links]
        way = [str(chain.full.ref), chain.full.session, links]
    return [way, msgspec.to_builtins(plan.timeline), plan.asked]


def _try(
    run: Run, chain: Chain, objects: Objects, ranks: Ranks, strict: bool, lend: Lend | None
) -> tuple[Proved | None, EverystepError | None]:
    def fits(record: RankRecord) -> None:
        specs = {tensor.spec.key: tensor.spec for tensor in record.tensors}
        _check_world(record, ranks)
        misfit = capture.check(objects, record.tree, specs, ranks.world_size)
        misfit.raise_if(strict=strict)

    def standing(record: RankRecord) -> Mapping[str, torch.Tensor]:
        specs = {tensor.spec.key: tensor.spec for tensor in record.tensors}
        live = (objects.models, objects.optimizers)
        return standing_slots(*live, record.tree, specs, ranks.world_size)

    classes = by_name(type(optimizer) for optimizer in objects.optimizers.values())
    how = How(fits=fits, lend=lend, standing=standing, classes=classes)
    try:
        proved = read_chain(run, chain, ranks.rank, how)
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


def _agree(
    ranks: Ranks, error: EverystepError | None, guilty: Excluded
) -> list[tuple[Json, Excluded]]:
    """Every rank's reason why this way cannot be used (None: it can), and what is to blame.

    Raises:
        EverystepError: a rank's failure is not damage to this step; on every rank.
    """
    fulls = [[str(ref), session] for ref, session in guilty.fulls]
    blame = [[list(one) for one in guilty.deltas], fulls]
    reasons = ranks.gather([as_json(error), isinstance(error, _DAMAGE), blame])
    for rank, (reason, damage, _) in enumerate(reasons):
        if reason is not None and not damage:
            if error is not None and rank == ranks.rank:
                raise error
            raise from_json(rank, reason)
    return [(reason, _excluded(told)) for reason, _, told in reasons]


def _excluded(told: Json) -> Excluded:
    deltas, fulls = told
    return Excluded(
        {(name, offset) for name, offset in deltas},
        {(StepRef.parse(ref), session) for ref, session in fulls},
    )


def _let_go(error: BaseException | None) -> None:
    """Empty the frames in which an error came up: they hold the state that has failed."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _first(reasons: Sequence[tuple[Json, Excluded]]) -> str:
    told = enumerate(reason for reason, _ in reasons)
    return next(f"rank {rank}: {reason[1]}" for rank, reason in told if reason is not None)


def _apply(
    objects: Objects, proved: Proved | None, ranks: Ranks, strict: bool, copy: raw.Copy
) -> None:
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
            capture.apply(
                objects, record.tree, specs, proved.tensors, ranks.world_size, proved.standing, copy
            )
        except EverystepError as failure:
            error = failure
    raise_together(ranks, error)  # too late for another step: something live has been changed


def _set_aside(
    run: Run, failed: Sequence[tuple[Chain, str]], bad: Excluded, good: Chain, ranks: Ranks
) -> None:
    """Move full checkpoints that have failed out of the way."""

    def move() -> Json:
        for chain, reason in failed:
            full = chain.full
            if (full.ref, full.session) in bad.fulls and run.entries(full.ref):
                _log.warning(
                    "step %s is set aside in %s (%s); step %s is restored instead",
                    full.ref, run.set_aside(full), reason, good.ref,
                )  # fmt: skip
            else:
                _log.warning(
                    "step %s is lost (%s); step %s is restored instead",
                    chain.ref, reason, good.ref,
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
    begun += _without_full(listing)
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


def _without_full(listing: Listing) -> list[StepRef]:
    """Steps that segments of the log begin with whose full checkpoint is gone.

    A log that is older than a session which began anew was found to be worthless then; one whose
    full is there in part was cut off while that was being written.
    """
    anew = max((s.session for s in listing.sessions if s.restored is None), default=0)
    partly = {entry.ref for entry in listing.steps} | {ref for ref, _ in listing.loose}
    found = []
    for segment in (log.segment for log in listing.logs):
        base = StepRef(segment.timeline, segment.base)
        begun = fmt.step_directory(base) + "/"
        being_written = any(name.startswith(begun) for name in listing.strangers)
        if segment.session >= anew and base not in partly and not being_written:
            found.append(StepRef(segment.timeline, segment.base + 1))
    return found
