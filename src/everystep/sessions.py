"""From one restore to the next: who stores the steps, one strategy or several in turn."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

from everystep.agent.client import Agent
from everystep.automatic import STRATEGIES, Automatic
from everystep.blocking import Blocking, Facts
from everystep.engine.meter import Cost, Lane
from everystep.errors import UsageError
from everystep.logged import Logged
from everystep.mirrored import Mirrored
from everystep.outcomes import Outcomes
from everystep.recorded import Recorded
from everystep.shadowed import Shadowed
from everystep.staged import Given, Staged
from everystep.state.objects import Objects
from everystep.state.ranks import Ranks
from everystep.stats import StepLog
from everystep.store.retention import Retention, Upkeep
from everystep.store.run import StepEntry
from everystep.strategies import Deltas, Full, Replica, Shadow
from everystep.types import StepRef

Strategy = Full | Deltas | Replica | Shadow

Session = Blocking | Staged  # or Logged, Mirrored or Shadowed, which are such


class Sessions:
    """Makes the sessions of a process.

    Args:
        strategy: as `Checkpointer` takes it.
        objects: the state's owners.
        ranks: this process's place in the job.
        retention: which checkpoints to keep.
        log: of all steps.
        outcomes: what to do when a step cannot be stored.

    Raises:
        UsageError: it is no strategy.
    """

    def __init__(
        self,
        strategy: Strategy | Literal["auto"],
        objects: Objects,
        ranks: Ranks,
        retention: Retention,
        log: StepLog,
        outcomes: Outcomes,
    ) -> None:
        self._options = STRATEGIES["full"] if strategy == "auto" else strategy
        if not isinstance(self._options, Full | Deltas | Replica | Shadow):
            hint = "Full(…), Deltas(…), Replica(…) or Shadow(…) of everystep, or 'auto'"
            raise UsageError(f"strategy={strategy!r}: not a strategy", hint=hint)
        self.blocking = isinstance(self._options, Full) and self._options.blocking
        self._objects, self._ranks, self._retention = objects, ranks, retention
        self._log, self._outcomes = log, outcomes
        self._automatic = Automatic(objects, ranks, log) if strategy == "auto" else None
        self._using = self._options

    @property
    def shadow(self) -> Shadow | None:
        """The shadow of this run, if it is to have one."""
        return self._options if isinstance(self._options, Shadow) else None

    def begin(
        self,
        facts: Facts,
        agent: Agent | None,
        known: Sequence[StepEntry],
        pinned: Sequence[StepRef],
        done: int,
    ) -> Session:
        """The first of what a restore begins.

        Args:
            agent: None: steps are stored by this process.
            known: steps of the timeline that are there.
            pinned: steps to keep in any case.
            done: steps.
        """
        self._facts, self._agent, self._pinned = facts, agent, pinned
        if self._automatic is not None and agent is not None:
            self._automatic.begin(facts, agent)
        return self._made(self._options, facts, known, done)

    def next(self, session: Session, done: int) -> Session:
        """The one that the step which is about to end belongs to: another one, where the strategy
        changes now.

        Args:
            session: that of the step before.
            done: the steps before.
        """
        if not isinstance(session, Staged):
            return session
        started_s, past = time.monotonic(), session.cost
        chosen = None if self._automatic is None else self._automatic.due(session, done)
        options = chosen or session.successor
        if options is None:
            return session
        if chosen is None:  # else it has been asked whether that goes well
            session.flush()  # what it has in hand becomes durable first
        session.close()
        whole = session.whole_parameters and chosen is None  # the other ranks may have not changed
        facts = self._facts._replace(whole_parameters=whole, unmoved=False)
        steps = facts.run.listing().steps
        known = [entry for entry in steps if entry.ref.timeline == facts.timeline]
        following = self._made(options, facts, known, done)
        if isinstance(following, Staged):
            _carry_over(past, following.cost, started_s)
        return following

    def _made(
        self, options: Strategy, facts: Facts, known: Sequence[StepEntry], done: int
    ) -> Session:
        agent, objects, ranks = self._agent, self._objects, self._ranks
        log, outcomes = self._log, self._outcomes
        self._using = options
        if agent is None:
            upkeep = Upkeep(facts.run, self._retention, ranks.rank, known, self._pinned)
            return Blocking(facts, objects, ranks, upkeep, done, log, outcomes)
        given = Given(
            facts, objects, ranks, agent, self._retention, known, self._pinned, done, log, outcomes
        )
        session: Staged
        if isinstance(options, Deltas):
            session = Logged(given, options)
        elif isinstance(options, Replica):
            session = Mirrored(given, options)
        elif isinstance(options, Shadow):
            session = Shadowed(given, options)
        else:
            session = Staged(given, options)
        if self._automatic is not None:
            self._automatic.watch(session)
        return session

    def strategy(self, session: Session | None) -> Strategy:
        """The one in use, where this is the session."""
        given_up = isinstance(session, Recorded) and session.given_up is not None
        return Full(every=1) if given_up else self._using

    def end(self) -> None:
        """There is no next one."""
        if self._automatic is not None:
            self._automatic.end()


def _carry_over(past: Cost, cost: Cost, changed_from_s: float) -> None:
    """The step that is about to end began in the session before, and waits for the change."""
    now_s = time.monotonic()
    for name in ("begun_s", "forward_s", "backward_s", "update_s"):
        setattr(cost, name, getattr(past, name))
    cost.lanes = [*past.lanes, Lane("stall", changed_from_s, now_s)]
    cost.staging_s += now_s - changed_from_s
