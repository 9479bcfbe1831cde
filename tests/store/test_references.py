"""Steps that refer to files of earlier ones read the same, and nothing that they need goes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import everystep
from byte_runs import (
    NoSync,
    Tensor,
    adapter_state,
    begin,
    files_of,
    new_run,
    read_back,
    small_state,
    tensor,
    write_part,
    write_step,
)
from everystep.errors import Damaged, Missing, StoreError, StoreFailed
from everystep.store import format as fmt
from everystep.store.format import DataFile, PartName, RankRecord, TimelineRecord
from everystep.store.local import LocalBackend
from everystep.store.pruning import carry_out, plan_prune
from everystep.store.references import (
    leftovers,
    needed_places,
    needed_steps,
    reachable,
    references,
    references_of,
    referrers_first,
)
from everystep.store.retention import Retention, Upkeep
from everystep.store.run import Run, StepEntry
from everystep.store.verify import verify_run, verify_step
from everystep.store.wellformed import complaints
from everystep.types import StepRef


def main(step: int) -> StepRef:
    return StepRef("main", step)


def bytes_of(state: list[Tensor]) -> dict[str, bytes]:
    return {t.key: t.data for t in state}


def only_entry(run: Run, ref: StepRef) -> StepEntry:
    (entry,) = run.entries(ref)
    return entry


def stem(session: int = 1, rank: int = 0, world_size: int = 1) -> str:
    return PartName(session, rank, world_size, "").stem


# ---------------------------------------------------------------- reading


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_step_that_refers_to_another_reads_the_same(tmp_path: Path, world_size: int) -> None:
    run = new_run(tmp_path, world_size, NoSync())
    write_step(run, main(1), world_size)
    write_step(run, main(2), world_size, earlier=main(1))
    begin(run, 2, "main@2", world_size=world_size, parent=main(2))
    fork = StepRef("main@2", 3)
    write_step(run, fork, world_size, session=2, earlier=main(1))
    for ref in (main(2), fork):
        assert not list((tmp_path / fmt.step_directory(ref)).glob("*.model.safetensors"))
        for rank in range(world_size):
            places = references(run.record(only_entry(run, ref), rank))
            assert places == {(main(1), f"{stem(1, rank, world_size)}.model.safetensors")}
            assert read_back(run, ref, rank) == bytes_of(adapter_state(rank, ref, main(1)))
    assert list(verify_run(run, run.listing())) == []
    state = everystep.load(tmp_path, "main@2:3")
    assert {key for key in state.tensors} == {t.key for t in small_state()}


def test_damage_is_named_where_it_is_and_costs_every_step_that_needs_the_file(
    tmp_path: Path,
) -> None:
    run = new_run(tmp_path, calls=NoSync())
    write_step(run, main(1))
    write_step(run, main(2))
    write_step(run, main(3), earlier=main(1))
    name = f"{fmt.step_directory(main(1))}/{stem()}.model.safetensors"
    whole = (tmp_path / name).read_bytes()
    for data in (whole[:-1] + bytes([whole[-1] ^ 1]), whole[:-1], None, bytes(len(whole))):
        (tmp_path / name).unlink(missing_ok=True)
        if data is not None:
            (tmp_path / name).write_bytes(data)
        found = list(verify_run(run, run.listing()))
        assert {(f.level, str(f.step), f.path) for f in found} == {
            ("damage", "main:1", name), ("damage", "main:3", name),
        }  # fmt: skip
        with pytest.raises((Damaged, Missing)) as raised:
            read_back(run, main(3), 0)
        assert str(raised.value.path).endswith(name)
        assert everystep.load(tmp_path).step == 2
    (tmp_path / name).write_bytes(whole)
    assert list(verify_run(run, run.listing())) == []


def test_tensors_that_only_the_earlier_step_names_are_no_damage(tmp_path: Path) -> None:
    """A file may hold more than what a later step takes from it."""
    run = new_run(tmp_path, calls=NoSync())
    write_own(run, main(1))
    write_own(run, main(2), earlier=main(1))
    path = tmp_path / f"{fmt.step_directory(main(2))}/{stem()}.json"
    record = run.record(only_entry(run, main(2)), 0)
    key = "/models/model/w"
    less = msgspec.structs.replace(
        record,
        tensors=[t for t in record.tensors if t.spec.key != key],
        pieces=[p for p in record.pieces if p.piece.key != key],
    )
    path.write_bytes(fmt.encode_record(less))
    assert list(verify_run(run, run.listing())) == []
    assert key not in read_back(run, main(2), 0)


# ---------------------------------------------------------------- records


def referring(name: str, step: StepRef | None, ref: StepRef) -> RankRecord:
    """A record of rank 1 of 2, in session 5, with one file."""
    file = DataFile(name=name, nbytes=9, header_bytes=9, header_xxh3_128="", step=step)
    return RankRecord(
        run="", timeline=ref.timeline, step=ref.step, session=5, rank=1, world_size=2, created="",
        metrics={}, files=[file], tensors=[], pieces=[], replica_xxh3_128=None, tree={},
        versions={},
    )  # fmt: skip


OWN = stem(5, 1, 2)
DATA = ".model.safetensors"


@pytest.mark.parametrize(
    ("name", "step"),
    [
        (OWN + DATA, None),
        (OWN + DATA, main(8)),
        (OWN + DATA, main(0)),
        (stem(4, 1, 2) + DATA, main(8)),
        (stem(4, 1, 2) + DATA, StepRef("main@3", 900)),
    ],
)
def test_references_that_are_in_order(name: str, step: StepRef | None) -> None:
    record = referring(name, step, main(9))
    assert list(complaints(record, OWN)) == []
    assert references(record) == (frozenset() if step is None else {(step, name)})


@pytest.mark.parametrize(
    ("name", "step", "said"),
    [
        (OWN + DATA, main(9), "no earlier step"),
        (OWN + DATA, main(10), "no earlier step"),
        (stem(4, 1, 2) + DATA, None, "not a data file of its part"),
        (stem(6, 1, 2) + DATA, main(8), "later session"),
        (stem(4, 0, 2) + DATA, main(8), "not a data file of its rank"),
        (stem(4, 1, 3) + DATA, main(8), "not a data file of its rank"),
        (OWN + ".json", main(8), "not a data file of its rank"),
        (OWN + ".json", None, "not a data file of its part"),
        ("x" + DATA, main(8), "not a data file of its rank"),
        ("../" + OWN + DATA, main(8), "no place for a file"),
        (OWN + DATA, main(-1), "no place for a file"),
        (OWN + DATA, main(10**12), "no place for a file"),
        (OWN + DATA, StepRef("..", 8), "no place for a file"),
        (OWN + DATA, StepRef("a/b", 8), "no place for a file"),
        (OWN + DATA, StepRef("", 8), "no place for a file"),
        (OWN + DATA, StepRef("main\n", 8), "no place for a file"),
    ],
)
def test_references_that_make_no_sense(name: str, step: StepRef | None, said: str) -> None:
    (found,) = complaints(referring(name, step, main(9)), OWN)
    assert said in found


def test_a_place_is_named_once() -> None:
    record = referring(OWN + DATA, main(8), main(9))
    (file,) = record.files
    other = msgspec.structs.replace(file, step=main(7))
    both = msgspec.structs.replace(record, files=[file, other])
    assert list(complaints(both, OWN)) == []
    twice = msgspec.structs.replace(record, files=[file, file])
    assert list(complaints(twice, OWN)) == ["it names a file twice"]


def test_a_file_of_version_1_lies_beside_its_record() -> None:
    plain = {"name": "x", "nbytes": 1, "header_bytes": 1, "header_xxh3_128": ""}
    assert msgspec.convert(plain, DataFile).step is None
    assert b'"step":null' in msgspec.json.encode(msgspec.convert(plain, DataFile))


# ---------------------------------------------------------------- what is needed


def made_up(step: int, session: int = 1) -> StepEntry:
    part = PartName(session, 0, 1, "")
    return StepEntry(ref=main(step), session=session, world_size=1, parts=(part,), nbytes=0)


def test_everything_on_a_chain_or_a_circle_is_needed() -> None:
    refers = {main(5): {main(4)}, main(4): {main(2)}, main(2): {main(5)}, main(3): {main(1)}}
    assert needed_steps([main(5)], refers) == {main(5), main(4), main(2)}
    assert needed_steps([main(3)], refers) == {main(1)}
    assert needed_steps([main(1)], refers) == set()
    assert reachable([1], lambda n: [n + 1] if n < 10_000 else []) == set(range(2, 10_001))


GRAPHS = st.dictionaries(
    st.integers(0, 7).map(main), st.sets(st.integers(0, 7).map(main), max_size=3)
)


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(1, 2)), unique=True), GRAPHS)
def test_the_order_of_removal(
    numbers: list[tuple[int, int]], graph: dict[StepRef, set[StepRef]]
) -> None:
    """Whatever the order, each goes once; where references go back only, no step is removed while
    one that refers to it is left."""
    entries = [made_up(*number) for number in numbers]
    ordered = referrers_first(entries, graph)
    assert sorted(map(str, ordered)) == sorted(map(str, entries))
    back = {ref: {step for step in steps if step < ref} for ref, steps in graph.items()}
    ordered = referrers_first(entries, back)
    for at, entry in enumerate(ordered):
        assert not any(entry.ref in back.get(later.ref, ()) for later in ordered[at:])
    assert referrers_first(entries, {}) == sorted(
        entries, key=lambda e: [n for n, _ in numbers].index(e.ref.step)
    )


def test_a_record_that_cannot_be_read_refers_to_nothing_and_one_that_may_be_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(tmp_path, calls=NoSync())
    write_own(run, main(1))
    write_own(run, main(2), earlier=main(1))
    entries = list(run.listing().steps)
    assert references_of(run, entries) == {main(2): {main(1)}}
    assert needed_places(run, entries) == {(main(1), f"{stem()}.model.safetensors")}
    marker = tmp_path / fmt.step_directory(main(2)) / f"{stem()}.json"
    good = marker.read_bytes()
    marker.write_bytes(good[:-9])
    assert references_of(run, entries) == {} and needed_places(run, entries) == set()
    marker.unlink()
    assert needed_places(run, entries) == set()
    marker.write_bytes(good)

    def refuse(*args: object) -> None:
        raise StoreFailed("no answer")

    monkeypatch.setattr(run.backend, "read", refuse)
    with pytest.raises(StoreFailed):
        needed_places(run, entries)


# ---------------------------------------------------------------- cleaning up, setting aside


def own_state(rank: int, model: StepRef, ref: StepRef) -> list[Tensor]:
    """A state in which nothing is replicated, with the model of another step."""
    return [
        tensor("/models/model/w", "uint8", 5, seed=f"{model} {rank}"),
        tensor("/optimizers/optimizer/state/exp", "float32", 2, seed=f"{ref} {rank}"),
    ]


def write_own(
    run: Run, ref: StepRef, rank: int = 0, world_size: int = 1, session: int = 1,
    earlier: StepRef | None = None,
) -> RankRecord:  # fmt: skip
    """One rank's part of a step, whose model is as in an earlier one."""
    state = own_state(rank, earlier or ref, ref)
    places = {"model": earlier} if earlier else None
    return write_part(
        run, ref, state, rank=rank, world_size=world_size, session=session, earlier=places
    )


