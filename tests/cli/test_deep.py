"""`everystep verify --deep`: every step of a run is folded and proved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import byte_runs
from delta_runs import Trained, record_of, train_run
from everystep.errors import CannotRestore
from everystep.recovery import deep
from everystep.recovery.deep import steps_to_fold
from everystep.recovery.reach import How
from small_runs import Said, flip

Cli = Callable[..., Said]


def steps(first: int, last: int, timeline: str = "main") -> list[str]:
    return [f"{timeline}:{step}" for step in range(first, last + 1)]


def verified(cli: Cli, path: Path) -> tuple[int, Any]:
    said = cli("verify", path, "--deep", "--json")
    assert said.err == ""
    return said.status, said.json


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_healthy_run_is_proved_and_not_changed(cli: Cli, tmp_path: Path, ranks: int) -> None:
    trained = train_run(tmp_path / "run", fulls=(2, 6, 9), ranks=ranks)
    before = byte_runs.files_of(trained.path)
    status, verdict = verified(cli, trained.path)
    assert (status, verdict["ok"], verdict["findings"]) == (0, True, [])
    assert verdict["proved"] == steps(2, 12)
    assert (verdict["differing"], verdict["lost"]) == ([], [])
    assert byte_runs.files_of(trained.path) == before
    lines = cli("verify", trained.path, "--deep").out.splitlines()
    assert lines[:2] == ["whole: main:2 to 12", "proved: main:2 to 12"]
    assert lines[2].startswith("nothing is damaged, every step comes out, ")


def test_full_checkpoints_alone_are_proved(cli: Cli, healthy: Path) -> None:
    status, verdict = verified(cli, healthy)
    assert (status, verdict["proved"], verdict["lost"]) == (0, steps(1, 3), [])


def test_a_delta_that_is_damaged_costs_the_steps_to_the_next_full(cli: Cli, tmp_path: Path) -> None:
    trained = train_run(tmp_path / "run", fulls=(2, 7))
    name, offset, _ = record_of(trained, 4)
    flip(trained.path, name, offset + 9)
    status, verdict = verified(cli, trained.path)
    assert status == 1
    assert verdict["proved"] == [*steps(2, 3), *steps(7, 12)]
    assert (verdict["differing"], verdict["lost"]) == ([], steps(4, 6))


def test_a_delta_of_other_gradients_is_found_at_its_step(cli: Cli, tmp_path: Path) -> None:
    trained = train_run(tmp_path / "run", fulls=(2, 7), wrong=(4,))
    assert cli("verify", trained.path).status == 0, "every byte is as it was written"
    status, verdict = verified(cli, trained.path)
    assert status == 1
    assert verdict["proved"] == [*steps(2, 3), *steps(7, 12)]
    assert (verdict["differing"], verdict["lost"]) == (["main:4"], steps(5, 6))
    (differs, lost) = verdict["findings"]
    assert (differs["step"], lost["step"]) == ("main:4", "main:5")
    assert "is not what it was in training" in differs["what"]
    assert "optimizers.optimizer.state" in differs["what"] or "models.model" in differs["what"]
    assert "to step 6, cannot be had" in lost["what"]
    text = cli("verify", trained.path, "--deep").out
    assert "not as in training: main:4\n" in text and "cannot be had: main:5 to 6\n" in text


def test_a_full_that_the_deltas_do_not_give_is_named(cli: Cli, tmp_path: Path) -> None:
    trained = train_run(tmp_path / "run", fulls=(2, 7), altered={7: "/models/model/p.1"})
    assert cli("verify", trained.path).status == 0
    status, verdict = verified(cli, trained.path)
    assert status == 1
    assert verdict["differing"] == ["main:7", "main:8"], "and what follows it is not as it was"
    assert (verdict["proved"], verdict["lost"]) == (steps(2, 6), steps(9, 12))
    assert verdict["findings"][0]["what"] == (
        "the full checkpoint is not what the deltas before it give: models.model.p.1"
    )


def test_deltas_go_on_through_a_full_that_is_damaged(cli: Cli, tmp_path: Path) -> None:
    trained = train_run(tmp_path / "run", fulls=(2, 7))
    flip(trained.path, "steps/main/*7/*.model.safetensors", -1)
    status, verdict = verified(cli, trained.path)
    assert (status, verdict["damaged"]) == (1, ["main:7"])
    assert (verdict["proved"], verdict["lost"]) == (steps(2, 12), [])


def test_the_end_of_the_log_may_be_under_way(cli: Cli, tmp_path: Path) -> None:
    trained = train_run(tmp_path / "run", upto=8, ranks=2, ends={1: 7})
    status, verdict = verified(cli, trained.path)
    assert (status, verdict["proved"], verdict["lost"]) == (0, steps(2, 7), ["main:8"])
    assert {finding["level"] for finding in verdict["findings"]} == {"note"}


def test_a_fork_is_proved_from_where_it_left(cli: Cli, tmp_path: Path) -> None:
    trained = train_run(tmp_path / "run", upto=8, fork=5)
    status, verdict = verified(cli, trained.path)
    assert (status, verdict["findings"]) == (0, [])
    assert verdict["proved"] == [*steps(2, 8), *steps(6, 8, "main@5")]


def test_an_optimizer_that_cannot_be_built_here(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = train_run(tmp_path / "run", upto=7, fulls=(2, 5))

    def fail(*words: object) -> None:
        raise CannotRestore("there is no such optimizer")

    monkeypatch.setattr(deep, "read_chain", fail)
    monkeypatch.setattr(deep, "FoldedStep", lambda *words, **more: fail())
    status, verdict = verified(cli, trained.path)
    assert (status, verdict["proved"]) == (1, ["main:2", "main:5"])
    assert verdict["lost"] == [*steps(3, 4), *steps(6, 7)]
    assert "there is no such optimizer" in verdict["findings"][0]["what"]


def test_how_much_there_is_to_fold_is_known_before(tmp_path: Path) -> None:
    trained: Trained = train_run(tmp_path / "run", ranks=2)
    listing = trained.run.listing()
    segments = trained.run.segments(listing)
    told = 0

    def folded(number: int) -> None:
        nonlocal told
        told += number

    deep.prove_run(trained.run, listing, segments, How(folded=folded))
    assert told == steps_to_fold(listing, segments) == 2 * 10
