"""Parts of a step, written by any number of ranks and read back by each."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from byte_runs import (
    TREE,
    Tensor,
    files_of,
    new_run,
    noise,
    pieces_of,
    read_back,
    small_state,
    tensor,
    write_part,
    write_step,
)
from everystep.errors import Damaged, Missing, ReplicasDiffer, StoreFailed, StoreFull
from everystep.store import format as fmt
from everystep.store import full, tensorfile
from everystep.store.durable import SystemCalls
from everystep.store.format import RunRecord
from everystep.store.full import section_of
from everystep.store.local import LocalBackend
from everystep.store.reading import StepReader, locate
from everystep.store.run import Run
from everystep.store.verify import verify_run
from everystep.types import _ITEM_BYTES, Piece, StepRef, TensorSpec, element_count, join_key

REF = StepRef("main", 1)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_what_ranks_share_out_each_reads_whole(tmp_path: Path, world_size: int) -> None:
    run = new_run(tmp_path, world_size)
    write_step(run, REF, world_size)
    for rank in range(world_size):
        expected = {t.key: t.data for t in small_state(rank, REF)}
        assert read_back(run, REF, rank) == expected
    stored = sum(len(data) for name, data in files_of(tmp_path).items() if "safetensors" in name)
    own = sum(len(t.data) for t in small_state() if not t.replicated)
    shared = sum(len(t.data) for t in small_state() if t.replicated)
    headers = sum(
        file.header_bytes for r in run.records(run.entries(REF)[0]).values() for file in r.files
    )
    assert stored == headers + world_size * own + shared, "what is shared is stored once"


SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)
STATES = st.lists(
    st.tuples(st.sampled_from(sorted(_ITEM_BYTES)), SHAPES, st.booleans(), st.booleans()),
    max_size=6,
)


@settings(max_examples=25)
@given(state=STATES, world_size=st.integers(1, 5))
def test_any_state_comes_back(
    tmp_path_factory: pytest.TempPathFactory,
    state: list[tuple[str, tuple[int, ...], bool, bool]],
    world_size: int,
) -> None:
    def of(rank: int) -> list[Tensor]:
        return [
            tensor(
                join_key("models" if in_model else "extras", "model", f"t{i}/~"),
                dtype,
                *shape,
                seed=0 if replicated else rank,
                replicated=replicated,
            )
            for i, (dtype, shape, in_model, replicated) in enumerate(state)
        ]

    run = new_run(tmp_path_factory.mktemp("run"), world_size)
    for rank in range(world_size):
        write_part(run, REF, of(rank), rank=rank, world_size=world_size)
    for rank in range(world_size):
        assert read_back(run, REF, rank) == {t.key: t.data for t in of(rank)}
    assert list(verify_run(run, run.listing())) == []


def test_the_record_is_the_last_thing_that_is_written(tmp_path: Path) -> None:
    names: list[str] = []

    class Log(SystemCalls):
        def rename(self, source: Path, target: Path) -> None:
            names.append(target.name.split(".", 1)[1])
            super().rename(source, target)

    run = new_run(tmp_path)
    write_step(Run(LocalBackend(tmp_path, Log()), RunRecord(run=run.id, created="")), REF)
    assert names[-1] == "json"
    assert sorted(names[:-1]) == ["model.safetensors", "state.safetensors"]


def test_a_step_is_there_when_its_last_record_is(tmp_path: Path) -> None:
    run = new_run(tmp_path, 3)
    for rank in (2, 0, 1):
        assert not any(entry.complete for entry in run.entries(REF))
        write_part(run, REF, small_state(rank), rank=rank, world_size=3)
    (entry,) = run.entries(REF)
    assert entry.complete and entry.missing_ranks == []


# ---------------------------------------------------------------- replicas


def test_replicas_that_differ_are_seen_in_the_names_and_named_in_the_error(tmp_path: Path) -> None:
    run = new_run(tmp_path, 2)
    write_part(run, REF, small_state(0, seed=1), rank=0, world_size=2)
    other = small_state(1, seed=1)
    other[1] = tensor("/models/model/bias", "bfloat16", 3, seed="drifted", replicated=True)
    write_part(run, REF, other, rank=1, world_size=2)
    (entry,) = run.entries(REF)
    assert entry.diverged and not entry.complete
    records = run.records(entry)
    with pytest.raises(ReplicasDiffer, match=r"models\.model\.bias has other bits on rank 1"):
        locate(records, 0)
    with pytest.raises(ReplicasDiffer, match=r"models\.model\.bias has other bits on rank 0"):
        locate(records, 1)


@pytest.mark.parametrize("change", [{"dtype": "int32"}, {"shape": (5, 3)}])
def test_replicas_of_another_dtype_or_shape_differ(tmp_path: Path, change: dict[str, Any]) -> None:
    run = new_run(tmp_path, 2)
    write_part(run, REF, small_state(0, seed=1), rank=0, world_size=2)
    other = small_state(1, seed=1)
    other[0] = other[0]._replace(**change)
    write_part(run, REF, other, rank=1, world_size=2)
    assert run.entries(REF)[0].diverged


def test_ranks_of_which_only_one_shares_make_no_step(tmp_path: Path) -> None:
    """After replicas differed, ranks may stop sharing at different steps."""
    run = new_run(tmp_path, 2)
    alone = [t._replace(replicated=False) for t in small_state(0)]
    write_part(run, REF, alone, rank=0, world_size=2)
    write_part(run, REF, small_state(1), rank=1, world_size=2)
    assert not run.entries(REF)[0].complete


# ---------------------------------------------------------------- writing what cannot be read


def small_part(run: Run, **changes: Any) -> None:
    write_part(run, REF, small_state(), **changes)


def no_files(root: Path) -> bool:
    return not any(name.startswith("steps") for name in files_of(root))


def test_a_lying_header_encoder_fails_at_write_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = tensorfile.encode_header

    def lie(slots: Any, metadata: Any) -> bytes:
        return real([slot._replace(code="F32") for slot in slots], metadata)

    monkeypatch.setattr(tensorfile, "encode_header", lie)
    with pytest.raises(Damaged):
        small_part(new_run(tmp_path))
    assert no_files(tmp_path)


def test_a_lying_record_encoder_fails_at_write_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(tmp_path)
    real = fmt.encode_record
    for lie in (
        lambda record: real(record)[:-1],
        lambda record: real(record).replace(b'"step":1', b'"step":2'),
        lambda record: real(msgspec.structs.replace(record, step=2)),
        lambda record: real(msgspec.structs.replace(record, metrics={"loss": 1})),
    ):
        monkeypatch.setattr(fmt, "encode_record", lie)
        with pytest.raises(Damaged):
            small_part(run)
        assert no_files(tmp_path)


def test_a_wrong_description_fails_at_write_time(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    whole = tensor("/models/model/a", "float32", 4)
    for pieces in (
        [Piece(whole.key, 0, 5)],
        [Piece(whole.key, 3, 2)],
    ):
        with pytest.raises((Damaged, StoreFailed)):
            write_part(run, REF, [whole], pieces=pieces)
        assert no_files(tmp_path)


def test_a_source_of_another_length_fails_at_write_time(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    short = tensor("/models/model/a", "float32", 4)._replace(data=b"123")
    with pytest.raises(StoreFailed, match="another length"):
        write_part(run, REF, [short])
    assert no_files(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"ref": StepRef("main", 10**12)},
        {"ref": StepRef("../x", 1)},
        {"session": 10**9},
        {"session": -1},
        {"rank": 100_000, "world_size": 100_001},
        {"rank": 1},
    ],
)
def test_numbers_for_which_names_have_no_room_are_refused(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    run = new_run(tmp_path)
    ref = change.pop("ref", REF)
    with pytest.raises(StoreFailed, match="too many digits"):
        write_part(run, ref, [], **change)
    assert no_files(tmp_path)


@pytest.mark.parametrize("call", ["create", "write_at", "sync", "rename", "sync_directory"])
@pytest.mark.parametrize("late", [False, True], ids=["data", "record"])
def test_a_step_that_could_not_be_stored_leaves_nothing(
    tmp_path: Path, call: str, late: bool
) -> None:
    """A01, A06: or the data of failed steps would keep the disk full."""
    run = new_run(tmp_path)
    calls = SystemCalls()
    backend = LocalBackend(tmp_path, calls)
    real = getattr(calls, call)
    armed = not late
    fired: list[str] = []

    def put(files: Any) -> None:
        nonlocal armed
        armed = armed or files[0].name.endswith(".json")
        LocalBackend.put(backend, files)

    def fail(*args: Any) -> Any:
        nonlocal armed
        if not armed or fired:
            return real(*args)
        fired.append(call)
        raise OSError(errno.ENOSPC, "full")

    setattr(calls, call, fail)
    backend.put = put  # type: ignore[method-assign]
    with pytest.raises(StoreFull):
        small_part(Run(backend, RunRecord(run=run.id, created="")))
    assert fired == [call]
    assert no_files(tmp_path)
    assert run.entries(REF) == []
    write_step(run, REF)
    assert run.entries(REF)[0].complete


def test_where_the_record_cannot_be_taken_back_its_data_stays(tmp_path: Path) -> None:
    """The record has its name, and that this is durable is not known: with its data it is whole."""
    run = new_run(tmp_path)

    class Stubborn(SystemCalls):
        broken = False

        def rename(self, source: Path, target: Path) -> None:
            super().rename(source, target)
            self.broken = target.suffix == ".json"

        def sync_directory(self, path: Path) -> None:
            if self.broken:
                raise OSError(errno.EIO, "broken")
            super().sync_directory(path)

        def unlink(self, path: Path) -> None:
            if path.suffix == ".json":
                raise OSError(errno.EIO, "broken")
            super().unlink(path)

    backend = LocalBackend(tmp_path, Stubborn())
    with pytest.raises(StoreFailed):
        small_part(Run(backend, RunRecord(run=run.id, created="")))
    assert read_back(run, REF, 0) == {t.key: t.data for t in small_state()}


# ---------------------------------------------------------------- reading what is not as written


def data_file(root: Path, label: str = "model") -> Path:
    (path,) = root.glob(f"steps/main/*/*.{label}.safetensors")
    return path


def test_damage_in_a_tensor_is_named_with_its_place(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    small_part(run)
    path = data_file(tmp_path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(Damaged, match=r"models\.model\.bias: hash of bytes") as raised:
        read_back(run, REF, 0)
    assert raised.value.step == REF
    assert raised.value.at == len(data) - 6
    assert str(raised.value.path).endswith(path.name)


def test_a_missing_file_is_missing(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    small_part(run)
    data_file(tmp_path, "state").unlink()
    with pytest.raises(Missing):
        read_back(run, REF, 0)


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    small_part(run)
    (entry,) = run.entries(REF)
    records = run.records(entry)
    seen: list[int] = []
    buffers = []

    def buffer_for(spec: TensorSpec) -> memoryview:
        buffers.append(memoryview(bytearray(spec.nbytes)))
        return buffers[-1]

    StepReader(run.backend, entry, records).read(locate(records, 0), buffer_for, seen.append)
    assert sum(seen) == sum(len(t.data) for t in small_state())


def test_a_large_tensor_is_read_in_stretches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everystep.store.reading._CHUNK_BYTES", 100)
    run = new_run(tmp_path, 2)
    big = Tensor("/models/model/big", "uint8", (999,), noise(999), True)
    for rank in (0, 1):
        write_part(run, REF, [big], rank=rank, world_size=2)
    assert read_back(run, REF, 1) == {big.key: big.data}
    assert list(verify_run(run, run.listing())) == []
    stored = sorted(tmp_path.glob("steps/main/*/*r00001*.safetensors"))[0]
    data = bytearray(stored.read_bytes())
    data[-150] ^= 1
    stored.write_bytes(data)
    assert [f.path for f in verify_run(run, run.listing())] == [str(stored.relative_to(tmp_path))]


# ---------------------------------------------------------------- where a tensor lies


def one_record(run: Run, rank: int = 0) -> fmt.RankRecord:
    (entry,) = run.entries(REF)
    return run.record(entry, rank)


def test_pieces_with_a_gap_or_an_overlap_are_no_tensor(tmp_path: Path) -> None:
    run = new_run(tmp_path, 2)
    shared = tensor("/models/model/a", "uint8", 10, replicated=True)
    for rank in (0, 1):
        write_part(run, REF, [shared], rank=rank, world_size=2)
    records = {rank: one_record(run, rank) for rank in (0, 1)}
    assert [len(place.parts) for place in locate(records, 0)] == [2]
    for start, stop in ((6, 10), (4, 10), (5, 9), (5, 11)):
        (stored,) = records[1].pieces
        moved = msgspec.structs.replace(stored, piece=Piece(shared.key, start, stop))
        changed = {0: records[0], 1: msgspec.structs.replace(records[1], pieces=[moved])}
        with pytest.raises(Damaged, match="not all of it"):
            locate(changed, 0)


def test_what_belongs_to_one_rank_is_not_taken_from_another(tmp_path: Path) -> None:
    run = new_run(tmp_path, 2)
    write_step(run, REF, 2)
    records = {rank: one_record(run, rank) for rank in (0, 1)}
    mine = [p for p in records[1].pieces if not p.piece.key.endswith("mean")]
    changed = {0: records[0], 1: msgspec.structs.replace(records[1], pieces=mine)}
    with pytest.raises(Damaged, match=r"mean: not all of it"):
        locate(changed, 1)


def test_a_piece_of_another_tensor_is_not_taken_for_it(tmp_path: Path) -> None:
    """The hash of the piece is right, and it is not the hash of the tensor."""
    run = new_run(tmp_path)
    small_part(run)
    record = one_record(run)
    tensors = [msgspec.structs.replace(t, xxh3_128="0" * 32) for t in record.tensors]
    with pytest.raises(Damaged, match="another tensor"):
        locate({0: msgspec.structs.replace(record, tensors=tensors)}, 0)


@pytest.mark.parametrize(
    ("key", "section"),
    [
        ("/models/model/a.b", "model"),
        ("/models/model/a~1b", "model"),
        ("/models/gen/a", "model.gen"),
        ("/models/model/extra_state/x/y", "rest"),
        ("/models/model", "rest"),
        ("/optimizers/optimizer/state/model/a/exp_avg", "state"),
        ("/optimizers/gen/state/model/a/exp_avg", "state"),
        ("/optimizers/optimizer/groups/0/lr", "rest"),
        ("/extras/model/x", "rest"),
        ("/rng/torch", "rest"),
    ],
)
def test_sections(key: str, section: str) -> None:
    assert section_of(key) == section


def test_names_in_a_data_file_are_those_of_a_state_dict(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    odd = [
        tensor(join_key("models", "model", name), "uint8", 1)
        for name in ("fc.weight", "a/b", "__metadata__", "~")
    ]
    write_part(run, REF, odd)
    names = {stored.name for stored in one_record(run).pieces}
    assert names == {"fc.weight", "a/b", "/models/model/__metadata__", "~"}
    assert read_back(run, REF, 0) == {t.key: t.data for t in odd}


def test_models_have_files_of_their_own(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    tensors = [
        tensor(f"/models/{name}/w", "uint8", 1) for name in ("model", "gen", "dïs", "G" * 150)
    ]
    write_part(run, REF, tensors, tree=TREE)
    labels = {file.name.split(".")[1] for file in one_record(run).files}
    assert {"model", "model%2Egen", "model%2Ed%C3%AFs"} < labels and len(labels) == 4
    assert read_back(run, REF, 0) == {t.key: t.data for t in tensors}


def test_hashes_cover_row_major_bytes(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    small_part(run)
    hashes = {t.spec.key: t.xxh3_128 for t in one_record(run).tensors}
    assert hashes == {t.key: fmt.digest(t.data) for t in small_state()}
    assert all(element_count(t.shape) for t in small_state())


def test_pieces_of_the_helper_cover_everything() -> None:
    """The partition that these tests write with is the library's own."""
    shared = [t for t in small_state() if t.replicated]
    covered = [p for rank in range(3) for p in pieces_of(shared, rank, 3)]
    assert sum(p.stop - p.start for p in covered) == sum(t.spec.elements for t in shared)


def test_nothing_is_gathered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk is used before the next one is asked for: the same memory may hold both."""
    run = new_run(tmp_path)
    one = bytearray(4)
    whole = tensor("/models/model/a", "uint8", 20)

    def chunks(start: int, stop: int) -> Iterator[memoryview]:
        for at in range(start, stop, 4):
            one[:] = whole.data[at : at + 4]
            yield memoryview(one)

    monkeypatch.setattr(Tensor, "source", lambda self: full.Source(self.spec, chunks))
    write_part(run, REF, [whole])
    assert read_back(run, REF, 0) == {whole.key: whole.data}