def names_in(root: Path, ref: StepRef) -> set[str]:
    return {path.name for path in (root / fmt.step_directory(ref)).glob("*")}


def test_cleaning_up_spares_what_a_whole_step_refers_to(tmp_path: Path) -> None:
    """Rank 1 failed at step 2, and step 3 of rank 0 goes on from its own step 2."""
    run = new_run(tmp_path, 2, NoSync())
    for rank in (0, 1):
        write_own(run, main(1), rank, 2)
    write_own(run, main(2), 0, 2)
    write_own(run, main(3), 0, 2, earlier=main(2))
    write_own(run, main(3), 1, 2, earlier=main(1))
    write_own(run, main(4), 1, 2, earlier=main(3))
    before = files_of(tmp_path)
    assert leftovers(run, run.listing()) == [(main(4), stem(1, 1, 2))]
    assert run.clean_up() == 2
    gone = before.keys() - files_of(tmp_path).keys()
    assert gone and all(name.startswith(fmt.step_directory(main(4))) for name in gone)
    assert list(verify_step(run, only_entry(run, main(3)))) == []
    for path in (tmp_path / fmt.step_directory(main(3))).glob("*r00000*.json"):
        path.unlink()  # step 3 is not whole any more, and nothing needs what it referred to
    run.clean_up()
    assert [str(entry.ref) for entry in run.listing().steps] == ["main:1"]
    assert run.listing().loose == ()


