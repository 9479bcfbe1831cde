"""Runs made of plain bytes, without torch and without training: what tests of the store write."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from everystep.planning.partition import share_of
from everystep.store import format as fmt
from everystep.store.durable import SystemCalls
from everystep.store.format import RankRecord, TimelineRecord
from everystep.store.full import Content, FileLayout, Part, Source, lay_out_files, streamed
from everystep.store.full import write_part as write_whole_part
from everystep.store.local import LocalBackend
from everystep.store.reading import StepReader, locate
from everystep.store.run import Run
from everystep.types import Piece, StepRef, TensorSpec, element_count, item_bytes

TREE: dict[str, Any] = {
    "models": {"model": {"aliases": {}, "frozen": [], "extra_state": {}}},
    "optimizers": {},
    "extras": {},
    "loaders": {},
    "rng": {},
}
"""The JSON part of a state with one model and nothing else."""


class Tensor(NamedTuple):
    """A tensor as bytes."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes
    replicated: bool = False

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(
            key=self.key, dtype=self.dtype, shape=self.shape, replicated=self.replicated
        )

    def source(self) -> Source:
        size = item_bytes(self.dtype) or 1

        def chunks(start: int, stop: int) -> Iterator[memoryview]:
            view = memoryview(self.data)[start * size : stop * size]
            for at in range(0, len(view), 7):  # an odd length, so that chunks end in an element
                yield view[at : at + 7]

        return Source(self.spec, chunks)


