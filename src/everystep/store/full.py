"""One rank's full checkpoint of a step: safetensors files, and the record that makes them count.

The rank's data files become durable first, all of them; then the record is put, and only then does
the step exist for this rank.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import xxhash

from everystep.errors import Damaged, StoreError, StoreFailed
from everystep.store import format as fmt
from everystep.store import tensorfile
from everystep.store.backend import Backend, NewFile
from everystep.store.format import DataFile, PartName, RankRecord, StoredPiece, StoredTensor
from everystep.store.wellformed import checked, complaints
from everystep.types import Buffer, Json, Piece, StepRef, TensorSpec, split_key

STATE_SECTION = "state"
"""The data file of optimizer slots."""

REST_SECTION = "rest"
"""The data file of what is in no model and no slot: it may have another form at every step."""

PIECES_SECTION = "pieces"
"""The data file of what has changed since the image before; see `store.increments`."""


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
    agreement: str | None = None
    """What stands for the hash over all replicated tensors, where this rank has not all of them."""

    @property
    def name(self) -> PartName:
        """The part's name, but for the replica hash."""
        return PartName(self.session, self.rank, self.world_size, "")


class Place(NamedTuple):
    """Where a piece lies in a file."""

    piece: Piece
    name: str
    start: int
    """In bytes from the beginning of the file."""
    stop: int


@dataclass(frozen=True)
class FileLayout:
    """A data file before it is filled: the same for every step whose pieces have the same form."""

    section: str
    header: bytes
    """Everything before the first tensor."""
    places: tuple[Place, ...]
    """In the order of their bytes, without gaps."""
    nbytes: int

    @functools.cached_property
    def header_xxh3_128(self) -> str:
        """The hash of the header."""
        return fmt.digest(self.header)


@dataclass
class Content:
    """A data file of a part, with its bytes or with where they already are."""

    layout: FileLayout
    hashes: list[str]
    """Of each place, xxh3-128; may be filled while the parts are read."""
    parts: Iterable[Buffer] = ()
    lasting: bool = False
    """See `NewFile.lasting`."""
    earlier: DataFile | None = None
    """The file in which this content has been stored by an earlier step; then nothing is
    written."""

    def data_file(self, stem: str) -> DataFile:
        """The description of the file.

        Args:
            stem: what the names of all files of the part begin with.
        """
        if self.earlier is not None:
            return self.earlier
        return DataFile(
            name=f"{stem}.{fmt.file_label(self.layout.section)}.safetensors",
            nbytes=self.layout.nbytes,
            header_bytes=len(self.layout.header),
            header_xxh3_128=self.layout.header_xxh3_128,
        )


def section_of(key: str) -> str:
    """Which data file a tensor goes into: one per model, one of slots, and one for the rest."""
    parts = split_key(key)
    if parts[0] == "models" and len(parts) == 3:
        return "model" if parts[1] == "model" else f"model.{parts[1]}"
    is_slot = parts[0] == "optimizers" and len(parts) > 2 and parts[2] == "state"
    return STATE_SECTION if is_slot else REST_SECTION


def lay_out_files(specs: Mapping[str, TensorSpec], pieces: Sequence[Piece]) -> list[FileLayout]:
    """Divide pieces among data files, and place them.

    Args:
        specs: the tensors by key.
        pieces: what is to be stored of them.

    Raises:
        Damaged: a header would not be read as what it is.
    """
    sections: dict[str, list[Piece]] = {}
    for piece in pieces:
        sections.setdefault(section_of(piece.key), []).append(piece)
    return [lay_out_file(section, specs, members) for section, members in sections.items()]


def lay_out_file(
    section: str, specs: Mapping[str, TensorSpec], pieces: Sequence[Piece]
) -> FileLayout:
    """Place pieces in one data file.

    Raises:
        Damaged: its header would not be read as what it is.
    """
    named = {_name_in_file(piece, specs[piece.key], section): piece for piece in pieces}
    slots = tensorfile.lay_out(
        [(name, *_form(specs[piece.key], piece)) for name, piece in named.items()]
    )
    header = tensorfile.encode_header(slots, {"format": "pt"})
    nbytes = len(header) + (slots[-1].stop if slots else 0)
    tensorfile.header_length(header[:8], nbytes, section)
    if tensorfile.decode_header(header, nbytes, section) != slots:
        raise Damaged("a header does not read back as it was written", path=section)
    first = len(header)
    places = (Place(named[s.name], s.name, first + s.start, first + s.stop) for s in slots)
    return FileLayout(section, header, tuple(places), nbytes)


