"""One rank's full checkpoint of a step: safetensors files, streamed, and the record that makes
them count.

The rank's data files become durable first, all of them; then the record is put, and only then does
the step exist for this rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import xxhash

from everystep.errors import Damaged, StoreError, StoreFailed
from everystep.store import format as fmt
from everystep.store import tensorfile
from everystep.store.backend import Backend, NewFile
from everystep.store.format import DataFile, PartName, RankRecord, StoredPiece, StoredTensor
from everystep.store.wellformed import complaints
from everystep.types import Buffer, Json, Piece, StepRef, TensorSpec, split_key

STATE_SECTION = "state"
"""The data file of everything that is in no model."""


@dataclass(frozen=True)
class Source:
    """A tensor to store: its description, and where its bytes come from."""

    spec: TensorSpec
    chunks: Callable[[int, int], Iterator[memoryview]]
    """Bytes of elements start to stop, row-major; each view is used before the next is asked."""


@dataclass(frozen=True)
class Part:
    """What one rank writes of one step, apart from the tensors."""

    ref: StepRef
    run: str
    session: int
    rank: int
    world_size: int
    tree: Json
    metrics: dict[str, Json]
    created: str
    versions: dict[str, str]


def write_full(
    backend: Backend, part: Part, sources: Sequence[Source], pieces: Sequence[Piece]
) -> RankRecord:
    """Make one rank's part of a step durable.

    Memory: the parts of a tensor are hashed and written as they come; nothing is gathered.

    Args:
        backend: where to.
        part: which step of what, and all that is not a tensor.
        sources: every tensor of this rank's state.
        pieces: which of their elements this rank stores; the other (replicated) tensors are
            hashed, not written.

    Raises:
        StoreError: as the backend says; the step does not exist then, and what had been written of
            it is removed as far as the store allows.
    """
    by_key = {source.spec.key: source for source in sources}
    base = PartName(part.session, part.rank, part.world_size, "")
    directory = fmt.step_directory(part.ref)
    _require_names(part, base)
    writers = [_SectionWriter(members, by_key) for members in _by_section(pieces).values()]
    files = [writer.data_file(base) for writer in writers]
    names = [f"{directory}/{file.name}" for file in files]
    try:
        backend.put(
            [
                NewFile(name, file.nbytes, writer.parts())
                for name, file, writer in zip(names, files, writers, strict=True)
            ]
        )
        record = _record_of(part, sources, by_key, writers, files)
        marker = f"{directory}/{base._replace(replica=(record.replica_xxh3_128 or '')[:16]).marker}"
        names.insert(0, marker)  # is removed before the data, should it be there in spite of all
        _put_marker(backend, marker, base, record)
    except BaseException:
        with contextlib.suppress(StoreError):
            for name in names:
                backend.delete(name)
        raise
    return record


def _require_names(part: Part, base: PartName) -> None:
    """Refuse numbers for which names have no room: no reader would see such a step."""
    path = f"{fmt.step_directory(part.ref)}/{base.marker}"
    place = fmt.parse_step_path(path)
    if place is None or place[0] != part.ref or fmt.parse_marker(place[1]) != base:
        raise StoreFailed(
            "a step, session or rank has too many digits for the name of a file",
            path=path,
            expected=f"<= step {fmt.LAST_STEP:,}, {fmt.MOST_RANKS:,} ranks",
        )


def _record_of(
    part: Part,
    sources: Sequence[Source],
    by_key: Mapping[str, Source],
    writers: Sequence[_SectionWriter],
    files: list[DataFile],
) -> RankRecord:
    stored = [piece for index, writer in enumerate(writers) for piece in writer.stored(index)]
    whole = {p.piece.key: p.xxh3_128 for p in stored if _is_whole(p.piece, by_key)}
    tensors = [
        StoredTensor(spec=source.spec, xxh3_128=whole.get(source.spec.key) or _hash_all(source))
        for source in sources
    ]
    return RankRecord(
        run=part.run,
        timeline=part.ref.timeline,
        step=part.ref.step,
        session=part.session,
        rank=part.rank,
        world_size=part.world_size,
        created=part.created,
        metrics=part.metrics,
        files=files,
        tensors=tensors,
        pieces=stored,
        replica_xxh3_128=_replica_hash(tensors),
        tree=part.tree,
        versions=part.versions,
    )


def _put_marker(backend: Backend, name: str, base: PartName, record: RankRecord) -> None:
    """Make the record durable, unless it would not be read as what it is."""
    data = fmt.encode_record(record)
    if fmt.decode_record(data, RankRecord, name) != record:
        raise Damaged("a record does not read back as it was written", path=name)
    for complaint in complaints(record, base.stem):
        raise Damaged(complaint, path=name)
    backend.put([NewFile(name, len(data), [data])])


def _by_section(pieces: Sequence[Piece]) -> dict[str, list[Piece]]:
    sections: dict[str, list[Piece]] = {}
    for piece in pieces:
        sections.setdefault(section_of(piece.key), []).append(piece)
    return sections


def section_of(key: str) -> str:
    """Which data file a tensor goes into: one per model, and one for all the rest."""
    parts = split_key(key)
    if parts[0] != "models" or len(parts) != 3:
        return STATE_SECTION
    return "model" if parts[1] == "model" else f"model.{parts[1]}"


def _name_in_file(key: str, section: str) -> str:
    fqn = split_key(key)[-1]
    return key if section == STATE_SECTION or fqn == "__metadata__" else fqn


class _SectionWriter:
    """The bytes of one data file, hashed as they pass."""

    def __init__(self, pieces: Sequence[Piece], sources: Mapping[str, Source]) -> None:
        self._sources = sources
        self._section = section_of(pieces[0].key)
        self._pieces = {_name_in_file(piece.key, self._section): piece for piece in pieces}
        slots = tensorfile.lay_out([(n, *self._form(p)) for n, p in self._pieces.items()])
        self._header = tensorfile.encode_header(slots, {"format": "pt"})
        self._nbytes = len(self._header) + (slots[-1].stop if slots else 0)
        self._hashes = {slot.name: "" for slot in slots}
        tensorfile.header_length(self._header[:8], self._nbytes, self._section)
        if tensorfile.decode_header(self._header, self._nbytes, self._section) != slots:
            raise Damaged("a header does not read back as it was written", path=self._section)

    def _form(self, piece: Piece) -> tuple[str, tuple[int, ...]]:
        spec = self._sources[piece.key].spec
        whole = _is_whole(piece, self._sources)
        return spec.dtype, spec.shape if whole else (piece.stop - piece.start,)

    def parts(self) -> Iterator[Buffer]:
        """All bytes of the file in order."""
        yield self._header
        for name in self._hashes:
            piece = self._pieces[name]
            state = xxhash.xxh3_128()
            for chunk in self._sources[piece.key].chunks(piece.start, piece.stop):
                state.update(chunk)
                yield chunk
            self._hashes[name] = state.hexdigest()

    def data_file(self, base: PartName) -> DataFile:
        """The description of this file."""
        return DataFile(
            name=f"{base.stem}.{fmt.file_label(self._section)}.safetensors",
            nbytes=self._nbytes,
            header_bytes=len(self._header),
            header_xxh3_128=fmt.digest(self._header),
        )

    def stored(self, file: int) -> list[StoredPiece]:
        """What the file holds, once its parts have been written."""
        return [
            StoredPiece(piece=self._pieces[name], file=file, name=name, xxh3_128=found)
            for name, found in self._hashes.items()
        ]


def _is_whole(piece: Piece, sources: Mapping[str, Source]) -> bool:
    return piece.stop - piece.start == sources[piece.key].spec.elements


def _hash_all(source: Source) -> str:
    state = xxhash.xxh3_128()
    for chunk in source.chunks(0, source.spec.elements):
        state.update(chunk)
    return state.hexdigest()


def _replica_hash(tensors: Sequence[StoredTensor]) -> str | None:
    """Over what the ranks must have in common: key, dtype, shape and hash of each tensor."""
    replicated = sorted((t for t in tensors if t.spec.replicated), key=lambda t: t.spec.key)
    if not replicated:
        return None
    lines = (f"{t.spec.key}\0{t.spec.dtype}\0{t.spec.shape}\0{t.xxh3_128}\n" for t in replicated)
    return fmt.digest("".join(lines).encode())
