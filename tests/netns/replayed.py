"""A recorded run's shadow, fed anew with what a mirror might have shown instead."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from everystep.agent import protocol as p
from everystep.agent.image import Image, SlotLayout
from everystep.agent.mirror import Mirror
from everystep.agent.shadow_wire import WireSource
from everystep.deltas.packing import unpack, unpack_layout
from everystep.deltas.samples import ON_WIRE, Reduced
from everystep.errors import Damaged, StoreFailed
from everystep.tap.gloo import Gloo
from everystep.tap.live import Drops
from everystep.tap.packets import Parser
from everystep.tap.pieces import Frames
from everystep.tap.reduced import Reader
from netns.cable import Packet, wired
from netns.job import digest
from netns.recorded import STEPS, Recording, State, Told
from tap.recording import frames_of

Digests = Mapping[str, str]

MOST_LAG = 100
"""Frames that may have passed after a step, when its records come."""


class Turned:
    """A mirror that shows what it is given, and is waited for."""

    quiet_s = 0.1
    is_behind = False

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._batches: list[Frames | None] = []
        self._is_idle = self._is_closed = False
        self._count = 0

    def show(self, packets: Sequence[Packet]) -> None:
        """Returns when they have been taken in; and that nothing more is on its way."""
        batches: list[Frames | None] = [None]
        if packets:
            lengths = [one.length for one in packets]
            first = self._count + 1
            batches.append(frames_of([one.data for one in packets], first, lengths))
            self._count += len(packets)
        with self._changed:
            self._batches = batches
            self._is_idle = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_idle)

    def next(self, timeout_s: float) -> Frames | None:
        with self._changed:
            self._is_idle = not self._batches
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._batches or self._is_closed)
            return self._batches.pop() if self._batches else None

    def end(self) -> None:
        """Let whoever waits go."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def drops(self) -> Drops:
        return Drops(self._count, 0, 0)

    def close(self) -> None:
        """Nothing is open."""


class Outcome(Struct):
    """How a replay went, by rank."""

    exact: dict[int, list[int]]
    lacking: dict[int, dict[int, str]]
    """Why each of these steps was not had; empty: it had no state, and was told of no step."""
    refuted: int = 0
    """Gradients that were taken for the trainer's, and whose proof has shown that they are not."""


