"""Steps stored by the training process itself, before `step()` returns: the base case."""

from __future__ import annotations

import logging
import time
from typing import NamedTuple

from everystep.agent.writer import keep_identity, not_removed, ranks_behind
from everystep.errors import StoreError
from everystep.outcomes import Outcomes
from everystep.saving import Writer, save
from everystep.state.capture import capture
from everystep.state.objects import Objects
from everystep.state.ranks import Ranks
from everystep.stats import StepLog
from everystep.store.retention import Upkeep
from everystep.store.run import Run
from everystep.types import Json, StepRef

_log = logging.getLogger("everystep")


class Facts(NamedTuple):
    """What a session is about."""

    run: Run
    """With a backend that writes."""
    number: int
    timeline: str
    identity: list[tuple[str, bytes]]
    """Files to write again should the directory lose them: name and bytes."""
    share_replicas: bool
    whole_parameters: bool = False
    """Of what ranks share out, a parameter and its slots go to one rank: some rank may have a
    replica."""
    unmoved: bool = True
    """The state is still the one that the session begins from."""


class Blocking:
    """Writes each step in `step()`."""

    def __init__(
        self,
        facts: Facts,
        objects: Objects,
        ranks: Ranks,
        upkeep: Upkeep,
        done: int,
        log: StepLog,
        outcomes: Outcomes,
    ) -> None:
        self.timeline = facts.timeline
        self._restored = done
        self._facts, self._objects, self._ranks = facts, objects, ranks
        self._upkeep, self._log, self._outcomes = upkeep, log, outcomes
        self._share_replicas = facts.share_replicas

    def step(self, ref: StepRef, metrics: dict[str, Json]) -> None:
        """Make this rank's part of a step durable."""
        started = time.perf_counter()
        entry = self._log.begin(ref.step, self._restored)
        try:
            written = self._save(ref, metrics)
            self._log.durable(ref.step, written)
            self._outcomes.stored()
            self._look_after(ref)
        except StoreError as error:
            entry.error = error.headline()
            entry.durable_lag_steps = entry.staged_lag_steps = self._log.durable_lag(ref.step)
            self._outcomes.failed(ref, error)
        finally:
            entry.stall_s = entry.bookkeeping_s = time.perf_counter() - started

    def _save(self, ref: StepRef, metrics: dict[str, Json]) -> int:
        facts = self._facts
        if self._ranks.rank == 0:
            lost = keep_identity(facts.run.backend, facts.identity)
            if lost is not None:
                _log.warning("%s", lost)
        writer = Writer(facts.run.id, facts.number, self._ranks, self._share_replicas)
        state = capture(self._objects, self._ranks.world_size)
        return save(facts.run.backend, writer, ref, state, metrics)

    def _look_after(self, ref: StepRef) -> None:
        """Retention, and a look at the other ranks; never a reason to end training by itself."""
        try:
            waiting = self._upkeep.after_step(ref, self._facts.number)
        except StoreError as error:
            _log.error("%s", not_removed(error))
            return
        diverged, late = ranks_behind(waiting)
        if late is not None:
            _log.warning("%s", late)
        if diverged is not None and self._share_replicas:
            self._share_replicas = False
            self._outcomes.diverged(diverged)

    def refresh(self) -> None:
        """The statistics are up to date already."""

    def flush(self) -> None:
        """Every step is durable already."""

    def hear(self) -> None:
        """There is nothing that this process has not seen itself."""

    def close(self) -> None:
        """Finish removing what may go."""
        try:
            self._upkeep.close()
        except StoreError as error:
            _log.error("%s", not_removed(error))
