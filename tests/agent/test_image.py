"""A step in staging memory: stored as if it had been written straight from the tensors."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.scenes import begin_of, bytes_of, put_still, run_at, state, still_of, whole_of
from byte_runs import TREE, Tensor, files_of, tensor
from everystep.agent import protocol as p
from everystep.agent.arena import PAGE_BYTES, Arena
from everystep.agent.image import STILL_SECTION, Image, SlotLayout, still_file
from everystep.errors import Damaged
from everystep.planning.partition import pieces_of
from everystep.store import format as fmt
from everystep.store.format import RankRecord
from everystep.store.full import (
    Content,
    Part,
    Source,
    lay_out_file,
    lay_out_files,
    streamed,
    write_full,
    write_part,
)
from everystep.store.run import Run
from everystep.types import Piece, StepRef

CREATED = "2026-01-01T00:00:00Z"
DTYPES = ("float32", "float64", "bfloat16", "int8", "bool", "complex64", "float8_e8m0fnu")

drawn = st.builds(
    lambda name, dtype, shape, replicated: tensor(name, dtype, *shape, replicated=replicated),
    st.sampled_from(
        ["/models/model/", "/models/other/", "/optimizers/o/state/"]
    ).flatmap(lambda start: st.integers(0, 9).map(lambda n: f"{start}t{n}")),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 5), max_size=2),
    st.booleans(),
)  # fmt: skip
states = st.lists(drawn, max_size=8, unique_by=lambda t: t.key)
rests = st.lists(
    st.builds(
        lambda n, dtype, length: tensor(f"/extras/e{n}", dtype, length),
        st.integers(0, 9),
        st.sampled_from(DTYPES),
        st.integers(0, 40),
    ),
    max_size=4,
    unique_by=lambda t: t.key,
)


class Staged(NamedTuple):
    image: Image
    arena: Arena
    files: int
    """Where its slot begins."""


def staged(
    begin: p.Begin,
    tensors: Sequence[Tensor],
    rest: Sequence[Tensor] = (),
    *,
    hashed: Sequence[int] = (),
    still: p.Still | None = None,
    step: int = 1,
) -> Staged:
    """A step in the second slot of an arena, as the trainer and the agent put it there."""
    specs = [t.spec for t in tensors]
    pieces = pieces_of(specs, begin.rank, begin.world_size)
    rest_bytes = sum(len(t.data) for t in rest)
    layout = SlotLayout(1, specs, pieces, rest_bytes)
    arena = Arena.made(2, max(layout.slot_bytes, PAGE_BYTES))
    slot = arena.slot(1)
    layout.write_headers(slot)
    by_key = {t.key: t for t in tensors}
    hashes = {}
    for number, (piece, offset) in enumerate(zip(pieces, layout.offsets, strict=True)):
        data = bytes_of(by_key[piece.key], piece)
        slot[offset : offset + len(data)] = data
        if number in hashed:
            hashes[number] = fmt.digest(data)
    joined = b"".join(t.data for t in rest)
    slot[layout.rest_offset : layout.rest_offset + len(joined)] = joined
    seal = p.Seal(
        slot=1,
        layout=1,
        step=step,
        created=CREATED,
        hashes=hashes,
        whole=whole_of(tensors, pieces),
        rest=[t.spec for t in rest],
        still=still is not None,
        tree=msgspec.json.encode(TREE),
        metrics={"loss": 0.5},
    )
    return Staged(Image(begin, layout, seal, still, slot), arena, arena.slot_bytes)


def source(one: Tensor) -> Source:
    """Quicker than `Tensor.source`, which gives seven bytes at a time."""
    return Source(one.spec, lambda start, stop: iter([memoryview(one.data)[start:stop]]))


def part_of(begin: p.Begin, step: int = 1) -> Part:
    return Part(
        ref=StepRef("main", step), run=begin.run, session=begin.session, rank=begin.rank,
        world_size=begin.world_size, tree=dict(TREE), metrics={"loss": 0.5}, created=CREATED,
        versions={},
    )  # fmt: skip


def stored_from(image: Image, run: Run) -> RankRecord:
    return write_part(run.backend, image.part(), image.specs, image.contents(), image.whole)


def in_steps(path: Path) -> dict[str, bytes]:
    return {name: data for name, data in files_of(path).items() if name.startswith("steps/")}


def in_memory(found: Staged) -> dict[str, bytes]:
    """The files that are told to whoever restarts."""
    return {
        file.name: bytes(found.arena.view(file.offset, file.nbytes))
        if file.data is None
        else file.data
        for file in found.image.files(found.files)
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path, Run, Path]:
    """Two runs of the same identity."""
    one, other = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("other")
    run, twin = run_at(one), run_at(other)
    twin.id = run.id
    return run, one, twin, other


@settings(max_examples=40)
@given(states, rests, st.integers(0, 2), st.sets(st.integers(0, 9)))
def test_it_is_stored_as_from_the_tensors(
    runs: tuple[Run, Path, Run, Path],
    tensors: list[Tensor],
    rest: list[Tensor],
    which: int,
    hashed: set[int],
) -> None:
    run, one, twin, other = runs
    rank, world_size = [(0, 1), (0, 2), (1, 2)][which]
    begin = begin_of(run, rank=rank, world_size=world_size)
    found = staged(begin, tensors, rest, hashed=sorted(hashed))
    told = in_memory(found)
    record = stored_from(found.image, run)
    alone = [msgspec.structs.replace(t.spec, replicated=False) for t in rest]
    pieces = [
        *pieces_of([t.spec for t in tensors], rank, world_size),
        *(Piece(spec.key, 0, spec.elements) for spec in alone),
    ]
    sources = [t.source() for t in [*tensors, *rest]]
    expected = write_full(twin.backend, part_of(begin), sources, pieces)
    assert record == expected
    assert in_steps(one) == in_steps(other)
    assert told == in_steps(one)
    assert in_memory(found) == told  # the second time from hashes that are known
    found.arena.close()
    for each, path in ((run, one), (twin, other)):
        for name in in_steps(path):
            each.backend.delete(name)


@pytest.mark.parametrize("hashed", [(), (0, 2)], ids=["hashed by the agent", "by the trainer"])
def test_files_larger_than_a_stretch(
    runs: tuple[Run, Path, Run, Path], hashed: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 5 MB, written directly, and of odd lengths: stretches and blocks end within tensors."""
    monkeypatch.setattr("everystep.agent.image._STRETCH_BYTES", 1 << 20)
    run, one, twin, other = runs
    noise = random.Random(5)
    sizes = {"a": 2_200_001, "b": 3, "c": 2_800_007, "d": 0}
    tensors = [
        Tensor(f"/models/model/{name}", "uint8", (size,), noise.randbytes(size))
        for name, size in sizes.items()
    ]
    begin = begin_of(run)
    found = staged(begin, tensors, hashed=hashed)
    told = in_memory(found)
    record = stored_from(found.image, run)
    pieces = pieces_of([t.spec for t in tensors], 0, 1)
    assert record == write_full(twin.backend, part_of(begin), [source(t) for t in tensors], pieces)
    assert in_steps(one) == in_steps(other) == told
    found.arena.close()
    run.delete_part(StepRef("main", 1), part_of(begin).name.stem)
    twin.delete_part(StepRef("main", 1), part_of(begin).name.stem)


