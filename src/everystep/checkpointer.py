"""The front door: store the training state at every step, and restore it."""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import msgspec
import torch
from torch import nn
from torch.optim import Optimizer

from everystep.errors import (
    EverystepError,
    Missing,
    NothingToRestore,
    NotRestored,
    RanksDisagree,
    ReplicasDiffer,
    StoreError,
    TooManyFailedSteps,
    UsageError,
)
from everystep.recovery.agree import on_first_rank
from everystep.recovery.plan import Plan, plan_restore
from everystep.recovery.restore import require_fresh, restore
from everystep.saving import Writer, encoded_metrics, save, versions
from everystep.signals import SaveOnSignal, SignalHold
from everystep.state.capture import Objects, capture
from everystep.state.ranks import Ranks
from everystep.store import format as fmt
from everystep.store.local import LocalBackend
from everystep.store.records import require_run_or_empty, write_record
from everystep.store.retention import Retention, Upkeep
from everystep.store.run import Run, StepEntry, now
from everystep.types import Json, StepRef, StepStats

_log = logging.getLogger("everystep")

_STATS_KEPT = 10_000
_LATE_STEPS = 8
"""After so many steps that some rank has not stored, say so."""


class Checkpointer:
    """Stores the full training state of a run at every step, and brings it back bit for bit.

    Under `torch.distributed` make it on every rank, after `init_process_group`, with the same
    arguments; `restore` is collective, `step` is not. Parameters that DistributedDataParallel
    keeps alike are shared out: each rank writes its part of them.

    Args:
        run: the run directory; made if it is not there. All ranks see the same one.
        model: a module, or a mapping of name to module. DDP, `torch.compile`, activation
            checkpointing and FSDP2 are seen through; FSDP1 is refused.
        optimizer: an optimizer, or a mapping of name to optimizer.
        extras: whatever else must go on exactly, by name: anything with `state_dict` and
            `load_state_dict` (schedules, scalers, loaders, averages), dicts of plain values,
            `random.Random`, `numpy.random.Generator`, `torch.Generator`. The global generators of
            Python, NumPy and torch are always included.
        retention: which checkpoints to keep; by default the newest three.
        on_error: what to do when a step cannot be stored. `report` logs an error, notes it in
            `stats`, lets training go on, and tries again at the next step; `raise` raises.
        max_failed_steps: raise `TooManyFailedSteps` after so many failures in a row; None: never.
        on_signal: hold a signal (SIGTERM) back until the step is durable; None: leave it alone.

    Raises:
        Unsupported: something in the state cannot be stored exactly; the message names it.
        NotARun: the directory holds something else.
        RunBusy: another live process uses this run.
    """

    def __init__(
        self,
        run: str | os.PathLike[str],
        *,
        model: nn.Module | Mapping[str, nn.Module],
        optimizer: Optimizer | Mapping[str, Optimizer] | None = None,
        extras: Mapping[str, Any] | None = None,
        retention: Retention = Retention(),  # noqa: B008 - immutable
        on_error: Literal["report", "raise"] = "report",
        max_failed_steps: int | None = None,
        on_signal: SaveOnSignal | None = None,
    ) -> None:
        if on_error not in ("report", "raise"):
            raise UsageError(f"on_error={on_error!r}: neither 'report' nor 'raise'")
        self._objects = Objects.of(model, optimizer, extras)
        self._retention = retention
        self._on_error, self._max_failed_steps = on_error, max_failed_steps
        self._stats: collections.deque[StepStats] = collections.deque(maxlen=_STATS_KEPT)
        self._ranks = Ranks.here()
        self._session: _Session | None = None
        self._done = 0
        self._closed = False
        self._failed_in_a_row = 0
        self._share_replicas = True
        self._refuse_early()
        self._path = Path(run)
        with contextlib.ExitStack() as owned:
            backend = LocalBackend.made(self._path)
            require_run_or_empty(backend)
            owned.enter_context(backend.lock(fmt.LOCK_FILE, self._ranks.rank))
            self._signal = None if on_signal is None else SignalHold(on_signal)
            if self._signal is not None:
                owned.callback(self._signal.close)
            self._backend = backend
            self._owned = owned.pop_all()

    def _refuse_early(self) -> None:
        """Find what cannot be stored now, not at the first step. A data loader is not asked: its
        `state_dict` may start workers."""
        asked = {
            name: extra
            for name, extra in self._objects.extras.items()
            if not isinstance(extra, torch.utils.data.DataLoader)
        }
        objects = Objects(self._objects.models, self._objects.optimizers, asked)
        capture(objects, self._ranks.world_size)

    def restore(
        self, step: int | StepRef | None = None, *, required: bool = False, strict: bool = True
    ) -> int:
        """Bring all objects, and the random number generators, to a stored step. Collective.

        Call it as the last thing before the training loop: what is seeded afterwards is not what
        was stored. Every byte is proved before anything live is changed. A newest step that is
        damaged is set aside, by name, and the one before it is used.

        Args:
            step: None: the newest step that is complete on all ranks. A number (on the current
                timeline) or a `StepRef`: that step and no other; if later steps exist, training
                goes on in a new timeline, and they stay.
            required: raise `NothingToRestore` where there is nothing yet.
            strict: False lets tensors be missing on either side, as in torch; another shape or
                dtype is an error all the same.

        Returns:
            The number of training steps already done; 0 for a fresh run.

        Raises:
            NothingToRestore: the step is not there, or nothing is and `required`.
            CannotRestore: there are steps, and none can be proved.
            LayoutMismatch: the stored state does not fit the objects.
            RanksDisagree: ranks asked for different steps, or do not share the directory.
        """
        started = time.monotonic()
        asked = self._ranks.gather([None if step is None else str(step), required, strict])
        if any(other != asked[0] for other in asked):
            raise RanksDisagree("ranks called restore() differently", found=asked)
        self._end_session()
        run = self._open_run()
        plan = self._plan(run, step)
        entry: StepEntry | None = None
        if plan.candidates:
            entry = restore(run, plan, self._objects, self._ranks, strict=strict)
        elif required:
            raise NothingToRestore(
                "the run has no step yet, and required=True",
                path=self._path,
                hint="check the path, or call restore() to begin a fresh run",
            )
        self._begin(run, plan, entry)
        if entry is None:
            _log.info("%s: a fresh run, nothing to restore", self._path)
            return 0
        took_s = time.monotonic() - started
        _log.info("%s: restored step %s in %.2f s", self._path, entry.ref, took_s)
        return self._done

    def _open_run(self) -> Run:
        """The run, made by rank 0 where it is not there yet."""
        if self._closed:
            raise UsageError("the Checkpointer is closed", hint="make a new one")
        first = on_first_rank(self._ranks, lambda: Run.open_or_create(self._backend).id)
        found: str | None = None  # each rank looks for itself, and fails with all the others
        with contextlib.suppress(StoreError):
            found = Run.open(self._path).id
        if any(other != first for other in self._ranks.gather(found)):
            raise RanksDisagree(
                f"{self._path} is not the same directory on all ranks",
                hint="use a path on a file system that all hosts share",
            )
        return Run(self._backend, fmt.RunRecord(run=first, created=""))

    def _plan(self, run: Run, step: int | StepRef | None) -> Plan:
        def decide() -> Json:
            listing = run.listing()
            plan = plan_restore(listing, step)
            if not plan.candidates:
                require_fresh(listing)
            return msgspec.to_builtins(plan)

        return msgspec.convert(on_first_rank(self._ranks, decide), Plan)

    def _begin(self, run: Run, plan: Plan, entry: StepEntry | None) -> _Session:
        """Begin a session: a writer of steps after the restored one, and of no other."""
        restored = None if entry is None else entry.ref

        size = self._ranks.world_size

        def begin() -> Json:
            self._backend.sweep()
            number = run.clean_up()
            run.begin_session(number, plan.timeline, size, restored, versions())
            return number

        number: int = on_first_rank(self._ranks, begin)
        listing = run.listing()

        def write_again() -> None:
            for record in listing.timelines.values():
                write_record(self._backend, fmt.timeline_file(record.name), record)
            run.begin_session(number, plan.timeline, size, restored, versions())
            write_record(self._backend, fmt.RUN_FILE, fmt.RunRecord(run=run.id, created=now()))

        if entry is not None and entry.world_size > 1:  # once they differ, they stay different
            self._share_replicas = any(part.replica for part in entry.parts)
        pinned = {t.parent for t in listing.timelines.values() if t.parent is not None}
        if restored is not None:
            pinned.add(restored)
        timeline = plan.timeline.name
        known = [e for e in listing.steps if e.ref.timeline == timeline and e.session < number]
        upkeep = Upkeep(run, self._retention, self._ranks.rank, known, pinned)
        self._session = _Session(run, number, timeline, upkeep, write_again)
        self._done = 0 if restored is None else restored.step
        return self._session

    def step(self, **metrics: float | int | str | bool | torch.Tensor) -> None:
        """End a training step: make the state durable. Returns when this rank's part is.

        Args:
            metrics: numbers, strings or one-element tensors to record with the step.

        Raises:
            NotRestored: the run has steps, or there are several ranks, and `restore()` was not
                called.
            Unsupported: something in the state cannot be stored exactly.
            StoreError: the step could not be stored, and `on_error="raise"`.
            ReplicasDiffer: ranks hold different bits, and `on_error="raise"`.
            TooManyFailedSteps: `max_failed_steps` was reached.
        """
        started = time.perf_counter()
        session = self._session or self._begin_without_restore()
        recorded = encoded_metrics(metrics)
        self._done += 1
        ref = StepRef(session.timeline, self._done)
        written_bytes, durable, problem = 0, False, None
        try:
            written_bytes = self._store(session, ref, recorded)
            durable, self._failed_in_a_row = True, 0
            self._look_after(session, ref)
        except StoreError as error:
            problem = error.headline()
            self._not_stored(ref, error)
        finally:
            stall_s = time.perf_counter() - started
            self._stats.append(
                StepStats(
                    step=ref.step, stall_s=stall_s, written_bytes=written_bytes,
                    durable=durable, error=problem,
                )
            )  # fmt: skip
            if self._signal is not None:
                self._signal.step_ended()

    def _begin_without_restore(self) -> _Session:
        if self._ranks.world_size > 1:  # step() alone must not wait for other ranks
            raise NotRestored(
                "ranks have not agreed on where to begin",
                hint="call restore() on every rank before the first step()",
            )
        run = self._open_run()
        plan = self._plan(run, None)
        if plan.candidates:
            raise NotRestored(
                f"{self._path} already has step {plan.candidates[0].ref}",
                hint="call restore() before the first step(), or use another directory",
            )
        return self._begin(run, plan, None)

    def _store(self, session: _Session, ref: StepRef, metrics: dict[str, Json]) -> int:
        if self._ranks.rank == 0:
            session.keep_identity()
        writer = Writer(session.run.id, session.number, self._ranks, self._share_replicas)
        state = capture(self._objects, self._ranks.world_size)
        return save(self._backend, writer, ref, state, metrics)

    def _not_stored(self, ref: StepRef, problem: StoreError) -> None:
        """Say so, and raise where the user wants that."""
        self._failed_in_a_row += 1
        _log.error(
            "step %s is not stored: %s; training goes on, and the next step tries again "
            "(%d in a row failed)", ref, problem.headline(), self._failed_in_a_row,
        )  # fmt: skip
        if self._on_error == "raise":
            raise problem
        limit = self._max_failed_steps
        if limit is not None and self._failed_in_a_row >= limit:
            raise TooManyFailedSteps(
                f"{self._failed_in_a_row} steps in a row could not be stored",
                step=ref,
                hint=problem.hint,
            ) from problem

    def _look_after(self, session: _Session, ref: StepRef) -> None:
        """Retention, and a look at the other ranks; never a reason to end training by itself."""
        try:
            waiting = session.upkeep.after_step(ref, session.number)
        except StoreError as error:
            _log.error("old checkpoints could not be removed: %s", error.headline())
            return
        diverged = next((entry for entry in waiting if entry.diverged), None)
        if diverged is not None and self._share_replicas:
            self._share_replicas = False
            problem = ReplicasDiffer(
                "ranks hold different bits of parameters or slots that must be alike; "
                "from now on every rank stores its own",
                step=diverged.ref,
                hint="docs/exactness.md says which operations of torch are not bit-stable",
            )
            _log.error("%s", problem.headline())
            if self._on_error == "raise":
                raise problem
        late = [entry for entry in waiting if entry.missing_ranks]
        if len(late) >= _LATE_STEPS and len(late) % _LATE_STEPS == 0:
            _log.warning(
                "step %s is not complete: nothing of rank %s yet; does every rank call step()?",
                late[0].ref, ", ".join(map(str, late[0].missing_ranks)),
            )  # fmt: skip

    def _end_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            try:
                session.upkeep.close()
            except StoreError as error:
                _log.error("old checkpoints could not be removed: %s", error.headline())

    def steps(self) -> list[int]:
        """The steps that can be restored by number, on the current timeline and what led to it."""
        try:
            run = Run.open(self._path)
        except EverystepError:
            return []
        listing = run.listing()
        name = self._session.timeline if self._session else listing.current_timeline()
        return [entry.ref.step for entry in listing.line(name)]

    @property
    def stats(self) -> Sequence[StepStats]:
        """What each step of this process cost, oldest first (the last 10,000)."""
        return tuple(self._stats)

    def close(self) -> None:
        """Give up the run. Every step is durable already; calling it twice is no error."""
        self._closed = True
        self._end_session()
        self._owned.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class _Session:
    """From one restore to the next, or to the end: who writes, and where to."""

    def __init__(
        self, run: Run, number: int, timeline: str, upkeep: Upkeep, write_again: Callable[[], None]
    ) -> None:
        self.run, self.number, self.timeline, self.upkeep = run, number, timeline, upkeep
        self._write_again = write_again

    def keep_identity(self) -> None:
        """Make sure that the directory is still that of a run: steps in one that somebody has
        emptied could never be restored."""
        try:
            self.run.backend.size(fmt.RUN_FILE)
        except Missing:
            _log.warning("%s is gone, and any steps with it: written again", fmt.RUN_FILE)
            self._write_again()
