"""Tasks: what is cut how, in which order, and that all of it comes to its place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

import strategies
from engine.sinks import MemorySink
from everystep.engine.device import CpuDevice
from everystep.engine.tasks import (
    SMALL_BYTES,
    Awkward,
    Found,
    Group,
    Large,
    Member,
    Task,
    tasks_for,
)
from everystep.errors import Unsupported
from everystep.planning.partition import pieces_of
from everystep.state import raw
from everystep.state.tree import Encoder, Held
from everystep.types import TensorSpec


def held_of(tensors: Sequence[torch.Tensor], *, replicated: bool = False) -> list[Held]:
    """Describe tensors as a capture does."""
    encoder = Encoder()
    for number, tensor in enumerate(tensors):
        encoder.new_section()
        encoder.tensor(tensor, f"/{number:03}", replicated=replicated)
    return list(encoder.held.values())


def cut(
    fixed: Sequence[Held], writers: Sequence[str | None], rank: int = 0, world_size: int = 1
) -> tuple[list[Task], MemorySink, Any]:
    """The tasks, and the sink that says where to."""
    specs = [held.spec for held in fixed]
    pieces = pieces_of(specs, rank, world_size)
    sink = MemorySink()
    place = sink.describe(specs, pieces, 0)
    tasks = tasks_for(fixed, writers, pieces, place, lambda writer: int(writer or 0))
    return tasks, sink, (pieces, place)


def done(
    fixed: Sequence[Held],
    rank: int,
    world_size: int,
    device: CpuDevice,
    snapshots: bool,
    spoil: Sequence[torch.Tensor] = (),
) -> tuple[dict[str, bytes], Found]:
    """Run all tasks; the bytes of pieces by key, and the hashes."""
    tasks, sink, (pieces, place) = cut(fixed, [None] * len(fixed), rank, world_size)
    room = sink.acquire(0)
    assert room is not None
    slot, found = torch.frombuffer(room.view, dtype=torch.uint8), Found()
    if snapshots:
        for task in tasks:
            task.snapshot(device)
        for tensor in spoil:
            raw._in_place_carrier(tensor).zero_()
    for task in tasks:
        task.run(device, slot, found)
    specs = {held.spec.key: held.spec for held in fixed}
    sizes = [
        (piece.stop - piece.start) * (specs[piece.key].nbytes // max(1, specs[piece.key].elements))
        for piece in pieces
    ]
    data = {
        piece.key: bytes(room.view[offset : offset + nbytes])
        for piece, offset, nbytes in zip(pieces, place.offsets, sizes, strict=True)
    }
    assert sum(task.nbytes for task in tasks) == sum(sizes)
    return data, found


@settings(max_examples=60)
@given(st.lists(strategies.tensors(), max_size=8), st.booleans(), st.integers(1, 3))
def test_all_comes_to_its_place(
    tensors: list[torch.Tensor], snapshots: bool, world_size: int
) -> None:
    fixed = held_of(tensors, replicated=True)
    truth = {h.spec.key: raw.bits_of({"": h.tensor}, "") for h in fixed}
    shares = [
        done(fixed, r, world_size, CpuDevice(snapshots), snapshots) for r in range(world_size)
    ]
    for key, data in truth.items():
        assert b"".join(share.get(key, b"") for share, _ in shares) == data
        for share, found in shares:
            if len(share.get(key, b"")) < len(data):
                assert found.whole[key] == xxhash.xxh3_128(data).hexdigest()
            else:
                assert key not in found.whole


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_snapshot_is_of_its_moment(world_size: int) -> None:
    def tensors() -> list[torch.Tensor]:
        torch.manual_seed(1)
        return [
            torch.randn(5), torch.randn(300, 300), torch.randn(300, 301).t(),
            torch.randn(200, 200, dtype=torch.complex64).conj(), torch.randn(()),
            torch.randn(600, 600).to(torch.float8_e4m3fn),
        ]  # fmt: skip

    for rank in range(world_size):
        device = CpuDevice(snapshots=True)
        kept, spoiled = held_of(tensors(), replicated=True), held_of(tensors(), replicated=True)
        plain = done(kept, rank, world_size, device, snapshots=False)
        live = [h.tensor.conj() if h.tensor.is_conj() else h.tensor for h in spoiled]
        late = done(spoiled, rank, world_size, device, snapshots=True, spoil=live)
        assert late == plain and any(map(any, plain[0].values()))


def test_a_snapshot_is_used_once() -> None:
    tensor = torch.randn(300, 300)
    (task,), sink, (_, place) = cut(held_of([tensor]), [None])
    room = sink.acquire(0)
    assert room is not None
    slot = torch.frombuffer(room.view, dtype=torch.uint8)
    stretch = slice(place.offsets[0], place.offsets[0] + tensor.nbytes)
    device = CpuDevice(snapshots=True)
    for forget in (False, True):
        task.snapshot(device)
        before = tensor.clone()
        tensor.add_(1)
        if forget:
            task.forget()
        task.run(device, slot, Found())
        expected = tensor if forget else before
        assert bytes(room.view[stretch]) == expected.numpy().tobytes()
    task.run(device, slot, Found())
    assert bytes(room.view[stretch]) == tensor.numpy().tobytes()


def _kinds(tensors: Sequence[torch.Tensor], **options: Any) -> list[type]:
    return [type(task) for task in cut(held_of(tensors, **options), [None] * len(tensors))[0]]


def test_what_is_cut_how() -> None:
    limit = SMALL_BYTES // 4
    assert _kinds([torch.zeros(limit)]) == [Large]
    assert _kinds([torch.zeros(limit - 1)] * 3) == [Group]
    assert _kinds([torch.zeros(3, 4).t()]) == [Group]
    assert _kinds([torch.zeros(limit, 2).t()]) == [Awkward]
    assert _kinds([torch.zeros(3, dtype=torch.complex64).conj()]) == [Awkward]
    assert _kinds([torch.zeros(0, 3)]) == []
    assert len(_kinds([torch.zeros(3)] * 1100)) == 3  # no more than 512 at once
    assert len(_kinds([torch.zeros(limit - 1)] * 70)) == 3  # nor more than 8 MiB
    assert len(_kinds([torch.zeros(limit)] * 33)) == 3  # nor, of larger ones, than 4 MiB
    assert len(_kinds([torch.zeros(17 * limit)] * 3)) == 3


def test_groups_have_one_writer() -> None:
    tensors = [torch.zeros(3) for _ in range(6)]
    tasks, _, _ = cut(held_of(tensors), ["1", "2", "1", None, "2", "1"])
    assert sorted((str(task.writer), len(task.keys)) for task in tasks) == [
        ("1", 3), ("2", 2), ("None", 1),
    ]  # fmt: skip


def test_what_is_written_first_comes_first_and_of_that_the_largest() -> None:
    sizes = [1_100_000, 1_200_000, 1_300_000, 1_400_000]
    tasks, _, _ = cut(held_of([torch.zeros(n) for n in sizes]), ["2", "1", "2", "1"])
    assert [task.nbytes // 4 for task in tasks] == [1_400_000, 1_200_000, 1_300_000, 1_100_000]


def test_what_is_only_hashed_is_gathered() -> None:
    """Of a state that ranks share most tensors are small, and each task takes some time."""
    tensors = [torch.zeros(100) for _ in range(300)]
    for rank in range(2):
        tasks, _, _ = cut(held_of(tensors, replicated=True), ["1"] * 300, rank, 2)
        assert [type(task) for task in tasks] == [Group, Large]
        assert sorted(len(task.keys) for task in tasks) == [150, 150]


def test_memory_that_was_freed_is_refused() -> None:
    tensor, other = torch.zeros(100_000), torch.zeros(100_000)
    (task,), sink, _ = cut(held_of([other, tensor]), [None, None])
    room = sink.acquire(0)
    assert room is not None
    slot = torch.frombuffer(room.view, dtype=torch.uint8)
    task.run(CpuDevice(), slot, Found())
    tensor.untyped_storage().resize_(0)
    with pytest.raises(Unsupported, match=r"001.*freed"):
        task.run(CpuDevice(), slot, Found())
    tensor.untyped_storage().resize_(400_000)  # elsewhere, and whole again
    tensor.fill_(3)
    found = Found()
    task.run(CpuDevice(), slot, found)
    assert found.pieces[1] == xxhash.xxh3_128(tensor.numpy().tobytes()).hexdigest()


def test_a_group_goes_to_the_slot_that_it_is_given() -> None:
    tensor = torch.arange(10.0)
    fixed = held_of([tensor])
    (task,), sink, (_, place) = cut(fixed, [None])
    for number in (1, 2, 1):
        room = sink.acquire(0)
        assert room is not None
        tensor.fill_(number)
        task.run(CpuDevice(), torch.frombuffer(room.view, dtype=torch.uint8), Found())
        start = place.offsets[0]
        assert bytes(room.view[start : start + 40]) == tensor.numpy().tobytes()
        sink.release(room.slot)


def test_a_spec_says_how_much_is_kept() -> None:
    """A rank that stores nothing of a tensor keeps all of it for its hash."""
    tensor = torch.zeros(1000)
    spec = TensorSpec(key="/t", dtype="float32", shape=(1000,), replicated=True)
    task = Large([Member(Held(tensor, spec), None, whole=True)], None)
    assert (task.nbytes, task.kept_bytes) == (0, 4000)
