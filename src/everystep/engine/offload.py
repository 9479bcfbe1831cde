"""The engine: takes the state of a step out of training's way, while training computes.

After `step()` the state stays as it is until an optimizer writes. A thread beside training copies
it to staging memory meanwhile; a hook before the optimizer's step copies, or snapshots, what is
left (Checkflow, IEEE CAL 2025). Tensors that no optimizer writes are copied in `step()` itself,
since anything may write them; large ones that never change are not copied at all (`still.py`).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import msgspec

from everystep.agent.priority import give_way
from everystep.agent.sink import Place, Room, Sink
from everystep.engine.capture import Capture, versions_of
from everystep.engine.device import Device, device_for
from everystep.engine.meter import Cost, Lane, Plan
from everystep.engine.owned import Shares
from everystep.engine.still import Still
from everystep.engine.tasks import Task, of_model, tasks_for, written_by_several
from everystep.engine.window import Window
from everystep.planning.hiding import Interval
from everystep.state import raw
from everystep.state.objects import Objects
from everystep.state.ranks import Ranks
from everystep.state.recapture import Captured, Recapture
from everystep.state.tree import Held
from everystep.state.uncompiled import uncompiled
from everystep.types import Json

_log = logging.getLogger("everystep")

_SPARE_REST_BYTES = 64 << 10
_SKIP_WAIT_S = 0.02
"""How long a step waits for a slot that must be on its way, where it may be skipped."""

_BLOCK_WAIT_S = 3600.0
_MOST_TORN = 3


class Engine:
    """Copies each step's state to a sink.

    Args:
        objects: the state's owners. Hooks are set on their optimizers until `close`.
        ranks: this process's place in the job.
        sink: takes the steps.
        every: a checkpoint at every so many steps; `auto`: as fast as they can be copied.
        policy: what happens where the sink has no room.
        snapshot_bytes: how much device memory snapshots may take; None: any.
        device: how bytes leave; None: found from the tensors.
        write_still: makes tensors that do not change durable, as a part of a step.
        shares: which rank stores what; None: all have equally much.
    """

    def __init__(
        self,
        objects: Objects,
        ranks: Ranks,
        sink: Sink,
        *,
        every: int | Literal["auto"],
        policy: Literal["block", "skip"],
        snapshot_bytes: int | None = None,
        device: Device | None = None,
        share_replicas: bool = True,
        write_still: Callable[[int, Sequence[Held]], None] | None = None,
        shares: Shares | None = None,
    ) -> None:
        self._sink, self._shares = sink, shares or Shares(objects, ranks)
        self._auto, self._every = every == "auto", 1 if every == "auto" else int(every)
        self._interval = Interval()
        self._policy, self._snapshot_bytes = policy, snapshot_bytes
        self._optimizers = list(objects.optimizers.values())
        self._recapture = Recapture(objects, ranks.world_size)
        self.share_replicas = share_replicas
        self._device = device
        self._write_still = write_still
        self._still = Still()
        self._laid_out: tuple[int, bool] | None = None
        self._place: Place | None = None
        self._tasks: list[Task] = []
        self._volatile: list[Task] = []
        self._counted: dict[int, list[int]] = {}  # by the id of a task: where in `fixed` its are
        self._state_bytes = self._rest_room = 0
        self._capture: Capture | None = None
        self._cost = Cost(step=0, begun_s=time.monotonic())
        self._plan = Plan()
        self._torn_in_a_row = 0
        self._all_at_once = False
        self._steps_staged = 0
        self._window = Window()
        self._writer_order: dict[str | None, int] = {}
        self._changed, self._stop = threading.Condition(), False
        self._owed = self._owed_waits = False
        self._update_from_s = 0.0
        self._hooks: list[Any] = []
        for name, optimizer in objects.optimizers.items():
            self._hooks += [
                optimizer.register_step_pre_hook(self._hook(self._before_update, name)),
                optimizer.register_step_post_hook(self._hook(self._after_update, name)),
            ]
        self._thread = threading.Thread(target=self._work, name="everystep-copy", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ hooks

    @staticmethod
    def _hook(act: Callable[[str], None], name: str) -> Callable[..., None]:
        @uncompiled
        def hook(*_: object) -> None:
            act(name)

        return hook

    def _before_update(self, writer: str) -> None:
        now_s = time.monotonic()
        cost = self._cost
        self._writer_order.setdefault(writer, len(self._writer_order))
        self._window.close(now_s, cost)
        capture = self._capture
        if capture is not None and not capture.done:
            with cost.stalled("snapshot"):
                left = capture.before_update(writer, self._snapshot_bytes)
            cost.snapshot_bytes += left
        self._update_from_s = time.monotonic()

    def _after_update(self, writer: str) -> None:
        now_s = time.monotonic()
        self._cost.update_s += now_s - self._update_from_s
        self._cost.lanes.append(Lane("update", self._update_from_s, now_s))

    # ------------------------------------------------------------ the thread beside training

    def _work(self) -> None:
        give_way()
        while not self._stop:
            capture = self._capture
            if capture is not None and not capture.done:
                capture.serve(self._window.look)
                continue
            pause_s = self._window.look()
            with self._changed:
                if not self._stop and self._capture is capture:
                    self._changed.wait(pause_s)

    # ------------------------------------------------------------ steps

    def step(self, step: int, metrics: Mapping[str, Json]) -> Cost:
        """End a training step, and begin to copy its state.

        Args:
            step: its number.
            metrics: to be recorded with it, as JSON.

        Returns:
            What the step has cost; some of it becomes known later.

        Raises:
            Unsupported: something in the state cannot be stored exactly.
            StoreError: there is no staging memory.
        """
        cost = self._cost
        cost.step, first = step, self._steps_staged == 0
        try:
            cost.every = self._interval.steps if self._auto else self._every
            cost.owed, self._owed = self._owed, False
            cost.due = cost.owed or first or step % cost.every == 0
            if cost.due or self._capture is None or self._capture.done:
                self._end_capture(cost)
            if cost.due:
                self._take(cost, metrics, now=first or self._all_at_once)
        finally:
            cost.ended_s = time.monotonic()
            self._begin_cost(cost.ended_s)
            self._wake()  # last: the two threads share the interpreter
        return cost

    @property
    def cost(self) -> Cost:
        """What the step that is going on has cost so far."""
        return self._cost

    def owe(self, *, wait: bool = False) -> None:
        """Take a checkpoint of the next step, whatever its number, that must become durable; with
        `wait`, training waits for room for it."""
        self._owed, self._owed_waits = True, wait

    def set_every(self, every: int | Literal["auto"]) -> None:
        """Take one at every so many steps from now on."""
        self._auto, self._every = every == "auto", 1 if every == "auto" else int(every)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _begin_cost(self, at_s: float) -> None:
        self._cost = Cost(step=0, begun_s=at_s)
        self._window.open()

    def _end_capture(self, cost: Cost) -> None:
        """The last step's copy must be over before the next begins."""
        capture, self._capture = self._capture, None
        if capture is None:
            return
        if not capture.done:
            with cost.stalled("snapshot"):
                cost.snapshot_bytes += capture.before_update(None, 0)
                capture.wait()
        self._learn(capture, cost)

    def _learn(self, capture: Capture, cost: Cost) -> None:
        past = capture.cost
        if capture.problem is None:
            self._torn_in_a_row = 0
        else:
            past.error = capture.problem
            self._torn_in_a_row += 1
            _log.error("step %d is not staged: %s", capture.step, capture.problem)
            if self._torn_in_a_row == _MOST_TORN:
                self._all_at_once = True
                _log.error(
                    "%d steps in a row could not be copied beside training: from now on they are "
                    "copied before step() returns", _MOST_TORN,
                )  # fmt: skip
        rates = [past.offload_bytes_per_s or 0.0, cost.snapshot_bytes_per_s or 0.0]
        cycle_s = time.monotonic() - cost.begun_s - cost.stall_s
        if self._auto and max(rates) > 0 and cycle_s > 0:
            self._interval = self._interval.observe(self._state_bytes, cycle_s, max(rates))
        cost.deviation = self._plan.compare(cost)

    def _take(self, cost: Cost, metrics: Mapping[str, Json], *, now: bool) -> None:
        with cost.stalled("bookkeeping"):
            captured = self._recapture.now()
            self._lay_out(captured, cost.step)
            rest = [held.spec for held in captured.rest]
        place = self._place
        with cost.stalled("staging"):
            wait = now or self._policy == "block" or (cost.owed and self._owed_waits)
            room = self._sink.acquire(_BLOCK_WAIT_S if wait else _SKIP_WAIT_S)
        if room is None or place is None:
            cost.error = "there was no room in staging memory"
            _log.warning("step %d is not staged: %s", cost.step, cost.error)
            return
        with cost.stalled("bookkeeping"), self._given_back_on_error(room):
            device = self._device_of(captured)
            device.stable()
            device.pin(room.address, place.slot_bytes)
            self._put_rest(captured.rest, room, place)
            cost.state_bytes = self._state_bytes
            cost.copied_bytes = self._state_bytes
            capture = Capture(
                sink=self._sink, device=device, place=place, room=room,
                tasks=[*self._volatile, *self._tasks], rest=rest, still=self._still.known,
                versions=self._versions(captured), tree=captured.tree, metrics=metrics, cost=cost,
                checks=self._proof(captured),
            )  # fmt: skip
        self._capture = capture
        with cost.stalled("snapshot"):
            if now:
                self._wake()
                cost.snapshot_bytes += capture.before_update(None, 0)
                capture.wait()
            elif self._volatile:
                cost.snapshot_bytes += capture.before_update(_ANYBODY, self._snapshot_bytes)
        self._steps_staged += 1

    def _versions(self, captured: Captured) -> dict[int, list[int]]:
        """How often the tensors of each task with parameters or buffers have been written. Those of
        slots are noted a moment later, by the thread beside training: hardly anybody but an
        optimizer writes them, and to look at many tensors takes time."""
        found: dict[int, list[int]] = {}
        for task in (*self._volatile, *self._tasks):
            if id(task) in self._counted:
                seen = list(map(captured.versions.__getitem__, self._counted[id(task)]))
                complete = None not in seen
                found[id(task)] = cast("list[int]", seen) if complete else versions_of(task.live)
        return found

    def _proof(self, captured: Captured) -> Callable[[], str | None]:
        """What must hold before a step is sealed."""

        def check() -> str | None:
            if not captured.unmoved():
                self._recapture.forget()
                return (
                    "a tensor was given other memory or another form (p.data = …), and stayed the "
                    "same object; from now on every step looks for that"
                )
            return self._still.check()

        return check

    @contextlib.contextmanager
    def _given_back_on_error(self, room: Room) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._sink.release(room.slot)
            raise

    def _put_rest(self, rest: Sequence[Held], room: Room, place: Place) -> None:
        at = place.rest_offset
        for held in rest:
            for chunk in raw.host_chunks(held.tensor, 0, held.tensor.numel()):
                room.view[at : at + len(chunk)] = chunk
                at += len(chunk)

    # ------------------------------------------------------------ layout

    def _lay_out(self, captured: Captured, step: int) -> None:
        """Tell the sink what steps hold, where that has changed."""
        facts = (captured.version, self.share_replicas)
        rest_bytes = sum(held.spec.nbytes for held in captured.rest)
        moved = self._still.moved()
        if facts == self._laid_out and not moved and rest_bytes <= self._rest_room:
            return
        fixed = [self._as_stored(held) for held in captured.fixed]
        still = self._still.chosen(fixed, captured.writers)
        if self._write_still is None:
            still = set()
        shared = written_by_several(self._optimizers)
        moving = [
            (held, None if raw.same_memory(held.tensor) in shared else writer)
            for held, writer in zip(fixed, captured.writers, strict=True)
            if held.spec.key not in still
        ]
        if still:
            kept = [held for held in fixed if held.spec.key in still]
            if self._write_still is not None:
                self._write_still(step, kept)
            self._still.keep(kept, self._device_of(captured))
        else:
            self._still.forget()
        specs = [held.spec for held, _ in moving]
        pieces = self._shares.of(specs)
        self._rest_room = 2 * rest_bytes + _SPARE_REST_BYTES
        if self._device is not None:
            self._device.unpin()
        self._place = self._sink.describe(specs, pieces, self._rest_room)
        tasks = tasks_for(
            [held for held, _ in moving],
            [writer for _, writer in moving],
            pieces,
            self._place,
            lambda writer: self._writer_order.get(writer, len(self._writer_order)),
        )
        for task in tasks:
            task.writer = task.writer or _ANYBODY
        self._tasks = [task for task in tasks if task.writer != _ANYBODY]
        self._volatile = [task for task in tasks if task.writer == _ANYBODY]
        places = {held.spec.key: place for place, held in enumerate(captured.fixed)}
        self._counted = {
            id(task): [places[key] for key in task.keys] for task in tasks if of_model(task.keys[0])
        }
        self._state_bytes = sum(task.nbytes for task in tasks)
        self._laid_out = facts

    def _device_of(self, captured: Captured) -> Device:
        if self._device is None:
            self._device = device_for([held.tensor for held in captured.fixed])
        return self._device

    def _as_stored(self, held: Held) -> Held:
        if held.spec.replicated and not self.share_replicas:
            return Held(held.tensor, msgspec.structs.replace(held.spec, replicated=False))
        return held

    # ------------------------------------------------------------ the end

    def settle(self) -> None:
        """Return when the copy that is under way is staged or given up."""
        self._end_capture(self._cost)

    def close(self) -> None:
        """Finish, end the thread, and take the hooks away."""
        self.settle()
        while self._hooks:
            self._hooks.pop().remove()
        self._stop = True
        self._wake()
        self._thread.join()
        self._tasks, self._volatile, self._write_still = [], [], None  # nothing goes in a circle
        if self._device is not None:
            self._device.close()


_ANYBODY = "\0anybody"
"""The writer of what may be written at any time."""