def test_cleaning_up_spares_data_whose_record_is_gone(tmp_path: Path) -> None:
    run = new_run(tmp_path, calls=NoSync())
    for step, earlier in ((1, None), (2, main(1)), (3, None)):
        write_own(run, main(step), earlier=earlier)
    for step in (1, 3):
        (tmp_path / fmt.step_directory(main(step)) / f"{stem()}.json").unlink()
    run.clean_up()
    assert {ref for ref, _ in run.listing().loose} == {main(1)}
    assert list(verify_step(run, only_entry(run, main(2)))) == []


def test_cleaning_up_spares_a_chain_and_a_circle(tmp_path: Path) -> None:
    """No writer makes them; a part that is needed by one that is needed is spared as well."""
    run = new_run(tmp_path, 2, NoSync())
    other = StepRef("main@9", 2)
    for ref in (main(1), other):
        write_own(run, ref, 0, 2)
    for rank in (0, 1):
        write_own(run, main(3), rank, 2)

    def refer(ref: StepRef, to: StepRef) -> None:
        record = run.record(only_entry(run, ref), 0)
        file = msgspec.structs.replace(record.files[0], step=to, name=f"{stem(1, 0, 2)}{DATA}")
        changed = msgspec.structs.replace(record, files=[*record.files, file])
        path = tmp_path / fmt.step_directory(ref) / f"{stem(1, 0, 2)}.json"
        path.write_bytes(fmt.encode_record(changed))

    refer(main(3), other)
    refer(other, main(1))
    refer(main(1), other)
    before = files_of(tmp_path)
    run.clean_up()
    assert files_of(tmp_path) == before


