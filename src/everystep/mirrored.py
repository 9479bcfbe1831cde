"""Steps folded by the agent as they come, and written now and then: the strategy `Replica`."""

from __future__ import annotations

import logging
from pathlib import Path

from msgspec import Struct

from everystep.agent import protocol as p
from everystep.agent.handover import Lost
from everystep.agent.hosts import plan
from everystep.engine.meter import Cost
from everystep.pace import Persisting
from everystep.recorded import Recorded, for_copies
from everystep.recovery.classes import elsewhere, names_of, search_paths, unfit
from everystep.staged import Given, Recording
from everystep.store.newest import Newest
from everystep.strategies import Full, Replica
from everystep.types import Json, StepRef

_log = logging.getLogger("everystep")


class Mirrored(Recorded):
    """A session whose agent holds a second copy of the state, and does each step again."""

    strategy = "Replica"

    def __init__(self, given: Given, options: Replica) -> None:
        facts, objects, ranks = given.facts, given.objects, given.ranks
        self._options = options
        self._lost: str | None = None
        """Why the agent has no replica now."""
        self._unfoldable: str | None = None
        """Why it will not have one again."""
        self._base: Cost | None = None
        self._newest = 0
        self._noticed: str | None = None
        """The same, once a step is taken whole for it."""
        self._pace = Persisting(options.persist_every, options.mtbf_s, alike=ranks.world_size > 1)
        super().__init__(
            for_copies(given), options, options.full(),
            recording=Recording(
                options.buffer_bytes, options.log, True, names_of(objects.kinds), search_paths(),
                plan(Path(facts.run.backend.abilities.location), facts.number, ranks,
                     options.peers),
            ),
        )  # fmt: skip
        reason = unfit(objects.kinds) or elsewhere(objects.parameters)
        if reason is not None:
            self._fall_back(reason)
        else:  # the copy begins with a full checkpoint of this process
            self._record(objects, options, None, self._hand_over, plain=not options.log)
        self._agent.log.persist_every(self._pace.every)

    def _note(self, message: Struct) -> None:
        """Take a message, in a thread of the agent's client."""
        if isinstance(message, Lost):
            self._lost = "the agent has died, and its copy with it"
        elif isinstance(message, p.NotFolded):
            self._unfoldable = f"step {message.step}: {message.reason}"
        elif isinstance(message, p.Folded):
            self._pace.folds.append(message.took_s)
        else:
            if isinstance(message, p.Stored):
                self._pace.writes.append(message.took_s)
            super()._note(message)

    def _hand_over(self, step: int, nbytes: int) -> None:
        self._gaps = 0

    def step(self, ref: StepRef, metrics: dict[str, Json]) -> None:
        """End a step; see `Checkpointer.step`."""
        cost, self._newest = self._engine.cost, ref.step
        super().step(ref, metrics)
        self._pace.steps.append(cost)
        self._agent.log.persist_every(self._pace.choose())
        if self._noticed is not None and self._recorder is not None:
            self._fall_back(self._noticed)

    def _broken(self) -> str | None:
        lost, self._lost, self._noticed = self._lost, None, self._unfoldable
        if self._base is not None and self._base.error is not None:
            lost = lost or f"the full that the copy begins with is lost: {self._base.error}"
        return lost or self._noticed

    def _begin_chain(self, step: int, cost: Cost) -> None:
        self._base = cost
        self._rebase(step, cost)

    def close(self) -> None:
        """Stage what is under way, and hand over the last deltas. The agent goes on."""
        recorded = self._recorder is not None
        super().close()
        if recorded:
            self._agent.settle()
            self._say_what_is_lost()
        ranks, run = self._ranks, self._facts.run
        if self.successor is not None and ranks.world_size > 1:
            newest = Newest(run.backend, self._facts.number, ranks.rank, ranks.world_size)
            newest.stand_back()  # the other ranks' agents must not wait for word from this one's

    def flush(self) -> None:
        """Make the newest step durable, if the store takes it."""
        super().flush()
        if self._recorder is not None:
            self._say_what_is_lost()

    def _say_what_is_lost(self) -> None:
        """No step comes that could be taken whole."""
        why, entry = self._lost or self._unfoldable, self._log.get(self._newest)
        if why is not None and entry is not None and not entry.durable:
            _log.error("the newest steps are not stored: %s", why)

    def _fall_back(self, why: str) -> None:
        super()._fall_back(why)
        full = self._options.full()
        self.successor = Full(every=1, snapshot_bytes=full.snapshot_bytes, linger_s=full.linger_s)
