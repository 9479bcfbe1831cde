"""Steps written down as deltas, and in full where that cannot be: what `Logged` and `Mirrored` have
in common."""

from __future__ import annotations

import logging
from collections.abc import Callable

from everystep.engine.meter import Cost
from everystep.engine.recorder import BEHIND, Recorder
from everystep.errors import Unsupported
from everystep.saving import versions
from everystep.staged import Given, Recording, Staged
from everystep.state.objects import Objects
from everystep.state.shards import is_dtensor
from everystep.strategies import Deltas, Full, Replica, Shadow
from everystep.types import Json, StepRef

_log = logging.getLogger("everystep")

_MOST_GAPS = 3
"""So many steps in a row that cannot be written as deltas, and `Full` takes over."""


_SLICES = 16
_SMALL_BYTES = 2 << 20
"""Parameters of at most so many bytes are hashed whole, with their slots, at every step: at some
5 GB/s that takes a millisecond or two, beside training."""


def for_copies(given: Given) -> Given:
    """For a session whose steps are done again elsewhere: a rank has its share in whole
    parameters, since an optimizer computes with these."""
    facts = given.facts._replace(whole_parameters=True)
    if any(map(is_dtensor, given.objects.parameters)):
        # what little is not sharded is not worth being shared out
        facts = facts._replace(share_replicas=False)
    return given._replace(facts=facts)


class Recorded(Staged):
    """A session whose recorder writes down each step, and whose engine takes some of them whole."""

    def __init__(
        self,
        given: Given,
        options: Deltas | Replica | Shadow,
        full: Full,
        *,
        recording: Recording,
    ) -> None:
        self._recorder: Recorder | None = None
        self._policy = options.policy
        self._gaps = 0
        self._chain_begun = False
        super().__init__(given, full, recording=recording)

    def _record(
        self,
        objects: Objects,
        options: Deltas | Replica | Shadow,
        chained: int | None,
        told: Callable[[int, int], None],
        *,
        plain: bool = False,
    ) -> None:
        """Begin to record; see `Recorder`."""
        self._chain_begun = chained is not None
        try:
            self._recorder = self.recorder(
                objects,
                self._ranks,
                self._agent.log,
                policy=options.policy,
                share_replicas=self._facts.share_replicas,
                chained=chained,
                slices=options.slices or _slices(objects),
                versions=versions(),
                told=told,
                shares=self._shares,
                plain=plain,
                layerwise=isinstance(options, Replica) and options.layerwise,
            )
        except Unsupported as error:
            self._fall_back(error.headline())

    def hear(self) -> None:
        """Act on what the agent has told, in the training thread; see `Staged.hear`."""
        super().hear()
        if self._recorder is not None:
            self._recorder.share_replicas = self._engine.share_replicas

    # ------------------------------------------------------------ steps

    def step(self, ref: StepRef, metrics: dict[str, Json]) -> None:
        """End a step; see `Checkpointer.step`."""
        cost = self._engine.cost
        super().step(ref, metrics)
        if self._recorder is None:
            return
        why = self._recorder.not_early()
        if why is not None:
            self._note_deviation(cost, f"no gradients are copied during backward: {why}")
        if cost.due and cost.error is None:
            self._recorder.full_stored(ref.step)

    def _record_step(self, ref: StepRef, metrics: dict[str, Json], cost: Cost) -> None:
        """Hand over its delta, or have it stored in full."""
        if self._recorder is not None:
            problem = self._recorder.step(ref.step, metrics, cost) or self._broken()
            if problem is not None:
                self._gap(ref, problem, cost)

    def _note_deviation(self, cost: Cost, what: str) -> None:
        """Say it in the log, and in what is told of the step."""
        _log.warning("%s", what)
        cost.deviation = what
        entry = self._log.get(cost.step)
        if entry is not None:
            entry.deviation = what

    def _broken(self) -> str | None:
        """Why a delta would be of no use, although it was written down."""
        return None

    def _gap(self, ref: StepRef, problem: str, cost: Cost) -> None:
        """A step that cannot be written as a delta is stored in full."""
        self._engine.owe(wait=self._policy == "block")
        self._begin_chain(ref.step, cost)
        begins, self._chain_begun = not self._chain_begun, True
        if begins:
            return
        if BEHIND not in problem:
            self._gaps += 1
        _log.warning("step %s is stored in full, not as a delta: %s", ref, problem)
        if self._gaps >= _MOST_GAPS:
            self._fall_back(problem)

    def _begin_chain(self, step: int, cost: Cost) -> None:
        """Deltas go on from the state after this step, which is stored in full."""

    def _rebase(self, step: int, cost: Cost) -> None:
        """Have the agent's copy give way to the full checkpoint of a step. The agent hears of it
        after the deltas before that, which it would not fold otherwise, and before anything of the
        full checkpoint, which it would give up again."""
        if self._recorder is not None:
            with cost.stalled("staging"):
                self._recorder.settle()
            self._agent.log.rebase(step)

    def _fall_back(self, why: str) -> None:
        """Go on as `Full(every=1)` does."""
        name = type(self).strategy
        _log.error(
            "%s cannot record this run (%s): every step is stored in full instead", name, why
        )
        self.given_up = why
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.close()

    given_up: str | None = None
    """Why steps are not recorded any more."""

    strategy = "Deltas"
    """In messages."""

    recorder: type[Recorder] = Recorder
    """The kind."""

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
            super().close()


def _slices(objects: Objects) -> int:
    """As many as keep the hashing of each step short."""
    groups = [g for optimizer in objects.optimizers.values() for g in optimizer.param_groups]
    nbytes = sum(parameter.nbytes for group in groups for parameter in group["params"])
    return 1 if nbytes <= _SMALL_BYTES else _SLICES
