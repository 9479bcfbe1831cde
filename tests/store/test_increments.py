"""What of an image is written: over any history each unit lies where its record says, and what is
kept for the sake of an image stays bounded."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from byte_runs import Tensor, noise, tensor
from everystep.planning.partition import share_of
from everystep.store import format as fmt
from everystep.store import increments
from everystep.store.full import PIECES_SECTION, Content, lay_out_files
from everystep.store.increments import (
    DENSE_SHARE,
    MOST_FILE_BYTES,
    MOST_IMAGES,
    Cut,
    Durable,
    Increment,
    contents_of,
    plan_image,
    units_of,
)
from everystep.types import Piece, StepRef, TensorSpec, item_bytes

UNIT = 64


@pytest.fixture(autouse=True, scope="module")
def small_units() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(increments, "UNIT_BYTES", UNIT)
        yield


# ---------------------------------------------------------------- cutting


@given(
    st.sampled_from(["float64", "float32", "bfloat16", "uint8", "complex128"]),
    st.lists(st.integers(0, 40), max_size=2),
    st.integers(0, 400),
    st.integers(0, 400),
)
def test_units_are_the_piece_and_their_bounds_do_not_depend_on_it(
    dtype: str, shape: list[int], one: int, other: int
) -> None:
    spec = TensorSpec(key="/models/model/w", dtype=dtype, shape=tuple(shape))
    start, stop = sorted((min(one, spec.elements), min(other, spec.elements)))
    units = units_of(spec, Piece(spec.key, start, stop))
    size = item_bytes(dtype) or 1
    ends = [start, *(unit.piece.stop for unit in units)]
    assert [unit.piece.start for unit in units] == ends[:-1]
    assert ends[-1] == stop
    assert all(unit.nbytes <= UNIT for unit in units)
    assert all(unit.nbytes for unit in units) or start == stop
    if len(units) > 1:
        assert all(end * size % UNIT == 0 for end in ends[1:-1])
        assert all(unit.shape == (unit.piece.stop - unit.piece.start,) for unit in units)
    elif stop - start == spec.elements:
        assert units[0].shape == spec.shape


@given(st.integers(0, 500), st.booleans(), st.sets(st.integers(0, 8)))
def test_hashes_of_pieces_are_those_of_their_bytes(
    nbytes: int, is_known: bool, changed: set[int]
) -> None:
    """Whether they are taken, known, or those of the image before."""
    one = tensor("/models/model/w", "uint8", nbytes)
    piece = Piece(one.key, 0, nbytes)
    first = Cut(None)
    digest = fmt.digest
    assert first.add(one.spec, piece, memoryview(one.data), None) == digest(one.data)
    last = Durable(first.hashes, first.tensors, {}, [], 1, 0)
    data = bytearray(one.data)
    for index in changed:
        data[index * UNIT : index * UNIT + 1] = b"!" if index * UNIT < nbytes else b""
    second = Cut(last)
    known = digest(data) if is_known else None
    assert second.add(one.spec, piece, memoryview(data), known) == digest(data)
    assert b"".join(second.views.values()) == data
    assert all(digest(second.views[unit]) == found for unit, found in second.hashes.items())
    assert second.tensors == ({piece: digest(data)} if nbytes > UNIT else {})


# ---------------------------------------------------------------- histories


class History:
    """Images one after the other, and what the files that they write hold."""

    def __init__(self) -> None:
        self.last: Durable | None = None
        self.step = 0
        self.files: dict[tuple[StepRef, str], dict[str, bytes]] = {}
        self.refers: dict[StepRef, set[StepRef]] = {}
        self.sizes: dict[StepRef, int] = {}
        """Without headers, which are large for units as small as these."""

    def add(self, tensors: Sequence[Tensor]) -> Increment:
        """Write an image, and check that its record would be right."""
        self.step += 1
        ref = StepRef("main", self.step)
        specs = {t.key: t.spec for t in tensors}
        cut = Cut(self.last)
        for one in tensors:
            cut.add(one.spec, Piece(one.key, 0, one.spec.elements), memoryview(one.data), None)
        plan = plan_image(cut.hashes, self.last)
        assert not set(plan.write) & set(plan.refer)
        assert set(plan.write) | set(plan.refer) == cut.hashes.keys()
        if not plan.refer and plan.is_dense:
            contents = self._plain(specs, {t.key: t.data for t in tensors})
        else:
            contents = contents_of(plan, cut, specs, self.last)
        increment = Increment(plan, cut, contents)
        files = [content.data_file("s000001-r00000of00001") for content in contents]
        self.refers[ref] = increment.refers_to
        self.sizes[ref] = sum(unit.nbytes for unit in plan.write)
        held: dict[str, bytes] = {t.key: b"" for t in tensors}
        pieces: list[tuple[Piece, bytes]] = []
        for content, file in zip(contents, files, strict=True):
            place = (file.step or ref, file.name)
            if content.earlier is None:
                self.files[place] = _bytes_by_name(content)
            pieces += [(p.piece, self.files[place][p.name]) for p in content.layout.places]
        for piece, data in sorted(pieces, key=lambda found: found[0].start):
            held[piece.key] += data
        assert held == {t.key: t.data for t in tensors}
        self.last = increment.stored(ref, files, self.last)
        return increment

    def _plain(self, specs: Mapping[str, TensorSpec], data: Mapping[str, bytes]) -> list[Content]:
        pieces = [Piece(key, 0, spec.elements) for key, spec in specs.items()]
        found = []
        for layout in lay_out_files(specs, pieces):
            parts = [layout.header, *(data[place.piece.key] for place in layout.places)]
            hashes = [fmt.digest(data[p.piece.key]) for p in layout.places]
            found.append(Content(layout, hashes, parts))
        return found

    def kept(self) -> set[StepRef]:
        """The newest step, and all without which it, or one of them, cannot be had."""
        found, waiting = set(), [StepRef("main", self.step)]
        while waiting:
            ref = waiting.pop()
            if ref not in found:
                found.add(ref)
                waiting += self.refers[ref]
        return found


def _bytes_by_name(content: Content) -> dict[str, bytes]:
    data = b"".join(content.parts)
    assert len(data) == content.layout.nbytes
    return {place.name: data[place.start : place.stop] for place in content.layout.places}


def total_of(tensors: Sequence[Tensor]) -> int:
    return sum(len(t.data) for t in tensors)


SHAPES = [
    ("a", "uint8", (900,)),
    ("b", "float32", (5, 33)),
    ("c", "float64", ()),
    ("d", "int8", (0,)),
]


def changed(tensors: Sequence[Tensor], share: float, rng: random.Random) -> list[Tensor]:
    """Some units of about a share of all bytes with other bytes in them."""
    found = []
    for one in tensors:
        data = bytearray(one.data)
        for start in range(0, len(data), UNIT):
            if rng.random() < share:
                data[start] = (data[start] + 1) % 256
        found.append(one._replace(data=bytes(data)))
    return found


@settings(max_examples=60)
@given(st.lists(st.one_of(st.floats(0, 1), st.just(0.0), st.just(1.0)), max_size=50), st.randoms())
def test_over_any_history_an_image_is_whole_and_little_is_kept_for_it(
    shares: list[float], rng: random.Random
) -> None:
    history = History()
    tensors = [tensor(f"/models/model/{name}", dtype, *shape) for name, dtype, shape in SHAPES]
    total = total_of(tensors)
    for share in shares:
        before = history.last
        increment = history.add(tensors)
        last = history.last
        assert last is not None
        written = sum(unit.nbytes for unit in increment.plan.write)
        assert written <= total
        assert len(history.kept()) <= last.images <= MOST_IMAGES
        assert last.nbytes <= MOST_FILE_BYTES * total
        if increment.plan.refer and before is not None:
            assert written < DENSE_SHARE * total
            same = {u for u, h in increment.cut.hashes.items() if before.hashes.get(u) == h}
            assert same >= set(increment.plan.refer)
            assert same - set(increment.plan.refer) <= same - before.places.keys()
        else:
            assert last.images == 1 and history.kept() == {StepRef("main", history.step)}
        tensors = changed(tensors, share, rng)


@pytest.mark.parametrize("share", [0.0, 0.02, 0.1, 0.3, 0.45])
def test_hundreds_of_images(share: float) -> None:
    """Bytes that are written on average, and at most, and that are kept for the newest image."""
    rng = random.Random(1)
    history = History()
    tensors = [tensor("/models/model/w", "uint8", 200 * UNIT), tensor("/models/model/b", "int8", 9)]
    total = total_of(tensors)
    written, kept = [], []
    for _ in range(300):
        plan = history.add(tensors).plan
        written.append((sum(unit.nbytes for unit in plan.write), not plan.refer))
        kept.append(sum(history.sizes[ref] for ref in history.kept()))
        tensors = changed(tensors, share, rng)
    assert max(kept) <= MOST_FILE_BYTES * total
    assert max(nbytes for nbytes, _ in written) <= total
    assert all(nbytes <= 0.6 * total for nbytes, is_whole in written if not is_whole)
    mean = sum(nbytes for nbytes, _ in written) / len(written) / total
    assert mean <= max(2 * share / (1 + share), share + 1 / MOST_IMAGES) + 0.03
    assert sum(is_whole for _, is_whole in written) <= len(written) / 3 + 1


def test_all_that_changes_at_once_is_not_cut() -> None:
    history = History()
    sections = []
    for seed in (*range(4), 3, 4):  # dense at first, then nothing, then all
        tensors = [tensor("/models/model/w", "uint8", 500, seed=seed)]
        increment = history.add(tensors)
        sections.append([(c.layout.section, c.earlier is None) for c in increment.contents])
    pieces, plain = (PIECES_SECTION, True), ("model", True)
    # what was stored in one piece cannot be referred to in units, so it is written once more
    assert sections == [[pieces], [plain], [plain], [plain], [pieces], [plain]]


def test_another_form_of_the_same_bytes_is_written() -> None:
    history = History()
    data = noise(UNIT)
    for dtype, shape in (
        ("uint8", (64,)),
        ("uint8", (8, 8)),
        ("float32", (16,)),
        ("float32", (16,)),
    ):
        kept = tensor("/models/model/kept", "uint8", 400)
        plan = history.add([Tensor("/models/model/w", dtype, shape, data), kept]).plan
    assert [len(plan.write), len(plan.refer)] == [0, 8]
    assert {u.piece.key for u in plan.refer} == {"/models/model/w", "/models/model/kept"}
    assert [sum(1 for name in held if name.endswith("/w")) for held in history.files.values()] == [
        *(1, 1, 1),
    ]


def test_shares_of_ranks_are_cut_alike() -> None:
    """Where ranks divide a tensor, its units but those at the borders are those of the whole."""
    spec = TensorSpec(key="/models/model/w", dtype="float32", shape=(400,), replicated=True)
    whole = {unit.piece for unit in units_of(spec, Piece(spec.key, 0, 400))}
    for rank in range(3):
        (extent,) = share_of([400], [4], rank, 3)
        units = units_of(spec, Piece(spec.key, extent.start, extent.stop))
        assert {unit.piece for unit in units[1:-1]} <= whole
