"""The strategy `auto`: begins as `Full`, measures, and changes to what wastes the least time.

Ranks decide by what all of them have measured, which they tell each other through small files, and
change at a step that is far enough ahead for all to have heard of it: none waits for another.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from everystep.agent.arena import available_bytes
from everystep.agent.client import Agent
from everystep.agent.hosts import host
from everystep.blocking import Facts as Session
from everystep.engine.owned import unrepeatable
from everystep.errors import EverystepError, StoreError, UsageError
from everystep.mirrored import Mirrored
from everystep.observed import Observed
from everystep.planning.choosing import Name, choose
from everystep.planning.facts import Facts, slowest
from everystep.planning.failures import estimate_mtbf
from everystep.recorded import Recorded
from everystep.recovery.classes import elsewhere, unfit
from everystep.staged import Staged
from everystep.state.objects import Objects
from everystep.state.ranks import Ranks
from everystep.stats import StepLog
from everystep.store.ballots import Ballot, Ballots
from everystep.store.restarts import restarts_of
from everystep.strategies import Deltas, Full, Replica

_log = logging.getLogger("everystep")

STRATEGIES: dict[Name, Full | Deltas | Replica] = {
    "full": Full(), "deltas": Deltas(), "replica": Replica(),
}  # fmt: skip

FIRST_S = 10.0
"""Into a session the first choice is made, or later, if a step takes more than a second."""

AGAIN_S = 120.0
"""From one choice to the next."""

ALIKE = 3
"""So many choices must come to the same before a strategy that works is left."""

LOOK_S = 1.0
"""Between two looks for what other ranks have told."""

LEAD_S, LEAD_STEPS = 30.0, 64
"""So much later than the last rank has heard of it is a change, and at a multiple of the latter."""

MEMORY_SHARE = 0.8
"""Of the memory that is left, what agents may take."""


class _Change(NamedTuple):
    name: Name
    at: int
    """After this step."""


class Automatic:
    """Chooses for a run, as long as this process has it.

    Args:
        objects: the state's owners. Hooks are set on their optimizers until `end`.
        ranks: this process's place in the job.
        log: of all steps.
    """

    def __init__(self, objects: Objects, ranks: Ranks, log: StepLog) -> None:
        self._objects, self._ranks, self._log = objects, ranks, log
        self._excluded: dict[str, str] = _unsuited(objects)
        """By name, what this run cannot have, and why. It only grows."""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._observed: Observed | None = None

    # ------------------------------------------------------------ a session

    def begin(self, session: Session, agent: Agent) -> None:
        """A session begins, with `Full`."""
        self.end()
        if not self._objects.optimizers:
            return  # nothing is updated
        ranks = self._ranks
        self._session, self._agent, self._done = session, agent, 0
        self._ballots = Ballots(session.run.backend, session.number, ranks.rank, ranks.world_size)
        self._ballots.forget()
        self._ballot = Ballot(round=0, host=host(), facts={}, heard=0, step=0)
        self._syncs: collections.deque[float] = collections.deque(maxlen=5)
        self._answers: collections.deque[Name] = collections.deque(maxlen=ALIKE)
        self._now: Name = "full"
        self._change: _Change | None = None
        self._looking = False
        self._next_s = time.monotonic() + FIRST_S
        self._stop.clear()
        self._observed = Observed(self._objects, ranks)

    def watch(self, session: Staged) -> None:
        """Measure this one from now on."""
        if self._observed is not None:
            self._observed.begin_again()
            session.watcher = self._observed.heard

    def end(self) -> None:
        """The session ends: nothing is chosen any more."""
        observed, self._observed = self._observed, None
        if observed is None:
            return
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._thread = None
        observed.close()
        self._ballots.forget()

    # ------------------------------------------------------------ in the training thread

    def due(self, session: Staged, done: int) -> Full | Deltas | Replica | None:
        """The strategy to change to now, all before being durable; None: there is no change. To be
        asked when a step is about to end.

        Args:
            session: the present one.
            done: the steps before.
        """
        observed = self._observed
        if observed is None:
            return None
        self._done = done
        self._hear_of_failure(session)
        observed.step(session.cost)
        if self._change is not None:
            return self._changed(session, done)
        if self._thread is not None and not self._thread.is_alive():
            self._thread = None
        if self._thread is None and observed.is_ready and time.monotonic() >= self._next_s:
            self._advance(observed)
        return None

    def _hear_of_failure(self, session: Staged) -> None:
        if isinstance(session, Recorded) and session.given_up is not None:
            name: Name = "replica" if isinstance(session, Mirrored) else "deltas"
            if name not in self._excluded:
                self._excluded = {**self._excluded, name: session.given_up}
                self._next_s = 0.0

    def _advance(self, observed: Observed) -> None:
        """Look at the gradients of one step, and then decide in a thread."""
        if not self._looking:
            self._looking = True
            observed.look_at_gradients()
        elif observed.has_looked():
            self._looking = False
            self._next_s = time.monotonic() + AGAIN_S
            self._thread = threading.Thread(target=self._decide, name="everystep-auto", daemon=True)
            self._thread.start()

    def _changed(self, session: Staged, done: int) -> Full | Deltas | Replica | None:
        change = self._change
        if change is None or done < change.at:
            return None
        session.flush()
        session.refresh()
        staged = next((one for one in reversed(self._log.all()) if one.staged), None)
        if staged is not None and not staged.durable:
            # the store does not take it: what is in memory would be given up
            self._change = change._replace(at=done + LEAD_STEPS)
            return None
        self._now, self._change = change.name, None
        self._answers.clear()
        self._next_s = time.monotonic() + AGAIN_S
        return STRATEGIES[change.name]

    # ------------------------------------------------------------ in a thread of its own

    def _decide(self) -> None:
        """One round: measure, tell, hear, choose."""
        try:
            facts = self._measured()
            if facts is None:
                self._next_s = time.monotonic() + FIRST_S
            elif (told := self._told_by_all(facts)) is not None:
                self._choose(*told)
        except (EverystepError, msgspec.ValidationError) as error:
            _log.warning("auto: nothing can be chosen now: %s", error)

    def _measured(self) -> Facts | None:
        session, observed = self._session, self._observed
        started_s = time.monotonic()
        self._ballots.cast(self._ballot)  # once more: to see how long a small write takes
        self._syncs.append(time.monotonic() - started_s)
        failures, observed_s = restarts_of(session.run, self._ranks.rank)
        if observed is None:
            return None
        return observed.facts(
            mtbf_s=estimate_mtbf(failures, observed_s).mean_s,
            sync_s=statistics.median(self._syncs),
            deltas=self._now == "deltas",
            excluded=self._excluded,
        )

    def _told_by_all(self, facts: Facts) -> tuple[Sequence[Ballot], int] | None:
        """The ballots of all ranks, once each has read all, and the newest step that any rank had
        done by then; None: the session has ended before."""
        number = self._ballot.round + 1
        self._cast(
            round=number, facts=msgspec.to_builtins(facts), available_bytes=available_bytes(),
            held_bytes=_held_bytes(self._agent.pid),
        )  # fmt: skip
        while (ballots := self._ballots.begun(number)) is None:
            if self._stop.wait(LOOK_S):
                return None
        self._cast(heard=number, step=self._done)
        while (heard := self._ballots.heard(number)) is None:
            if self._stop.wait(LOOK_S):
                return None
        return ballots, max(ballot.step for ballot in heard)

    def _cast(self, **changes: object) -> None:
        self._ballot = msgspec.structs.replace(self._ballot, **changes)
        while not self._stop.is_set():
            with contextlib.suppress(StoreError):
                self._ballots.cast(self._ballot)
                return
            self._stop.wait(LOOK_S)

    def _choose(self, ballots: Sequence[Ballot], step: int) -> None:
        """What all ranks choose alike, and when they change.

        Args:
            step: see `_told_by_all`.
        """
        facts, now = slowest([_facts_of(one, ballots) for one in ballots]), self._now
        try:
            verdict = choose(facts, now)
            answer, reason = verdict.strategy, verdict.reason
        except UsageError as error:
            answer, reason = now, f"{now} goes on: {error.headline()}"
        self._answers.append(answer)
        first, is_sure = self._ballot.round == 1, self._answers.count(answer) == ALIKE
        changes = answer != now and (first or is_sure or now in facts.excluded)
        if changes:
            self._change = _Change(answer, self._when(step, facts))
        if (first or changes) and self._ranks.rank == 0:
            _log.info("auto: %s", reason)

    def _when(self, step: int, facts: Facts) -> int:
        if self._ranks.world_size == 1:
            return step
        after = step + max(LEAD_STEPS, int(LEAD_S / facts.step_s))
        return -(-after // LEAD_STEPS) * LEAD_STEPS


def _facts_of(ballot: Ballot, ballots: Sequence[Ballot]) -> Facts:
    """What a rank has measured, and its part of its host's memory.

    Raises:
        UsageError: a figure that makes no sense.
    """
    facts = msgspec.convert(ballot.facts, Facts)
    if ballot.available_bytes is None:
        return facts
    here = sum(other.host == ballot.host for other in ballots)
    memory = ballot.held_bytes + int(MEMORY_SHARE * ballot.available_bytes / here)
    return msgspec.structs.replace(facts, host_memory_bytes=memory)


def _unsuited(objects: Objects) -> dict[str, str]:
    """The strategies that this run cannot have, as far as that is known before it begins."""
    not_again = [why for one in objects.optimizers.values() if (why := unrepeatable(one))]
    not_there = [why for why in (unfit(objects.kinds), elsewhere(objects.parameters)) if why]
    found = {}
    if not_again:
        found["deltas"] = not_again[0]
    if not_again or not_there:
        found["replica"] = [*not_again, *not_there][0]
    return found


def _held_bytes(pid: int) -> int:
    """Of shared memory, which staging is, by a process."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssShmem:"):
                return int(line.split()[1]) << 10
    return 0
