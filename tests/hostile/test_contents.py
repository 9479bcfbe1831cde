"""Records and data files whose hashes are right and whose contents try to hurt the reader."""

from __future__ import annotations

import json
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import everystep
from byte_runs import (
    TREE,
    NoSync,
    begin,
    files_of,
    forged,
    framed,
    new_run,
    small_state,
    write_part,
    write_step,
)
from everystep.errors import CannotRestore, Damaged, EverystepError, Unsupported
from everystep.store import format as fmt
from everystep.store.local import LocalBackend
from everystep.store.references import references_of
from everystep.store.retention import Retention, Upkeep
from everystep.store.run import Run
from everystep.store.verify import verify_run
from everystep.types import StepRef
from trips import BLOCKING

REF = StepRef("main", 1)
MANY = 200_000


@contextmanager
def frugal(limit_bytes: int) -> Iterator[None]:
    """Fail if more than so many bytes are held at once, or ten seconds are computed."""
    tracemalloc.start()
    started = time.process_time()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < limit_bytes, f"{peak:,} bytes"
    assert time.process_time() - started < 10


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_step(new_run(tmp_path / "run", calls=NoSync()), REF)
    return tmp_path / "run"


def only(root: Path, pattern: str) -> Path:
    (path,) = root.glob(f"steps/main/*/{pattern}")
    return path


