"""Steps copied beside training by the engine, and stored by the agent: the strategy `Full`."""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from msgspec import Struct

from everystep import errors
from everystep.agent import protocol as p
from everystep.agent.client import Agent
from everystep.agent.image import STILL_SECTION
from everystep.blocking import Facts
from everystep.engine.meter import Cost
from everystep.engine.offload import Engine
from everystep.engine.owned import Shares
from everystep.errors import StoreError, StoreFailed
from everystep.outcomes import Outcomes
from everystep.planning.partition import pieces_of
from everystep.saving import source_of, versions
from everystep.state.objects import Objects
from everystep.state.ranks import Ranks
from everystep.state.tree import Held
from everystep.stats import Entry, StepLog
from everystep.store import format as fmt
from everystep.store.backend import NewFile
from everystep.store.format import PartName
from everystep.store.full import hash_all, lay_out_file, streamed
from everystep.store.measured import Measure, Span
from everystep.store.retention import Retention
from everystep.store.run import StepEntry
from everystep.strategies import Deltas, Full
from everystep.types import Json, StepRef

_log = logging.getLogger("everystep")


_TOLD_AT_ONCE = 8
"""So many steps' statistics go to the agent at a time: one after the other they cost more."""


class Recording(NamedTuple):
    """What the agent does with records of steps."""

    buffer_bytes: int | None = None
    """The most memory for those that wait."""
    logs: bool = False
    """It appends them to the log."""
    replica: bool = False
    """It folds them."""
    classes: Mapping[str, tuple[str, str]] = MappingProxyType({})
    """Optimizers that are not torch's."""
    paths: Sequence[str] = ()
    """Where their modules may be found."""
    peers: p.PeerPlan | None = None
    """Whose copies it holds."""
    shadow: p.ShadowPlan | None = None
    """Whom it hands them on to."""
    compacts: bool = False
    """It folds what it has appended, and writes full checkpoints of it."""


class Given(NamedTuple):
    """What each session of a process is made with."""

    facts: Facts
    objects: Objects
    ranks: Ranks
    agent: Agent
    retention: Retention
    known: Sequence[StepEntry]
    """Steps of the timeline that are there."""
    pinned: Sequence[StepRef]
    """Those to keep in any case."""
    done: int
    """Steps."""
    log: StepLog
    outcomes: Outcomes


