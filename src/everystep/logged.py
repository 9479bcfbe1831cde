"""Steps logged as deltas, with full ones between that training stages, or that the agent makes: the
strategy `Deltas`."""

from __future__ import annotations

import collections
import logging
import statistics
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import msgspec
from msgspec import Struct

from everystep.agent import protocol as p
from everystep.agent.handover import Lost
from everystep.blocking import Facts
from everystep.checking import Checks
from everystep.compacting import compacts
from everystep.engine.meter import Cost
from everystep.errors import UsageError
from everystep.pace import Chain, Pace
from everystep.planning.failures import estimate_mtbf
from everystep.planning.intervals import Choice, Costs, Limits
from everystep.recorded import Recorded, for_copies
from everystep.recovery.classes import names_of, search_paths
from everystep.staged import Given, Recording
from everystep.strategies import Deltas
from everystep.types import Json, StepRef

_log = logging.getLogger("everystep")


_FIRST_FULL_EVERY = 32
"""Until enough is measured to choose."""

_FOLDS_KEPT = 64


class Logged(Recorded):
    """A session whose steps go to the log, and now and then, in full, through staging memory."""

    def __init__(self, given: Given, options: Deltas) -> None:
        facts, objects = given.facts, given.objects
        self._options = options
        self._mtbf_s = options.mtbf_s or _mtbf_s(facts)
        self._pace = Pace()
        self._limits = Limits(memory_bytes=options.buffer_bytes)
        self._beside = ThreadPoolExecutor(1, "everystep-plan")
        self._chosen: Future[Choice] | None = None
        self._handed: collections.deque[tuple[int, int]] = collections.deque()
        self._chain = Chain(given.done)
        self._base: Cost | None = None
        self._compacts = compacts(objects, options)
        """The agent makes the full checkpoints after the first."""
        self._copied: Cost | None = None
        """The full checkpoint that its copy begins from."""
        self._lost = False
        """It has died, and its copy with it."""
        self._folds: collections.deque[float] = collections.deque(maxlen=_FOLDS_KEPT)
        """Seconds."""
        self._not_folded: p.NotFolded | None = None
        recording = Recording(options.buffer_bytes, logs=True)
        if self._compacts:
            recording = Recording(
                options.buffer_bytes, logs=True, replica=True, compacts=True,
                classes=names_of(objects.kinds), paths=search_paths(),
            )  # fmt: skip
            given = for_copies(given)
        full = options.full(compacts=self._compacts)
        super().__init__(given, options, full, recording=recording)
        self._objects = objects
        self._checks = None if self._compacts else self._made_checks()  # a copy proves each step
        self._to_check: int | None = None
        every = options.full_every
        self._choice = Choice(
            _FIRST_FULL_EVERY if every == "auto" else every,
            1 if options.batch == "auto" else options.batch,
        )
        self._obey()
        chained = (given.done or None) if facts.unmoved else None
        self._record(objects, options, chained, self._hand_over)

    def _made_checks(self) -> Checks | None:
        """What replays the log beside training; None: it is not wanted, or cannot be."""
        if not self._options.check:
            return None
        path = Path(self._facts.run.backend.abilities.location)
        checks = Checks(path, self._ranks.rank, self._objects.optimizers)
        if checks.unfit is not None:
            _log.warning("no stretch is replayed beside training: %s", checks.unfit)
            return None
        return checks

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
        elif isinstance(message, p.Folded):
            self._folds.append(message.took_s)
        elif isinstance(message, p.NotFolded):
            self._not_folded = message
            if self._recorder is None:
                self._say_what_is_wrong()
        elif isinstance(message, Lost):
            self._lost = True
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
        if self._compacts:
            self._renew_copy(ref, cost)
        super().step(ref, metrics)
        self._pace.steps.append(cost)
        if self._not_folded is not None and self._recorder is not None:
            self._end_copy(self._not_folded)

    def _renew_copy(self, ref: StepRef, cost: Cost) -> None:
        """Let the agent's copy begin from this step, where it has none. The log goes on."""
        first = self._copied is None  # the engine takes it anyway
        why = "the agent that held the last one has died" if self._lost else None
        if self._copied is not None and self._copied.error is not None:
            why = f"step {self._copied.step} is not staged"
        if not first and why is None:
            return
        self._copied, self._lost = cost, False
        if why is not None:
            _log.warning("the agent's copy begins anew from step %s: %s", ref, why)
            self._engine.owe(wait=self._policy == "block")
            self._rebase(ref.step, cost)

    def _end_copy(self, told: p.NotFolded) -> None:
        """The agent makes no full checkpoints any more. The log goes on, and other ranks' agents
        make theirs of the same steps."""
        self._not_folded = None
        if told.differs:
            self._fall_back(f"step {told.step}: {told.reason}")
            return
        _log.error(
            "the agent makes no full checkpoints any more, training takes them: %s", told.reason
        )
        self._compacts = False
        self._checks = self._made_checks()
        self._obey()

    def _broken(self) -> str | None:
        if self._base is None or self._base.error is None:
            return None
        return f"the full that the chain begins with is lost: {self._base.error}"

    def _say_what_is_wrong(self) -> None:
        """No step comes that could be taken in another way."""
        told, self._not_folded = self._not_folded, None
        if told is not None and told.differs:
            _log.error("the log is of no use from step %s on: %s", told.step, told.reason)

    def _begin_chain(self, step: int, cost: Cost) -> None:
        self._base = self._copied = cost
        self._chain.begin(step)
        if self._compacts:
            self._lost = False
            self._rebase(step, cost)

    def _fall_back(self, why: str) -> None:
        super()._fall_back(why)
        if self._checks is not None:
            self._checks.close()
        if not self._compacts:
            self._engine.set_every(1)
            return
        # the copy has the only slot of staging memory
        self.successor = msgspec.structs.replace(self._options.full(), every=1)

    # ------------------------------------------------------------ how often

    def _choose(self) -> None:
        """Follow the cost model, where that is left to us: it is asked beside training, and obeyed
        at the next word from the agent."""
        if self._chosen is not None and self._chosen.done():
            choice, self._chosen = self._chosen.result(), None
            if choice != self._choice:
                self._choice = choice
                self._obey()
        costs = self._figures()
        wanted = "auto" in (self._options.full_every, self._options.batch)
        if costs is not None and wanted and self._chosen is None:
            self._chosen = self._beside.submit(
                _best, self._choice, costs, self._limits, self._options
            )

    def _figures(self) -> Costs | None:
        """The figures of the cost model; None: too little is known."""
        costs = self._pace.costs(self._mtbf_s)
        if costs is None or not self._compacts:
            return costs
        if not self._folds:
            return None
        fold_s = statistics.median(self._folds)
        return msgspec.structs.replace(
            costs, fold_s=fold_s, full_stall_s=0.0, replay_s=min(fold_s, costs.step_s)
        )

    def _obey(self) -> None:
        every = self._choice.full_every
        if self._options.full_every == "auto" and self._ranks.world_size > 1:
            # they choose on their own, yet alike
            every = 1 << (every.bit_length() - 1)
        self._full_every = every
        if self._compacts:
            self._agent.log.persist_every(every)
        else:
            self._engine.set_every(every)
        self._agent.log.set_batch(self._choice.batch)

    def close(self) -> None:
        """Stage what is under way, and hand over the last deltas. The agent goes on."""
        if self._compacts:  # another session begins when what is under way is written
            self._agent.log.persist_every(0)
        try:
            super().close()
        finally:
            self._say_what_is_wrong()
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
