"""Steps that a process on another host does again: the strategy `Shadow`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from msgspec import Struct

from everystep.agent import protocol as p
from everystep.agent.certificates import is_installed
from everystep.agent.handover import Lost
from everystep.agent.hosts import address
from everystep.agent.wire import is_loopback
from everystep.engine.meter import Cost
from everystep.engine.sampled import SampledRecorder, unseen
from everystep.recorded import Recorded, for_copies
from everystep.recovery.classes import elsewhere, names_of, search_paths, unfit
from everystep.staged import Given, Recording
from everystep.strategies import Full, Shadow
from everystep.types import Json, StepRef

_log = logging.getLogger("everystep")

_MOST_REFUSALS = 3
"""So many states in a row that no record could lead on from, since gradients are not what the
shadow has seen, and `Full` takes over."""

_AGREE_EVERY = 16
"""Steps, at one of which all ranks end together: a step of which some ranks' parts are in the
shadow and others' on the store is whole nowhere. To hear of each other takes two small
collectives."""


def shadow_plan(options: Shadow) -> p.ShadowPlan:
    """What an agent must know of the shadows of a run."""
    token_file = str(Path(options.token_file).absolute())
    return p.ShadowPlan(places=options.places(), token_file=token_file, tap=options.tap)


class Shadowed(Recorded):
    """A session whose agent hands on what a shadow cannot see."""

    strategy = "Shadow"

    def __init__(self, given: Given, options: Shadow) -> None:
        objects, ranks = given.objects, given.ranks
        self._options = options
        self._wanted: str | None = None
        """Why the shadow needs a state."""
        self._refusals = 0
        self._leaves: str | None = None
        """Why this rank cannot go on; the others may not know yet."""
        self._base: Cost | None = None
        self.in_shadow: int | None = None
        """The step to which the shadow has this rank's state; None: none is known of."""
        self._newest = 0
        plan = shadow_plan(options)
        reason = unfit(objects.kinds) or elsewhere(objects.parameters)
        if not all(is_loopback(host) for host, _ in plan.places) and not is_installed():
            reason = "cryptography is not installed: pip install everystep[peers] on every host"
        if reason is None and options.tap == "wire":
            self.recorder = SampledRecorder
            reason = unseen(objects, ranks)
        said: Any = ranks.gather({"host": str(address()), "reason": reason})
        plan.hosts = [one["host"] for one in said]
        reason = next((one["reason"] for one in said if one["reason"] is not None), None)
        super().__init__(
            for_copies(given), options, options.full(),
            recording=Recording(
                options.buffer_bytes, replica=True, classes=names_of(objects.kinds),
                paths=search_paths(), shadow=plan,
            ),
        )  # fmt: skip
        if reason is not None:
            self._end_together(reason)
        else:  # the shadow begins with a state of this process
            self._record(objects, options, None, self._handed_over, plain=True)
            self._hear_of_each_other()

    def _note(self, message: Struct) -> None:
        """Take a message, in a thread of the agent's client."""
        if isinstance(message, Lost):
            self._wanted, self.in_shadow = "the agent has died", None
        elif isinstance(message, p.StateWanted):
            self._wanted, self.in_shadow = message.reason, None
            self._refusals += message.lasting
        elif isinstance(message, p.InShadow):
            self.in_shadow = message.step
            if message.led:
                self._refusals = 0
        else:
            super()._note(message)

    def _handed_over(self, step: int, nbytes: int) -> None:
        self._gaps = 0

    def step(self, ref: StepRef, metrics: dict[str, Json]) -> None:
        """End a step; see `Checkpointer.step`."""
        self._newest = ref.step
        super().step(ref, metrics)
        if self._refusals >= _MOST_REFUSALS:
            self._fall_back(self._wanted or "gradients are not those on the network")
        is_due = self._ranks.world_size == 1 or ref.step % _AGREE_EVERY == 0
        if is_due and self.successor is None:
            self._hear_of_each_other()

    def _broken(self) -> str | None:
        wanted, self._wanted = self._wanted, None
        if self._base is not None and self._base.error is not None:
            wanted = wanted or f"the state for the shadow is lost: {self._base.error}"
        return wanted

    def _begin_chain(self, step: int, cost: Cost) -> None:
        self._base, self._wanted = cost, None  # a state is on its way

    def close(self) -> None:
        """Stage what is under way, and hand over the last deltas. The agent goes on."""
        recorded = self._recorder is not None
        super().close()
        if recorded:
            self._agent.settle()
            self._say_what_is_lost()

    def flush(self) -> None:
        """Have the newest step in the shadow, if that is there."""
        super().flush()
        if self._recorder is not None:
            self._say_what_is_lost()

    def _say_what_is_lost(self) -> None:
        """No step comes that the shadow could be given."""
        entry = self._log.get(self._newest)
        if self._newest and self.in_shadow != self._newest and not (entry and entry.durable):
            _log.error(
                "step %s is stored nowhere; the shadow has %s",
                self._newest,
                "none" if self.in_shadow is None else f"step {self.in_shadow}",
            )

    def _fall_back(self, why: str) -> None:
        if self._leaves is None and self._ranks.world_size > 1:
            _log.error(
                "the shadow is of no use to rank %d: %s; all ranks leave it within %d steps",
                self._ranks.rank, why, _AGREE_EVERY,
            )  # fmt: skip
        self._leaves = self._leaves or why

    def _hear_of_each_other(self) -> None:
        reason = next((one for one in self._ranks.gather(self._leaves) if one is not None), None)
        if reason is not None:
            self._end_together(str(reason))

    def _end_together(self, why: str) -> None:
        super()._fall_back(why)
        full = self._options.full()
        self.successor = Full(every=1, snapshot_bytes=full.snapshot_bytes, linger_s=full.linger_s)