def written_with_still(
    run: Run, begin: p.Begin, tensors: Sequence[Tensor], still: p.Still, step: int,
    kept: Sequence[Tensor],
) -> RankRecord:  # fmt: skip
    """The same step without any staging memory."""
    by_key = {t.key: t.source() for t in tensors}
    pieces = pieces_of([t.spec for t in tensors], begin.rank, begin.world_size)
    contents = [
        streamed(layout, by_key)
        for layout in lay_out_files({t.key: t.spec for t in tensors}, pieces)
    ]
    layout = lay_out_file(STILL_SECTION, {s.key: s for s in still.specs}, still.pieces)
    known = dict(zip(still.pieces, still.hashes, strict=True))
    hashes = [known[place.piece] for place in layout.places]
    earlier = still_file(still, begin, StepRef("main", step))
    contents.append(Content(layout, hashes, earlier=earlier))
    specs = [t.spec for t in [*tensors, *kept]]
    whole: Mapping[str, str] = {t.key: fmt.digest(t.data) for t in [*tensors, *kept]}
    return write_part(run.backend, part_of(begin, step), specs, contents, whole)


@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (1, 2)])
def test_tensors_that_do_not_change_are_referred_to(
    tmp_path: Path, rank: int, world_size: int
) -> None:
    run, twin = run_at(tmp_path / "one"), run_at(tmp_path / "other")
    twin.id = run.id
    begin = begin_of(run, rank=rank, world_size=world_size)
    kept = [
        tensor("/models/model/frozen", "float32", 41, replicated=True),
        tensor("/models/model/own", "int8", 5),
    ]
    still = still_of(begin, kept, 1)
    for each in (run, twin):
        put_still(each, begin, still, kept)
    for step in (1, 2):
        tensors = state(step, 300)
        found = staged(begin, tensors, still=still, step=step)
        assert found.image.refers_to == ([] if step == 1 else [StepRef("main", 1)])
        told = in_memory(found)
        record = stored_from(found.image, run)
        assert record == written_with_still(twin, begin, tensors, still, step, kept)
        directory = fmt.step_directory(StepRef("main", step))
        on_store = {n: d for n, d in in_steps(tmp_path / "one").items() if n.startswith(directory)}
        name = f"{directory}/{still_file(still, begin, still.step).name}"
        on_store.pop(name, None)  # the trainer has made it durable itself
        assert told == on_store
        found.arena.close()
    assert in_steps(tmp_path / "one") == in_steps(tmp_path / "other")


