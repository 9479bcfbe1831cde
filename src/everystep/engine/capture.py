"""One step's copy on its way to staging memory, shared by the training thread and the one beside
it."""

from __future__ import annotations

import collections
import operator
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec
import torch

from everystep.agent.sink import Place, Room, Sealed, Sink
from everystep.engine.device import Device
from everystep.engine.meter import Cost, Lane
from everystep.engine.tasks import Found, Task
from everystep.errors import EverystepError
from everystep.types import Json, TensorSpec, spoken

_TROUBLE = (EverystepError, RuntimeError, MemoryError, OSError, ValueError)
"""What ends a copy, and not training."""

_version = operator.attrgetter("_version")


def versions_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """What rises with every write in place (but for one through `.data`)."""
    return list(map(_version, tensors))


class Capture:
    """The tasks of one step. They may be run by any thread; the last one done seals the step.

    Args:
        tasks: in the order in which they are to be done.
        versions: by the id of a task, those of its tensors; of other tasks they are noted by the
            thread that looks first.
        checks: called in the thread that finishes, before sealing; returns why the step must not
            be sealed, or None.
    """

    def __init__(
        self,
        *,
        sink: Sink,
        device: Device,
        place: Place,
        room: Room,
        tasks: Sequence[Task],
        rest: Sequence[TensorSpec],
        still: bool,
        versions: Mapping[int, list[int]],
        tree: Json,
        metrics: Mapping[str, Json],
        cost: Cost,
        checks: Callable[[], str | None],
    ) -> None:
        self.step, self.cost = cost.step, cost
        self._sink, self._device, self._place, self._room = sink, device, place, room
        self._slot = torch.frombuffer(room.view, dtype=torch.uint8)
        self._rest, self._still, self._tree, self._metrics = rest, still, tree, metrics
        self._checks = checks
        self._guard = threading.Condition()
        self._waiting = collections.deque(tasks)
        self._safe: collections.deque[Task] = collections.deque()
        self._running: dict[int, Task] = {}  # by thread
        self._taken = False
        self._urgent: set[int] = set()
        self._lanes: list[Lane] = []
        self._versions = {id(task): versions.get(id(task)) for task in tasks}
        self._found = Found()
        self._problem: str | None = None
        self._over = False
        self._done = False

    @property
    def done(self) -> bool:
        """Whether it is sealed, or given up."""
        return self._done

    @property
    def problem(self) -> str | None:
        """Why it was given up."""
        return self._problem

    def serve(self, pause: Callable[[], float]) -> None:
        """Run tasks, in the thread beside training, until all is over.

        Args:
            pause: called between tasks; returns for how many seconds at most to wait for one.
        """
        with self._guard:
            waiting = list(self._waiting)
        for task in waiting:
            self._note_versions(task)
        while not self._done:
            pause_s = pause()
            begun = self._next()
            if begun is not None:
                self._run(begun, beside=True)
                continue
            self._finish()
            with self._guard:
                if not self._done and (self._running or self._taken or self._over):
                    self._guard.wait(pause_s)

    def _note_versions(self, task: Task) -> None:
        if self._versions.get(id(task), ()) is None:
            self._versions[id(task)] = versions_of(task.live)

    def _account(self, task: Task, started_s: float) -> None:
        """Note what was copied beside training; stretches that follow each other at once are one.
        What the training thread waited for counts there."""
        ended_s = time.monotonic()
        if id(task) not in self._urgent:
            self.cost.offload_bytes += task.nbytes
            self.cost.offload_s += ended_s - started_s
        last = self._lanes[-1] if self._lanes else None
        if last is not None and started_s - last.stop_s < 1e-3:
            self._lanes[-1] = Lane("offload", last.start_s, ended_s)
        else:
            self._lanes.append(Lane("offload", started_s, ended_s))

    def _next(self, among: Collection[int] | None = None) -> Task | None:
        """Begin the first task that waits.

        Args:
            among: ids of tasks; None: any.
        """
        with self._guard:
            source = self._waiting or self._safe
            if not source or self._problem is not None:
                return None
            if among is not None and id(source[0]) not in among:
                return None
            task = source.popleft()
            self._running[threading.get_ident()] = task
            return task

    def _run(self, task: Task, *, beside: bool = False) -> None:
        started_s = time.monotonic()
        self._note_versions(task)
        try:
            task.run(self._device, self._slot, self._found)
            if id(task) in self._versions:
                self._check(task)
        except _TROUBLE as error:
            self._give_up(f"copying failed: {error}")
        except BaseException:
            self._give_up("copying was interrupted")
            raise
        finally:
            with self._guard:
                if beside:
                    self._account(task, started_s)
                self._running.pop(threading.get_ident(), None)
                self._guard.notify_all()

    def _check(self, task: Task) -> None:
        then, now = self._versions[id(task)] or [], versions_of(task.live)
        if now == then:
            return
        for key, before, after in zip(task.keys, then, now, strict=True):
            if before != after:
                self._give_up(f"{spoken(key)} was written while it was copied")
                return

    def _give_up(self, problem: str) -> None:
        with self._guard:
            self._problem = self._problem or problem

    def _finish(self) -> None:
        """Seal, if this was the last."""
        with self._guard:
            left = self._running or ((self._waiting or self._safe) and self._problem is None)
            if left or self._taken or self._over:
                return
            self._over = True
        try:
            self._problem = self._problem or self._checks()
            if self._problem is None:
                self._seal()
        except _TROUBLE as error:
            self._give_up(f"sealing failed: {error}")
        for task in self._safe:
            task.forget()
        self.cost.lanes += self._lanes
        try:
            if self._problem is not None:
                self._sink.release(self._room.slot)
        finally:
            with self._guard:
                self._done = True
                self._guard.notify_all()

    def _seal(self) -> None:
        self._sink.seal(
            Sealed(
                slot=self._room.slot,
                layout=self._place.layout,
                step=self.step,
                hashes=self._found.pieces,
                whole=self._found.whole,
                rest=self._rest,
                still=self._still,
                tree=msgspec.json.encode(self._tree),
                metrics=self._metrics,
                every=self.cost.every,
                owed=self.cost.owed,
            )
        )
        self.cost.staged_at_s = time.monotonic()

    # ------------------------------------------------------------ for the training thread

    def before_update(self, writer: str | None, budget_bytes: int | None) -> int:
        """See to it that an optimizer may write: nothing that it writes is read any more when
        this returns. Returns the number of bytes that had been left to copy.

        Args:
            writer: the optimizer; None: anything may be written.
            budget_bytes: how much may be snapshotted; the rest is copied to staging memory.
        """
        try:
            return self._before_update(writer, budget_bytes)
        except BaseException:
            self._abandon()
            raise

    def _before_update(self, writer: str | None, budget_bytes: int | None) -> int:
        mine = self._take_out(writer)
        left = sum(task.nbytes for task in mine)
        if self._device.snapshots:
            mine = self._snapshot(mine, budget_bytes)
        with self._guard:
            self._taken = False
            urgent = {id(task) for task in mine}
            self._urgent |= urgent
            self._waiting.extendleft(reversed(mine))
            self._guard.notify_all()
        while (task := self._next(urgent)) is not None:
            self._run(task)
        with self._guard:
            while self._reads(writer):
                self._guard.wait(1.0)
        return left

    def _abandon(self) -> None:
        """Give up in the middle of anything, as at a KeyboardInterrupt."""
        with self._guard:
            self._problem = self._problem or "copying was interrupted"
            self._taken = False
            self._running.pop(threading.get_ident(), None)
            self._guard.notify_all()

    def _take_out(self, writer: str | None) -> list[Task]:
        with self._guard:
            mine = [task for task in self._waiting if writer is None or task.writer == writer]
            kept = [task for task in self._waiting if not (writer is None or task.writer == writer)]
            self._waiting = collections.deque(kept)
            self._taken = True  # nobody may think meanwhile that nothing is left
            return mine

    def _snapshot(self, mine: Sequence[Task], budget_bytes: int | None) -> list[Task]:
        """Keep what fits the budget as it is; returns what does not."""
        used = 0
        rest: list[Task] = []
        for task in mine:
            if budget_bytes is not None and used + task.kept_bytes > budget_bytes:
                rest.append(task)
                continue
            self._note_versions(task)
            try:
                task.snapshot(self._device)
            except (RuntimeError, MemoryError):  # no room on the device: it is copied instead
                rest.append(task)
                continue
            self._check(task)
            used += task.kept_bytes
            with self._guard:
                self._versions.pop(id(task), None)
                self._safe.append(task)
        return rest

    def _reads(self, writer: str | None) -> bool:
        return any(
            id(task) in self._versions and (writer is None or task.writer == writer)
            for task in self._running.values()
        )

    def wait(self) -> None:
        """Return once it is sealed or given up."""
        try:
            while (task := self._next()) is not None:
                self._run(task)
        except BaseException:
            self._abandon()
            raise
        self._finish()
        with self._guard:
            while not self._done:
                self._guard.wait(1.0)