def test_cleaning_up_reads_no_record_where_nothing_can_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(tmp_path, calls=NoSync())
    write_own(run, main(1))

    def refuse(*args: object) -> None:
        raise StoreFailed("no answer")

    monkeypatch.setattr(run, "record", refuse)
    assert run.clean_up() == 2
    write_part(run, main(2), own_state(0, main(2), main(2)), world_size=2)
    with pytest.raises(StoreFailed):
        run.clean_up()
    assert len(run.listing().steps) == 2, "what may be needed stays"


def test_setting_aside_leaves_what_another_step_refers_to(tmp_path: Path) -> None:
    run = new_run(tmp_path, calls=NoSync())
    write_own(run, main(1))
    for step in (2, 3):
        write_own(run, main(step), earlier=main(1))
    write_own(run, main(4))
    before = {step: names_in(tmp_path, main(step)) for step in (1, 2, 3, 4)}
    shared = f"{stem()}.model.safetensors"
    run.set_aside(only_entry(run, main(4)))
    assert names_in(tmp_path, main(4)) == set()
    where = run.set_aside(only_entry(run, main(1)))
    assert names_in(tmp_path, main(1)) == {shared}
    assert {path.name for path in (tmp_path / where).iterdir()} == before[1] - {shared}
    for step in (2, 3):
        assert list(verify_step(run, only_entry(run, main(step)))) == []
    run.clean_up()
    assert names_in(tmp_path, main(1)) == {shared}
    for step in (2, 3):
        run.set_aside(only_entry(run, main(step)))
    run.clean_up()
    assert names_in(tmp_path, main(1)) == set(), "a step that was set aside keeps nothing"


