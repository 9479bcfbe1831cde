"""A stored state without a model: which step, whose rank, and shards put together."""

from __future__ import annotations

import struct
from pathlib import Path

import msgspec
import pytest

import everystep
from byte_runs import TREE, NoSync, Tensor, begin, forged, new_run, tensor, write_step
from everystep.errors import CannotRestore, NothingToRestore, UsageError
from everystep.state import raw
from everystep.store.format import StoredTensor
from everystep.store.full import Part, Source, write_full
from everystep.store.run import Run
from everystep.store.verify import verify_run
from everystep.store.wellformed import tiles
from everystep.types import Piece, Shard, StepRef


@pytest.fixture
def forked(run_dir: Path) -> Path:
    run = new_run(run_dir, calls=NoSync())
    for step in (1, 2, 3):
        write_step(run, StepRef("main", step))
    begin(run, 2, "main@2", parent=StepRef("main", 2), restored=StepRef("main", 2))
    write_step(run, StepRef("main@2", 3), session=2)
    return run_dir


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (None, "main@2:3"),
        (3, "main@2:3"),
        ("3", "main@2:3"),
        ("2", "main:2"),
        (1, "main:1"),
        ("main:3", "main:3"),
        (StepRef("main", 3), "main:3"),
    ],
)
def test_which_step(forked: Path, step: int | str | StepRef | None, expected: str) -> None:
    state = everystep.load(forked, step)
    assert str(state.ref) == expected
    seed = StepRef.parse(expected)
    assert (
        raw.bits_of(state.tensors, "/models/model/weight")
        == tensor("/models/model/weight", "float32", 3, 5, seed=seed).data
    )


@pytest.mark.parametrize(
    "step",
    ["", "x", "main:", ":3", "main:x", "-1", "\u00b2", "9" * 5000, "1.0", "../x:1", "main:-3"],
)
def test_what_is_no_step(forked: Path, step: str) -> None:
    with pytest.raises(UsageError, match="is not a step"):
        everystep.load(forked, step)


@pytest.mark.parametrize("step", [9, "9", "x:1", "main:9", 10**30, -1])
def test_a_step_that_is_not_there(forked: Path, step: int | str) -> None:
    with pytest.raises(NothingToRestore):
        everystep.load(forked, step)


def test_a_damaged_newest_step_is_passed_over_and_left_where_it_is(
    forked: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (path,) = forked.glob("steps/main@2/*/*.model.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert str(everystep.load(forked).ref) == "main:2"
    assert "main@2:3 cannot be used" in caplog.text
    assert path.read_bytes() == data
    with pytest.raises(CannotRestore):
        everystep.load(forked, 3)


def test_metrics_come_back_under_any_name(run_dir: Path) -> None:
    run = new_run(run_dir, calls=NoSync())
    write_step(run, StepRef("main", 1))
    (path,) = run_dir.glob("steps/main/*/*.json")
    forged(path, metrics={"$tensor": {"$float": "7ff0000000000000"}})
    assert everystep.load(run_dir).metrics == {"$tensor": float("inf")}


# ---------------------------------------------------------------- shards

Place = tuple[tuple[int, int], tuple[int, int]]
"""(offsets, shape) of a rank's part of a 4 × 3 tensor."""


def sharded_run(root: Path, places: list[Place]) -> Run:
    """Each rank holds a part of the numbers 0 to 11 in a 4 × 3 tensor."""
    run = new_run(root, len(places), NoSync())
    for rank, (offsets, shape) in enumerate(places):
        numbers = [
            3 * row + column
            for row in range(offsets[0], offsets[0] + shape[0])
            for column in range(offsets[1], offsets[1] + shape[1])
        ]
        data = struct.pack(f"<{len(numbers)}i", *numbers)
        local = Tensor("/models/model/rows", "int32", shape, data)
        shard = Shard(
            global_shape=(4, 3),
            offsets=offsets,
            mesh_shape=(len(places),),
            mesh_dim_names=None,
            placements=("S(0)",),
        )
        spec = msgspec.structs.replace(local.spec, shard=shard)
        part = Part(
            ref=StepRef("main", 1),
            run=run.id,
            session=1,
            rank=rank,
            world_size=len(places),
            tree=TREE,
            metrics={},
            created="",
            versions={},
        )
        source = Source(spec, local.source().chunks)
        write_full(run.backend, part, [source], [Piece(local.key, 0, local.spec.elements)])
    return run


@pytest.mark.parametrize(
    "places",
    [
        [((0, 0), (4, 3))],
        [((0, 0), (2, 3)), ((2, 0), (2, 3))],
        [((0, 0), (3, 3)), ((3, 0), (1, 3)), ((4, 0), (0, 3))],
        [((0, 0), (2, 2)), ((0, 2), (2, 1)), ((2, 0), (2, 2)), ((2, 2), (2, 1))],
        [((0, 0), (2, 3)), ((0, 0), (2, 3)), ((2, 0), (2, 3)), ((2, 0), (2, 3))],
    ],
    ids=["one", "rows", "an empty one", "a grid", "rows, each twice"],
)
def test_shards_make_the_whole(run_dir: Path, places: list[Place]) -> None:
    run = sharded_run(run_dir, places)
    for rank in range(len(places)):
        whole = everystep.load(run_dir, rank=rank).tensors["/models/model/rows"]
        assert whole.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert list(verify_run(run, run.listing())) == []


@pytest.mark.parametrize(
    "places",
    [
        [((0, 0), (2, 3))],
        [((0, 0), (2, 3)), ((3, 0), (1, 3))],
        [((0, 0), (2, 3)), ((1, 0), (2, 3))],
        [((0, 0), (3, 3)), ((1, 0), (1, 3))],
        [((0, 0), (2, 2)), ((2, 0), (2, 2)), ((0, 2), (2, 1)), ((1, 1), (2, 1))],
        [((0, 0), (0, 3))],
    ],
    ids=["half", "a hole", "an overlap", "sum is right: hole and overlap", "no grid", "nothing"],
)
def test_shards_that_make_no_whole(run_dir: Path, places: list[Place]) -> None:
    """What no rank holds must not come back as whatever is in memory."""
    run = sharded_run(run_dir, places)
    with pytest.raises(CannotRestore, match="do not make the whole"):
        everystep.load(run_dir)
    assert any("do not make the whole" in f.what for f in verify_run(run, run.listing()))


def test_a_tensor_sharded_on_one_rank_and_whole_on_the_other(run_dir: Path) -> None:
    sharded_run(run_dir, [((0, 0), (2, 3)), ((2, 0), (2, 3))])
    (path,) = run_dir.glob("steps/main/*/*r00001*.json")
    stored = Run.open(run_dir).record(Run.open(run_dir).listing().steps[0], 1).tensors[0]
    plain: StoredTensor = msgspec.structs.replace(
        stored, spec=msgspec.structs.replace(stored.spec, shard=None)
    )
    forged(path, tensors=[msgspec.to_builtins(plain)])
    with pytest.raises(CannotRestore):
        everystep.load(run_dir)


def test_what_tiles() -> None:
    assert tiles([()], ())
    assert not tiles([], ())
    assert tiles([], (0, 3))
    assert tiles([((0, 2),), ((2, 1),)], (3,))
    assert not tiles([((0, 2),)], (3,))
    assert not tiles([((0, 2),), ((1, 2),)], (3,))
