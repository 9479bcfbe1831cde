"""Makes one delta of every training step, and hands it to the log."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Literal

import torch

from everystep.agent.sink import RecordSink
from everystep.deltas.delta import Delta, Layout, Stored, Update
from everystep.deltas.packing import pack_layout
from everystep.engine.changes import Beside, bytes_of
from everystep.engine.gradients import Apart, Source
from everystep.engine.layerwise import Copies, close_all, copies_for, why_not_early
from everystep.engine.meter import Cost
from everystep.engine.owned import Shares, accelerator, keys_of, unrepeatable
from everystep.engine.promise import fulfil
from everystep.engine.taken import Step, Taken, code, print_of, write_record
from everystep.errors import EverystepError, StoreFailed, Unsupported
from everystep.state.draws import Draws
from everystep.state.fingerprint import Rota
from everystep.state.objects import Objects
from everystep.state.ranks import Ranks
from everystep.state.recapture import Captured, Recapture
from everystep.types import Json

_WAIT_S = 3600.0
_SKIP_WAIT_S = 1.0
_MOST_WAITING = 2
"""Steps whose deltas wait to be handed over; then training waits, or the step is given up."""

BEHIND = "the log has fallen behind"
"""In what `Recorder.step` returns: this passes, and says nothing of the next step."""

_LOST = (EverystepError, RuntimeError, MemoryError, OSError, ValueError)
"""What costs a delta, and does not end training."""


class Recorder:
    """Watches optimizers, and writes down what each step has changed.

    A step of which something cannot be written down exactly is a gap in the chain: the state after
    it must be stored in full, and the chain begins anew there.

    Args:
        objects: the state's owners. Hooks are set on their optimizers until `close`.
        sink: takes the records.
        policy: what happens where it has no room.
        chained: the step whose state is stored and is the state now; None: there is none, so that
            the first step is a gap.
        slices: so many consecutive fingerprints cover the state.
        versions: recorded with the layout.
        told: called with a step and the bytes of its record as it is handed over, in a thread.
        shares: which rank writes down what; None: all have equally much.
        plain: gradients are taken as they are: nobody is going to store them.
        layerwise: those that do not stay as they are are copied during backward.

    Raises:
        Unsupported: what an optimizer does cannot be done again from its gradients.
    """

    def __init__(
        self,
        objects: Objects,
        ranks: Ranks,
        sink: RecordSink,
        *,
        policy: Literal["block", "skip"],
        share_replicas: bool,
        chained: int | None,
        slices: int,
        versions: dict[str, str],
        told: Callable[[int, int], None],
        shares: Shares | None = None,
        plain: bool = False,
        layerwise: bool = False,
    ) -> None:
        for name, optimizer in objects.optimizers.items():
            reason = unrepeatable(optimizer)
            if reason is not None:
                raise Unsupported(f"optimizers.{name}: {reason}")
        self._objects, self._ranks, self._sink = objects, ranks, sink
        self._policy, self.share_replicas = policy, share_replicas
        self._device, self._shares = accelerator(objects), shares or Shares(objects, ranks)
        self._chained, self._slices, self._versions, self._told = chained, slices, versions, told
        self._plain, self._layerwise = plain, layerwise
        self._beside = Beside(objects.extras)
        size, left_out = ranks.world_size, self._beside.left_out
        self._recapture = Recapture(objects, size, versions=False, left_out=left_out)
        self._keys: set[str] = set()
        self._rota: Rota | None = None
        self._proved: list[torch.Tensor] = []
        self._layout: Layout | None = None
        self._laid_out: tuple[int, bool] | None = None
        self._opened = False
        self._taken: list[Taken] = []
        self._problem: str | None = None
        self._waited_s = 0.0
        foreign = any(
            not type(optimizer).__module__.startswith("torch.optim.")
            for optimizer in objects.optimizers.values()
        )
        self._draws = Draws(objects.extras.values()) if foreign else None  # torch's draw nothing
        self._moved = self._broken = False
        self._alone, self._ended, self._safe = ranks.world_size == 1, 0, 0
        self._steps: collections.deque[tuple[Step, Future[None]]] = collections.deque()
        # the log may keep one of them waiting
        self._thread = ThreadPoolExecutor(1, "everystep-delta")
        self._sender = ThreadPoolExecutor(1, "everystep-send")
        self._sources = [
            Source(name, optimizer, self._take, self._updated)
            for name, optimizer in objects.optimizers.items()
        ]
        self._copies: dict[str, Copies] = {}
        self._renew_copies()
        held = [id(parameter) for source in self._sources for parameter in source.parameters]
        self._shared = len(set(held)) < len(held)
        if chained is not None:
            captured = self._recapture.now()
            self._layout = self._lay_out(captured)
            self._beside.since(captured, self._sources, self._keys)

    # ------------------------------------------------------------ hooks

    def _take(self, source: Source, problem: str | None) -> None:
        """An optimizer is about to write."""
        started_s = time.monotonic()
        # its gradients took all ranks, so all have ended the step before, and may have kept back
        # the records of so many
        self._safe = max(self._safe, self._ended - _MOST_WAITING)
        for step, _ in self._steps:
            if not step.prints.done():
                wait([step.prints])
        layout = self._layout
        problem = problem or source.written_beside(places=False)  # `step` looks for that
        try:
            if layout is not None and problem is None:
                self._take_gradients(source, layout)
        except _LOST as error:
            problem = str(error)
        self._problem = self._problem or problem
        self._waited_s += time.monotonic() - started_s
        if self._draws is not None:
            self._draws.note()

    def _take_gradients(self, source: Source, layout: Layout) -> None:
        taken = source.taken()
        encoder = Apart(len(self._taken))
        taken.options = source.options.changed(encoder)
        taken.tensors = list(encoder.held.values())
        parameters = layout.optimizers[source.name]
        if self._device is not None:
            self._device.stable()
        copies = self._copies.get(source.name)
        if copies is not None and not taken.known:
            copies.take(taken, parameters)
        if not taken.lasting and taken.kept is None:
            taken.coded = Future()
            taken.coded.set_result(code(taken, parameters, self._device, plain=self._plain))
        self._taken.append(taken)

    def _updated(self, source: Source) -> None:
        if self._draws is not None and self._draws.drawn():
            self._problem = self._problem or f"{source.name} has drawn random numbers"
        for one in self._sources if self._shared else [source]:
            self._moved = one.note() or self._moved

    # ------------------------------------------------------------ steps

    def step(self, step: int, metrics: Mapping[str, Json], cost: Cost) -> str | None:
        """End a training step.

        Args:
            cost: what is waited for is added to it.

        Returns:
            Why its state must be stored in full; None: its delta is on its way.

        Raises:
            Unsupported: something in the state cannot be stored exactly.
        """
        cost.snapshot_s += self._waited_s
        self._waited_s = 0.0
        self._ended = step
        with cost.stalled("bookkeeping"):
            problem, one = self._put_together(step, metrics, cost)
        if problem is None and len(self._steps) >= _MOST_WAITING:
            with cost.stalled("staging"):
                problem = self._make_room()
        if problem is not None or one is None:
            self._chained, self._opened = step, False
            self._sender.submit(self._mend)  # after those that are lost
            return problem
        if not self._opened:
            self._sender.submit(self._sink.open_log, step - 1, pack_layout(one.layout))
            self._opened = True
        cost.logged = True
        to_code = [taken for taken in one.taken if taken.coded is None]
        for taken in to_code:
            taken.coded = Future()
        self._thread.submit(self._read, one, to_code)  # once: every call wakes a thread
        self._steps.append((one, self._sender.submit(self._finish, one)))
        self._chained = step
        return None

    def _put_together(
        self, step: int, metrics: Mapping[str, Json], cost: Cost
    ) -> tuple[str | None, Step | None]:
        """What the step has changed, or why that cannot be told."""
        taken, self._taken = self._taken, []
        problem, self._problem = self._problem, None
        for source in self._sources:
            source.come_last()
            written = source.written_beside()
            problem = source.unfinished() or problem or written
            if written is not None:
                self._moved = source.note(places=True) or self._moved
            if source.used_gradients_written([t for t in taken if t.optimizer == source.name]):
                problem = problem or f"gradients of {source.name} were written after their use"
        if self._moved:
            self._moved = False
            self._recapture.forget()
        captured = self._recapture.now()
        problem = self._renewed(captured) or problem
        before, layout = self._layout, self._lay_out(captured)
        changes = self._beside.since(captured, self._sources, self._keys)
        problem = problem or self._failed() or changes.problem
        if before is None or self._chained != step - 1:
            problem = problem or "there is no state yet that a delta could begin from"
        elif before.optimizers != layout.optimizers:
            problem = problem or "the optimizers have got other parameters"
        self._layout = layout
        if problem is not None:
            return problem, None
        options = [Stored(held.spec, bytes_of(held.tensor)) for t in taken for held in t.tensors]
        if self._device is not None:
            self._device.stable()
        return None, Step(
            step, layout, taken, changes.tensors + options, changes.tree, metrics, self._proved,
            self._rota, cost,
        )  # fmt: skip

    def _renewed(self, captured: Captured) -> str | None:
        """Which optimizer has got other parameters, in words; it is known what they are then."""
        if self._laid_out is not None and captured.version == self._laid_out[0]:
            return None  # the same groups were found
        others = [source for source in self._sources if not source.same_parameters()]
        for source in others:
            source.renew()
        if others:
            self._renew_copies()
        return f"{others[0].name} has got other parameters" if others else None

    def _renew_copies(self) -> None:
        close_all(self._copies)
        if self._device is None and (self._plain or self._layerwise):
            models = list(self._objects.models.values()) if self._layerwise else None
            self._copies = copies_for(self._sources, models)

    def not_early(self) -> str | None:
        """Why gradients are not copied during backward any more, in words; this is told once."""
        return why_not_early(self._copies.values())

    @property
    def state_bytes(self) -> int:
        """Of the parameters and slots of this rank."""
        return sum(tensor.nbytes for tensor in self._proved)

    def full_stored(self, step: int) -> None:
        """The state after this step is being stored in full: the log goes on in a new segment."""
        if self._chained == step:
            self._opened = False

    def _make_room(self) -> str | None:
        _, future = self._steps[0]
        if self._policy == "skip" and not future.done():
            return BEHIND
        future.exception()  # waits
        return self._failed()

    def _failed(self) -> str | None:
        """Forget the steps whose deltas are handed over; why the first of the others is not."""
        while self._steps and self._steps[0][1].done():
            step, future = self._steps.popleft()
            error = future.exception()
            if isinstance(error, _LOST):
                return f"the delta of step {step.number} is lost: {error}"
            if error is not None:
                wait([future for _, future in self._steps])
                self._steps.clear()  # one mistake is told once
                raise error
        return None

    # ------------------------------------------------------------ the layout

    def _lay_out(self, captured: Captured) -> Layout:
        facts = (captured.version, self.share_replicas)
        if self._layout is not None and facts == self._laid_out:
            return self._layout
        self._laid_out, self._opened = facts, False
        specs = [held.spec for held in captured.fixed]
        keys = keys_of(self._objects, self._ranks.world_size)
        self._keys = set(keys.values())
        # buffers may change as soon as training goes on; deltas hold them whole
        pairs = zip(captured.fixed, captured.writers, strict=True)
        proved = [held for held, w in pairs if w is not None or held.spec.key in self._keys]
        self._proved = [held.tensor for held in proved]
        self._rota = Rota.of(self._proved, self._slices)
        optimizers = {
            source.name: self._shares.of_gradients(
                specs, [keys[id(p)] for p in source.parameters], self.share_replicas
            )
            for source in self._sources
        }
        return Layout(
            rank=self._ranks.rank,
            world_size=self._ranks.world_size,
            optimizers=optimizers,
            state=[held.spec.key for held in proved],
            slices=self._slices,
            left_out=self._beside.left_out,
            threads=torch.get_num_threads(),
            versions=self._versions,
        )

    # ------------------------------------------------------------ the thread beside training

    def _read(self, one: Step, to_code: list[Taken]) -> None:
        """Take from live memory what the step's delta needs."""
        fulfil(one.prints, partial(print_of, one, self._device, self._sources))
        for taken in to_code:
            parameters = one.layout.optimizers[taken.optimizer]
            if taken.coded is not None:
                act = partial(code, taken, parameters, self._device, plain=self._plain)
                fulfil(taken.coded, act)

    def _finish(self, one: Step) -> None:
        try:
            if self._broken:
                raise StoreFailed("the one before it is lost")
            self._send(one)
        except BaseException as error:
            self._broken = True  # until the chain begins anew
            one.cost.error = f"its delta is lost: {error}"
            raise

    def _mend(self) -> None:
        self._broken = False

    def _send(self, one: Step) -> None:
        prints = one.prints.result()
        updates = []
        for taken in one.taken:
            coded = [] if taken.coded is None else taken.coded.result()
            taken.coded = None  # it may refer to gradients
            updates.append(Update(taken.optimizer, taken.options, coded, taken.scale))
        metrics = dict(one.metrics)
        delta = Delta(one.number, updates, one.tensors, one.tree, metrics, prints)
        wait_s = _WAIT_S if self._policy == "block" else _SKIP_WAIT_S
        nbytes = write_record(self._sink, delta, one.taken, wait_s)
        if nbytes is None:
            raise StoreFailed(f"there was no room for it: {BEHIND}")
        self._told(one.number, nbytes)
        self._sink.publish(one.number, None if self._alone else self._safe)
        one.cost.logged_bytes, one.cost.logged_at_s = nbytes, time.monotonic()

    # ------------------------------------------------------------ the end

    def settle(self) -> None:
        """Return when all deltas are handed over, or lost."""
        wait([future for _, future in self._steps])

    def close(self) -> str | None:
        """Finish, and take the hooks away; why the newest steps are lost, if they are."""
        self.settle()
        try:
            return self._failed()
        finally:
            for source in self._sources:
                source.close()
            close_all(self._copies)
            self._sender.shutdown()
            self._thread.shutdown()
            if self._device is not None:
                self._device.close()
            self._steps.clear()
            self._taken, self._layout, self._proved = [], None, []
            self._sources = []  # nothing goes in a circle: objects end with their owner