class Watched(LocalBackend):
    """A backend that notes how files are deleted."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, NoSync())
        self.deleted: list[tuple[str, bool]] = []

    def delete(self, name: str, *, reuse: bool = False) -> None:
        self.deleted.append((name.split(".", 1)[1], reuse))
        super().delete(name, reuse=reuse)


@pytest.mark.parametrize("reuse", [False, True])
def test_the_space_of_data_files_may_be_reused_and_that_of_records_not(
    tmp_path: Path, reuse: bool
) -> None:
    new_run(tmp_path)
    backend = Watched(tmp_path)
    run = Run.open_or_create(backend)
    write_own(run, main(1))
    if reuse:
        run.delete_part(main(1), stem(), reuse=True)
    else:
        run.delete_part(main(1), stem())
    assert backend.deleted == [
        ("json", False), ("model.safetensors", reuse), ("state.safetensors", reuse),
    ]  # fmt: skip


# ---------------------------------------------------------------- retention


@contextmanager
def upkeep_of(
    run: Run, policy: Retention, rank: int = 0, known: Any = (), pinned: Any = ()
) -> Iterator[Upkeep]:
    upkeep = Upkeep(run, policy, rank, known, pinned)
    try:
        yield upkeep
    finally:
        upkeep.close()


def stored(
    run: Run, upkeep: Upkeep, ref: StepRef, rank: int = 0, world_size: int = 1, session: int = 1,
    earlier: StepRef | None = None,
) -> None:  # fmt: skip
    """What a rank does at a step."""
    record = write_own(run, ref, rank, world_size, session, earlier)
    upkeep.after_step(ref, session, {step for step, _ in references(record)})
    upkeep.finish_removal()


def left(run: Run) -> list[str]:
    return [str(entry.ref) for entry in run.listing().steps]


def test_a_step_stays_as_long_as_one_that_stays_refers_to_it(tmp_path: Path) -> None:
    run = new_run(tmp_path, calls=NoSync())
    with upkeep_of(run, Retention(keep_last=2)) as upkeep:
        stored(run, upkeep, main(1))
        for step in range(2, 7):
            stored(run, upkeep, main(step), earlier=main(step - 1))
        assert left(run) == ["main:1", "main:5", "main:6"]
        stored(run, upkeep, main(7))
        assert left(run) == ["main:1", "main:6", "main:7"]
        stored(run, upkeep, main(8), earlier=main(7))
        assert left(run) == ["main:7", "main:8"]
        assert upkeep._references.keys() == {main(8)}, "what is gone is forgotten"


def test_what_earlier_sessions_referred_to_is_read_once_and_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(tmp_path, calls=NoSync())
    write_own(run, main(1))
    write_own(run, main(2), earlier=main(1))
    begin(run, 2, restored=main(2))
    read: list[StepRef] = []
    real = Run.record

    def watched(self: Run, entry: StepEntry, rank: int) -> RankRecord:
        read.append(entry.ref)
        return real(self, entry, rank)

    monkeypatch.setattr(Run, "record", watched)
    with upkeep_of(run, Retention(keep_last=3), known=run.listing().steps) as upkeep:
        stored(run, upkeep, main(3), session=2)
        assert read == [], "nothing can go yet"
        stored(run, upkeep, main(4), session=2)
        assert read == [main(1), main(2)]
        assert left(run) == ["main:1", "main:2", "main:3", "main:4"], "1 for the sake of 2"
        stored(run, upkeep, main(5), session=2)
        assert left(run) == ["main:3", "main:4", "main:5"]
        assert read == [main(1), main(2)]


def test_a_store_that_does_not_answer_is_asked_again_before_anything_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(tmp_path, calls=NoSync())
    write_own(run, main(1))
    write_own(run, main(2), earlier=main(1))
    with upkeep_of(run, Retention(keep_last=2), known=run.listing().steps) as upkeep:

        def refuse(*args: object) -> None:
            raise StoreFailed("no answer")

        with monkeypatch.context() as patched:
            patched.setattr(run, "record", refuse)
            with pytest.raises(StoreFailed):
                stored(run, upkeep, main(3))
        assert left(run) == ["main:1", "main:2", "main:3"]
        upkeep.after_step(main(3), 1)
        upkeep.finish_removal()
        assert left(run) == ["main:1", "main:2", "main:3"]
        stored(run, upkeep, main(4))
        assert left(run) == ["main:3", "main:4"]


def test_another_timeline_keeps_what_it_refers_to(tmp_path: Path) -> None:
    """Training goes on in `main`, and its old steps are needed by a fork."""
    run = new_run(tmp_path, calls=NoSync())
    write_own(run, main(1))
    write_own(run, main(2))
    begin(run, 2, "side", parent=main(2), restored=main(2))
    write_own(run, StepRef("side", 3), session=2, earlier=main(1))
    begin(run, 3, restored=main(2))
    known = [entry for entry in run.listing().steps if entry.ref.timeline == "main"]
    with upkeep_of(run, Retention(keep_last=1), known=known) as upkeep:
        for step in (3, 4):
            stored(run, upkeep, main(step), session=3)
    assert left(run) == ["main:1", "main:4", "side:3"]
    assert list(verify_run(run, run.listing())) == []


def test_ranks_that_refer_to_different_steps_remove_their_own_files_only(tmp_path: Path) -> None:
    run = new_run(tmp_path, 2, NoSync())
    with (
        upkeep_of(run, Retention(keep_last=1), 0) as first,
        upkeep_of(run, Retention(keep_last=1), 1) as second,
    ):
        for step in range(1, 6):
            stored(run, first, main(step), 0, 2, earlier=main(1) if step > 1 else None)
            stored(run, second, main(step), 1, 2, earlier=main(3) if step > 3 else None)
        first.after_step(main(5), 1, {main(1)})
    ranks = {e.ref.step: [part.rank for part in e.parts] for e in run.listing().steps}
    assert ranks == {1: [0], 3: [1], 4: [0, 1], 5: [0, 1]}
    run.clean_up()
    begin(run, 2, world_size=2, restored=main(5))
    assert {e.ref.step: [p.rank for p in e.parts] for e in run.listing().steps} == ranks
    for rank in (0, 1):
        with upkeep_of(run, Retention(keep_last=1), rank, run.listing().steps) as upkeep:
            stored(run, upkeep, main(6), rank, 2, session=2)
            upkeep.after_step(main(6), 2)
    assert [e for e in run.listing().complete()] == [main(5), main(6)]
    assert list(verify_step(run, only_entry(run, main(5)))) == []


def test_what_a_step_that_cannot_be_removed_refers_to_stays(tmp_path: Path) -> None:
    """Else a step that is still listed would have lost its data."""

    class Stuck(NoSync):
        def unlink(self, path: Path) -> None:
            if path.parent.name == "000000000002" and path.suffix == ".json":
                raise OSError(1, "immutable")
            super().unlink(path)

    run = new_run(tmp_path, calls=Stuck())
    with upkeep_of(run, Retention(keep_last=1)) as upkeep:
        stored(run, upkeep, main(1))
        stored(run, upkeep, main(2), earlier=main(1))
        with pytest.raises(StoreError):
            stored(run, upkeep, main(3))
        assert left(run) == ["main:1", "main:2", "main:3"]
        assert list(verify_run(run, run.listing())) == []
        upkeep.after_step(main(3), 1)
        with pytest.raises(StoreError):
            upkeep.finish_removal()
    assert left(run) == ["main:1", "main:2", "main:3"]


class Checking(LocalBackend):
    """A backend that looks, after each file that goes, whether what is listed can be read."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, NoSync())
        self.looked = 0

    def delete(self, name: str, *, reuse: bool = False) -> None:
        super().delete(name, reuse=reuse)
        self.looked += 1
        run = Run.open(self._root)
        for entry in run.listing().steps:
            if entry.complete:
                assert list(verify_step(run, entry)) == [], f"after {name}"


