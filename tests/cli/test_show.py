"""`everystep show`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

import everystep
from everystep.state import raw
from everystep.store.format import digest
from everystep.store.run import Run
from small_runs import Said, flip, write_part

Cli = Callable[..., Said]


def test_the_newest_step(cli: Cli, forked: Path) -> None:
    said = cli("show", forked, "--json")
    assert (said.status, said.err) == (0, "")
    shown = said.json
    assert list(shown) == [
        "path", "run", "step", "state", "stored", "folded_from", "deltas", "timeline", "parent",
        "rank", "world_size", "missing_ranks", "created", "metrics", "versions", "session",
        "session_facts", "files", "models", "groups", "extras", "rng", "tensor_count",
        "tensor_bytes", "tensors",
    ]  # fmt: skip
    assert (shown["step"], shown["timeline"], shown["parent"]) == ("main@3:6", "main@3", "main:3")
    assert (shown["state"], shown["rank"], shown["world_size"]) == ("complete", 0, 1)
    assert shown["versions"]["torch"] == torch.__version__
    assert shown["session_facts"]["restored"] == "main:3"
    assert shown["metrics"]["at"] == 6
    assert shown["extras"] == ["schedule"]
    assert {"numpy", "python", "torch"} <= set(shown["rng"])
    assert [Path(file["path"]).stat().st_size for file in shown["files"]] == [
        file["size_bytes"] for file in shown["files"]
    ]
    assert shown["files"][0]["path"].endswith(".json")
    assert shown["models"] == [
        {"model": "model", "tensors": 4, "elements": 83, "size_bytes": 332, "aliases": {},
         "frozen": []}
    ]  # fmt: skip
    (group,) = shown["groups"]
    assert (group["optimizer"], group["group"], group["parameters"]) == ("optimizer", 0, 4)
    assert group["class_name"] == "torch.optim.adamw.AdamW"
    assert group["options"]["lr"] == 0.01
    assert group["options"]["betas"] == [0.9, 0.999]
    assert shown["tensors"] is None


def test_the_layout(cli: Cli, healthy: Path) -> None:
    shown = cli("show", healthy, "--step", "2", "--tensors", "--json").json
    state = everystep.load(healthy, 2)
    assert shown["step"] == "main:2"
    assert len(shown["tensors"]) == shown["tensor_count"] == len(state.tensors)
    assert sum(tensor["nbytes"] for tensor in shown["tensors"]) == shown["tensor_bytes"]
    for tensor in shown["tensors"]:
        loaded = state.tensors[tensor["key"]]
        assert tensor == {
            "key": tensor["key"],
            "dtype": str(loaded.dtype).removeprefix("torch."),
            "shape": list(loaded.shape),
            "shard": None,
            "replicated": False,
            "nbytes": loaded.nbytes,
            "xxh3_128": digest(raw.bits_of(state.tensors, tensor["key"])),
        }


def test_the_view_of_a_rank(cli: Cli, two: Path) -> None:
    shown = cli("show", two, "--rank", "1", "--tensors", "--json").json
    assert (shown["step"], shown["rank"], shown["world_size"]) == ("main:2", 1, 2)
    assert {file["rank"] for file in shown["files"]} == {0, 1}
    assert shown["models"][0]["aliases"] == {"twin": "same"}
    tensors = {tensor["key"]: tensor for tensor in shown["tensors"]}
    rows = tensors["/models/model/rows"]
    assert (rows["shape"], rows["shard"]["global_shape"]) == ([2, 3], [4, 3])
    assert rows["shard"]["offsets"] == [2, 0]
    assert tensors["/models/model/same"]["replicated"]
    plain = cli("show", two, "--rank", "1", "--tensors").out.splitlines()
    (line,) = [line for line in plain if line.startswith("/models/model/rows")]
    assert line.split()[1:6] == ["float32", "[2,3]", "[4,3]", "at", "[2,0]"]
    assert any("tied twin = same" in line for line in plain)


def test_a_rank_that_is_not_there(cli: Cli, two: Path) -> None:
    said = cli("show", two, "--rank", "2")
    assert (said.status, said.out) == (1, "")
    assert "rank 2" in said.err


def test_plain_text(cli: Cli, forked: Path) -> None:
    lines = cli("show", forked, "--step", "main:4").out.splitlines()
    assert lines[0] == f"step main:4 of {forked}, as rank 0 holds it"
    heads = [line.split()[0] for line in lines[1:9]]
    assert heads == [
        "state", "timeline", "stored", "versions", "metrics", "model", "optimizer", "lr",
    ]  # fmt: skip
    table = lines.index(next(line for line in lines if line.startswith("rank ")))
    assert [line.split()[-1].rpartition(".")[2] for line in lines[table + 1 :]] == [
        "json", "safetensors", "safetensors", "safetensors",
    ]  # fmt: skip


def test_an_incomplete_step_can_be_looked_at(cli: Cli, two: Path) -> None:
    write_part(Run.open(two), 3, rank=0)
    shown = cli("show", two, "--step", "3", "--json").json
    assert (shown["step"], shown["state"], shown["missing_ranks"]) == ("main:3", "incomplete", [1])
    assert "nothing of rank 1" in cli("show", two, "--step", "main:3").out


def test_a_damaged_record(cli: Cli, healthy: Path) -> None:
    record = flip(healthy, "steps/main/*3/*.json", 200)
    said = cli("show", healthy)
    assert (said.status, said.out) == (1, "")
    assert record.name in said.err and "hash differs" in said.err


def test_a_lost_session_record(cli: Cli, healthy: Path) -> None:
    (healthy / "sessions/000001.json").unlink()
    assert cli("show", healthy, "--json").json["session_facts"] is None
    assert "session 1 (its record is lost)" in cli("show", healthy).out
