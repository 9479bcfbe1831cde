"""Every step that can be had is listed, shown, compared, exported and proved, with a full
checkpoint or without."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import byte_logs
import byte_runs
from delta_runs import Trained, losses, record_of, train_run
from everystep.deltas.delta import Delta
from everystep.deltas.packing import pack
from everystep.state import raw
from everystep.store import format as fmt
from everystep.store.log import NewRecord
from everystep.types import StepRef
from small_runs import Said

Cli = Callable[..., Said]


@pytest.fixture
def trained(tmp_path: Path) -> Trained:
    """Steps main:2 to main:12; 2 and 6 are stored in full, all but 2 as deltas."""
    return train_run(tmp_path / "run")


def spoil(trained: Trained, step: int, rank: int = 0) -> None:
    """Flip a bit in the payload of a delta."""
    name, offset, nbytes = record_of(trained, step, rank)
    path = trained.path / name
    data = bytearray(path.read_bytes())
    data[offset + nbytes // 2] ^= 1
    path.write_bytes(data)


# ---------------------------------------------------------------- ls


def test_every_step_is_listed(cli: Cli, trained: Trained) -> None:
    listed = cli("ls", trained.path, "--json").json
    assert listed["newest"] == "main:12"
    assert [(r["step"], r["stored"]) for r in listed["steps"]] == [
        ("main:2", "full"), *((f"main:{s}", "delta") for s in (3, 4, 5)), ("main:6", "both"),
        *((f"main:{s}", "delta") for s in range(7, 13)),
    ]  # fmt: skip
    assert {r["state"] for r in listed["steps"]} == {"complete"}
    assert [r["metrics"] for r in listed["steps"]] == [
        {"loss": losses(12)[s]} for s in range(2, 13)
    ]
    assert listed["timelines"][0]["complete_steps"] == 11
    assert listed["gaps"] == []
    in_log = sum(r["size_bytes"] for r in listed["steps"] if r["stored"] == "delta")
    (log,) = trained.path.glob("logs/main/*.log")
    assert 0 < in_log < log.stat().st_size


def test_the_list_for_people(cli: Cli, trained: Trained) -> None:
    lines = cli("ls", trained.path).out.splitlines()
    assert lines[0].startswith(f"{trained.path}: 11 complete steps, ")
    assert lines[1].split() == ["metric", "by", "step", "first", "…", "last"]
    name, bars, first, _, last = lines[2].split()
    assert (name, first, last) == ("loss", "0.5", "0.0833333")
    assert (len(bars), bars[0], bars[-1]) == (11, "█", "▁")
    assert lines[3].split() == ["step", "state", "stored", "size", "session", "ranks", "loss"]
    assert lines[4].split()[:3] == ["main:2", "complete", "full"]
    assert lines[-1] == "newest: main:12"


def test_a_gap_is_named(cli: Cli, tmp_path: Path) -> None:
    trained = train_run(tmp_path / "run", fulls=(2, 9), left_out=(5,))
    listed = cli("ls", trained.path, "--json").json
    assert [r["step"] for r in listed["steps"]] == [f"main:{s}" for s in (2, 3, 4, 9, 10, 11, 12)]
    assert listed["gaps"] == [
        {"first": "main:5", "last": "main:8", "what": "there is no delta", "path": None,
         "byte": None}
    ]  # fmt: skip
    assert "cannot be had: main:5 to 8: there is no delta\n" in cli("ls", trained.path).out


def test_where_the_log_is_torn_is_said(cli: Cli, trained: Trained) -> None:
    name, offset, _ = record_of(trained, 10)
    path = trained.path / name
    path.write_bytes(path.read_bytes()[: offset + 5])
    listed = cli("ls", trained.path, "--json").json
    assert (listed["newest"], listed["gaps"]) == ("main:9", [])


def test_a_delta_whose_beginning_makes_no_sense_is_damaged(cli: Cli, trained: Trained) -> None:
    name, offset, _ = record_of(trained, 4)
    path = trained.path / name
    data = bytearray(path.read_bytes())
    data[offset + 8] ^= 0xFF
    path.write_bytes(data)
    states = {r["step"]: r["state"] for r in cli("ls", trained.path, "--json").json["steps"]}
    assert [step for step, state in states.items() if state == "damaged"] == ["main:4"]


def test_a_header_that_is_longer_than_what_is_read_first(cli: Cli, tmp_path: Path) -> None:
    run = byte_runs.new_run(tmp_path / "run", calls=byte_runs.NoSync())
    byte_runs.write_step(run, StepRef("main", 1))
    log = byte_logs.new_log(run.backend, run.id)
    log.begin(1, byte_logs.LAYOUT)
    log.append([_delta(2, {"loss": 0.25, "word": "x" * 9_000})])
    (_, row) = cli("ls", tmp_path / "run", "--json").json["steps"]
    assert row["metrics"] == {"loss": 0.25, "word": "x" * 9_000}


def _delta(step: int, metrics: dict[str, Any]) -> NewRecord:
    """A delta of nothing."""
    delta = Delta(step, [], [], {}, metrics, np.zeros(1, np.uint64))
    return NewRecord(step, *pack(delta))


def test_a_long_run_is_cut_for_people_and_is_quick(cli: Cli, tmp_path: Path) -> None:
    run = byte_runs.new_run(tmp_path / "run", calls=byte_runs.NoSync())
    byte_runs.write_step(run, StepRef("main", 1))
    log = byte_logs.new_log(run.backend, run.id)
    log.begin(1, byte_logs.LAYOUT)
    log.append([_delta(step, {"loss": 1 / step}) for step in range(2, 10_001)])
    began_s = time.process_time()
    lines = cli("ls", tmp_path / "run").out.splitlines()
    took_s = time.process_time() - began_s
    assert took_s < 30  # about one second; a scan per step would take minutes
    assert "9,950 earlier rows not shown; --all shows them" in lines
    assert sum(line.startswith("main:") for line in lines) == 50
    assert lines[-1] == "newest: main:10000"
    assert sum(row.startswith("main:") for row in
               cli("ls", tmp_path / "run", "--all").out.splitlines()) == 10_000  # fmt: skip
    assert len(cli("ls", tmp_path / "run", "--json").json["steps"]) == 10_000


def test_a_step_that_a_later_session_went_back_over_is_not_had(cli: Cli, trained: Trained) -> None:
    byte_runs.begin(trained.run, 2, restored=StepRef("main", 9))
    byte_logs.write_log(trained.run.backend, [10], base=9, run=trained.run.id, session=2)
    steps = cli("ls", trained.path, "--json").json["steps"]
    assert [(r["step"], r["session"]) for r in steps][-2:] == [("main:9", 1), ("main:10", 2)]


# ---------------------------------------------------------------- show


def test_a_folded_step_is_shown(cli: Cli, trained: Trained) -> None:
    shown = cli("show", trained.path, "--step", "5", "--tensors", "--json").json
    assert (shown["step"], shown["state"], shown["stored"]) == ("main:5", "complete", "delta")
    assert (shown["folded_from"], shown["deltas"], shown["created"]) == ("main:2", 3, None)
    assert shown["metrics"] == {"loss": losses(12)[5]}
    assert shown["groups"][0]["options"]["lr"] == 1e-2 / 5
    state = trained.tensors(5)
    assert {t["key"]: t["xxh3_128"] for t in shown["tensors"]} == {
        key: fmt.digest(raw.bits_of(state, key)) for key in state
    }
    assert shown["files"][-1]["path"].endswith(".log")
    text = cli("show", trained.path, "--step", "5").out
    assert "\nfolded     3 deltas onto main:2\n" in text


def test_a_step_with_both_is_shown_as_it_is_stored(cli: Cli, trained: Trained) -> None:
    shown = cli("show", trained.path, "--step", "6", "--json").json
    assert (shown["stored"], shown["folded_from"], shown["deltas"]) == ("both", None, 0)
    assert shown["created"] is not None
    assert cli("show", trained.path, "--step", "2", "--json").json["stored"] == "full"


# ---------------------------------------------------------------- export and diff


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_step_is_exported_as_it_was(cli: Cli, tmp_path: Path, ranks: int) -> None:
    trained = train_run(tmp_path / "run", upto=8, ranks=ranks)
    for step in range(2, 9):
        for rank in range(ranks):
            target = tmp_path / f"{step}.{rank}.safetensors"
            said = cli("export", trained.path, "--step", step, "--to", target, "--rank", rank)
            assert said.status == 0, said
            state = trained.tensors(step)
            loaded = safetensors.torch.load_file(target)
            assert loaded.keys() == {"p.0", "p.1"}
            for name in loaded:
                assert raw.bits_of(loaded, name) == raw.bits_of(state, f"/models/model/{name}")


def test_a_folded_step_as_pt(cli: Cli, trained: Trained, tmp_path: Path) -> None:
    target = tmp_path / "x.pt"
    assert cli("export", trained.path, "--step", "11", "--to", target).status == 0
    loaded = torch.load(target, weights_only=True)  # noqa: TID251 - what its users do
    state = trained.tensors(11)
    assert loaded["step"] == 11
    assert loaded["metrics"] == {"loss": losses(12)[11]}
    assert raw.bits_of(loaded["model"], "p.0") == raw.bits_of(state, "/models/model/p.0")
    slots = loaded["optimizer"]["state"][0]
    key = "/optimizers/optimizer/state/model/p.0/exp_avg"
    assert raw.bits_of(slots, "exp_avg") == raw.bits_of(state, key)


def test_a_folded_step_as_dcp(cli: Cli, trained: Trained, tmp_path: Path) -> None:
    assert cli("export", trained.path, "--step", "4", "--to", tmp_path / "x").status == 0
    assert (tmp_path / "x" / ".metadata").is_file()


def test_any_two_steps_are_compared(cli: Cli, trained: Trained) -> None:
    said = cli("diff", trained.path, "3", "11", "--json")
    assert (said.status, said.err) == (1, "")
    a, b = trained.tensors(3), trained.tensors(11)
    found = {t["key"]: t for t in said.json["tensors"]}
    assert found.keys() == {key for key in a if raw.bits_of(a, key) != raw.bits_of(b, key)}
    key = "/models/model/p.0"
    before, after = a[key].double(), b[key].double()
    change = (before - after).square().sum().sqrt()
    assert found[key]["l2"] == change.item()
    assert found[key]["relative_l2"] == (change / before.square().sum().sqrt()).item()
    assert cli("diff", trained.path, "5", "5").status == 0


def test_a_folded_step_equals_the_full_checkpoint_of_another_run(
    cli: Cli, trained: Trained, tmp_path: Path
) -> None:
    full = train_run(tmp_path / "full", fulls=range(2, 13))
    for step in range(2, 13):
        assert cli("diff", trained.path, step, "--with", full.path).status == 0


def test_ranks_that_are_folded_are_compared(cli: Cli, tmp_path: Path) -> None:
    trained = train_run(tmp_path / "run", upto=6, ranks=2)
    found = cli("diff", trained.path, "3", "5", "--json").json
    assert found["a"]["world_size"] == 2
    assert {t["rank"] for t in found["tensors"] if t["key"].startswith("/models/")} == {None}
    assert cli("diff", trained.path, "4", "4").status == 0


def test_what_moved_most(cli: Cli, trained: Trained) -> None:
    everything = cli("diff", trained.path, "3", "11", "--json").json["tensors"]
    moved = cli("diff", trained.path, "3", "11", "--top", "1", "--json").json["tensors"]
    ranked = [t for t in everything if t["key"].startswith("/models/")]
    ranked.sort(key=lambda t: -float(t["relative_l2"]))
    assert [t["key"] for t in moved] == [t["key"] for t in ranked[:1]]
    lines = cli("diff", trained.path, "3", "11", "--top", "3").out.splitlines()
    assert [line.split()[0] for line in lines[3:5]] == [t["key"] for t in ranked]
    assert lines[5] == "the 2 tensors of models that moved most"
    assert cli("diff", trained.path, "3", "3", "--top", "3").status == 0


# ---------------------------------------------------------------- verify


def test_a_run_with_deltas_is_whole(cli: Cli, trained: Trained) -> None:
    verdict = cli("verify", trained.path, "--json").json
    assert (verdict["ok"], verdict["findings"], verdict["damaged"]) == (True, [], [])
    assert verdict["whole"] == [f"main:{s}" for s in range(2, 13)]
    assert (verdict["proved"], verdict["differing"], verdict["lost"]) == (None, None, None)
    text = cli("verify", trained.path).out
    assert text.startswith("whole: main:2 to 12\n")


def test_damage_in_a_delta_costs_the_steps_up_to_the_next_full(cli: Cli, trained: Trained) -> None:
    spoil(trained, 4)
    said = cli("verify", trained.path, "--json")
    assert said.status == 1
    assert said.json["damaged"] == ["main:4", "main:5"]
    assert said.json["whole"] == ["main:2", "main:3", *(f"main:{s}" for s in range(6, 13))]
    assert cli("verify", trained.path, "--step", "3").status == 0
    said = cli("verify", trained.path, "--step", "5", "--json")
    assert (said.status, said.json["damaged"], said.json["whole"]) == (1, ["main:5"], [])


def test_one_folded_step_is_verified(cli: Cli, trained: Trained) -> None:
    said = cli("verify", trained.path, "--step", "4", "--json")
    assert (said.status, said.json["whole"], said.json["findings"]) == (0, ["main:4"], [])
    assert cli("verify", trained.path, "--step", "40").status == 1