@pytest.mark.parametrize("by", ["training", "prune"])
def test_at_no_moment_of_a_removal_is_a_step_listed_that_cannot_be_read(
    tmp_path: Path, by: str
) -> None:
    new_run(tmp_path, calls=NoSync())
    backend = Checking(tmp_path)
    run = Run.open_or_create(backend)
    for step, earlier in ((1, None), (2, 1), (3, None), (4, 1), (5, 3), (6, None)):
        write_own(run, main(step), earlier=main(earlier) if earlier else None)
    policy = Retention(keep_last=1)
    if by == "prune":
        listing = run.listing()
        files = {entry.name: entry.nbytes for entry in backend.list("")}
        links = references_of(run, listing.steps)
        carry_out(run, plan_prune(listing, files, policy, {}, links), lambda: None)
    else:
        known = [entry for entry in run.listing().steps if entry.ref < main(6)]
        with upkeep_of(run, policy, known=known) as upkeep:
            upkeep.after_step(main(6), 1)
    assert left(run) == ["main:6"]
    assert backend.looked == 5 + 2 * 2 + 3, "records and data files"


# ---------------------------------------------------------------- any history


class Move(NamedTuple):
    """What happens at a step, by rank: 0: nothing is stored; 1: all is; more: it refers to what
    the rank stored before."""

    ranks: tuple[int, int]


