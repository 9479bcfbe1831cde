"""docs/format.md against the code, and its reader against real runs."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import everystep
from byte_runs import (
    adapter_state,
    begin,
    files_of,
    new_run,
    small_state,
    tensor,
    write_part,
    write_step,
)
from everystep import types
from everystep.recovery.part import read_part
from everystep.state import raw, tree
from everystep.store import format as fmt
from everystep.store import logformat as lf
from everystep.store import tensorfile
from everystep.store.measured import MEASURED
from everystep.store.run import Run
from everystep.types import Piece, Shard, StepRef, TensorSpec

DOCUMENT = Path(__file__).parents[2] / "docs" / "format.md"
TEXT = DOCUMENT.read_text(encoding="utf-8")
READER = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)[0]


def table_under(heading: str) -> list[list[str]]:
    """The cells of the first table under a heading, without its head."""
    match = re.search(
        rf"^#+ {re.escape(heading)}\n(.*?)(?=^#+ |\Z)", TEXT, re.MULTILINE | re.DOTALL
    )
    assert match is not None, f"no heading {heading!r}"
    lines = [line for line in match.group(1).splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert len(rows) > 2
    return rows[2:]


def codes(cell: str) -> list[str]:
    return re.findall(r"`([^`]*)`", cell)


# ---------------------------------------------------------------- tables


@pytest.mark.parametrize(
    ("heading", "record"),
    [
        ("Fields of `run.json`", fmt.RunRecord),
        ("Fields of `timelines/NAME.json`", fmt.TimelineRecord),
        ("Fields of `sessions/NUMBER.json`", fmt.SessionRecord),
        ("Fields of a marker", fmt.RankRecord),
        ("Fields of a file", fmt.DataFile),
        ("Fields of a tensor", fmt.StoredTensor),
        ("Fields of a spec", TensorSpec),
        ("Fields of a shard", Shard),
        ("Fields of a piece", fmt.StoredPiece),
        ("Fields of a range", Piece),
        ("Fields of the JSON of `BEGIN`", lf.SegmentRecord),
    ],
)
def test_the_fields_of_records(heading: str, record: type[msgspec.Struct]) -> None:
    documented = {codes(name)[0]: kind for name, kind, _ in table_under(heading)}
    fields = msgspec.structs.fields(record)
    assert list(documented) == [field.encode_name for field in fields]
    kinds = {
        "int": "integer",
        "str": "string",
        "bool": "bool",
        "str | None": "string or null",
        "StepRef | None": "ref or null",
        "Shard | None": "shard or null",
        "TensorSpec": "spec",
        "Piece": "range",
        "Json": "object",
        "dict[str, Json]": "object",
        "dict[str, str]": "object",
        "list[DataFile]": "list of file",
        "list[StoredTensor]": "list of tensor",
        "list[StoredPiece]": "list of piece",
        "tuple[int, ...]": "list of integers",
        "tuple[int, ...] | None": "list of integers or null",
        "tuple[str, ...]": "list of strings",
        "tuple[str, ...] | None": "list of strings or null",
    }
    annotations = record.__annotations__
    assert documented == {name: kinds[annotations[name]] for name in documented}


def test_the_frame() -> None:
    data = fmt.encode_record(fmt.TimelineRecord(name="main", parent=None))
    rows = table_under("Records")
    content = len(data) - 60
    places = {"n − 60": content, "n − 2": len(data) - 2}
    at = 0
    for offset, nbytes, what in rows:
        assert places.get(offset) == at or int(offset) == at
        length = places[nbytes] if nbytes in places else int(nbytes)
        literal = "".join(codes(what)).encode()
        found = data[at : at + length]
        if literal:
            assert literal in found and len(found) - len(literal) == what.count("line feed")
        at += length
    assert at == len(data)
    assert [row[0] for row in rows] == ["0", "13", "45", "47", "58", "n − 2"]
    assert fmt.FRAME_BYTES == 58
    assert data[13:45].decode() == fmt.digest(data[47:])


def test_the_head_of_a_record() -> None:
    rows = table_under("The head of a record")
    segment = lf.Segment("main", session=3, rank=1, world_size=4, number=2, base=900)
    head, digest = lf.encode_head(lf.Kind.DELTA, segment, 905, 77, b"p" * 16, b"v" * 16)
    fields = [head[int(offset) : int(offset) + int(nbytes)] for offset, nbytes, _ in rows]
    assert b"".join(fields) == head and len(head) == lf.HEAD_BYTES
    assert fields[0].decode() == codes(rows[0][2])[0]
    assert rows[1][2] == f"version of the log: {lf.LOG_VERSION}"
    numbers = [int.from_bytes(field, "little") for field in fields[1:7]]
    assert numbers == [lf.LOG_VERSION, 2, 1, 905, 3, 0]
    assert int.from_bytes(fields[7], "little") == 77
    assert fields[8:] == [b"p" * 16, b"v" * 16, digest]
    assert digest == bytes.fromhex(fmt.digest(head[:72]))
    assert f"a head of {lf.HEAD_BYTES} bytes" in TEXT and lf.ALIGNMENT == 8


def test_the_kinds_of_records() -> None:
    rows = table_under("Kinds of records")
    assert [(int(row[0]), codes(row[1])[0]) for row in rows] == [(k.value, k.name) for k in lf.Kind]
    assert f"`{lf.END_MAGIC.decode()}`" in rows[2][3]
    segment = lf.Segment("main", session=3, rank=1, world_size=4, number=2, base=900)
    assert segment.name == "logs/main/s000003-r00001of00004-000000000900.2.log"
    assert "`logs/NAME/PART-BASE.N.log`" in TEXT


def test_the_dtypes() -> None:
    documented = {}
    for names, nbytes, declared, shape in table_under("Dtypes"):
        extra = tuple(int(n) for n in re.findall(r"\d+", shape))
        for name in codes(names):
            documented[name] = (int(nbytes), codes(declared)[0], extra)
    in_code = {
        name: (nbytes, *tensorfile.stored_form(name, ()))
        for name, nbytes in types._ITEM_BYTES.items()
    }
    assert documented == in_code


def test_the_tags() -> None:
    documented = [codes(tag)[0] for tag, _, _ in table_under("Values")]
    source = Path(tree.__file__).read_text(encoding="utf-8")
    assert sorted(documented) == sorted(set(re.findall(r'"(\$[a-z]+)"', source)))
    assert len(documented) == len(set(documented))


def test_every_tag_decodes_as_documented() -> None:
    tensors = {
        "/i": torch.tensor([[0]]),
        "/v": torch.tensor([2.5]),
        "/b": torch.tensor([0, 0, 128, 63], dtype=torch.uint8),
    }
    examples: dict[str, Any] = {
        "$tensor": "/v",
        "$leaf": "/v",
        "$parameter": "/v",
        "$frozen": "/v",
        "$array": ["/b", "<f4", [1]],
        "$coo": ["/i", "/v", [3], True],
        "$int": "-0x20000000000001",
        "$float": "7ff8000000000001",
        "$complex": [1.0, {"$float": "7ff0000000000000"}],
        "$bytes": "AAE=",
        "$text": "7aCA",
        "$scalar": ["<f4", "0000803f"],
        "$dtype": "bfloat16",
        "$device": "cuda:0",
        "$tuple": [1, 2],
        "$set": [1, 2],
        "$frozenset": [1],
        "$size": [3, 5],
        "$deque": [[1], 4],
        "$dict": [[1, 2]],
        "$ordered": [["a", 1]],
        "$counter": [["a", 3]],
        "$module": [[["a", 1]], {"": {"version": 1}}],
    }
    assert sorted(examples) == sorted(codes(row[0])[0] for row in table_under("Values"))
    decoded = {t: tree.Decoder(tensors).decode({t: content}) for t, content in examples.items()}
    shown = {tag: repr(value) for tag, value in decoded.items()}
    assert shown["$int"] == "-9007199254740993"
    assert shown["$complex"] == "(1+infj)"
    assert decoded["$bytes"] == b"\0\1" and decoded["$text"] == "\ud800"
    assert decoded["$array"].tolist() == [1.0] and float(decoded["$scalar"]) == 1.0
    assert decoded["$tuple"] == (1, 2) and decoded["$set"] == {1, 2}
    assert decoded["$deque"].maxlen == 4 and decoded["$dict"] == {1: 2}
    assert decoded["$coo"].to_dense().tolist() == [2.5, 0.0, 0.0]
    assert decoded["$parameter"].requires_grad and not decoded["$frozen"].requires_grad
    assert decoded["$leaf"].requires_grad and not decoded["$tensor"].requires_grad
    for tag in ("$int", "$float", "$bytes", "$text", "$dtype", "$device", "$complex"):
        again = tree.Encoder().encode(decoded[tag], "/x")
        assert again == {tag: examples[tag]}, "both directions"


def test_the_sections_and_numbers_in_the_text() -> None:
    assert f"{fmt.MAX_RECORD_BYTES:,} bytes MUST be refused" in TEXT
    assert f"{tensorfile.MAX_HEADER_BYTES:,}" in TEXT
    assert f"exactly {fmt.STEP_DIGITS} digits" in TEXT
    assert f"more than {2 * tree.MAX_DEPTH} MUST be refused" in TEXT
    versions = [row[0] for row in table_under("Versions of the format")]
    assert versions == [str(version) for version in range(1, fmt.FORMAT + 1)]
    for record in ("`run.json`", "`timelines/NAME.json`", "`sessions/NUMBER.json`", "a marker"):
        assert table_under(f"Fields of {record}")[0][2] == str(fmt.FORMAT)
    assert f"format\nversion {fmt.FORMAT};" in TEXT
    for name in (fmt.RUN_FILE, fmt.LOCK_FILE, "damaged/", f"{MEASURED}/"):
        assert f"`{name}" in TEXT


def test_the_tree_has_the_entries_that_the_table_has(tmp_path: Path) -> None:
    documented = [codes(row[0])[0] for row in table_under("The tree")]
    train(tmp_path)
    run = Run.open(tmp_path)
    found = run.record(run.listing().steps[-1], 0).tree
    assert sorted(documented) == sorted(found)


# ---------------------------------------------------------------- the reader


def reader(
    monkeypatch: pytest.MonkeyPatch, *, checks: bool = True
) -> dict[str, Callable[..., Any]]:
    """The document's reader, with or without xxhash at hand."""
    if not checks:
        monkeypatch.setitem(sys.modules, "xxhash", None)
    names: dict[str, Any] = {}
    exec(compile(READER, DOCUMENT.name, "exec"), names)
    assert (names["digest"] is not None) == checks
    return names