def noise(nbytes: int, seed: object = 0) -> bytes:
    """Bytes without a pattern, always the same."""
    blocks = (hashlib.sha256(f"{seed}:{n}".encode()).digest() for n in range(nbytes // 32 + 1))
    return b"".join(blocks)[:nbytes]


def tensor(key: str, dtype: str, *shape: int, seed: object = 0, replicated: bool = False) -> Tensor:
    """A tensor of noise."""
    nbytes = element_count(shape) * (item_bytes(dtype) or 1)
    return Tensor(key, dtype, shape, noise(nbytes, f"{key} {seed}"), replicated)


def small_state(rank: int = 0, seed: object = 0) -> list[Tensor]:
    """Two parameters that all ranks hold alike, and a buffer and a slot of each rank."""
    return [
        tensor("/models/model/weight", "float32", 3, 5, seed=seed, replicated=True),
        tensor("/models/model/bias", "bfloat16", 3, seed=seed, replicated=True),
        tensor("/models/model/mean", "int64", 2, seed=f"{seed} {rank}"),
        tensor("/optimizers/optimizer/state/exp", "float64", 3, seed=f"{seed} {rank}"),
    ]


def pieces_of(tensors: Sequence[Tensor], rank: int, world_size: int) -> list[Piece]:
    """What a rank stores: its own, and its share of what all hold alike."""
    own = [Piece(t.key, 0, t.spec.elements) for t in tensors if not t.replicated]
    shared = sorted(t for t in tensors if t.replicated)
    sizes = [item_bytes(t.dtype) or 1 for t in shared]
    extents = share_of([t.spec.elements for t in shared], sizes, rank, world_size)
    return own + [Piece(shared[e.position].key, e.start, e.stop) for e in extents]


def write_part(
    run: Run,
    ref: StepRef,
    tensors: Sequence[Tensor],
    *,
    rank: int = 0,
    world_size: int = 1,
    session: int = 1,
    tree: Mapping[str, Any] = TREE,
    metrics: Mapping[str, Any] | None = None,
    pieces: Sequence[Piece] | None = None,
    earlier: Mapping[str, StepRef] | None = None,
) -> RankRecord:
    """Make one rank's part of a step durable.

    Args:
        earlier: sections that are not written, since they are as this step of the rank has them;
            their tensors' bytes are not looked at.
    """
    part = Part(
        ref=ref,
        run=run.id,
        session=session,
        rank=rank,
        world_size=world_size,
        tree=dict(tree),
        metrics=dict(metrics or {}),
        created="2026-01-01T00:00:00Z",
        versions={},
    )
    chosen = pieces_of(tensors, rank, world_size) if pieces is None else pieces
    sources = {t.key: t.source() for t in tensors}
    contents = [
        stored_earlier(run, layout, (earlier or {})[layout.section], rank)
        if layout.section in (earlier or {})
        else streamed(layout, sources)
        for layout in lay_out_files({t.key: t.spec for t in tensors}, chosen)
    ]
    hashes = {t.key: fmt.digest(t.data) for t in tensors}
    return write_whole_part(run.backend, part, [t.spec for t in tensors], contents, hashes)


def stored_earlier(run: Run, layout: FileLayout, step: StepRef, rank: int) -> Content:
    """A data file that a rank's record of an earlier step has, or refers to."""
    entry = next(e for e in reversed(run.entries(step)) if any(p.rank == rank for p in e.parts))
    record = run.record(entry, rank)
    end = f".{fmt.file_label(layout.section)}.safetensors"
    index, file = next((i, f) for i, f in enumerate(record.files) if f.name.endswith(end))
    hashes = {piece.name: piece.xxh3_128 for piece in record.pieces if piece.file == index}
    place = msgspec.structs.replace(file, step=file.step or step)
    return Content(layout, [hashes[place.name] for place in layout.places], earlier=place)


def write_step(
    run: Run,
    ref: StepRef,
    world_size: int = 1,
    session: int = 1,
    earlier: StepRef | None = None,
) -> None:
    """All ranks' parts of a step with a small state of its own, or with the model of an earlier one
    that stores it."""
    for rank in range(world_size):
        write_part(
            run,
            ref,
            adapter_state(rank, ref, earlier or ref),
            rank=rank,
            world_size=world_size,
            session=session,
            earlier={"model": earlier} if earlier else None,
        )


def adapter_state(rank: int, ref: StepRef, earlier: StepRef) -> list[Tensor]:
    """What a rank holds at a step whose model is that of an earlier one."""
    return small_state(rank, earlier)[:3] + small_state(rank, ref)[3:]


def read_back(run: Run, ref: StepRef, rank: int) -> dict[str, bytes]:
    """All tensors of a rank at a complete step, as restore reads them."""
    entry = [entry for entry in run.entries(ref) if entry.complete][-1]
    records = run.records(entry)
    buffers: dict[str, bytearray] = {}

    def buffer_for(spec: TensorSpec) -> memoryview:
        buffers[spec.key] = bytearray(spec.nbytes)
        return memoryview(buffers[spec.key])

    StepReader(run.backend, entry, records).read(locate(records, rank), buffer_for)
    return {key: bytes(data) for key, data in buffers.items()}


class NoSync(SystemCalls):
    """The system calls without the waiting, for tests in which no power is cut."""

    def sync(self, fd: int) -> None:
        pass

    def sync_directory(self, path: Path) -> None:
        pass


def new_run(path: Path, world_size: int = 1, calls: SystemCalls | None = None) -> Run:
    """A run with its first session, and no step."""
    path.mkdir(parents=True, exist_ok=True)
    run = Run.open_or_create(LocalBackend(path, calls))
    begin(run, 1, world_size=world_size)
    return run


def begin(
    run: Run,
    session: int,
    timeline: str = "main",
    *,
    world_size: int = 1,
    parent: StepRef | None = None,
    restored: StepRef | None = None,
) -> None:
    """Record a session."""
    record = TimelineRecord(name=timeline, parent=parent)
    run.begin_session(session, record, world_size, restored, {})


def files_of(root: Path) -> dict[str, bytes]:
    """Every file below a directory by its name."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


def forged(path: Path, **changes: Any) -> None:
    """Change fields of a record and give it a hash that is valid, as an attacker would."""
    content = msgspec.json.decode(path.read_bytes()[fmt.FRAME_BYTES : -len(fmt.FRAME_SUFFIX)])
    path.write_bytes(framed(content | changes))


def framed(content: Any) -> bytes:
    """Any JSON in the frame of a record, with a hash that is valid."""
    text = content if isinstance(content, bytes) else msgspec.json.encode(content)
    rest = fmt.FRAME_MIDDLE[2:] + text + fmt.FRAME_SUFFIX
    return fmt.FRAME_PREFIX + fmt.digest(rest).encode() + fmt.FRAME_MIDDLE[:2] + rest