class Start(NamedTuple):
    """A session."""

    world_size: int
    back: int
    """Restore so many complete steps before the newest of any timeline."""
    moves: list[Move]
    crash: bool
    """It ends amid a step: data without a record, and one rank's part alone."""


STARTS = st.builds(
    Start,
    st.integers(1, 2),
    st.sampled_from([0, 0, 0, 1, 2, 4]),
    st.lists(st.builds(Move, st.tuples(st.integers(0, 4), st.integers(0, 4))), max_size=6),
    st.booleans(),
)
POLICIES = st.builds(
    Retention,
    keep_last=st.none() | st.integers(1, 3),
    keep_every=st.none() | st.integers(2, 3),
)


class History:
    """A run that is trained, killed, restored and forked, with what each step held."""

    def __init__(self, root: Path, policy: Retention) -> None:
        self.root, self.policy = root, policy
        self.run = Run.open_or_create(LocalBackend(root, NoSync()))
        self.held: dict[tuple[StepRef, int, int], dict[str, bytes]] = {}
        """By step, session and rank."""
        self.referring = 0

    def check(self) -> set[StepRef]:
        """Every step that is complete holds what it held; returns them."""
        complete = self.run.listing().complete()
        for ref, entry in complete.items():
            for rank in range(entry.world_size):
                assert read_back(self.run, ref, rank) == self.held[ref, entry.session, rank]
        return set(complete)

    def session(self, start: Start) -> None:
        """As `Checkpointer` does it."""
        before = self.check()
        number = self.run.clean_up()
        assert self.check() == before, "a restart lost a step"
        assert all(e.whole or self.is_needed(e) for e in self.run.listing().steps)
        listing = self.run.listing()
        refs = sorted(before, key=lambda ref: (ref.step, ref.timeline))
        restored = refs[max(0, len(refs) - 1 - start.back)] if refs else None
        timeline = self.timeline_after(listing.timelines, refs, restored)
        parent = restored if restored is not None and timeline != restored.timeline else None
        record = TimelineRecord(name=timeline, parent=parent)
        self.run.begin_session(number, record, start.world_size, restored, {})
        listing = self.run.listing()
        pinned = {t.parent for t in listing.timelines.values() if t.parent is not None}
        pinned |= {restored} if restored else set()
        known = [e for e in listing.steps if e.ref.timeline == timeline and e.session < number]
        upkeep = [
            Upkeep(self.run, self.policy, rank, known, pinned) for rank in range(start.world_size)
        ]
        done = restored.step if restored else 0
        newest = self.run.entries(restored)[-1] if restored else None
        same = newest is not None and newest.world_size == start.world_size
        last: list[StepRef | None] = [restored if same else None] * start.world_size
        try:
            for at, move in enumerate(start.moves, done + 1):
                for rank in range(start.world_size):
                    ref = StepRef(timeline, at)
                    last[rank] = self.step(upkeep[rank], ref, rank, start, move, number, last[rank])
                    self.check()
        finally:
            for one in upkeep:
                one.close()
        if start.crash:
            torn, loose = (StepRef(timeline, done + len(start.moves) + n) for n in (1, 2))
            self.store(torn, 0, 2, number, last[0] if start.world_size == 2 else None)
            self.store(loose, 0, start.world_size, number, last[0])
            for path in (self.root / fmt.step_directory(loose)).glob("*.json"):
                path.unlink()

    def timeline_after(self, timelines: Any, refs: list[StepRef], restored: StepRef | None) -> str:
        """Go on where the step is the newest of its timeline; else fork."""
        if restored is None:
            return "main"
        if restored == max(ref for ref in refs if ref.timeline == restored.timeline):
            return restored.timeline
        return f"fork{len(timelines)}"

    def step(
        self, upkeep: Upkeep, ref: StepRef, rank: int, start: Start, move: Move, session: int,
        last: StepRef | None,
    ) -> StepRef | None:  # fmt: skip
        choice = move.ranks[rank]
        if choice == 0:
            return last
        record = self.store(ref, rank, start.world_size, session, last if choice > 1 else None)
        refers = {step for step, _ in references(record)}
        self.referring += len(refers)
        upkeep.after_step(ref, session, refers)
        upkeep.finish_removal()
        return ref

    def store(
        self, ref: StepRef, rank: int, world_size: int, session: int, last: StepRef | None
    ) -> RankRecord:
        record = write_own(self.run, ref, rank, world_size, session, last)
        stored_in = next((f.step for f in record.files if f.step), ref)
        self.held[ref, session, rank] = bytes_of(own_state(rank, stored_in, ref))
        return record

    def is_needed(self, entry: StepEntry) -> bool:
        places = needed_places(self.run, self.run.listing().steps)
        return entry.ref in {ref for ref, _ in places}

    def prune(self, policy: Retention) -> None:
        """What stays can be read, and is what the plan says."""
        listing = self.run.listing()
        files = {entry.name: entry.nbytes for entry in self.run.backend.list("")}
        known = references_of(self.run, listing.steps)
        plan = plan_prune(listing, files, policy, {}, known)
        carry_out(self.run, plan, lambda: None)
        assert self.check() == {entry.ref for entry in plan.kept}
        assert all(e.whole or self.is_needed(e) for e in self.run.listing().steps)


@settings(max_examples=25)
@given(POLICIES, POLICIES, st.lists(STARTS, min_size=1, max_size=4))
def test_whatever_happens_a_step_that_is_listed_can_be_read(
    tmp_path_factory: pytest.TempPathFactory,
    policy: Retention,
    pruning: Retention,
    starts: list[Start],
) -> None:
    """After every step of every rank, after every start, and after a prune."""
    history = History(tmp_path_factory.mktemp("run"), policy)
    for start in starts:
        history.session(start)
    history.run.clean_up()
    history.prune(pruning)
