"""Steps logged as deltas, with full ones staged in between: the strategy `Deltas`."""

from __future__ import annotations

import collections
import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

from msgspec import Struct

from everystep.agent import protocol as p
from everystep.agent.client import Agent
from everystep.blocking import Facts
from everystep.checking import Checks
from everystep.engine.meter import Cost
from everystep.errors import UsageError
from everystep.outcomes import Outcomes
from everystep.pace import Chain, Pace
from everystep.planning.failures import estimate_mtbf
from everystep.planning.intervals import Choice, Costs, Limits
from everystep.recorded import Recorded
from everystep.staged import Recording
from everystep.state.capture import Objects
from everystep.state.ranks import Ranks
from everystep.stats import StepLog
from everystep.store.retention import Retention
from everystep.store.run import StepEntry
from everystep.strategies import Deltas
from everystep.types import Json, StepRef

_log = logging.getLogger("everystep")


_FIRST_FULL_EVERY = 32
"""Until enough is measured to choose."""


class Logged(Recorded):
    """A session whose steps go to the log, and now and then, in full, through staging memory."""

    def __init__(
        self,
        facts: Facts,
        objects: Objects,
        ranks: Ranks,
        agent: Agent,
        options: Deltas,
        retention: Retention,
        known: Sequence[StepEntry],
        pinned: Sequence[StepRef],
        done: int,
        log: StepLog,
        outcomes: Outcomes,
    ) -> None:
        self._options = options
        self._mtbf_s = options.mtbf_s or _mtbf_s(facts)
        self._pace = Pace()
        self._limits = Limits(memory_bytes=options.buffer_bytes)
        self._beside = ThreadPoolExecutor(1, "everystep-plan")
        self._chosen: Future[Choice] | None = None
        self._handed: collections.deque[tuple[int, int]] = collections.deque()
        self._chain = Chain(done)
        self._base: Cost | None = None
        super().__init__(
            facts, objects, ranks, agent, options, options.full(), retention, known, pinned, done,
            log, outcomes, recording=Recording(buffer_bytes=options.buffer_bytes),
        )  # fmt: skip
        path = Path(facts.run.backend.abilities.location)
        self._checks = Checks(path, ranks.rank, objects.optimizers) if options.check else None
        if self._checks is not None and self._checks.unfit is not None:
            _log.warning("no stretch is replayed beside training: %s", self._checks.unfit)
            self._checks = None
        self._to_check: int | None = None
        every = options.full_every
        self._choice = Choice(
            _FIRST_FULL_EVERY if every == "auto" else every,
            1 if options.batch == "auto" else options.batch,
        )
        self._obey()
        self._record(objects, options, done or None, self._hand_over)

    # ------------------------------------------------------------ what the agent tells

    def _note(self, message: Struct) -> None:
        """Take a message, in a thread of the agent's client."""
        if isinstance(message, p.Logged):
            self._outcomes.stored()
            self._pace.writes.append((message.written_bytes, message.took_s))
            while self._handed and self._handed[0][0] <= message.step:
                self._chain.logged(*self._handed.popleft())
        elif isinstance(message, p.Stored):
            self._chain.stored(message.step)
        for step, nbytes in self._chain.restorable():
            self._log.durable(step, nbytes)
        if not isinstance(message, p.Logged):
            super()._note(message)

    def _hand_over(self, step: int, nbytes: int) -> None:
        self._gaps = 0
        self._handed.append((step, nbytes))
        self._pace.deltas.append(nbytes)

    def hear(self) -> None:
        """Act on what the agent has told, in the training thread; see `Staged.hear`."""
        super().hear()
        self._check()

    def _act(self, message: Struct) -> None:
        super()._act(message)
        if not isinstance(message, p.Stored):
            return
        if message.written_bytes and message.took_s > 0:
            self._pace.fulls.append((message.written_bytes, message.took_s))
        if self._recorder is not None:  # not after the end, or as `Full`
            self._choose()
            step, base = message.step, self._chain.base
            if base is not None and step > base and self._turn(step):
                self._to_check = step  # a chain's first has none before it to begin from

    def _turn(self, step: int) -> bool:
        """Whether it is up to this rank to replay up to this full checkpoint: ranks take turns."""
        return step // self._full_every % self._ranks.world_size == self._ranks.rank

    def _check(self) -> None:
        """Hear what the last replay has found, and begin the next."""
        if self._checks is None or self._recorder is None:
            return
        found = self._checks.result()
        if found is not None:
            ref, verdict = found
            if verdict.problem is not None:
                self._fall_back(f"a replay up to step {ref} gives another state: {verdict.problem}")
                return
            if verdict.skipped is not None:
                _log.info("step %s was not checked: %s", ref, verdict.skipped)
            elif verdict.steps:
                self._pace.replays.append((verdict.steps, verdict.took_s))
        step = self._to_check
        if step is not None and self._chain.newest_logged >= step:
            self._to_check = None
            ref = StepRef(self._facts.timeline, step)
            self._beside.submit(self._checks.start, ref, self._recorder.state_bytes)

    # ------------------------------------------------------------ steps

    def step(self, ref: StepRef, metrics: dict[str, Json]) -> None:
        """End a step; see `Checkpointer.step`."""
        cost = self._engine.cost
        super().step(ref, metrics)
        self._pace.steps.append(cost)

    def _broken(self) -> str | None:
        if self._base is None or self._base.error is None:
            return None
        return f"the full that the chain begins with is lost: {self._base.error}"

    def _begin_chain(self, step: int, cost: Cost) -> None:
        self._base = cost
        self._chain.begin(step)

    def _fall_back(self, why: str) -> None:
        super()._fall_back(why)
        if self._checks is not None:
            self._checks.close()
        self._engine.set_every(1)

    # ------------------------------------------------------------ how often

    def _choose(self) -> None:
        """Follow the cost model, where that is left to us: it is asked beside training, and obeyed
        at the next word from the agent."""
        if self._chosen is not None and self._chosen.done():
            choice, self._chosen = self._chosen.result(), None
            if choice != self._choice:
                self._choice = choice
                self._obey()
        costs = self._pace.costs(self._mtbf_s)
        wanted = "auto" in (self._options.full_every, self._options.batch)
        if costs is not None and wanted and self._chosen is None:
            self._chosen = self._beside.submit(
                _best, self._choice, costs, self._limits, self._options
            )

    def _obey(self) -> None:
        every = self._choice.full_every
        if self._options.full_every == "auto" and self._ranks.world_size > 1:
            every = 1 << max(0, every.bit_length() - 1)  # ranks choose on their own, yet alike
        self._full_every = every
        self._engine.set_every(every)
        self._agent.log.set_batch(self._choice.batch)

    def close(self) -> None:
        """Stage what is under way, and hand over the last deltas. The agent goes on."""
        try:
            super().close()
        finally:
            self._beside.shutdown()
            if self._checks is not None:
                self._checks.close()


def _best(now: Choice, costs: Costs, limits: Limits, options: Deltas) -> Choice:
    """The choice after the costs were measured again; what the user has set stays."""
    full_every = None if options.full_every == "auto" else options.full_every
    batch = None if options.batch == "auto" else options.batch
    try:
        return now.observe(costs, limits, full_every=full_every, batch=batch)
    except UsageError:  # the store cannot take it all: what can be had is had
        return Choice(now.full_every, batch or 1)


def _mtbf_s(facts: Facts) -> float:
    """The mean time between failures, from when the run was started."""
    starts = sorted(
        datetime.fromisoformat(session.created)
        for session in facts.run.listing().sessions
        if session.timeline == facts.timeline
    )
    observed_s = (starts[-1] - starts[0]).total_seconds() if starts else 0.0
    return estimate_mtbf(max(0, len(starts) - 1), max(0.0, observed_s)).mean_s
