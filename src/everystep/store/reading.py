"""Find the bytes of one rank's tensors among all ranks' files of a step, and read them, proving
each.

A file that an earlier step has written is read where it lies; nothing else differs for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import xxhash

from everystep.errors import Damaged, ReplicasDiffer
from everystep.store import format as fmt
from everystep.store import tensorfile
from everystep.store.backend import Backend
from everystep.store.datafile import open_data_file
from everystep.store.format import RankRecord, StoredPiece, StoredTensor
from everystep.store.run import StepEntry
from everystep.store.tensorfile import Slot
from everystep.types import TensorSpec, item_bytes, spoken

_CHUNK_BYTES = 4 << 20
_READERS = 4
_LARGE_BYTES = 32 << 20


Stretch = tuple[str, int, int, str]
"""Bytes of a data file: its name, where they begin, how many, and their hash."""


class Located(NamedTuple):
    """Where the elements of one tensor lie."""

    tensor: StoredTensor
    parts: list[tuple[int, StoredPiece]]
    """(rank, piece), in the order of their elements, without gaps."""


class _Placed(NamedTuple):
    """A tensor, and file and offset of each of its parts."""

    located: Located
    slots: list[tuple[str, int]]


class _Job(NamedTuple):
    """One stretch of a file to read into one stretch of memory."""

    name: str
    offset: int
    into: memoryview
    piece: StoredPiece


def locate(records: Mapping[int, RankRecord], rank: int) -> list[Located]:
    """Where each tensor of a rank lies. Pure.

    Args:
        records: the records of all ranks of the step.
        rank: whose tensors.

    Raises:
        ReplicasDiffer: ranks hashed a tensor that they must hold alike to different values.
        Damaged: elements of a tensor are in no file.
    """
    by_key: dict[str, list[tuple[int, StoredPiece]]] = {}
    for owner, record in records.items():
        for piece in record.pieces:
            by_key.setdefault(piece.piece.key, []).append((owner, piece))
    differing = _first_difference(records, rank)
    if differing is not None:
        raise differing
    located = []
    for tensor in records[rank].tensors:
        candidates = by_key.get(tensor.spec.key, [])
        own = [(owner, piece) for owner, piece in candidates if owner == rank]
        parts = own if _covers(own, tensor.spec) else sorted(candidates, key=_start)
        if not (tensor.spec.replicated or parts is own) or not _covers(parts, tensor.spec):
            raise Damaged(f"{spoken(tensor.spec.key)}: not all of it is in the files", rank=rank)
        if len(parts) == 1 and parts[0][1].xxh3_128 != tensor.xxh3_128:
            raise Damaged(
                f"{spoken(tensor.spec.key)}: what is stored is another tensor",
                rank=rank,
                expected=tensor.xxh3_128,
                found=parts[0][1].xxh3_128,
            )
        located.append(Located(tensor, parts))
    return located


def _first_difference(records: Mapping[int, RankRecord], rank: int) -> ReplicasDiffer | None:
    mine = {t.spec.key: t.xxh3_128 for t in records[rank].tensors if t.spec.replicated}
    for other, record in records.items():
        for tensor in record.tensors:
            known = mine.get(tensor.spec.key)
            if tensor.spec.replicated and known is not None and known != tensor.xxh3_128:
                return ReplicasDiffer(
                    f"{spoken(tensor.spec.key)} has other bits on rank {other}",
                    rank=rank,
                    expected=known,
                    found=tensor.xxh3_128,
                )
    return None


def _start(part: tuple[int, StoredPiece]) -> int:
    return part[1].piece.start


def _covers(parts: Sequence[tuple[int, StoredPiece]], spec: TensorSpec) -> bool:
    end = 0
    for _, stored in parts:
        if stored.piece.start != end or stored.piece.stop < end:
            return False
        end = stored.piece.stop
    return bool(parts) and end == spec.elements


class StepReader:
    """Reads the tensors of one complete step. Headers are read and checked once."""

    def __init__(self, backend: Backend, entry: StepEntry, records: Mapping[int, RankRecord]):
        self._backend, self._entry, self._records = backend, entry, records
        self._slots: dict[str, dict[str, Slot]] = {}

    def read(
        self,
        located: Sequence[Located],
        buffer_for: Callable[[TensorSpec], memoryview],
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Fill a buffer for each tensor; every byte is hashed and compared as it is read.

        Args:
            located: what to read, from `locate`.
            buffer_for: gives a writable view of exactly `spec.nbytes`; called from this thread,
                once for each tensor, before any of them is read.
            progress: called with the number of bytes just read, from any thread.

        Raises:
            Damaged: a hash differs; names the tensor and its place in the file.
            Missing: a file is gone.
            StoreFailed: the store refused.
        """
        with self.reading(progress) as reading:
            reading.begin(located, buffer_for)

    @contextlib.contextmanager
    def reading(self, progress: Callable[[int], None] | None = None) -> Iterator[Reading]:
        """Read and prove in several threads what is begun inside; at the end all of it is proved.

        Args:
            progress: see `read`.

        Raises:
            Damaged, Missing, StoreFailed: see `read`.
        """
        with ThreadPoolExecutor(_READERS, thread_name_prefix="everystep-read") as pool:
            reading = Reading(self, pool, progress)
            try:
                yield reading
                reading.finish()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def other_tensor(self, tensor: StoredTensor) -> Damaged:
        """What to say where the pieces are right, and the tensor they make is not."""
        problem = f"{spoken(tensor.spec.key)}: its pieces make another tensor"
        return Damaged(problem, step=self._entry.ref)

    def placed(self, located: Sequence[Located]) -> list[_Placed]:
        """In the order in which to read: large tensors first, lest one thread be busy with one when
        all others are done; else as they lie in the files."""
        placed = [
            _Placed(one, [self._slot(rank, stored, one.tensor.spec) for rank, stored in one.parts])
            for one in located
        ]
        placed.sort(key=lambda p: (p.located.tensor.spec.nbytes < _LARGE_BYTES, p.slots))
        return placed

    def _slot(self, rank: int, stored: StoredPiece, spec: TensorSpec) -> tuple[str, int]:
        """The file and offset of a piece, checked against the file's own header."""
        name, slots = self.open_file(rank, stored.file)
        slot = slots.get(stored.name)
        count = stored.piece.stop - stored.piece.start
        shape = spec.shape if count == spec.elements else (count,)
        if slot is None or (slot.code, slot.shape) != tensorfile.stored_form(spec.dtype, shape):
            raise Damaged(f"{spoken(spec.key)}: the file does not hold it as recorded", path=name)
        return name, self._records[rank].files[stored.file].header_bytes + slot.start

    def open_file(self, rank: int, index: int) -> tuple[str, dict[str, Slot]]:
        """The name of a rank's data file, and what is in it; checked when it is first asked for.

        Raises:
            Damaged: length, header hash or header are not as recorded.
            Missing: the file is gone.
        """
        files = self._records[rank].files
        if not 0 <= index < len(files):
            raise Damaged(f"a piece is in file {index} of {len(files)}", rank=rank)
        name = fmt.data_path(self._entry.ref, files[index])
        if name not in self._slots:
            slots = open_data_file(self._backend, name, files[index])
            self._slots[name] = {slot.name: slot for slot in slots}
        return name, self._slots[name]

    def check_piece(
        self,
        rank: int,
        stored: StoredPiece,
        spec: TensorSpec,
        progress: Callable[[int], None] | None = None,
        proved: set[Stretch] | None = None,
    ) -> None:
        """Read one piece and compare its hash, keeping nothing.

        Args:
            rank: who stores it.
            stored: the piece.
            spec: its tensor.
            progress: called with the number of bytes just read.
            proved: what has been read already, for an earlier step, and is not read again; what is
                read and proved is added.

        Raises:
            Damaged: the hash differs; says where.
        """
        name, offset = self._slot(rank, stored, spec)
        nbytes = (stored.piece.stop - stored.piece.start) * (item_bytes(spec.dtype) or 1)
        stretch = name, offset, nbytes, stored.xxh3_128
        if proved is not None and stretch in proved:
            return
        scratch = memoryview(bytearray(min(nbytes, _CHUNK_BYTES)))
        stretches = _stretches(nbytes, _CHUNK_BYTES)
        self.prove(name, offset, stored, ((s, scratch[:n]) for s, n in stretches), progress)
        if proved is not None:
            proved.add(stretch)

    def check_whole(self, located: Located) -> None:
        """Read the pieces of one tensor in order and compare the hash of all, keeping nothing.

        Raises:
            Damaged: it is another tensor.
        """
        state = xxhash.xxh3_128()
        scratch = memoryview(bytearray(_CHUNK_BYTES))
        spec = located.tensor.spec
        for rank, stored in located.parts:
            name, offset = self._slot(rank, stored, spec)
            length = (stored.piece.stop - stored.piece.start) * (item_bytes(spec.dtype) or 1)
            for start, nbytes in _stretches(length, _CHUNK_BYTES):
                self._backend.read(name, scratch[:nbytes], offset + start)
                state.update(scratch[:nbytes])
        if state.hexdigest() != located.tensor.xxh3_128:
            raise self.other_tensor(located.tensor)

    def prove(
        self,
        name: str,
        offset: int,
        stored: StoredPiece,
        views: Iterable[tuple[int, memoryview]],
        progress: Callable[[int], None] | None,
    ) -> None:
        """Fill views (each at its start in the piece) from a file, and compare the hash of all."""
        state = xxhash.xxh3_128()
        end = offset
        for start, view in views:
            self._backend.read(name, view, offset + start)
            state.update(view)
            end = offset + start + len(view)
            if progress is not None:
                progress(len(view))
        found = state.hexdigest()
        if found != stored.xxh3_128:
            raise Damaged(
                f"{spoken(stored.piece.key)}: hash of bytes {offset:,} to {end:,} differs",
                step=self._entry.ref,
                path=name,
                at=offset,
                expected=stored.xxh3_128,
                found=found,
            )