def test_it_can_be_stored_again_after_a_failure(tmp_path: Path) -> None:
    run = run_at(tmp_path)
    found = staged(begin_of(run), state(1), hashed=[1])
    half = found.image.contents()
    next(iter(half[0].parts))  # a writing that failed in the middle
    stored_from(found.image, run)
    first = in_steps(tmp_path)
    stored_from(found.image, run)
    assert in_steps(tmp_path) == first
    found.arena.close()


def test_a_rest_that_is_larger_than_its_place_is_refused(tmp_path: Path) -> None:
    begin = begin_of(run_at(tmp_path))
    specs: list[Any] = [t.spec for t in state(1)]
    layout = SlotLayout(1, specs, pieces_of(specs, 0, 1), 100)
    arena = Arena.made(2, layout.slot_bytes)
    large = tensor("/extras/large", "uint8", PAGE_BYTES + 1)
    seal = p.Seal(
        slot=0, layout=1, step=1, created=CREATED, hashes={}, whole={}, rest=[large.spec],
        still=False, tree=b"{}", metrics={},
    )  # fmt: skip
    with pytest.raises(Damaged, match="larger than its place"):
        Image(begin, layout, seal, None, arena.slot(0))
    arena.close()


def test_files_begin_at_pages_and_tensors_at_their_places() -> None:
    specs = [t.spec for t in state(1)]
    layout = SlotLayout(7, specs, pieces_of(specs, 0, 1), 5000)
    assert [offset % PAGE_BYTES for offset, _ in layout.files] == [0, 0]
    assert layout.rest_offset % PAGE_BYTES == 0
    assert layout.slot_bytes == layout.rest_offset + 2 * PAGE_BYTES
    ends = [offset + spec.nbytes for offset, spec in zip(layout.offsets, specs, strict=True)]
    assert max(ends) <= layout.rest_offset
