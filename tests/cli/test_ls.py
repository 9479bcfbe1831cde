"""`everystep ls`."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import everystep
from everystep.store.format import step_directory
from everystep.store.run import Run
from everystep.types import StepRef
from small_runs import Job, Said, flip, write_part
from trips import BLOCKING

Cli = Callable[..., Said]


def states(listed: Any) -> dict[str, str]:
    return {row["step"]: row["state"] for row in listed["steps"]}


def test_a_healthy_run(cli: Cli, healthy: Path) -> None:
    said = cli("ls", healthy, "--json")
    assert (said.status, said.err) == (0, "")
    listed = said.json
    assert list(listed) == [
        "path", "run", "size_bytes", "newest", "timelines", "steps", "gaps", "sessions",
        "set_aside", "unrecorded", "strangers", "damages",
    ]  # fmt: skip
    assert listed["path"] == str(healthy)
    assert listed["run"] == Run.open(healthy).id
    assert listed["size_bytes"] == sum(f.stat().st_size for f in healthy.rglob("*") if f.is_file())
    assert listed["newest"] == "main:3"
    assert listed["timelines"] == [
        {"timeline": "main", "parent": None, "current": True, "complete_steps": 3}
    ]
    (session,) = listed["sessions"]
    assert (session["session"], session["timeline"], session["restored"]) == (1, "main", None)
    for number, row in enumerate(listed["steps"], 1):
        directory = healthy / step_directory(StepRef("main", number))
        assert row == {
            "step": f"main:{number}",
            "state": "complete",
            "stored": "full",
            "size_bytes": sum(file.stat().st_size for file in directory.iterdir()),
            "session": 1,
            "world_size": 1,
            "missing_ranks": [],
            "metrics": {"loss": everystep.load(healthy, number).metrics["loss"], "at": number},
        }
    for key in ("gaps", "set_aside", "unrecorded", "strangers", "damages"):
        assert listed[key] == []


def test_plain_text(cli: Cli, forked: Path) -> None:
    said = cli("ls", forked)
    assert (said.status, said.err) == (0, "")
    lines = said.out.splitlines()
    assert lines[0].startswith(f"{forked}: 8 complete steps, ")
    assert lines[0].endswith(", 3 sessions")
    assert lines[1].split() == ["metric", "by", "step", "first", "…", "last"]
    assert [line.split()[0] for line in lines[2:4]] == ["loss", "at"]
    # main:1 to 3, then main@3:4 to 6
    assert lines[3].split()[1:] == ["▁▂▄▅▇█", "1", "…", "6"]
    del lines[1:4]
    assert lines[1].split() == ["step", "state", "size", "session", "ranks", "loss", "at"]
    assert [line.split()[:2] for line in lines[2:10]] == [
        *([f"main:{n}", "complete"] for n in range(1, 6)),
        *([f"main@3:{n}", "complete"] for n in range(4, 7)),
    ]
    assert len({line.index("complete") for line in lines[2:10]}) == 1, "not aligned"
    assert lines[10:] == [
        "timeline main: from the start, 5 complete",
        "timeline main@3: forked from main:3, 3 complete, current",
        "newest: main@3:6",
    ]
    assert "\x1b" not in said.out


def test_timelines_and_sessions_of_a_fork(cli: Cli, forked: Path) -> None:
    listed = cli("ls", forked, "--json").json
    assert listed["newest"] == "main@3:6"
    assert [(t["timeline"], t["parent"], t["current"]) for t in listed["timelines"]] == [
        ("main", None, False),
        ("main@3", "main:3", True),
    ]
    assert [(s["session"], s["restored"]) for s in listed["sessions"]] == [
        (1, None), (2, "main:3"), (3, "main:3"),
    ]  # fmt: skip


def test_a_fresh_run(cli: Cli, fresh: Path) -> None:
    listed = cli("ls", fresh, "--json").json
    assert (listed["newest"], listed["steps"]) == (None, [])
    assert cli("ls", fresh).out.splitlines()[-1] == "there is no complete step yet"


def test_a_rank_that_has_not_stored_its_part(cli: Cli, two: Path) -> None:
    write_part(Run.open(two), 3, rank=1)
    listed = cli("ls", two, "--json").json
    assert states(listed) == {"main:1": "complete", "main:2": "complete", "main:3": "incomplete"}
    assert listed["newest"] == "main:2"
    last = listed["steps"][-1]
    assert (last["world_size"], last["missing_ranks"], last["metrics"]) == (2, [0], {})
    assert "incomplete, no rank 0" in cli("ls", two).out


def test_ranks_with_other_bits(cli: Cli, two: Path) -> None:
    (marker,) = two.glob("steps/main/*2/*r00001of00002-*.json")
    stem, _, _ = marker.name.rpartition("-")
    marker.rename(marker.with_name(f"{stem}-{'1' * 16}.json"))
    listed = cli("ls", two, "--json").json
    assert states(listed) == {"main:1": "complete", "main:2": "diverged"}
    assert listed["newest"] == "main:1"


def test_a_step_that_was_written_again(cli: Cli, two: Path) -> None:
    for rank in (0, 1):
        write_part(Run.open(two), 2, rank, session=2)
    listed = cli("ls", two, "--json").json
    assert [(row["step"], row["session"], row["state"]) for row in listed["steps"]] == [
        ("main:1", 1, "complete"),
        ("main:2", 1, "superseded"),
        ("main:2", 2, "complete"),
    ]


def test_what_is_damaged_set_aside_or_strange(cli: Cli, healthy: Path) -> None:
    flip(healthy, "steps/main/*3/*.model.safetensors", -1)
    Job().run(healthy, 3)  # which sets main:3 aside, and stores it again
    flip(healthy, "steps/main/*1/*.json", 100)
    (healthy / "steps/main/000000000002").joinpath(
        "s000001-r00000of00001.json"
    ).unlink()  # fmt: skip
    (healthy / "notes.txt").write_text("x")
    (healthy / "sessions/000009.json").write_text("x")
    listed = cli("ls", healthy, "--json").json
    assert states(listed) == {"main:1": "damaged", "main:3": "complete"}
    (aside,) = listed["set_aside"]
    assert (aside["step"], aside["path"]) == ("main:3", "damaged/main/000000000003")
    assert (aside["files"], aside["size_bytes"] > 1000) == (4, True)
    assert listed["unrecorded"] == ["steps/main/000000000002/s000001-r00000of00001"]
    assert listed["strangers"] == ["notes.txt"]
    (damage,) = listed["damages"]
    assert damage.startswith("sessions/000009.json")
    plain = cli("ls", healthy).out
    assert "set aside, it failed its proof: main:3 in damaged/main/000000000003 (4 files" in plain
    assert all(word in plain for word in ("notes.txt", "sessions/000009.json", "no record"))


def test_metrics_that_are_not_finite(cli: Cli, run_dir: Path) -> None:
    job = Job()
    with everystep.Checkpointer(
        run_dir, model=job.model, optimizer=job.optimizer, strategy=BLOCKING
    ) as ck:
        job.train(1)
        ck.step(loss=math.nan, low=-math.inf, word="a\x1bb", many=2**70, flag=True)
    (row,) = cli("ls", run_dir, "--json").json["steps"]
    assert row["metrics"] == {
        "loss": "nan", "low": "-inf", "word": "a\x1bb", "many": 2**70, "flag": True,
    }  # fmt: skip
    assert "a\\x1bb" in cli("ls", run_dir).out