def content_of(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    content: dict[str, Any] = json.loads(data[fmt.FRAME_BYTES : -len(fmt.FRAME_SUFFIX)])
    return content


def refused(root: Path) -> str:
    """What is said by all ways of reading the run, none of which may succeed or break."""
    with pytest.raises(EverystepError) as raised:
        everystep.load(root)
    run = Run.open(root)
    found = [f for f in verify_run(run, run.listing()) if f.level == "damage"]
    assert found, "verify finds nothing"
    return str(raised.value)


# ---------------------------------------------------------------- records


def changed_tensor(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def change(content: dict[str, Any]) -> dict[str, Any]:
        content["tensors"][0]["spec"].update(changes)
        return content

    return change


def changed_piece(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def change(content: dict[str, Any]) -> dict[str, Any]:
        content["pieces"][0]["piece"].update(changes)
        return content

    return change


def changed(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda content: content | changes


def shard(**changes: Any) -> dict[str, Any]:
    return {
        "global_shape": [6, 5],
        "offsets": [3, 0],
        "mesh_shape": [2],
        "mesh_dim_names": None,
        "placements": ["S(0)"],
        **changes,
    }


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(changed_tensor(shape=[-3, -5]), id="negative lengths that multiply to 15"),
        pytest.param(changed_tensor(shape=[2**62, 2**62]), id="a shape beyond all memory"),
        pytest.param(changed_tensor(shape=[2**64, 0]), id="a length beyond 64 bits"),
        pytest.param(changed_tensor(shape=[1] * 65), id="65 dimensions"),
        pytest.param(changed_tensor(shape=[1] * MANY), id="very many dimensions"),
        pytest.param(changed_tensor(key="no pointer"), id="a key that is no pointer"),
        pytest.param(changed_tensor(key="/models/model/bias"), id="a key that stands twice"),
        pytest.param(changed_tensor(key=""), id="an empty key"),
        pytest.param(changed_tensor(dtype="float64"), id="another dtype than is stored"),
        pytest.param(changed_tensor(dtype="../../x"), id="a dtype that is none"),
        pytest.param(changed_tensor(dtype="save"), id="a dtype that is a function of torch"),
        pytest.param(changed_tensor(stride=[5]), id="strides of another shape"),
        pytest.param(changed_tensor(stride=[-5, 1]), id="negative strides"),
        pytest.param(changed_tensor(shard=shard(offsets=[4, 0])), id="a shard beyond the whole"),
        pytest.param(changed_tensor(shard=shard(offsets=[-1, 0])), id="a shard before the whole"),
        pytest.param(changed_tensor(shard=shard(offsets=[3])), id="too few offsets"),
        pytest.param(changed_tensor(shard=shard(global_shape=[6])), id="too few lengths"),
        pytest.param(changed_tensor(shard=shard(placements=["S(9)"])), id="no such dimension"),
        pytest.param(changed_tensor(shard=shard(placements=["S(-1)"])), id="a negative dimension"),
        pytest.param(changed_tensor(shard=shard(placements=["P(sum)"])), id="a pending sum"),
        pytest.param(changed_tensor(shard=shard(placements=[])), id="a mesh without placements"),
        pytest.param(
            changed_tensor(shard=shard(global_shape=[2**61, 5])), id="a whole beyond all memory"
        ),
        pytest.param(changed_piece(start=-1), id="a piece before the tensor"),
        pytest.param(changed_piece(stop=10**18), id="a piece beyond the tensor"),
        pytest.param(changed_piece(start=14, stop=3), id="a piece that ends before it begins"),
        pytest.param(changed_piece(start=3), id="a piece with a hole before it"),
        pytest.param(changed_piece(key="/models/model/bias"), id="a piece of another tensor"),
        pytest.param(changed_piece(key="/models/model/none"), id="a piece of no tensor"),
        pytest.param(changed(pieces=[]), id="nothing stored"),
        pytest.param(changed(files=[]), id="pieces in files that are not there"),
        pytest.param(changed(session=2), id="another session"),
        pytest.param(changed(rank=-1), id="rank -1"),
        pytest.param(changed(world_size=10**30), id="a world beyond 64 bits"),
        pytest.param(changed(step="1"), id="a step in words"),
        pytest.param(changed(tree=None), id="no tree"),
        pytest.param(changed(metrics=[]), id="metrics that are a list"),
        pytest.param(changed(replica_xxh3_128="0" * 32), id="another replica hash"),
        pytest.param(changed(format=0), id="format 0"),
        pytest.param(lambda content: [content], id="a list"),
        pytest.param(lambda content: {"format": 1}, id="almost nothing"),
    ],
)
def test_a_record_that_lies(root: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Each field of a record in turn says what cannot be; its hash is right."""
    path = only(root, "*.json")
    path.write_bytes(framed(json.dumps(change(content_of(path))).encode()))
    with frugal(40 << 20):
        with pytest.raises(EverystepError) as raised:
            everystep.load(root)
        assert len(str(raised.value)) < 5_000
        run = Run.open(root)
        found = [f for f in verify_run(run, run.listing()) if f.level == "damage"]
    # what a state is made of, and which dtypes there are, is not the store's to know
    said = str(raised.value)
    assert bool(found) == ("not well formed" not in said and "has no dtype" not in said)


def test_a_piece_in_a_file_that_is_not_there(root: Path) -> None:
    """A piece says that it lies in file 7, or -1, of two."""
    path = only(root, "*.json")
    for index in (7, -1, 2**70):
        content = content_of(path)
        content["pieces"][0]["file"] = index
        path.write_bytes(framed(json.dumps(content).encode()))
        refused(root)


def test_records_nested_as_deep_as_their_length(root: Path) -> None:
    """A recursive reader would run out of stack."""
    path = only(root, "*.json")
    text = msgspec.json.encode(content_of(path) | {"tree": "DEEP"})
    for opening, closing in ((b"[", b"]"), (b'{"a":', b"}")):
        deep = opening * MANY + b"1" + closing * MANY
        path.write_bytes(framed(text.replace(b'"DEEP"', deep)))
        with frugal(60 << 20):
            refused(root)


def test_a_name_that_stands_a_million_times(root: Path) -> None:
    """A record of repeated names takes no more memory than its length allows."""
    path = only(root, "*.json")
    text = msgspec.json.encode(content_of(path) | {"metrics": {"X": 1}})
    many = b",".join([b'"X":{}'] * MANY)
    path.write_bytes(framed(text.replace(b'"X":1', many)))
    with frugal(40 * path.stat().st_size):
        everystep.load(root)


@pytest.mark.parametrize("kind", ["run.json", "timelines/x.json", "sessions/000002.json", "record"])
def test_a_record_that_is_very_long_and_holds_nothing(root: Path, kind: str) -> None:
    """A sparse file of the greatest length, and one beyond it, is refused before it is read."""
    path = only(root, "*.json") if kind == "record" else root / kind
    for length in (fmt.MAX_RECORD_BYTES, 1 << 40):
        with open(path, "wb") as file:
            file.truncate(length)
        with frugal(20 << 20):
            run = Run.open(root)
            assert any(f.level == "damage" for f in verify_run(run, run.listing()))
    with open(path, "r+b") as file:  # a good beginning does not help
        file.truncate(2 << 20)
        file.write(fmt.FRAME_PREFIX + b"0" * 32 + fmt.FRAME_MIDDLE)
    with frugal(20 << 20):
        run = Run.open(root)
        assert any(f.level == "damage" for f in verify_run(run, run.listing()))


# ---------------------------------------------------------------- the tree and the metrics

BOMB: Any = 1
for _ in range(400):
    BOMB = {"$tuple": [BOMB]}

MALFORMED: list[Any] = [
    *[{"$unknown": 1}, {"$": 1}, {"$int": 5}, {"$int": "0xzz"}, {"$int": None}, {"$int": []}],
    *[{"$float": ""}, {"$float": "00"}, {"$float": 1}, {"$float": "zz" * 8}, {"$float": {}}],
    *[{"$complex": []}, {"$complex": [1]}, {"$complex": [{}, {}]}, {"$complex": ["a", "b"]}],
    *[{"$complex": 5}, {"$complex": {"$float": "00"}}, {"$bytes": "!"}, {"$bytes": 1}],
    *[{"$bytes": "ä"}, {"$text": "!"}, {"$text": "gIA="}, {"$text": 5}],
    *[{"$dtype": "save"}, {"$dtype": "__name__"}, {"$dtype": 5}, {"$dtype": []}],
    *[{"$device": "disk"}, {"$device": {}}, {"$device": "cuda:99999999999"}],
    *[{"$scalar": []}, {"$scalar": ["<f8", "00"]}, {"$scalar": ["<f8", ""]}, {"$scalar": 1}],
    *[{"$scalar": ["O", "00" * 8]}, {"$scalar": ["<i99", "00"]}, {"$scalar": ["<f8", 5]}],
    *[{"$tuple": 5}, {"$set": [[1]]}, {"$set": [{}]}, {"$frozenset": None}, {"$size": ["a"]}],
    *[{"$size": [[1]]}, {"$size": [2**70]}, {"$dict": 5}, {"$dict": [[1]]}, {"$dict": [[[], 1]]}],
    *[{"$dict": [1, 2]}, {"$ordered": None}, {"$counter": [["a"]]}, {"$dict": "ab"}],
    *[{"$deque": []}, {"$deque": [[1]]}, {"$deque": [[1], -1]}, {"$deque": [[1], "a"]}],
    *[{"$deque": [5, None]}, {"$deque": None}, {"$deque": {}}],
    *[{"$tensor": "/no/such"}, {"$tensor": None}, {"$tensor": []}, {"$tensor": {}}],
    *[{"$leaf": "/no"}, {"$parameter": "/no"}, {"$frozen": []}],
    *[{"$leaf": "/models/model/mean"}, {"$parameter": "/models/model/mean"}],
    *[{"$array": []}, {"$array": ["/no", "<f8", [1]]}, {"$array": 1}],
    *[{"$array": ["/models/model/mean", "O", [1]]}, {"$array": ["/models/model/mean", "<i8", [9]]}],
    *[{"$array": ["/models/model/mean", "<i8", [-1, -1]]}],
    *[{"$array": ["/models/model/mean", "<i8", "x"]}, {"$array": ["/models/model/mean", 5, [2]]}],
    *[{"$coo": []}, {"$coo": ["/no", "/no", [1], True]}, {"$coo": "abcd"}, {"$coo": {}}],
    *[{"$coo": ["/models/model/mean", "/models/model/mean", [2], True]}],
    *[{"$coo": ["/models/model/mean", "/models/model/mean", [2**62] * 3, True]}],
    *[{"$module": []}, {"$module": [5, 5]}, {"$module": [[["a", 1]], 5, 6]}, {"$module": None}],
    BOMB,
]  # fmt: skip


HARMLESS = [{"$module": [[["a", 1]], 5, 6]}, {"$size": [2**70]}]
"""Those that mean something after all, a plain value."""


@pytest.mark.parametrize("value", MALFORMED, ids=lambda value: json.dumps(value)[:40])
def test_a_malformed_value_in_an_extra(root: Path, value: Any) -> None:
    """A tag that says what no encoder writes: an error of ours, whatever it is."""
    path = only(root, "*.json")
    forged(path, tree={**TREE, "extras": {"x": value}}, metrics={"loss": 1})
    state = everystep.load(root)
    try:
        state.extra("x")
    except (Damaged, Unsupported):
        return
    assert value in HARMLESS


def test_malformed_metrics(root: Path) -> None:
    """Metrics hold any of the above."""
    path = only(root, "*.json")
    for value in MALFORMED:
        forged(path, metrics={"loss": value})
        try:
            everystep.load(root)
        except EverystepError:
            continue
        assert value in HARMLESS


@pytest.mark.parametrize(
    "tree",
    [
        *[None, [], 5, "tree", {}, {"models": {}}, {**TREE, "models": []}, {**TREE, "rng": None}],
        *[{**TREE, "models": {"model": {}}}, {**TREE, "models": {"model": None}}],
        {**TREE, "models": {"model": {"aliases": {"a": "none"}, "frozen": [], "extra_state": {}}}},
        {**TREE, "models": {"model": {"aliases": {"a": 5}, "frozen": [], "extra_state": {}}}},
        {**TREE, "models": {"model": {"aliases": [], "frozen": [], "extra_state": {}}}},
        *[{**TREE, "optimizers": {"o": {}}}, {**TREE, "optimizers": {"o": []}}],
        {**TREE, "optimizers": {"o": {"class": "x", "groups": [{}], "slots": []}}},
    ],
)  # fmt: skip
def test_a_tree_that_is_none(root: Path, tree: Any) -> None:
    """The JSON part of a state lacks what restoring looks for."""
    forged(only(root, "*.json"), tree=tree)
    with pytest.raises(CannotRestore):
        everystep.load(root)


@pytest.mark.parametrize("rng", [{}, {"python": 1}, {"torch": {"$tensor": "/rng"}}, {"x": BOMB}])
def test_hostile_state_never_half_restores_by_another_error(root: Path, rng: Any) -> None:
    """A state of the random generators that is none, at a real restore."""
    model = torch.nn.Module()
    model.register_buffer("mean", torch.zeros(2, dtype=torch.int64))
    model.register_parameter("weight", torch.nn.Parameter(torch.zeros(3, 5)))
    model.register_parameter("bias", torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)))
    forged(only(root, "*.json"), tree={**TREE, "rng": rng})
    with (
        everystep.Checkpointer(root, model=model, strategy=BLOCKING) as ck,
        pytest.raises(EverystepError),
    ):
        ck.restore()


# ---------------------------------------------------------------- data files


def forge_data(root: Path, header: bytes, data: bytes, nbytes: int | None = None) -> None:
    """Replace the model's data file and make the record describe the new one, hash and all."""
    path = only(root, "*.model.safetensors")
    full = struct.pack("<Q", len(header)) + header
    path.write_bytes(full + data)
    record = only(root, "*.json")
    content = content_of(record)
    for file in content["files"]:
        if file["name"] == path.name:
            file["nbytes"] = len(full) + len(data) if nbytes is None else nbytes
            file["header_bytes"] = len(full)
            file["header_xxh3_128"] = fmt.digest(full)
    record.write_bytes(framed(content))


def described(**entries: tuple[str, list[int], int, int]) -> bytes:
    return json.dumps(
        {
            name: {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}
            for name, (dtype, shape, start, stop) in entries.items()
        }
    ).encode()


WIDE = b"{" + b",".join(b'"%d":{}' % n for n in range(MANY // 10)) + b"}"


@pytest.mark.parametrize(
    ("header", "data_bytes"),
    [
        pytest.param(described(weight=("F32", [3, 5], 0, 60), bias=("BF16", [3], 0, 6),
                               mean=("I64", [2], 0, 16)), 60, id="all in one place"),
        pytest.param(described(weight=("F32", [3, 5], 0, 60)), 60, id="some missing"),
        pytest.param(described(weight=("F32", [5, 3], 16, 76), bias=("BF16", [3], 76, 82),
                               mean=("I64", [2], 0, 16)), 82, id="another shape"),
        pytest.param(described(weight=("I32", [3, 5], 16, 76), bias=("BF16", [3], 76, 82),
                               mean=("I64", [2], 0, 16)), 82, id="another dtype"),
        pytest.param(described(weight=("F32", [3, 5], 16, 10**18), bias=("BF16", [3], 76, 82),
                               mean=("I64", [2], 0, 16)), 82, id="beyond the end"),
        pytest.param(b"[" * MANY, 0, id="deep"),
        pytest.param(b'{"a":' * MANY, 0, id="deep objects"),
        pytest.param(b"{}" + b" " * MANY, 0, id="only spaces"),
        pytest.param(b'{"a":"' + b"a" * MANY + b'"}', 0, id="a long string"),
        pytest.param(WIDE, 0, id="wide"),
        pytest.param(b"\x00" * MANY, 0, id="zeros"),
        pytest.param(b"", 0, id="nothing"),
    ],
)  # fmt: skip
def test_a_data_file_that_lies(root: Path, header: bytes, data_bytes: int) -> None:
    """A safetensors file that does not hold what it says, with a record that vouches for it."""
    forge_data(root, header, bytes(data_bytes))
    with frugal(100 << 20):
        assert len(refused(root)) < 5_000


def test_a_data_file_shorter_than_a_header(root: Path) -> None:
    """A record that says 3 bytes, and a file that has them."""
    path = only(root, "*.model.safetensors")
    path.write_bytes(b"abc")
    record = only(root, "*.json")
    content = content_of(record)
    for file in content["files"]:
        file.update(nbytes=3, header_bytes=3, header_xxh3_128=fmt.digest(b"abc"))
    record.write_bytes(framed(content))
    refused(root)


def test_a_header_length_beyond_the_file(root: Path) -> None:
    """The first 8 bytes say that the header has 2^63 bytes."""
    path = only(root, "*.model.safetensors")
    path.write_bytes(struct.pack("<Q", 1 << 63) + path.read_bytes()[8:])
    with frugal(20 << 20):
        refused(root)


def test_a_sparse_file_of_a_terabyte(root: Path) -> None:
    """A tensor of 2^38 elements in a file that takes no space: refused before memory is taken."""
    path = only(root, "*.model.safetensors")
    huge = 1 << 40
    header = described(bias=("BF16", [3], huge + 16, huge + 22), mean=("I64", [2], huge, huge + 16),
                       weight=("F32", [huge // 4], 0, huge))  # fmt: skip
    forge_data(root, header, b"", nbytes=8 + len(header) + huge + 22)
    with open(path, "r+b") as file:
        file.truncate(8 + len(header) + huge + 22)
    record = only(root, "*.json")
    content = content_of(record)
    content["tensors"][0]["spec"]["shape"] = [huge // 4]
    for stored in content["pieces"]:
        if stored["piece"]["key"] == "/models/model/weight":
            stored["piece"]["stop"] = huge // 4
    record.write_bytes(framed(content))
    with frugal(20 << 20), pytest.raises(EverystepError) as raised:
        everystep.load(root)
    assert "no room" in str(raised.value)


def test_the_length_of_a_file_is_looked_at_first(root: Path) -> None:
    """A sparse tail of a terabyte behind good data is not read."""
    path = only(root, "*.model.safetensors")
    with open(path, "r+b") as file:
        file.truncate(1 << 40)
    with frugal(20 << 20):
        refused(root)


# ---------------------------------------------------------------- records of others


def test_a_record_of_another_step_run_or_rank(tmp_path: Path) -> None:
    """A whole part of another step or run is copied in under the right name."""
    run = new_run(tmp_path / "run", calls=NoSync())
    other = new_run(tmp_path / "other", calls=NoSync())
    for step in (1, 2):
        write_step(run, StepRef("main", step))
    write_part(other, StepRef("main", 2), small_state(seed="other"))
    target = tmp_path / "run" / "steps/main/000000000002"
    sources = [tmp_path / "other" / "steps/main/000000000002", target.parent / "000000000001"]
    kept = {path.name: path.read_bytes() for path in target.iterdir()}
    for source in sources:
        for path in target.iterdir():
            path.unlink()
        for path in source.iterdir():
            name = next(
                n
                for n in kept
                if n.endswith(path.suffix) and n.split(".")[1] == path.name.split(".")[1]
            )
            (target / name).write_bytes(path.read_bytes())
        assert everystep.load(tmp_path / "run").step == 1, "the newest is refused, the older taken"
        with pytest.raises(CannotRestore):
            everystep.load(tmp_path / "run", step=2)


def test_the_data_of_another_step_under_a_good_record(root: Path) -> None:
    """Metadata of step 1 with the tensors of step 2."""
    run = Run.open(root)
    write_step(run, StepRef("main", 2))
    for path in (root / "steps/main/000000000002").glob("*.safetensors"):
        (root / "steps/main/000000000001" / path.name).write_bytes(path.read_bytes())
    with pytest.raises(CannotRestore):
        everystep.load(root, step=1)
    assert everystep.load(root).step == 2


def test_sessions_and_timelines_in_great_number(root: Path) -> None:
    """Files that are none of ours, however many, do not stop a listing."""
    for n in range(1_000):
        (root / "timelines" / f"x{n}.json").write_bytes(b"")
        (root / f"stranger {n}").write_bytes(b"")
    with frugal(60 << 20):
        listing = Run.open(root).listing()
    assert len(listing.damages) == len(listing.strangers) == 1_000
    assert REF in listing.complete()


# ---------------------------------------------------------------- references

OWN_MODEL = "s000001-r00000of00001.model.safetensors"


def referring(root: Path, step: Any, name: str = OWN_MODEL) -> None:
    """Let the record of step 2 say that its model's file lies in the directory of another step."""
    (record,) = root.glob("steps/main/000000000002/*.json")
    content = content_of(record)
    for file in content["files"]:
        if ".model." in file["name"]:
            file.update(name=name, step=step)
    record.write_bytes(framed(content))


def read_nowhere_else(root: Path, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names that are opened while everything reads the run."""
    opened: set[str] = set()
    read, size = LocalBackend.read, LocalBackend.size

    def watched_read(self: LocalBackend, name: str, into: memoryview, offset: int) -> None:
        opened.add(name)
        read(self, name, into, offset)

    def watched_size(self: LocalBackend, name: str) -> int:
        opened.add(name)
        return size(self, name)

    with monkeypatch.context() as patched:
        patched.setattr(LocalBackend, "read", watched_read)
        patched.setattr(LocalBackend, "size", watched_size)
        run = Run.open(root)
        found = [f for f in verify_run(run, run.listing()) if f.level == "damage"]
        assert found and {f.step for f in found} == {StepRef("main", 2)}, "only this step"
        with pytest.raises(EverystepError) as raised:
            everystep.load(root, step=2)
        assert len(str(raised.value)) < 5_000
    return opened


@pytest.mark.parametrize(
    ("step", "name"),
    [
        pytest.param({"timeline": "main", "step": 2}, OWN_MODEL, id="itself"),
        pytest.param({"timeline": "main", "step": 3}, OWN_MODEL, id="a later step"),
        pytest.param({"timeline": "main", "step": -1}, OWN_MODEL, id="a step before all"),
        pytest.param({"timeline": "main", "step": 10**12}, OWN_MODEL, id="13 digits"),
        pytest.param({"timeline": "main", "step": 10**5000}, OWN_MODEL, id="5000 digits"),
        pytest.param({"timeline": "main", "step": "1"}, OWN_MODEL, id="a step in words"),
        pytest.param({"timeline": "main"}, OWN_MODEL, id="half a step"),
        pytest.param("main:1", OWN_MODEL, id="a string"),
        pytest.param([], OWN_MODEL, id="a list"),
        pytest.param({"timeline": "..", "step": 1}, OWN_MODEL, id="the folder above"),
        pytest.param({"timeline": "../../../outside", "step": 1}, OWN_MODEL, id="outside"),
        pytest.param({"timeline": "/outside", "step": 1}, OWN_MODEL, id="an absolute path"),
        pytest.param({"timeline": "a/b", "step": 1}, OWN_MODEL, id="two folders"),
        pytest.param({"timeline": "", "step": 1}, OWN_MODEL, id="no timeline"),
        pytest.param({"timeline": "main\0", "step": 1}, OWN_MODEL, id="a zero byte"),
        pytest.param({"timeline": "ma\u0131n", "step": 1}, OWN_MODEL, id="a letter beyond ASCII"),
        pytest.param({"timeline": "m" * MANY, "step": 1}, OWN_MODEL, id="a very long timeline"),
        pytest.param({"timeline": "main", "step": 1}, "../../../x.safetensors", id="a path"),
        pytest.param({"timeline": "main", "step": 1}, "s000001-r00000of00001.json", id="a record"),
        pytest.param({"timeline": "main", "step": 1},
                     "s000001-r00001of00002.model.safetensors", id="another rank"),
        pytest.param({"timeline": "main", "step": 1},
                     "s000002-r00000of00001.model.safetensors", id="a later session"),
        pytest.param({"timeline": "main", "step": 1}, "s000001-r00000of00001.m." + "x" * MANY
                     + ".safetensors", id="a very long name"),
    ],
)  # fmt: skip
def test_a_reference_that_leads_astray(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: Any, name: str
) -> None:
    """The record names a step that is none, or none that it could refer to: nothing is opened."""
    for number in (2, 3):
        write_step(Run.open(root), StepRef("main", number))
    if isinstance(step, dict) and step.get("step") == 10**5000:
        referring(root, {"timeline": "main", "step": "DIGITS"}, name)
        (record,) = root.glob("steps/main/000000000002/*.json")
        text = msgspec.json.encode(content_of(record))
        record.write_bytes(framed(text.replace(b'"DIGITS"', b"9" * 5000)))
    else:
        referring(root, step, name)
    with frugal(40 << 20):
        opened = read_nowhere_else(root, monkeypatch)
    allowed = {str(path.relative_to(root)) for path in root.rglob("*")}
    assert opened <= allowed
    assert not any("000000000002" in at and at.endswith("safetensors") for at in opened)


@pytest.mark.parametrize("with_data", [False, True])
def test_a_reference_to_what_is_not_there_or_is_other(
    root: Path, monkeypatch: pytest.MonkeyPatch, with_data: bool
) -> None:
    """In order by itself, but no such step was ever written, or it has other tensors."""
    write_step(Run.open(root), StepRef("main", 2))
    referring(root, {"timeline": "main" if with_data else "side", "step": int(with_data)})
    opened = read_nowhere_else(root, monkeypatch)
    place = f"steps/{'main' if with_data else 'side'}/{int(with_data):012d}/{OWN_MODEL}"
    assert place in opened
    for file in root.glob("steps/main/000000000002/*.model.safetensors"):
        assert str(file.relative_to(root)) not in opened


@contextmanager
def upkeep_of(run: Run) -> Iterator[Upkeep]:
    upkeep = Upkeep(run, Retention(keep_last=1), 0, (), ())
    try:
        yield upkeep
    finally:
        upkeep.close()


def test_references_in_a_circle(root: Path) -> None:
    """Two timelines whose steps refer to each other: no one follows more than one reference."""
    run = Run.open(root)
    begin(run, 1, "side")
    side = StepRef("side", 1)
    write_step(run, side)
    for ref, other in ((REF, side), (side, REF)):
        (record,) = (root / fmt.step_directory(ref)).glob("*.json")
        content = content_of(record)
        extra = {**content["files"][0], "step": {"timeline": other.timeline, "step": other.step}}
        record.write_bytes(framed({**content, "files": [*content["files"], extra]}))
    found = [f for f in verify_run(run, run.listing()) if f.level == "damage"]
    assert found == []
    before = files_of(root)
    write_part(run, StepRef("main", 9), small_state(), world_size=2)  # something to clean up
    assert run.clean_up() == 2
    assert files_of(root) == before
    (entry,) = run.entries(REF)
    run.set_aside(entry)
    assert (root / fmt.step_directory(REF) / OWN_MODEL).exists(), "the other one refers to it"
    with upkeep_of(run) as upkeep:
        for number in (2, 3, 4):
            write_step(run, StepRef("main", number), session=2)
            upkeep.after_step(StepRef("main", number), 2)
            upkeep.finish_removal()
    assert [str(e.ref) for e in run.listing().steps] == ["main:4", "side:1"]


def test_very_many_references(root: Path) -> None:
    """A record with very many files: refused or read within its own length."""
    write_step(Run.open(root), StepRef("main", 2))
    (record,) = root.glob("steps/main/000000000002/*.json")
    content = content_of(record)
    file = content["files"][0]
    many = [{**file, "step": {"timeline": f"t{number}", "step": 1}} for number in range(MANY // 40)]
    record.write_bytes(framed({**content, "files": [*content["files"], *many]}))
    run = Run.open(root)
    with frugal(60 * record.stat().st_size):
        assert len(references_of(run, run.listing().steps)[StepRef("main", 2)]) == len(many)
        assert everystep.load(root, step=2).step == 2
