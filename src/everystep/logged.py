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
from everystep.engine.recorder import BEHIND, Recorder
from everystep.errors import Unsupported, UsageError
from everystep.outcomes import Outcomes
from everystep.pace import Chain, Pace
from everystep.planning.failures import estimate_mtbf
from everystep.planning.intervals import Choice, Costs, Limits
from everystep.saving import versions
from everystep.staged import Staged
from everystep.state.capture import Objects
from everystep.state.ranks import Ranks
from everystep.stats import StepLog
from everystep.store.retention import Retention
from everystep.store.run import StepEntry
from everystep.strategies import Deltas
from everystep.types import Json, StepRef

_log = logging.getLogger("everystep")

_MOST_GAPS = 3
"""So many steps in a row that cannot be written as deltas, and `Full` takes over."""

_MOST_AT_ONCE = 16
"""Deltas per write that `auto` may choose: what a write costs besides its bytes is not measured."""

_FIRST_FULL_EVERY = 32
"""Until enough is measured to choose."""


class Logged(Staged):
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
        self._recorder: Recorder | None = None
        self._handed: collections.deque[tuple[int, int]] = collections.deque()
        self._chain = Chain(done)
        self._gaps = 0
        self._base: Cost | None = None
        super().__init__(
            facts, objects, ranks, agent, options.full(), retention, known, pinned, done, log,
            outcomes, buffer_bytes=options.buffer_bytes,
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
        try:
            self._recorder = Recorder(
                objects,
                ranks,
                agent.log,
                policy=options.policy,
                share_replicas=facts.share_replicas,
                chained=done or None,
                slices=options.slices,
                versions=versions(),
                told=self._hand_over,
            )
        except Unsupported as error:
            self._fall_back(error.headline())

    # ------------------------------------------------------------ what the agent tells

    def _note(self, message: Struct) -> None:
        """Take a message, in a thread of the agent's client."""
        if isinstance(message, p.Logged):
            self._outcomes.stored()
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
        stored = [m for m in list(self._heard) if isinstance(m, p.Stored)]
        failed = [m for m in list(self._heard) if isinstance(m, p.NotLogged)]
        super().hear()
        if self._recorder is not None:
            self._recorder.share_replicas = self._engine.share_replicas
        for message in failed:
            self._refused(message.step, message.error)
        for full in stored:
            if full.written_bytes and full.took_s > 0:
                self._pace.fulls.append((full.written_bytes, full.took_s))
        if stored and self._recorder is not None:  # not after the end, or as `Full`
            self._choose()
            step, base = stored[-1].step, self._chain.base
            if base is not None and step > base and self._turn(step):
                self._to_check = step  # a chain's first has none before it to begin from
        self._check()

    def _turn(self, step: int) -> bool:
        """Whether it is up to this rank to replay up to this full checkpoint: ranks take turns."""
        size = self._ranks.world_size
        return step // max(1, self._choice.full_every) % size == self._ranks.rank

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
                self._pace.replay_s = verdict.took_s / verdict.steps
        step = self._to_check
        if step is not None and self._chain.newest_logged >= step:
            self._to_check = None
            ref = StepRef(self._facts.timeline, step)
            self._beside.submit(self._checks.start, ref, self._recorder.state_bytes)

    # ------------------------------------------------------------ steps

    def step(self, ref: StepRef, metrics: dict[str, Json]) -> None:
        """End a step; see `Checkpointer.step`."""
        cost = self._engine.cost
        if self._recorder is not None:
            problem = self._recorder.step(ref.step, metrics, cost)
            if problem is None and self._base is not None and self._base.error is not None:
                problem = f"the full that the chain begins with is lost: {self._base.error}"
            if problem is not None:
                self._base = cost
                self._gap(ref, problem)
        super().step(ref, metrics)
        self._pace.steps.append(cost)
        if self._recorder is not None and cost.due and cost.error is None:
            self._recorder.full_stored(ref.step)

    def _gap(self, ref: StepRef, problem: str) -> None:
        """A step that cannot be written as a delta is stored in full."""
        self._engine.owe()
        begins = self._chain.base is None
        self._chain.begin(ref.step)
        if begins:
            return
        if BEHIND not in problem:
            self._gaps += 1
        _log.warning("step %s is stored in full, not as a delta: %s", ref, problem)
        if self._gaps >= _MOST_GAPS:
            self._fall_back(problem)

    def _fall_back(self, why: str) -> None:
        """Go on as `Full` does."""
        _log.error("Deltas cannot record this run (%s): every step is stored in full instead", why)
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.close()
        if self._checks is not None:
            self._checks.close()
        self._engine.set_every("auto")

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
            self._chosen = self._beside.submit(_best, self._choice, costs, self._limits)

    def _obey(self) -> None:
        every, batch = self._choice.full_every, min(self._choice.batch, _MOST_AT_ONCE)
        if self._options.full_every != "auto":
            every = self._options.full_every
        elif self._ranks.world_size > 1:  # ranks choose on their own, and must choose alike
            every = 1 << max(0, every.bit_length() - 1)
        if self._options.batch != "auto":
            batch = self._options.batch
        self._engine.set_every(every)
        self._agent.log.set_batch(batch)

    def flush(self) -> None:
        """Make the newest step durable, if the store takes it."""
        if self._recorder is not None:
            self._recorder.settle()
        super().flush()

    def close(self) -> None:
        """Stage what is under way, and hand over the last deltas. The agent goes on."""
        recorder, self._recorder = self._recorder, None
        try:
            lost = None if recorder is None else recorder.close()
            if lost is not None:
                _log.error("%s", lost)
        finally:
            self._beside.shutdown()
            if self._checks is not None:
                self._checks.close()
            super().close()


def _best(now: Choice, costs: Costs, limits: Limits) -> Choice:
    try:
        return now.observe(costs, limits)
    except UsageError:  # the store cannot take it all: what can be had is had
        return Choice(now.full_every, 1)


def _mtbf_s(facts: Facts) -> float:
    """The mean time between failures, from when the run was started."""
    starts = sorted(
        datetime.fromisoformat(session.created)
        for session in facts.run.listing().sessions
        if session.timeline == facts.timeline
    )
    observed_s = (starts[-1] - starts[0]).total_seconds() if starts else 0.0
    return estimate_mtbf(max(0, len(starts) - 1), max(0.0, observed_s)).mean_s
