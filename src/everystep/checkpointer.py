"""The front door: store the training state at every step, and restore it."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from everystep.agent.client import Agent
from everystep.agent.hosts import rescue
from everystep.agent.memory import Overlay
from everystep.agent.shadow_fetch import fetch
from everystep.blocking import Facts
from everystep.engine.device import copy_memory
from everystep.errors import (
    EverystepError,
    NothingToRestore,
    NotRestored,
    RanksDisagree,
    StoreError,
    UsageError,
)
from everystep.outcomes import Outcomes
from everystep.recovery.agree import on_first_rank, raise_together
from everystep.recovery.plan import plan_restore
from everystep.recovery.restore import Restored, require_fresh, restore
from everystep.saving import encoded_metrics, versions
from everystep.sessions import Session, Sessions, Strategy
from everystep.shadowed import shadow_plan
from everystep.signals import SaveOnSignal, SignalHold
from everystep.state.capture import capture
from everystep.state.objects import Objects
from everystep.state.ranks import Ranks
from everystep.state.uncompiled import uncompiled
from everystep.stats import StepLog
from everystep.store import format as fmt
from everystep.store.chains import plan_chains
from everystep.store.local import LocalBackend
from everystep.store.records import require_run_or_empty
from everystep.store.retention import Retention
from everystep.store.run import Run
from everystep.types import Json, StepRef, StepStats

_log = logging.getLogger("everystep")


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
        strategy: how checkpoints are taken; `auto` begins as `Full()`, and changes to what wastes
            the least time by what this run measures.
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
        strategy: Strategy | Literal["auto"] = "auto",
        retention: Retention = Retention(),  # noqa: B008 - immutable
        on_error: Literal["report", "raise"] = "report",
        max_failed_steps: int | None = None,
        on_signal: SaveOnSignal | None = None,
    ) -> None:
        self._outcomes = Outcomes(on_error, max_failed_steps)
        self._objects = Objects.of(model, optimizer, extras)
        self._log = StepLog()
        self._ranks = Ranks.here()
        self._sessions = Sessions(
            strategy, self._objects, self._ranks, retention, self._log, self._outcomes
        )
        self._agent: Agent | None = None
        self._session: Session | None = None
        self._done = 0
        self._closed = False
        self._share_replicas = True
        self._refuse_early()
        self._path, self._pid = Path(run), os.getpid()
        with contextlib.ExitStack() as owned:
            backend = LocalBackend.made(self._path)
            require_run_or_empty(backend)
            owned.enter_context(backend.lock(fmt.LOCK_FILE, self._ranks.rank))
            self._signal = None if on_signal is None else SignalHold(on_signal)
            if self._signal is not None:
                owned.callback(self._signal.close)
            self._backend = backend
            self._owned = owned.pop_all()
        atexit.register(self.close)

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
        self._ask_shadow(step)
        run = self._open_run()
        self._settle(run)
        with contextlib.closing(self._in_memory(run)) as overlay:
            seen = Run(overlay, fmt.RunRecord(run=run.id, created=""))
            restored = restore(
                seen, step, self._objects, self._ranks, strict=strict, lend=overlay.lend,
                copy=copy_memory,
            )  # fmt: skip
        if restored.chain is None and required:
            raise NothingToRestore(
                "the run has no step yet, and required=True",
                path=self._path,
                hint="check the path, or call restore() to begin a fresh run",
            )
        self._begin(run, restored)
        if restored.chain is None:
            _log.info("%s: a fresh run, nothing to restore", self._path)
            return 0
        took_s = time.monotonic() - started
        _log.info("%s: restored step %s in %.2f s", self._path, restored.chain.ref, took_s)
        return self._done

    def _ask_shadow(self, step: int | StepRef | None) -> None:
        """Have the newest step of a shadow in the store, and the one that is asked for."""
        shadow = self._sessions.shadow
        if shadow is not None and not self._closed:
            plan = shadow_plan(shadow)
            on_first_rank(self._ranks, lambda: fetch(self._backend, plan, step))

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

    def _settle(self, run: Run) -> None:
        """Have an agent, and let all ranks' agents finish what they hold: the next session's
        first act is to clean up what earlier ones have left unfinished. Those that hold copies of
        lost ranks come before there is another agent of such a rank."""
        on_first_rank(self._ranks, lambda: list(rescue(self._backend, self._path)))
        agent, rank = self._agent, self._ranks.rank
        error: EverystepError | None = None
        try:
            if agent is None and self._sessions.blocking:
                agent = Agent.left_behind(self._path.absolute(), run.id, rank)
            elif agent is None:
                agent = Agent(self._path.absolute(), run.id, rank)
            if agent is not None:
                unsaved = agent.settle()
                if unsaved:
                    _log.error("%s: in memory only, since the store refuses it", unsaved[0])
        except EverystepError as failure:
            error = failure
        self._agent = agent
        raise_together(self._ranks, error)

    def _in_memory(self, run: Run) -> Overlay:
        """The store, with what agents on this host hold in memory before it."""
        return Overlay(self._backend, run.id, range(self._ranks.world_size))

    def _begin(self, run: Run, restored: Restored) -> Session:
        """Begin a session: a writer of steps after the restored one, and of no other."""
        chain, size = restored.chain, self._ranks.world_size
        ref = None if chain is None else chain.ref

        def begin() -> Json:
            self._backend.sweep()
            number = run.clean_up()
            run.begin_session(number, restored.timeline, size, ref, versions())
            return number

        number: int = on_first_rank(self._ranks, begin)
        listing = run.listing()
        if chain is not None and size > 1:  # once they differ, they stay different
            self._share_replicas = any(part.replica for part in chain.full.parts)
        pinned = {t.parent for t in listing.timelines.values() if t.parent is not None}
        if chain is not None:
            pinned |= {chain.ref, chain.full.ref}
        timeline = restored.timeline.name
        known = [e for e in listing.steps if e.ref.timeline == timeline and e.session < number]
        facts = Facts(run, number, timeline, run.identity(number), self._share_replicas)
        self._done = 0 if ref is None else ref.step
        self._log.forget_progress()
        agent = self._agent
        if agent is not None and self._sessions.blocking:  # it has finished what was left
            self._agent = None
            agent.close()
        self._session = self._sessions.begin(facts, self._agent, known, sorted(pinned), self._done)
        return self._session

    @uncompiled
    def step(self, **metrics: float | int | str | bool | torch.Tensor) -> None:
        """End a training step: its state is to be stored.

        With `Full()` it returns while the state is being copied beside training; the first step of
        a process, and one that a signal has been held back for, are copied before it returns. With
        `Deltas()` it returns when all that has changed beside parameters and slots is noted. With
        `Full(blocking=True)` it returns when this rank's part of the step is durable.

        Args:
            metrics: numbers, strings or one-element tensors to record with the step.

        Raises:
            NotRestored: the run has steps, or there are several ranks, and `restore()` was not
                called.
            Unsupported: something in the state cannot be stored exactly.
            StoreError: this step, or one before it, could not be stored, and `on_error="raise"`.
            ReplicasDiffer: ranks hold different bits, and `on_error="raise"`.
            TooManyFailedSteps: `max_failed_steps` was reached.
        """
        session = self._session or self._begin_without_restore()
        session = self._session = self._sessions.next(session, self._done)
        recorded = encoded_metrics(metrics)
        self._done += 1
        ref = StepRef(session.timeline, self._done)
        try:
            session.step(ref, recorded)
            if self._signal is not None and self._signal.held:
                session.flush()
        finally:
            if self._signal is not None:
                self._signal.step_ended()

    def _begin_without_restore(self) -> Session:
        if self._ranks.world_size > 1:  # step() alone must not wait for other ranks
            raise NotRestored(
                "ranks have not agreed on where to begin",
                hint="call restore() on every rank before the first step()",
            )
        run = self._open_run()
        self._settle(run)
        listing = run.listing()
        plan = plan_restore(listing, run.segments(listing), None)
        if plan.chain is not None:
            raise NotRestored(
                f"{self._path} already has step {plan.chain.ref}",
                hint="call restore() before the first step(), or use another directory",
            )
        require_fresh(listing)
        return self._begin(run, Restored(None, plan.timeline))

    def _end_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def steps(self) -> list[int]:
        """The steps that can be restored by number, on the current timeline and what led to it."""
        try:
            run = Run.open(self._path)
        except EverystepError:
            return []
        listing = run.listing()
        name = self._session.timeline if self._session else listing.current_timeline()
        return [ref.step for ref in plan_chains(listing, run.segments(listing), name).refs]

    @property
    def strategy(self) -> Strategy:
        """The one in use: with `auto` what it has chosen last, and `Full` where another has given
        up."""
        return self._sessions.strategy(self._session)

    @property
    def stats(self) -> Sequence[StepStats]:
        """What each step of this process cost, oldest first (the last 10,000)."""
        if self._session is not None:
            self._session.refresh()
        return self._log.all()

    def close(self) -> None:
        """Make every staged step durable, and give up the run. Calling it twice is no error.

        Raises:
            StoreError, TooManyFailedSteps, ReplicasDiffer: as `step` does, of what became of the
                last steps; all is given up before.
        """
        if os.getpid() != self._pid:  # a forked child has none of our threads
            return
        self._closed = True
        atexit.unregister(self.close)
        self._sessions.end()
        session = self._session
        try:
            self._end_session()
        finally:
            agent, self._agent = self._agent, None
            if agent is not None:
                agent.close()
                agent.listen(lambda message: None)  # no circle may keep the user's objects
            self._owned.close()
        if session is not None:
            session.hear()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with contextlib.suppress(*([] if error is None else [EverystepError])):  # it was logged
            self.close()
