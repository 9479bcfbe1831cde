"""A whole step in staging memory, as the files that it will be on the store."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence, Set

import msgspec
import xxhash

from everystep.agent.arena import whole_pages
from everystep.agent.protocol import Begin, Describe, InMemory, Seal, Still
from everystep.errors import Damaged, StoreFailed
from everystep.store import format as fmt
from everystep.store.format import DataFile, PartName
from everystep.store.full import (
    REST_SECTION,
    Content,
    FileLayout,
    Part,
    encoded,
    lay_out_file,
    lay_out_files,
    record_of,
)
from everystep.store.increments import Cut, Durable, Increment, contents_of, plan_image
from everystep.store.run import now
from everystep.types import Buffer, Json, Piece, StepRef, TensorSpec, spoken

STILL_SECTION = "still"
"""The data file of tensors that do not change, which later steps refer to."""

_STRETCH_BYTES = 8 << 20
"""What is hashed before it is handed on to be written."""


class SlotLayout:
    """Where everything lies in a slot: the data files one after the other, each from a page
    boundary on, so that they can be written without a copy; then room for the rest."""

    def __init__(
        self, number: int, specs: Sequence[TensorSpec], pieces: Sequence[Piece], rest_bytes: int
    ) -> None:
        self.number = number
        self.specs = {spec.key: spec for spec in specs}
        self.files: list[tuple[int, FileLayout]] = []
        starts: dict[Piece, int] = {}
        offset = 0
        for layout in lay_out_files(self.specs, pieces):
            self.files.append((offset, layout))
            starts.update((place.piece, offset + place.start) for place in layout.places)
            offset += whole_pages(layout.nbytes)
        self.offsets = [starts[piece] for piece in pieces]
        self.rest_offset = offset
        self.slot_bytes = offset + whole_pages(rest_bytes)
        numbers = {piece: number for number, piece in enumerate(pieces)}
        self.numbers = [
            [numbers[place.piece] for place in layout.places] for _, layout in self.files
        ]
        """For each place of each file, the number of its piece in the description."""
        self._rest: tuple[list[TensorSpec], FileLayout] | None = None

    def described(self, slot_bytes: int) -> Describe:
        """What it is made from.

        Args:
            slot_bytes: of the slot; it may be longer than it need be.
        """
        pieces = {
            number: place.piece
            for (_, layout), numbers in zip(self.files, self.numbers, strict=True)
            for place, number in zip(layout.places, numbers, strict=True)
        }
        return Describe(
            layout=self.number,
            specs=list(self.specs.values()),
            pieces=[pieces[number] for number in sorted(pieces)],
            rest_bytes=slot_bytes - self.rest_offset,
        )

    def rest_file(self, specs: Sequence[TensorSpec]) -> FileLayout:
        """The file of the rest of a step; the same one while the rest has the same form.

        Args:
            specs: the tensors, each of which is stored whole.
        """
        known = self._rest
        if known is None or known[0] != specs:
            pieces = [Piece(spec.key, 0, spec.elements) for spec in specs]
            by_key = {spec.key: spec for spec in specs}
            self._rest = known = (list(specs), lay_out_file(REST_SECTION, by_key, pieces))
        return known[1]

    def write_headers(self, slot: memoryview) -> None:
        """Put what stands before the first tensor of each file into a slot."""
        for offset, layout in self.files:
            slot[offset : offset + len(layout.header)] = layout.header


def still_file(still: Still, begin: Begin, at: StepRef) -> DataFile:
    """The description of the file with the tensors that do not change, for the record of a step.

    Args:
        at: the step whose record it is.
    """
    layout = _still_layout(still)
    stem = PartName(still.session, begin.rank, begin.world_size, "").stem
    return DataFile(
        name=f"{stem}.{fmt.file_label(STILL_SECTION)}.safetensors",
        nbytes=layout.nbytes,
        header_bytes=len(layout.header),
        header_xxh3_128=fmt.digest(layout.header),
        step=None if still.step == at else still.step,
    )


def _still_layout(still: Still) -> FileLayout:
    return lay_out_file(STILL_SECTION, {spec.key: spec for spec in still.specs}, still.pieces)


class Image:
    """A sealed slot. Hashes that the trainer has not sent are taken while it is written.

    Raises:
        Damaged: what came of the step makes no sense.
    """

    def __init__(
        self, begin: Begin, layout: SlotLayout, seal: Seal, still: Still | None, slot: memoryview
    ) -> None:
        self.begin, self.seal = begin, seal
        self.ref = StepRef(begin.timeline, seal.step)
        self._layout, self._slot = layout, slot
        self._still = still if seal.still else None
        rest_bytes = sum(spec.nbytes for spec in seal.rest)
        if layout.rest_offset + rest_bytes > len(slot):
            raise Damaged("the rest of a step is larger than its place", found=rest_bytes)
        try:
            self._tree = msgspec.json.decode(seal.tree)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise Damaged(f"the tree of a step is no JSON: {error}") from error
        self._hashes: dict[int, str] = dict(seal.hashes)
        self.agreement: str | None = None
        """See `Part.agreement`."""
        self._files: list[InMemory] | None = None
        self.hashing: tuple[float, float] | None = None
        """From the first to the last hash that was taken here, on the host's monotonic clock."""
        self._cut: Cut | None = None
        self._referred: set[StepRef] = set()

    @property
    def refers_to(self) -> list[StepRef]:
        """Earlier steps in whose files a part of this one lies, as it was written last."""
        still = self._still
        kept = set() if still is None or still.step == self.ref else {still.step}
        return sorted(self._referred | kept)

    @property
    def slot(self) -> memoryview:
        """All bytes of the slot."""
        return self._slot

    def described(self) -> tuple[Describe, int]:
        """What the same slot elsewhere is laid out by, and how many bytes there must be copied."""
        rest_bytes = sum(spec.nbytes for spec in self.seal.rest)
        return self._layout.described(len(self._slot)), self._layout.rest_offset + rest_bytes

    @property
    def specs(self) -> list[TensorSpec]:
        """All tensors of the rank's state."""
        still = [] if self._still is None else self._still.specs
        return [*self._layout.specs.values(), *still, *self.seal.rest]

    @property
    def whole(self) -> Mapping[str, str]:
        """Hashes of whole tensors of which the files hold less."""
        return self.seal.whole if self._still is None else {**self.seal.whole, **self._still.whole}

    @property
    def tree(self) -> Json:
        """All that is not a tensor."""
        return self._tree

    def fixed_keys(self) -> Set[str]:
        """Of the tensors whose form stays."""
        return self._layout.specs.keys()

    def is_fixed(self, spec: TensorSpec) -> bool:
        """Whether a tensor has a place in the slot, and the form for it.

        Raises:
            StoreFailed: it has a place, and another form.
        """
        known = self._layout.specs.get(spec.key)
        if known is not None and known != spec:
            raise StoreFailed(f"{spoken(spec.key)} has got another form", step=self.ref)
        return known is not None

    def memory(self) -> dict[str, memoryview]:
        """The bytes of tensors that lie in the slot as a whole, by key."""
        return {
            piece.key: view
            for _, spec, piece, view in self._stored()
            if piece.stop - piece.start == spec.elements
        }

    def _stored(self) -> Iterator[tuple[int | None, TensorSpec, Piece, memoryview]]:
        """The pieces in the slot: number in the description, if they have one, tensor, piece,
        bytes."""
        for (offset, layout), numbers in zip(self._layout.files, self._layout.numbers, strict=True):
            for (piece, _, first, last), number in zip(layout.places, numbers, strict=True):
                spec = self._layout.specs[piece.key]
                yield number, spec, piece, self._slot[offset + first : offset + last]
        at = self._layout.rest_offset
        for spec in self.seal.rest:
            whole = Piece(spec.key, 0, spec.elements)
            yield None, spec, whole, self._slot[at : at + spec.nbytes]
            at += spec.nbytes

    def resealed(
        self,
        step: int,
        rest: Sequence[TensorSpec],
        rest_bytes: bytes,
        tree: bytes,
        metrics: Mapping[str, Json],
    ) -> Image:
        """The image of a later step, whose fixed tensors are in the slot already.

        Args:
            rest: descriptions of the other ones.
            rest_bytes: their bytes, one after the other, to be put there.

        Raises:
            StoreFailed: there is no room for them.
        """
        first = self._layout.rest_offset
        if first + len(rest_bytes) > len(self._slot):
            raise StoreFailed("the rest of a step is larger than its place", step=self.ref)
        self._slot[first : first + len(rest_bytes)] = rest_bytes
        seal = msgspec.structs.replace(
            self.seal,
            step=step,
            created=now(),
            hashes={},
            whole={},
            rest=list(rest),
            still=False,
            tree=tree,
            metrics=dict(metrics),
        )
        return Image(self.begin, self._layout, seal, None, self._slot)

    def part(self) -> Part:
        """What is written beside the tensors."""
        begin = self.begin
        return Part(
            ref=self.ref,
            run=begin.run,
            session=begin.session,
            rank=begin.rank,
            world_size=begin.world_size,
            tree=self._tree,
            metrics=self.seal.metrics,
            created=self.seal.created,
            versions=begin.versions,
            agreement=self.agreement,
        )

    def contents(self) -> list[Content]:
        """The data files. They may be asked for again when a writing has failed."""
        found = [
            self._fixed(offset, layout, numbers)
            for (offset, layout), numbers in zip(
                self._layout.files, self._layout.numbers, strict=True
            )
        ]
        if self.seal.rest:
            found.append(self._rest_content())
        return [*found, *self._still_contents()]

    def _still_contents(self) -> list[Content]:
        if self._still is None:
            return []
        layout = _still_layout(self._still)
        by_piece = dict(zip(self._still.pieces, self._still.hashes, strict=True))
        hashes = [by_piece[place.piece] for place in layout.places]
        earlier = still_file(self._still, self.begin, self.ref)
        return [Content(layout, hashes, earlier=earlier)]

    def increment(self, last: Durable | None) -> tuple[Increment, Mapping[str, str]]:
        """The image as it is written after another one, and hashes of whole tensors of which the
        files hold no piece that is all. It may be asked for again when a writing has failed.

        Args:
            last: the image that was written last, whose files are there; None: refer to none.
        """
        if self._cut is None:
            self._cut = self._cut_up(last)
        plan = plan_image(self._cut.hashes, last)
        specs = {spec.key: spec for spec in self.specs}
        if not plan.refer and (plan.is_dense or not self._cut.tensors):
            contents = self.contents()
        else:
            contents = [*contents_of(plan, self._cut, specs, last), *self._still_contents()]
        increment = Increment(plan, self._cut, contents)
        self._referred = increment.refers_to
        whole = {
            piece.key: found
            for piece, found in self._cut.tensors.items()
            if piece.stop - piece.start == specs[piece.key].elements
        }
        return increment, {**whole, **self.whole}

    def _cut_up(self, last: Durable | None) -> Cut:
        """Cut what is in the slot, and hash all of it."""
        cut = Cut(last)
        started_s = time.monotonic()
        for number, spec, piece, view in self._stored():
            known = None if number is None else self._hashes.get(number)
            found = cut.add(spec, piece, view, known)
            if number is not None:
                self._hashes[number] = found
        self.hashing = started_s, time.monotonic()
        return cut

    def _fixed(self, offset: int, layout: FileLayout, numbers: Sequence[int]) -> Content:
        content = Content(layout, [], lasting=True)
        content.parts = self._stretches(offset, content, numbers)
        return content

    def _stretches(self, offset: int, content: Content, numbers: Sequence[int]) -> Iterator[Buffer]:
        """The bytes of a file, each stretch hashed before it is given."""
        layout, hashes, done = content.layout, self._hashes, 0
        for (_, _, first, last), number in zip(layout.places, numbers, strict=True):
            state = None if number in hashes else xxhash.xxh3_128()
            if state is not None or last - done >= _STRETCH_BYTES:
                for start in range(first, last, _STRETCH_BYTES):
                    stop = min(start + _STRETCH_BYTES, last)
                    if state is not None:
                        self._hash(state, self._slot[offset + start : offset + stop])
                    if stop - done >= _STRETCH_BYTES:
                        end = done + (stop - done) // _STRETCH_BYTES * _STRETCH_BYTES
                        yield self._slot[offset + done : offset + end]
                        done = end
            if state is not None:
                hashes[number] = state.hexdigest()
            content.hashes.append(hashes[number])
        yield self._slot[offset + done : offset + layout.nbytes]

    def _hash(self, state: xxhash.xxh3_128, data: Buffer) -> None:
        started_s = time.monotonic()
        state.update(data)
        first_s = self.hashing[0] if self.hashing else started_s
        self.hashing = (first_s, time.monotonic())

    def _rest_content(self) -> Content:
        layout = self._layout.rest_file(self.seal.rest)
        views, at = {}, self._layout.rest_offset
        for spec in self.seal.rest:
            views[spec.key] = self._slot[at : at + spec.nbytes]
            at += spec.nbytes
        parts = [views[place.piece.key] for place in layout.places]
        return Content(layout, [fmt.digest(part) for part in parts], [layout.header, *parts])

    def files(self, slot_offset: int) -> list[InMemory]:
        """All files that the store has, or is to have, of this step.

        Args:
            slot_offset: where the slot begins in staging memory.
        """
        if self._files is None:
            self._files = self._described(slot_offset)
        return self._files

    def _described(self, slot_offset: int) -> list[InMemory]:
        directory, stem = fmt.step_directory(self.ref), self.part().name.stem
        files = []
        contents = self.contents()
        fixed = {id(layout): slot_offset + offset for offset, layout in self._layout.files}
        for content in contents:
            parts = list(content.parts)  # takes the hashes
            if content.earlier is None:
                name = f"{directory}/{content.data_file(stem).name}"
                offset = fixed.get(id(content.layout))
                data = None if offset is not None else b"".join(parts)
                files.append(InMemory(name, content.layout.nbytes, offset or 0, data))
        record = record_of(self.part(), self.specs, contents, self.whole)
        replica = (record.replica_xxh3_128 or "")[:16]
        marker = f"{directory}/{self.part().name._replace(replica=replica).marker}"
        data = encoded(record, marker)
        return [*files, InMemory(marker, len(data), 0, data)]