class Reading:
    """Tensors of a step that are being read in several threads; see `StepReader.reading`."""

    def __init__(
        self,
        reader: StepReader,
        pool: ThreadPoolExecutor,
        progress: Callable[[int], None] | None,
    ) -> None:
        self._reader, self._pool, self._progress = reader, pool, progress
        self._split: list[tuple[StoredTensor, memoryview]] = []
        self._results: list[Future[None]] = []

    def begin(
        self, located: Sequence[Located], buffer_for: Callable[[TensorSpec], memoryview]
    ) -> None:
        """Begin to fill a buffer for each tensor.

        Args:
            located: what to read, from `locate`.
            buffer_for: see `StepReader.read`.
        """
        # first all buffers: new memory is made but slowly while other threads fill some of it
        jobs = list(_jobs(self._reader.placed(located), buffer_for, self._split))
        # what is copied to a buffer is to be hashed while it is in the cache
        self._submit(jobs, _CHUNK_BYTES)

    def begin_in_place(
        self,
        located: Sequence[Located],
        lend: Callable[[str, int, int], memoryview | None],
    ) -> tuple[dict[str, memoryview], list[Located]]:
        """Begin to prove tensors where they lie in memory anyway.

        Args:
            located: which.
            lend: gives the bytes of a file (name, offset, length), if they are in memory; reading
                them to there must copy nothing.

        Returns:
            The bytes by key, and what is not in memory in one piece.
        """
        lent: dict[str, memoryview] = {}
        left, jobs = [], []
        for one, slots in self._reader.placed(located):
            spec = one.tensor.spec
            view = lend(*slots[0], spec.nbytes) if len(slots) == 1 and spec.nbytes else None
            if view is None:
                left.append(one)
            else:
                lent[spec.key] = view
                jobs.append(_Job(*slots[0], view, one.parts[0][1]))
        self._submit(jobs, max((len(job.into) for job in jobs), default=0))
        return lent, left

    def _submit(self, jobs: Sequence[_Job], most_bytes: int) -> None:
        """Have jobs done, small ones together.

        Args:
            most_bytes: what is read and hashed at a time.
        """
        together: list[_Job] = []
        nbytes = 0
        for job in jobs:
            together.append(job)
            nbytes += len(job.into)
            if nbytes >= _CHUNK_BYTES:
                self._results.append(self._pool.submit(self._run, together, most_bytes))
                together, nbytes = [], 0
        if together:
            self._results.append(self._pool.submit(self._run, together, most_bytes))

    def _run(self, jobs: Sequence[_Job], most_bytes: int) -> None:
        for name, offset, into, piece in jobs:
            stretches = _stretches(len(into), most_bytes)
            views = ((start, into[start : start + length]) for start, length in stretches)
            self._reader.prove(name, offset, piece, views, self._progress)

    def finish(self) -> None:
        """Return when all that was begun is proved.

        Raises:
            Damaged, Missing, StoreFailed: see `StepReader.read`.
        """
        for result in self._results:
            result.result()
        for tensor, view in self._split:
            if fmt.digest(view) != tensor.xxh3_128:
                raise self._reader.other_tensor(tensor)


def _jobs(
    placed: Iterable[_Placed],
    buffer_for: Callable[[TensorSpec], memoryview],
    split: list[tuple[StoredTensor, memoryview]],
) -> Iterator[_Job]:
    """What to read where to; tensors of several parts are noted in `split`."""
    for (tensor, parts), slots in placed:
        view = buffer_for(tensor.spec)
        size = item_bytes(tensor.spec.dtype) or 1
        for (name, offset), (_, stored) in zip(slots, parts, strict=True):
            into = view[stored.piece.start * size : stored.piece.stop * size]
            yield _Job(name, offset, into, stored)
        if len(parts) > 1:
            split.append((tensor, view))


def _stretches(nbytes: int, most_bytes: int) -> Iterator[tuple[int, int]]:
    """(start, length) of what is read at a time."""
    for start in range(0, nbytes, most_bytes):
        yield start, min(most_bytes, nbytes - start)