def _name_in_file(piece: Piece, spec: TensorSpec, section: str) -> str:
    if section == PIECES_SECTION and piece.stop - piece.start != spec.elements:
        return f"{piece.key}~[{piece.start}:{piece.stop}]"  # in a key, 0 or 1 is behind each ~
    parts = split_key(piece.key)
    plain = section.split(".")[0] == "model" and parts[2] != "__metadata__"
    return parts[2] if plain else piece.key


def _form(spec: TensorSpec, piece: Piece) -> tuple[str, tuple[int, ...]]:
    whole = piece.stop - piece.start == spec.elements
    return spec.dtype, spec.shape if whole else (piece.stop - piece.start,)


def write_part(
    backend: Backend,
    part: Part,
    specs: Sequence[TensorSpec],
    contents: Sequence[Content],
    whole: Mapping[str, str],
) -> RankRecord:
    """Make one rank's part of a step durable.

    Args:
        backend: where to.
        part: which step of what, and all that is not a tensor.
        specs: every tensor of this rank's state.
        contents: the data files.
        whole: hashes by key of the (replicated) tensors that are in no file as a whole; those of
            which this rank has nothing may be left out.

    Raises:
        StoreError: as the backend says; the step does not exist then, and what had been written of
            it is removed as far as the store allows.
    """
    directory = fmt.step_directory(part.ref)
    base = part.name
    require_names(part)
    files = [content.data_file(base.stem) for content in contents]
    new = [
        NewFile(f"{directory}/{file.name}", file.nbytes, content.parts, content.lasting)
        for file, content in zip(files, contents, strict=True)
        if content.earlier is None
    ]
    names = [file.name for file in new]
    try:
        backend.put(new)
        record = record_of(part, specs, contents, whole)
        marker = f"{directory}/{base._replace(replica=(record.replica_xxh3_128 or '')[:16]).marker}"
        names.insert(0, marker)  # is removed before the data, should it be there in spite of all
        data = encoded(record, marker)
        backend.put([NewFile(marker, len(data), [data])])
    except BaseException:
        with contextlib.suppress(StoreError):
            for name in names:
                backend.delete(name)
        raise
    return record


def require_names(part: Part) -> None:
    """Refuse numbers for which names have no room: no reader would see such a step.

    Raises:
        StoreFailed: there are such.
    """
    path = f"{fmt.step_directory(part.ref)}/{part.name.marker}"
    place = fmt.parse_step_path(path)
    if place is None or place[0] != part.ref or fmt.parse_marker(place[1]) != part.name:
        raise StoreFailed(
            "a step, session or rank has too many digits for the name of a file",
            path=path,
            expected=f"<= step {fmt.LAST_STEP:,}, {fmt.MOST_RANKS:,} ranks",
        )


def record_of(
    part: Part,
    specs: Sequence[TensorSpec],
    contents: Sequence[Content],
    whole: Mapping[str, str],
) -> RankRecord:
    """The record of a part, once all hashes are known; see `write_part`."""
    elements = {spec.key: checked(spec).elements for spec in specs}
    stored, hashes = [], dict(whole)
    for index, content in enumerate(contents):
        for (piece, name, _, _), found in zip(content.layout.places, content.hashes, strict=True):
            stored.append(StoredPiece(piece=piece, file=index, name=name, xxh3_128=found))
            if piece.stop - piece.start == elements[piece.key]:
                hashes[piece.key] = found
    _put_in_order(stored)
    tensors = [StoredTensor(spec=spec, xxh3_128=hashes.get(spec.key, "")) for spec in specs]
    return RankRecord(
        run=part.run,
        timeline=part.ref.timeline,
        step=part.ref.step,
        session=part.session,
        rank=part.rank,
        world_size=part.world_size,
        created=part.created,
        metrics=part.metrics,
        files=[content.data_file(part.name.stem) for content in contents],
        tensors=tensors,
        pieces=stored,
        replica_xxh3_128=part.agreement or _replica_hash(tensors),
        tree=part.tree,
        versions=part.versions,
    )


