"""An engine over a sink in memory, with what every step should have been beside it."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch

from engine.sinks import MemorySink, Step
from everystep.engine import capture as capture_module
from everystep.engine.device import CpuDevice, Device, Hash
from everystep.engine.meter import Cost
from everystep.engine.offload import Engine
from everystep.state import raw
from everystep.state.capture import capture
from everystep.state.objects import Objects
from everystep.state.ranks import Ranks
from everystep.state.tree import Held
from waiting import until

MOVED = "a tensor was given other memory or another form"
"""How the engine begins to tell that it has met `p.data = …` for the first time."""

COPIER = "everystep-copy"
"""The name of the thread beside training."""


class Truth:
    """A blocking capture at the end of a step, as bytes."""

    def __init__(self, objects: Objects, world_size: int) -> None:
        state = capture(objects, world_size)
        self.tree = msgspec.json.decode(msgspec.json.encode(state.tree))
        self.specs = {key: held.spec for key, held in state.held.items()}
        self.tensors = {
            key: raw.bits_of({key: held.tensor}, key) for key, held in state.held.items()
        }


class Run:
    """A training run of a test: objects, engine, sink, and the truth of every step."""

    def __init__(
        self,
        model: Any,
        optimizer: Any = None,
        extras: Any = None,
        *,
        device: Device | None = None,
        sink: MemorySink | None = None,
        ranks: Ranks | None = None,
        still: bool = False,
        every: Any = 1,
        policy: Any = "skip",
        snapshot_bytes: int | None = None,
        truth: bool = True,
    ) -> None:
        self.objects = Objects.of(model, optimizer, extras)
        self.sink = sink or MemorySink()
        self.ranks = ranks or Ranks(0, 1)
        self.truth: dict[int, Truth] = {}
        self.costs: list[Cost] = []
        self.stills: list[tuple[int, dict[str, bytes]]] = []
        self.still_writes: list[tuple[int, set[str]]] = []
        self._keeps_truth = truth
        self.engine = Engine(
            self.objects,
            self.ranks,
            self.sink,
            every=every,
            policy=policy,
            snapshot_bytes=snapshot_bytes,
            device=device,
            write_still=self._write_still if still else None,
        )

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()

    def _write_still(self, step: int, held: Sequence[Held]) -> None:
        self.still_writes.append((step, {one.spec.key for one in held}))
        bits = {one.spec.key: raw.bits_of({one.spec.key: one.tensor}, one.spec.key) for one in held}
        self.stills.append((step, bits))

    def step(self, **metrics: Any) -> Cost:
        """End a training step."""
        number = len(self.costs) + 1
        if self._keeps_truth:
            self.truth[number] = Truth(self.objects, self.ranks.world_size)
        cost = self.engine.step(number, metrics)
        self.costs.append(cost)
        return cost

    def step_of(self, number: int) -> Step:
        """What was sealed, once it is."""
        until(lambda: number in self.sink.steps, 60, f"step {number} to be sealed")
        return self.sink.steps[number]

    def check(self, *expected: int, moves: int = 1) -> None:
        """Every sealed step is the truth, bit for bit; and it is just these that were sealed.

        Args:
            expected: the steps; none: all steps so far, but for those that were given up because
                a tensor had moved.
            moves: how many tensors were moved at most.
        """
        self.engine.settle()
        moved = [c.step for c in self.costs if (c.error or "").startswith(MOVED)]
        assert len(moved) <= moves
        wanted = list(expected) or [c.step for c in self.costs if c.step not in moved]
        assert self.sink.sealed == wanted, [cost.error for cost in self.costs]
        for number in wanted:
            stills: dict[str, bytes] = {}
            for step, written in self.stills:
                stills = written if step <= number else stills
            assert_is(self.sink.steps[number], self.truth[number], stills, number)


def assert_is(step: Step, truth: Truth, stills: Mapping[str, bytes], number: int) -> None:
    """Fail, naming the first tensor that differs."""
    assert step.tree == truth.tree
    tensors = step.tensors | (stills if step.still else {})
    assert set(tensors) == set(truth.tensors), number
    for key, data in truth.tensors.items():
        assert tensors[key] == data, f"step {number}: {key}"
        assert key in stills or step.specs[key] == truth.specs[key]


class HeldDevice(CpuDevice):
    """A CPU on which the thread beside training reads nothing until it is let, or the training
    thread stands in the hook; and which knows what is being read. Made in the training thread.

    Args:
        ahead: how many reads it may make before it is held.
    """

    def __init__(self, snapshots: bool = False, ahead: int = 0) -> None:
        super().__init__(snapshots)
        self.reads = 0
        """How many reads have been made, by any thread."""
        self.refuse: BaseException | None = None
        self._allowed = float(ahead)
        self._trainer = threading.current_thread()
        self._changed = threading.Lock()
        self._reading: list[tuple[int, int]] = []
        self.waiting = False

    def allow(self, reads: float) -> None:
        """Let the thread beside training make so many more reads."""
        self._allowed += reads

    def reads_any(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether one of these is being read at the moment."""
        mine = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors]
        with self._changed:
            return any(a < d and c < b for a, b in mine for c, d in self._reading)

    @contextlib.contextmanager
    def _read(self, sources: Sequence[torch.Tensor]) -> Iterator[None]:
        spans = [(s.data_ptr(), s.data_ptr() + s.nbytes) for s in sources]
        with self._changed:
            self._reading += spans
        if threading.current_thread().name == COPIER:
            self.waiting = True
            until(lambda: self._allowed >= 1 or _in_the_hook(self._trainer), 60, "a read to be let")
            self.waiting = False
            self._allowed = max(0, self._allowed - 1)
        try:
            if self.refuse is not None:
                raise self.refuse
            yield
        finally:
            with self._changed:
                self.reads += 1
                for span in spans:
                    self._reading.remove(span)

    def copy(
        self, source: torch.Tensor, target: torch.Tensor | None, hashes: Sequence[Hash]
    ) -> None:
        """Copy when it is let."""
        with self._read([source]):
            super().copy(source, target, hashes)

    def digest(self, source: torch.Tensor, target: torch.Tensor | None) -> str:
        """Copy and hash when it is let."""
        with self._read([source]):
            return CpuDevice().digest(source, target)

    def copy_group(self, sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
        """Copy when it is let."""
        with self._read(sources):
            super().copy_group(sources, targets)


def _in_the_hook(thread: threading.Thread) -> bool:
    """Whether a thread waits for what must be done before state is written."""
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None or frame.f_code is not threading.Condition.wait.__code__:
        return False
    caller = frame.f_back
    return caller is not None and caller.f_code.co_filename == capture_module.__file__
