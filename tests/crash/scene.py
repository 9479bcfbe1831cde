"""A run of hand-made tensors, written through the store alone, and what must be true of it after a
power cut."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from everystep.errors import EverystepError
from everystep.planning.partition import share_of
from everystep.recovery.plan import plan_restore
from everystep.recovery.restore import require_fresh
from everystep.store.backend import Backend
from everystep.store.durable import SystemCalls
from everystep.store.full import Part, Source, write_full
from everystep.store.local import LocalBackend
from everystep.store.reading import StepReader, locate
from everystep.store.retention import Retention, Upkeep
from everystep.store.run import Run, StepEntry
from everystep.store.verify import verify_run
from everystep.types import Piece, StepRef, TensorSpec, item_bytes

_SPECS = (
    TensorSpec(key="/models/model/weight", dtype="float32", shape=(5, 3), replicated=True),
    TensorSpec(key="/models/model/steps", dtype="int64", shape=()),
    TensorSpec(key="/optimizers/optimizer/exp_avg", dtype="bfloat16", shape=(7,), replicated=True),
    TensorSpec(key="/rng/torch", dtype="uint8", shape=(11,)),
)
_REPLICATED = {spec.key for spec in _SPECS if spec.replicated}


class Expected(NamedTuple):
    """What must be true if the power fails now."""

    run: str | None
    """The identity of the run; None while it is being made."""
    complete: frozenset[tuple[StepRef, int]]
    """(step, session): all of these can be read exactly."""
    newest: frozenset[tuple[StepRef, int] | None]
    """One of these is what restore() takes; None: a fresh start."""


class Skipped(SystemCalls):
    """Performs everything but fsync: for trees that nobody will cut the power of."""

    def sync(self, fd: int) -> None:
        """Nothing."""

    def sync_directory(self, path: Path) -> None:
        """Nothing."""


def value(spec: TensorSpec, ref: StepRef, session: int, rank: int, world_size: int) -> bytes:
    """The bytes of a tensor, different for each step, session and (unless replicated) rank."""
    whose = "all" if spec.key in _REPLICATED and world_size > 1 else rank
    text = f"{spec.key} {ref} {session} {whose}".encode()
    return hashlib.shake_256(text).digest(spec.elements * (item_bytes(spec.dtype) or 1))


def _source(spec: TensorSpec, data: bytes) -> Source:
    size = item_bytes(spec.dtype) or 1

    def chunks(start: int, stop: int) -> Iterator[memoryview]:
        yield memoryview(data)[start * size : stop * size]

    return Source(spec, chunks)


def write_step(
    backend: Backend, run: str, ref: StepRef, session: int, rank: int, world_size: int
) -> None:
    """One rank's part of a step, with replicated tensors shared out as the Checkpointer does."""
    specs = [msgspec.structs.replace(s, replicated=s.replicated and world_size > 1) for s in _SPECS]
    part = Part(
        ref=ref, run=run, session=session, rank=rank, world_size=world_size,
        tree={"step": ref.step}, metrics={}, created="", versions={},
    )  # fmt: skip
    sources = [_source(spec, value(spec, ref, session, rank, world_size)) for spec in specs]
    write_full(backend, part, sources, _pieces(specs, rank, world_size))


def _pieces(specs: list[TensorSpec], rank: int, world_size: int) -> list[Piece]:
    own = [Piece(spec.key, 0, spec.elements) for spec in specs if not spec.replicated]
    shared = sorted((s for s in specs if s.replicated), key=lambda s: s.key)
    sizes = [item_bytes(spec.dtype) or 1 for spec in shared]
    extents = share_of([s.elements for s in shared], sizes, rank, world_size)
    return own + [Piece(shared[e.position].key, e.start, e.stop) for e in extents]