class Staged:
    """A session whose steps go through staging memory."""

    successor: Full | Deltas | None = None
    """The strategy to go on with, where this one is of no use any more."""

    watcher: Callable[[Struct], None] | None = None
    """Is told all that the agent tells, in its thread."""

    def __init__(
        self,
        given: Given,
        options: Full,
        *,
        recording: Recording = Recording(),  # noqa: B008 - immutable
    ) -> None:
        facts, objects, ranks, agent = given.facts, given.objects, given.ranks, given.agent
        self.timeline = facts.timeline
        self._facts, self._ranks, self._agent = facts, ranks, agent
        self._log, self._outcomes = given.log, given.outcomes
        self._restored, self._newest_staged = given.done, 0
        self._heard: collections.deque[Struct] = collections.deque()
        self._costs: collections.deque[tuple[Cost, Entry]] = collections.deque()
        agent.listen(self._listen)
        agent.begin(
            p.Begin(
                run=facts.run.id,
                session=facts.number,
                timeline=facts.timeline,
                rank=ranks.rank,
                world_size=ranks.world_size,
                policy=options.policy,
                staging_bytes=options.staging_bytes,
                buffer_bytes=recording.buffer_bytes,
                logs=recording.logs,
                replica=recording.replica,
                compacts=recording.compacts,
                classes=dict(recording.classes),
                paths=list(recording.paths),
                peers=recording.peers,
                shadow=recording.shadow,
                linger_s=options.linger_s,
                retention=given.retention,
                known=list(given.known),
                pinned=list(given.pinned),
                versions=versions(),
                identity=facts.identity,
            )
        )
        self._shares = Shares(objects, ranks, whole=facts.whole_parameters)
        self._engine = Engine(
            objects,
            ranks,
            agent,
            every=options.every,
            policy=options.policy,
            snapshot_bytes=options.snapshot_bytes,
            share_replicas=facts.share_replicas,
            # a replica may have to change any tensor, and has all of them in its slot
            write_still=None if recording.replica else self._write_still,
            shares=self._shares,
        )

    @property
    def whole_parameters(self) -> bool:
        """See `Facts.whole_parameters`."""
        return self._facts.whole_parameters

    # ------------------------------------------------------------ what the agent tells

    def _listen(self, message: Struct) -> None:
        if self.watcher is not None:
            self.watcher(message)
        self._note(message)

    def _note(self, message: Struct) -> None:
        """Take a message, in a thread of the agent's client."""
        if isinstance(message, p.Stored):
            self._log.durable(message.step, message.written_bytes)
        elif isinstance(message, p.Notice):
            _log.log(message.level, "%s", message.text)
            return
        self._heard.append(message)

    def hear(self) -> None:
        """Act on what the agent has told, in the training thread.

        Raises:
            StoreError, TooManyFailedSteps, ReplicasDiffer: as the user has chosen.
        """
        while self._heard:
            self._act(self._heard.popleft())

    def _act(self, message: Struct) -> None:
        if isinstance(message, p.Stored):
            self._outcomes.stored()
        elif isinstance(message, p.NotStored | p.NotLogged) and message.error is not None:
            self._refused(message.step, message.error)
        elif isinstance(message, p.Diverged) and self._engine.share_replicas:
            self._engine.share_replicas = False
            self._outcomes.diverged(message.step)

    def _refused(self, step: int, told: tuple[str, str, str | None]) -> None:
        entry = self._log.get(step)
        if entry is not None and entry.error == told[1]:
            return  # it was tried again, and nothing has changed
        if entry is not None and not entry.durable:
            entry.error = told[1]
        kind = getattr(errors, told[0], StoreFailed)
        if not (isinstance(kind, type) and issubclass(kind, StoreError)):
            kind = StoreFailed
        ref = StepRef(self._facts.timeline, step)
        self._outcomes.failed(ref, kind(told[1], hint=told[2]))

    # ------------------------------------------------------------ steps

    @property
    def cost(self) -> Cost:
        """What the step that is going on has cost so far; it becomes complete later."""
        return self._engine.cost

    def step(self, ref: StepRef, metrics: dict[str, Json]) -> None:
        """End a step; see `Checkpointer.step`."""
        entry = self._log.begin(ref.step, self._restored)  # all that is told of it finds its entry
        cost = self._engine.cost
        self._record_step(ref, metrics, cost)
        try:
            self._engine.step(ref.step, metrics)
            self._costs.append((cost, entry))
            _take_over(entry, cost)
            entry.durable_lag_steps = self._log.durable_lag(ref.step)
            entry.staged_lag_steps = self._staged_lag(ref.step)
        except StoreError as error:
            cost.error = entry.error = error.headline()
            self._outcomes.failed(ref, error)
        if len(self._costs) >= _TOLD_AT_ONCE:
            self._tell_costs(finished_only=True)
        self.hear()

    def _record_step(self, ref: StepRef, metrics: dict[str, Json], cost: Cost) -> None:
        """Hand over what is kept of a step besides its state."""

    def refresh(self) -> None:
        """Bring the statistics of steps that are still being copied up to date."""
        for cost, entry in list(self._costs):
            _take_over(entry, cost)

    def _staged_lag(self, step: int) -> int:
        staged = [c.step for c, _ in self._costs if c.left_at_s is not None]
        self._newest_staged = max([self._newest_staged, *staged])
        return step - max(self._newest_staged, self._restored)

    def _tell_costs(self, *, finished_only: bool) -> None:
        """Complete the statistics of steps whose copy is over, and hand them to the agent."""
        while self._costs and (not finished_only or self._costs[0][0].over):
            cost, entry = self._costs.popleft()
            _take_over(entry, cost)
            if cost.left_at_s is not None:
                self._newest_staged = max(self._newest_staged, cost.step)
            self._agent.measured(_measure(self._facts.timeline, cost))

    def _write_still(self, step: int, held: Sequence[Held]) -> None:
        """Store tensors that do not change, as a file of this step."""
        facts, ranks = self._facts, self._ranks
        ref = StepRef(facts.timeline, step)
        specs = [one.spec for one in held]
        pieces = pieces_of(specs, ranks.rank, ranks.world_size)
        sources = {one.spec.key: source_of(one, shared=True) for one in held}
        layout = lay_out_file(STILL_SECTION, {spec.key: spec for spec in specs}, pieces)
        content = streamed(layout, sources)
        stem = PartName(facts.number, ranks.rank, ranks.world_size, "").stem
        file = content.data_file(stem)
        name = f"{fmt.step_directory(ref)}/{file.name}"
        facts.run.backend.put([NewFile(name, file.nbytes, content.parts)])
        by_piece = {
            place.piece: found for place, found in zip(layout.places, content.hashes, strict=True)
        }
        sizes = {spec.key: spec.elements for spec in specs}
        stored = {piece.key for piece in pieces if piece.stop - piece.start == sizes[piece.key]}
        parted = [source for key, source in sources.items() if key not in stored]
        self._agent.keep(
            p.Still(
                step=ref,
                session=facts.number,
                specs=specs,
                pieces=pieces,
                hashes=[by_piece[piece] for piece in pieces],
                whole={source.spec.key: hash_all(source) for source in parted},
            )
        )

    def flush(self) -> None:
        """Make the newest step durable, if the store takes it."""
        self._engine.settle()
        self._agent.settle()

    def close(self) -> None:
        """Stage what is under way. The agent goes on."""
        self._engine.close()
        self._tell_costs(finished_only=False)


def _take_over(entry: Entry, cost: Cost) -> None:
    entry.stall_s, entry.snapshot_s = cost.stall_s, cost.snapshot_s
    entry.staging_s, entry.bookkeeping_s = cost.staging_s, cost.bookkeeping_s
    entry.copied_bytes = cost.copied_bytes + cost.logged_bytes
    entry.staged = cost.left_at_s is not None
    entry.error = entry.error or cost.error
    entry.deviation = cost.deviation


def _measure(timeline: str, cost: Cost) -> Measure:
    return Measure(
        timeline=timeline,
        step=cost.step,
        begun_s=cost.begun_s,
        took_s=cost.ended_s - cost.begun_s,
        stall_s=cost.stall_s,
        snapshot_s=cost.snapshot_s,
        staging_s=cost.staging_s,
        bookkeeping_s=cost.bookkeeping_s,
        forward_s=cost.forward_s,
        backward_s=cost.backward_s,
        update_s=cost.update_s,
        state_bytes=cost.state_bytes,
        copied_bytes=cost.copied_bytes,
        written_bytes=0,
        offload_bytes_per_s=cost.offload_bytes_per_s,
        snapshot_bytes_per_s=cost.snapshot_bytes_per_s,
        staged_s=None if cost.staged_at_s is None else max(0.0, cost.staged_at_s - cost.ended_s),
        every=cost.every,
        error=cost.error,
        deviation=cost.deviation,
        spans=[
            Span(lane.name, lane.start_s - cost.begun_s, lane.stop_s - cost.begun_s)
            for lane in cost.lanes
        ],
    )