def test_the_reader_is_short_and_uses_the_standard_library() -> None:
    lines = [line for line in READER.splitlines() if line.strip()]
    assert len(lines) <= 70
    imported = re.findall(r"^\s*(?:import|from) (\w+)", READER, re.MULTILINE)
    assert set(imported) - {"xxhash"} <= sys.stdlib_module_names


def train(root: Path, steps: int = 2) -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    model.register_buffer("odd", torch.tensor([1 + 2j, 3], dtype=torch.complex64))
    model.register_buffer("bf", torch.tensor([], dtype=torch.bfloat16))
    optimizer = torch.optim.Adam(model.parameters())
    strategy = everystep.Full(every=1, policy="block")
    with everystep.Checkpointer(root, model=model, optimizer=optimizer, strategy=strategy) as ck:
        ck.restore()
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(5, 3)).square().sum().backward()
            optimizer.step()
            ck.step(loss=1.0)


@pytest.mark.parametrize("checks", [True, False])
def test_the_reader_reads_a_run_of_one_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checks: bool
) -> None:
    train(tmp_path)
    names = reader(monkeypatch, checks=checks)
    steps = names["complete_steps"](tmp_path)
    assert list(steps) == [1, 2]
    tensors, found_tree = names["read_step"](steps[2], 0)
    run = Run.open(tmp_path)
    proved = read_part(run, run.listing().steps[-1], 0)
    assert tensors == {
        key: (spec.dtype, spec.shape, raw.bits_of(proved.tensors, key))
        for key, spec in proved.specs.items()
    }
    assert len(tensors) > 15
    assert found_tree == proved.record.tree


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_reader_puts_the_pieces_of_ranks_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    run = new_run(tmp_path, world_size)
    for rank in range(world_size):
        write_part(run, StepRef("main", 1), small_state(rank), rank=rank, world_size=world_size)
    names = reader(monkeypatch)
    steps = names["complete_steps"](tmp_path)
    for rank in range(world_size):
        tensors, _ = names["read_step"](steps[1], rank)
        assert tensors == {t.key: (t.dtype, t.shape, t.data) for t in small_state(rank)}


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_reader_follows_references(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    run = new_run(tmp_path, world_size)
    first, second, fork = StepRef("main", 1), StepRef("main", 2), StepRef("main@2", 3)
    write_step(run, first, world_size)
    write_step(run, second, world_size, earlier=first)
    begin(run, 2, "main@2", world_size=world_size, parent=second)
    write_step(run, fork, world_size, session=2, earlier=first)
    names = reader(monkeypatch)
    for ref in (second, fork):
        markers = names["complete_steps"](tmp_path, ref.timeline)[ref.step]
        for rank in range(world_size):
            tensors, _ = names["read_step"](markers, rank)
            expected = adapter_state(rank, ref, first)
            assert tensors == {t.key: (t.dtype, t.shape, t.data) for t in expected}


@pytest.mark.parametrize("version", range(1, fmt.FORMAT + 1))
def test_the_reader_reads_every_version(monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    golden = Path(__file__).parents[1] / "golden" / f"format-{version}"
    names = reader(monkeypatch)
    for step, markers in names["complete_steps"](golden, "main@1").items():
        for rank in (0, 1):
            tensors, _ = names["read_step"](markers, rank)
            run = Run.open(golden)
            proved = read_part(run, run.entries(StepRef("main@1", step))[0], rank)
            assert tensors == {
                key: (spec.dtype, spec.shape, raw.bits_of(proved.tensors, key))
                for key, spec in proved.specs.items()
            }


def test_the_reader_sees_no_step_that_is_not_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(tmp_path, 2)
    write_part(run, StepRef("main", 1), small_state(), world_size=2)
    for rank in (0, 1):  # replicas that differ
        state = [tensor("/models/model/w", "uint8", 4, seed=rank, replicated=True)]
        write_part(run, StepRef("main", 2), state, rank=rank, world_size=2)
    write_part(run, StepRef("main", 3), [], session=1)
    write_part(run, StepRef("main", 3), [], session=2)
    steps = reader(monkeypatch)["complete_steps"](tmp_path)
    assert {step: paths[0].name for step, paths in steps.items()} == {
        3: "s000002-r00000of00001.json"
    }


def test_the_reader_finds_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run(tmp_path)
    write_part(run, StepRef("main", 1), small_state())
    names = reader(monkeypatch)
    for name, data in files_of(tmp_path / "steps").items():
        path = tmp_path / "steps" / name
        for at in range(60, len(data), 7):
            changed = bytearray(data)
            changed[at] ^= 1
            path.write_bytes(changed)
            with pytest.raises((ValueError, KeyError)):
                names["read_step"](names["complete_steps"](tmp_path)[1], 0)
        path.write_bytes(data)
    names["read_step"](names["complete_steps"](tmp_path)[1], 0)