class Session:
    """From one start of a (made-up) training to the next, through the parts that the Checkpointer
    is composed of, in its order."""

    def __init__(
        self,
        root: Path,
        calls: SystemCalls,
        world_size: int = 1,
        step: int | None = None,
        retention: Retention = Retention(keep_last=2),  # noqa: B008 - immutable
    ) -> None:
        self.world_size = world_size
        self.backends = [LocalBackend(root, calls) for _ in range(world_size)]
        first = self.backends[0]
        self.run = Run.open_or_create(first)
        listing = self.run.listing()
        plan = plan_restore(listing, self.run.segments(listing), step)
        if plan.chain is None:
            require_fresh(listing)
        self.restored = plan.chain.ref if plan.chain else None
        self.timeline = plan.timeline.name
        first.sweep()
        self.number = self.run.clean_up()
        self.run.begin_session(self.number, plan.timeline, world_size, self.restored, {})
        listing = self.run.listing()
        pinned = {t.parent for t in listing.timelines.values() if t.parent is not None}
        pinned |= {self.restored} if self.restored else set()
        known = [e for e in listing.steps if e.ref.timeline == self.timeline]
        self.upkeep = [
            Upkeep(Run.open_or_create(backend), retention, rank, known, pinned)
            for rank, backend in enumerate(self.backends)
        ]
        self.done = self.restored.step if self.restored else 0

    def store(self, step: int, rank: int) -> None:
        """One rank's part of a step."""
        ref = StepRef(self.timeline, step)
        write_step(self.backends[rank], self.run.id, ref, self.number, rank, self.world_size)

    def look_after(self, step: int, rank: int) -> None:
        """What a rank does after its step: remove what retention lets go."""
        self.upkeep[rank].after_step(StepRef(self.timeline, step), self.number)
        self.upkeep[rank].finish_removal()

    def close(self) -> None:
        """End the threads."""
        for upkeep in self.upkeep:
            upkeep.close()


def exact(run: Run, entry: StepEntry) -> str | None:
    """What differs between a step as it is read and as it was written; None if nothing."""
    try:
        records = run.records(entry)
        for rank in records:
            buffers: dict[str, bytearray] = {}

            def buffer_for(spec: TensorSpec, buffers: dict[str, bytearray] = buffers) -> memoryview:
                buffers[spec.key] = bytearray(spec.nbytes)
                return memoryview(buffers[spec.key])

            StepReader(run.backend, entry, records).read(locate(records, rank), buffer_for)
            for spec in _SPECS:
                written = value(spec, entry.ref, entry.session, rank, entry.world_size)
                if bytes(buffers.get(spec.key, b"")) != written:
                    return f"{entry.ref} of session {entry.session}: {spec.key} has other bytes"
    except EverystepError as error:
        return f"{entry.ref} of session {entry.session} is listed as complete: {error.headline()}"
    return None


def complaints(root: Path, expected: Expected) -> list[str]:
    """What is wrong with a run that a power cut has left in `root`; goes on with it to find out."""
    try:
        found = _complaints_as_it_is(root, expected)
        return found or _complaints_when_going_on(root, expected)
    except EverystepError as error:
        return [f"{type(error).__name__}: {error.headline()}"]


def _complaints_as_it_is(root: Path, expected: Expected) -> list[str]:
    found = []
    run = Run.open_or_create(LocalBackend(root, Skipped()))
    if expected.run is not None and run.id != expected.run:
        found.append("the run has lost its identity")
    listing = run.listing()
    found += [f"damaged: {damage.headline()}" for damage in listing.damages]
    complete = {(e.ref, e.session): e for e in listing.steps if e.complete}
    found += [f"lost: {ref} of session {n}" for ref, n in expected.complete - complete.keys()]
    found += [line for entry in complete.values() if (line := exact(run, entry)) is not None]
    plan = plan_restore(listing, run.segments(listing), None)
    if plan.chain is None:
        require_fresh(listing)
    newest = plan.chain.full if plan.chain else None
    taken = (newest.ref, newest.session) if newest else None
    if taken not in expected.newest:
        found.append(f"restore() takes {taken}, not one of {sorted(map(str, expected.newest))}")
    return found


def _complaints_when_going_on(root: Path, expected: Expected) -> list[str]:
    """The next session starts, cleans up and stores a step."""
    keep_all = Retention(keep_last=None)
    session = Session(root, Skipped(), retention=keep_all)
    try:
        session.store(session.done + 1, 0)
        session.look_after(session.done + 1, 0)
    finally:
        session.close()
    run, listing = session.run, session.run.listing()
    written = (StepRef(session.timeline, session.done + 1), session.number)
    complete = {(e.ref, e.session): e for e in listing.steps if e.complete}
    found = [f"lost when going on: {r}" for r in {written, *expected.complete} - complete.keys()]
    if found:
        return found
    found += [line for line in [exact(run, complete[written])] if line is not None]
    found += [f"left: {ref} {stem}" for ref, stem in listing.loose]
    found += [f"left: {name}" for name in listing.strangers]
    found += [f"left incomplete: {entry.ref}" for entry in listing.steps if not entry.complete]
    return found + [f"verify: {f.what}" for f in verify_run(run, listing) if f.level == "damage"]