def _put_in_order(stored: list[StoredPiece]) -> None:
    """The pieces of one tensor may lie in several files; a reader wants them as they follow."""
    first: dict[str, int] = {}
    for position, one in enumerate(stored):
        first.setdefault(one.piece.key, position)
    if len(first) < len(stored):
        stored.sort(key=lambda one: (first[one.piece.key], one.piece.start))


def encoded(record: RankRecord, name: str) -> bytes:
    """A record as it is stored, unless it would not be read as what it is.

    Raises:
        Damaged: it would not.
    """
    data = fmt.encode_record(record)
    if fmt.decode_record(data, RankRecord, name) != record:
        raise Damaged("a record does not read back as it was written", path=name)
    stem = PartName(record.session, record.rank, record.world_size, "").stem
    for complaint in complaints(record, stem):
        raise Damaged(complaint, path=name)
    return data


def _replica_hash(tensors: Sequence[StoredTensor]) -> str | None:
    """Over what the ranks must have in common: key, dtype, shape and hash of each tensor."""
    replicated = [(t.spec.key, t) for t in tensors if t.spec.replicated]
    if not replicated:
        return None
    replicated.sort(key=operator.itemgetter(0))
    lines = [f"{_begin_of_line(t.spec)}{t.xxh3_128}\n" for _, t in replicated]
    return fmt.digest("".join(lines).encode())


@functools.lru_cache(1 << 16)
def _begin_of_line(spec: TensorSpec) -> str:
    """What is the same at every step."""
    return f"{spec.key}\0{spec.dtype}\0{spec.shape}\0"


@dataclass(frozen=True)
class Source:
    """A tensor to store: its description, and where its bytes come from."""

    spec: TensorSpec
    chunks: Callable[[int, int], Iterator[memoryview]]
    """Bytes of elements start to stop, row-major; each view is used before the next is asked."""


def write_full(
    backend: Backend, part: Part, sources: Sequence[Source], pieces: Sequence[Piece]
) -> RankRecord:
    """Make one rank's part of a step durable, from tensors that do not change meanwhile.

    Memory: the parts of a tensor are hashed and written as they come; nothing is gathered.

    Args:
        backend: where to.
        part: which step of what, and all that is not a tensor.
        sources: every tensor of this rank's state.
        pieces: which of their elements this rank stores; the other (replicated) tensors are
            hashed, not written.

    Raises:
        StoreError: see `write_part`.
    """
    by_key = {source.spec.key: source for source in sources}
    specs = [source.spec for source in sources]
    require_names(part)
    layouts = lay_out_files({spec.key: spec for spec in specs}, pieces)
    contents = [streamed(layout, by_key) for layout in layouts]
    stored = {p.key for p in pieces if p.stop - p.start == by_key[p.key].spec.elements}
    whole = {key: hash_all(source) for key, source in by_key.items() if key not in stored}
    return write_part(backend, part, specs, contents, whole)


def streamed(layout: FileLayout, sources: Mapping[str, Source]) -> Content:
    """A data file whose bytes are hashed as they are read from tensors.

    Args:
        layout: what lies where.
        sources: the tensors by key.
    """
    content = Content(layout, [])

    def parts() -> Iterator[Buffer]:
        yield layout.header
        for place in layout.places:
            state = xxhash.xxh3_128()
            for chunk in sources[place.piece.key].chunks(place.piece.start, place.piece.stop):
                state.update(chunk)
                yield chunk
            content.hashes.append(state.hexdigest())

    content.parts = parts()
    return content


def hash_all(source: Source) -> str:
    """The hash of all bytes of a tensor."""
    state = xxhash.xxh3_128()
    for chunk in source.chunks(0, source.spec.elements):
        state.update(chunk)
    return state.hexdigest()