class Replay:
    """A run whose every step is known.

    Raises:
        AssertionError: the recording alone does not give what its trainers told.
    """

    def __init__(self, recording: Recording, lives: Sequence[Mapping[int, Digests]]) -> None:
        self._begins, self._lives = recording.begins, lives
        self.ranks = range(len(lives))
        told = self._begins[0].shadow
        assert told is not None
        self.hosts = told.hosts
        """The IP address of each rank."""
        first = max(recording.states.values(), key=lambda state: state.seal.step)
        self.first = first.seal.step
        """The step from whose state on all ranks are known."""
        self.steps = range(self.first + 1, self.first + STEPS + 1)
        layouts: dict[bytes, bytes] = {}
        self._told = {
            (one.rank, one.record.step): replace(
                one, layout=layouts.setdefault(one.layout, one.layout)
            )
            for one in recording.told
        }
        self.ends = self._look_for_ends(recording.frames)
        """So many frames had been seen when a step's all-reduces were whole; of the one before the
        first of `steps`, too."""
        self.packets = [
            Packet(i, recording.frames[i], len(recording.frames[i]))
            for i in range(
                self.ends[self.first],
                min(len(recording.frames), self.ends[self.steps[-1]] + MOST_LAG),
            )
        ]
        self.wired = wired(self.packets)
        self._slots: dict[int, SlotLayout] = {}
        self._states: dict[tuple[int, int], tuple[p.Seal, bytes]] = {}
        for rank in self.ranks:
            self._learn(recording.states[rank])

    def _look_for_ends(self, frames: Sequence[bytes]) -> dict[int, int]:
        tells = {place: _all_reduces(told) for place, told in self._told.items()}
        buckets = next(told.buckets for told in tells.values() if told.buckets is not None)
        parser = Parser()
        gloo = Gloo(
            parser,
            ranks=len(self.ranks),
            hosts={host: rank for rank, host in enumerate(self.hosts)},
            sizes={4 * sum(elements) for _, elements, _ in buckets},
        )
        reader, whole = Reader(parser, gloo), dict[int, int]()
        for i, frame in enumerate(frames):
            for buffer in reader.feed(frames_of([frame])):
                if not buffer.missing:
                    whole[buffer.collective] = i + 1
        ends: dict[int, int] = {}
        for step in self.steps:
            numbers = [number for number in whole if number <= tells[0, step].through]
            ends[step] = max(whole[number] for number in numbers)
            before = sorted(numbers)[: -len(buckets)]
            ends.setdefault(step - 1, max(whole[number] for number in before))
        return ends

    def _learn(self, state: State) -> None:
        """A rank's state after each step, which is the one that its trainer had."""
        rank, its = state.rank, state.describe
        self._slots[rank] = SlotLayout(its.layout, its.specs, its.pieces, its.rest_bytes)
        self._states[rank, state.seal.step] = state.seal, state.data
        folded = self._mirror(rank, state.seal.step)
        for step in range(state.seal.step + 1, self.steps.stop):
            told = self._told[rank, step]
            folded.fold(memoryview(told.found), told.layout)
            assert self._is_right(rank, folded)
            image = folded.image()
            self._states[rank, step] = image.seal, bytes(image.slot)

    @contextlib.contextmanager
    def _source(self) -> Iterator[tuple[WireSource, Turned]]:
        mirror = Turned()
        source = WireSource(mirror, lambda level, text: None, wait_s=0.0)
        try:
            source.begin(1, len(self.ranks), self.hosts)
            yield source, mirror
        finally:
            mirror.end()
            source.close()

    def _whole(self, source: WireSource, told: Told) -> bytes:
        return bytes(source.whole(told.record, memoryview(told.data), told.layout, lambda: None))

    def _mirror(self, rank: int, step: int) -> Mirror:
        """The state after a step, to be folded further."""
        layout = self._slots[rank]
        seal, data = self._states[rank, step]
        slot = memoryview(bytearray(layout.slot_bytes))
        slot[: len(data)] = data
        layout.write_headers(slot)
        return Mirror(Image(self._begins[rank], layout, seal, None, slot), {}, [])

    def _is_right(self, rank: int, folded: Mirror) -> bool:
        """Whether it is its part of the state that the trainer had after that step."""
        its = {
            key: digest(tensor)
            for key, tensor in folded._folding.tensors.items()
            if key.startswith(("/models/", "/optimizers/"))
        }
        return its.items() <= self._lives[rank][folded.step].items()

    # ------------------------------------------------------------ damage

    def run(self, packets: Sequence[Packet], *, lag: int, pause: int, folds: bool) -> Outcome:
        """Show these packets, in their order, and tell what agents told.

        Args:
            lag: each record comes when so many frames more have passed.
            pause: a state is given so many steps after one was lacking.
            folds: whether all that is had is folded, and not only what differs.

        Raises:
            AssertionError: a step that was had is wrong.
        """
        found = Outcome({rank: [] for rank in self.ranks}, {rank: {} for rank in self.ranks})
        states: dict[int, Mirror | None] = {}
        due = dict.fromkeys(self.ranks, self.first)
        shown = 0
        with self._source() as (source, mirror):
            for step in self.steps:
                for rank in self.ranks:
                    if due[rank] == step - 1:
                        source.begin_from(step - 1)
                        states[rank] = self._mirror(rank, step - 1) if folds else None
                stop = shown
                while stop < len(packets) and packets[stop].at < self.ends[step] + lag:
                    stop += 1
                mirror.show(packets[shown:stop])
                shown = stop
                for rank in self.ranks:
                    if step <= due[rank]:
                        found.lacking[rank][step] = ""
                        continue
                    try:
                        data = self._whole(source, self._told[rank, step])
                        states[rank] = self._proved(rank, step, data, states[rank], folds=folds)
                    except (StoreFailed, Damaged) as error:
                        found.refuted += isinstance(error, Damaged)
                        found.lacking[rank][step] = error.headline()
                        due[rank] = step + pause
                    else:
                        found.exact[rank].append(step)
        return found

    def _proved(
        self, rank: int, step: int, data: bytes, state: Mirror | None, *, folds: bool
    ) -> Mirror | None:
        """The state at this step, which is right.

        Raises:
            Damaged: the proof of the step has failed, as it must where something is wrong.
        """
        if data == self._told[rank, step].found and not folds:
            return None
        state = state or self._mirror(rank, step - 1)
        state.fold(memoryview(data), self._told[rank, step].layout)
        assert self._is_right(rank, state), (rank, step)
        return state if folds else None


def _all_reduces(told: Told) -> Reduced:
    tree = unpack(memoryview(told.data), unpack_layout(told.layout), on_wire=True).tree
    return msgspec.convert(tree[ON_WIRE], Reduced)
