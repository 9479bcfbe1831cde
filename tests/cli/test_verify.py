"""`everystep verify`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import byte_runs
from everystep.cli.output import ranges
from everystep.cli.verify import judge
from everystep.store.run import Run
from everystep.types import StepRef
from small_runs import Said, flip, write_part

Cli = Callable[..., Said]


def judged(cli: Cli, *words: object) -> tuple[int, Any]:
    said = cli("verify", *words, "--json")
    assert said.err == ""
    return said.status, said.json


def test_a_healthy_run(cli: Cli, forked: Path) -> None:
    status, verdict = judged(cli, forked)
    data = sum(file.stat().st_size for file in forked.glob("steps/*/*/*.safetensors"))
    assert status == 0
    assert list(verdict) == [
        "path", "ok", "read_bytes", "whole", "damaged", "incomplete", "proved", "differing",
        "lost", "findings",
    ]  # fmt: skip
    assert 0.5 * data < verdict["read_bytes"] < data, "headers aside, it read all"
    assert verdict["ok"] and verdict["findings"] == []
    assert verdict["whole"] == [*(f"main:{n}" for n in range(1, 6)),
                                *(f"main@3:{n}" for n in range(4, 7))]  # fmt: skip
    plain = cli("verify", forked)
    assert plain.status == 0
    assert plain.out.splitlines()[0] == "whole: main:1 to 5, main@3:4 to 6"
    assert plain.out.splitlines()[1].startswith("nothing is damaged, ")


def test_two_ranks(cli: Cli, two: Path) -> None:
    status, verdict = judged(cli, two)
    assert (status, verdict["whole"], verdict["findings"]) == (0, ["main:1", "main:2"], [])


def test_a_fresh_run(cli: Cli, fresh: Path) -> None:
    assert judged(cli, fresh)[0] == 0
    assert cli("verify", fresh).out == "there is no step yet\n"


@pytest.mark.parametrize("where", ["model.safetensors", "state.safetensors", "json"])
def test_one_flipped_bit_is_found_and_placed(cli: Cli, healthy: Path, where: str) -> None:
    file = flip(healthy, f"steps/main/*2/*.{where}", -40)
    status, verdict = judged(cli, healthy)
    (finding,) = verdict["findings"]
    assert (status, verdict["ok"]) == (1, False)
    assert (verdict["damaged"], verdict["whole"]) == (["main:2"], ["main:1", "main:3"])
    assert (finding["level"], finding["step"], finding["rank"]) == ("damage", "main:2", 0)
    assert finding["path"] == str(file.relative_to(healthy))
    length = file.stat().st_size
    if where == "json":
        assert finding["byte"] == 0 and f"{length:,} bytes" in finding["what"]
    else:  # the first byte of the tensor that holds it
        assert length - 40 - 5056 <= finding["byte"] <= length - 40
    plain = cli("verify", healthy)
    assert plain.status == 1
    lines = plain.out.splitlines()
    assert lines[1].split()[:3] == ["damage", "main:2", "0"]
    assert lines[1].endswith(finding["path"])
    assert "damaged: main:2" in lines
    assert lines[-1].startswith("1 damage found, ")


def test_every_byte_of_a_data_file_counts(cli: Cli, healthy: Path) -> None:
    (file,) = healthy.glob("steps/main/*1/*.model.safetensors")
    whole = file.read_bytes()
    for at in (0, 7, 8, 100, len(whole) // 2, len(whole) - 1):
        flip(healthy, "steps/main/*1/*.model.safetensors", at)
        assert judged(cli, healthy, "--step", "1")[0] == 1, at
        file.write_bytes(whole)
    assert judged(cli, healthy, "--step", "1")[0] == 0
    file.write_bytes(whole[:-1])
    assert judged(cli, healthy, "--step", "1")[1]["findings"][0]["byte"] == len(whole) - 1
    file.unlink()
    assert "not there" in judged(cli, healthy, "--step", "1")[1]["findings"][0]["what"]


def test_one_step_alone(cli: Cli, forked: Path) -> None:
    flip(forked, "steps/main/*2/*.model.safetensors", -1)
    assert judged(cli, forked, "--step", "6")[1]["whole"] == ["main@3:6"]
    assert judged(cli, forked, "--step", "main:4")[1]["whole"] == ["main:4"]
    status, verdict = judged(cli, forked, "--step", "2")  # on the line that leads to main@3
    assert (status, verdict["damaged"], verdict["whole"]) == (1, ["main:2"], [])


def test_a_part_that_is_missing_is_no_damage(cli: Cli, two: Path) -> None:
    write_part(Run.open(two), 3, rank=0)
    status, verdict = judged(cli, two)
    (finding,) = verdict["findings"]
    assert (status, finding["level"], verdict["incomplete"]) == (0, "note", ["main:3"])
    assert "rank 1" in finding["what"]


def test_an_older_writing_that_is_damaged_does_not_condemn_the_newer(cli: Cli, two: Path) -> None:
    for rank in (0, 1):
        write_part(Run.open(two), 2, rank, session=2)
    flip(two, "steps/main/*2/s000001-r00000*.safetensors", -1)
    status, verdict = judged(cli, two)
    assert status == 1
    assert (verdict["damaged"], verdict["whole"]) == (["main:2"], ["main:1", "main:2"])


def test_records_of_the_run_and_what_does_not_belong(cli: Cli, healthy: Path) -> None:
    for name in ("run.json", "timelines/main.json", "sessions/000001.json"):
        path = healthy / name
        before = path.read_bytes()
        flip(healthy, name, 60)
        status, verdict = judged(cli, healthy)
        assert status == 1
        assert [f["path"] for f in verdict["findings"] if f["level"] == "damage"] == [name]
        assert verdict["whole"] == ["main:1", "main:2", "main:3"]
        path.write_bytes(before)
    (healthy / "notes.txt").write_text("x")
    status, verdict = judged(cli, healthy)
    assert status == 0
    assert [(f["level"], f["path"]) for f in verdict["findings"]] == [("note", "notes.txt")]


def test_what_several_steps_refer_to_is_read_once(cli: Cli, tmp_path: Path) -> None:
    run = byte_runs.new_run(tmp_path / "run", calls=byte_runs.NoSync())
    first = StepRef("main", 1)
    byte_runs.write_step(run, first)
    alone = judged(cli, tmp_path / "run")[1]["read_bytes"]
    for step in (2, 3):
        byte_runs.write_step(run, StepRef("main", step), earlier=first)
    state = {t.key: len(t.data) for t in byte_runs.small_state()}
    slots = state["/optimizers/optimizer/state/exp"]
    status, verdict = judged(cli, tmp_path / "run")
    assert (status, verdict["whole"]) == (0, ["main:1", "main:2", "main:3"])
    assert (alone, verdict["read_bytes"]) == (sum(state.values()), alone + 2 * slots)
    assert judged(cli, tmp_path / "run", "--step", "3")[1]["read_bytes"] == alone
    file = flip(tmp_path / "run", "steps/main/*1/*.model.safetensors", -1)
    status, verdict = judged(cli, tmp_path / "run")
    assert (status, verdict["damaged"]) == (1, ["main:1", "main:2", "main:3"])
    names = {finding["path"] for finding in verdict["findings"]}
    assert names == {str(file.relative_to(tmp_path / "run"))}


def test_what_retention_removes_meanwhile_is_no_damage(healthy: Path) -> None:
    run = Run.open(healthy)
    listing = run.listing()
    _, second, third = listing.steps

    def remove_the_second(nbytes: int) -> None:
        run.delete_part(second.ref, second.parts[0].stem)

    verdict = judge(run, listing, "x", remove_the_second)
    assert verdict.ok
    assert (verdict.whole, verdict.damaged) == (["main:1", "main:3"], [])
    assert [(f.level, f.what) for f in verdict.findings] == [
        ("note", "was removed while it was read")
    ]
    (healthy / "steps/main/000000000003" / "s000001-r00000of00001.model.safetensors").unlink()
    alone = msgspec.structs.replace(listing, steps=(third,))
    assert not judge(run, alone, "x", lambda nbytes: None).ok


def test_steps_drawn_together() -> None:
    assert ranges([]) == ""
    assert ranges(["a:1", "a:2", "a:4", "b:5"]) == "a:1 to 2, a:4, b:5"
