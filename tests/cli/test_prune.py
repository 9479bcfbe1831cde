"""`everystep prune`."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import byte_runs
import everystep
from delta_runs import train_run
from everystep.store import local
from everystep.store.local import LocalBackend
from everystep.store.run import Run
from everystep.types import StepRef
from small_runs import Job, Said, flip, write_part

Cli = Callable[..., Said]


def pruned(cli: Cli, *words: object) -> Any:
    said = cli("prune", *words, "--json")
    assert (said.status, said.err) == (0, ""), said
    return said.json


def files(run: Path) -> dict[str, int]:
    found = (path for path in run.rglob("*") if path.is_file())
    return {str(path.relative_to(run)): path.stat().st_size for path in found}


def steps(run: Path) -> list[str]:
    return sorted(str(ref) for ref in Run.open(run).listing().complete())


def test_a_dry_run_says_and_removes_nothing(cli: Cli, forked: Path) -> None:
    before = files(forked)
    told = pruned(cli, forked, "--keep-last", "1", "--dry-run")
    assert list(told) == [
        "path", "done", "freed_bytes", "removed", "kept", "spared", "proved",
    ]  # fmt: skip
    assert files(forked) == before
    assert (told["done"], told["proved"]) == (False, [])
    assert [(r["kind"], r["step"], r["session"]) for r in told["removed"]] == [
        ("step", "main:1", 1), ("step", "main:2", 1), ("step", "main:4", 2),
        ("step", "main@3:4", 3), ("step", "main@3:5", 3),
    ]  # fmt: skip
    assert told["kept"] == ["main:3", "main:5", "main@3:6"]
    assert told["freed_bytes"] == sum(r["size_bytes"] for r in told["removed"])


def test_what_a_dry_run_says_is_what_goes(cli: Cli, forked: Path) -> None:
    before = files(forked)
    said = pruned(cli, forked, "--keep-last", "1", "--dry-run")
    done = pruned(cli, forked, "--keep-last", "1", "--yes")
    assert done == {**said, "done": True, "proved": ["main:5", "main@3:6"]}
    gone = [name for removal in done["removed"] for name in removal["files"]]
    assert before.keys() - files(forked).keys() == set(gone)
    assert sum(before[name] for name in gone) == done["freed_bytes"]
    assert steps(forked) == ["main:3", "main:5", "main@3:6"]
    assert cli("verify", forked).status == 0
    assert pruned(cli, forked, "--keep-last", "1", "--yes")["removed"] == []


def test_training_goes_on_after_it(cli: Cli, forked: Path, tmp_path: Path) -> None:
    whole, job = tmp_path / "whole", Job()
    job.run(whole, 8)
    pruned(cli, forked, "--keep-last", "1", "--yes")
    again = Job()
    again.run(forked, 8)
    assert again.bits() == job.bits()
    for step in (3, 5):
        fork = Job()
        with everystep.Checkpointer(
            forked, model=fork.model, optimizer=fork.optimizer, extras={"schedule": fork.schedule}
        ) as ck:
            assert ck.restore(everystep.StepRef("main", step)) == step


def test_the_best_step_by_a_metric(cli: Cli, healthy: Path) -> None:
    losses = {n: everystep.load(healthy, n).metrics["loss"] for n in (1, 2, 3)}
    least = min(losses, key=lambda n: losses[n])
    most = max(losses, key=lambda n: losses[n])
    assert least != most
    told = pruned(cli, healthy, "--keep-best", "loss", "--dry-run")
    assert told["kept"] == sorted({f"main:{least}", "main:3"})
    told = pruned(cli, healthy, "--keep-best", "loss", "--max", "--dry-run")
    assert told["kept"] == sorted({f"main:{most}", "main:3"})
    told = pruned(cli, healthy, "--keep-best", "at", "--keep-every", "2", "--dry-run")
    assert told["kept"] == ["main:1", "main:2", "main:3"]


def test_a_metric_that_nobody_recorded_removes_nothing(cli: Cli, healthy: Path) -> None:
    before = files(healthy)
    said = cli("prune", healthy, "--keep-best", "los", "--yes")
    assert said == (2, "", "everystep: no step has a number as metric 'los'\n"
                           "  try: there are: at, loss\n")  # fmt: skip
    assert files(healthy) == before


def test_one_timeline(cli: Cli, forked: Path) -> None:
    told = pruned(cli, forked, "--keep-last", "1", "--timeline", "main@3", "--yes")
    assert [r["step"] for r in told["removed"]] == ["main@3:4", "main@3:5"]
    assert steps(forked) == [*(f"main:{n}" for n in range(1, 6)), "main@3:6"]
    said = cli("prune", forked, "--keep-last", "1", "--timeline", "side", "--yes")
    assert (said.status, said.out) == (1, "")
    assert "'side'" in said.err and "there are: main, main@3" in said.err


def test_nothing_goes_before_what_stays_is_proved(cli: Cli, forked: Path) -> None:
    damaged = flip(forked, "steps/main@3/*6/*.state.safetensors", -1)
    before = files(forked)
    said = cli("prune", forked, "--keep-last", "1", "--yes")
    assert (said.status, said.out) == (1, "")
    assert "main@3:6" in said.err and damaged.name in said.err
    assert "nothing was removed" in said.err
    assert files(forked) == before
    assert pruned(cli, forked, "--keep-last", "1", "--timeline", "main", "--yes")["done"]


def test_records_go_first_and_old_steps_before_new(
    cli: Cli, healthy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone: list[str] = []
    original = LocalBackend.delete

    def recorded(self: LocalBackend, name: str, *, reuse: bool = False) -> None:
        assert not reuse, "nobody writes after it"
        gone.append(name)
        original(self, name)

    monkeypatch.setattr(LocalBackend, "delete", recorded)
    pruned(cli, healthy, "--keep-last", "1", "--yes")
    assert [name.split("/")[2][-1] + name[-5:] for name in gone] == [
        *["1.json", "1nsors", "1nsors", "1nsors"], *["2.json", "2nsors", "2nsors", "2nsors"],
    ]  # fmt: skip


def test_what_is_referred_to_stays_and_is_named(cli: Cli, tmp_path: Path) -> None:
    run = byte_runs.new_run(tmp_path / "run", calls=byte_runs.NoSync())
    for step in range(1, 8):
        earlier = {5: 1, 6: 1, 7: 4}.get(step)
        byte_runs.write_step(
            run, StepRef("main", step), earlier=StepRef("main", earlier) if earlier else None
        )
    before = files(tmp_path / "run")
    words = (tmp_path / "run", "--keep-last", "3")
    told = pruned(cli, *words, "--dry-run")
    assert told["kept"] == ["main:1", "main:4", "main:5", "main:6", "main:7"]
    assert told["spared"] == [
        {"step": "main:1", "referred_by": ["main:5", "main:6"]},
        {"step": "main:4", "referred_by": ["main:7"]},
    ]
    plain = cli("prune", *words, "--yes").out.splitlines()
    assert plain[-3:-1] == [
        "main:1 stays, since its files are needed: main:5 to 6 refer to them",
        "main:4 stays, since its files are needed: main:7 refers to them",
    ]
    gone = [name for removal in told["removed"] for name in removal["files"]]
    assert before.keys() - files(tmp_path / "run").keys() == set(gone)
    assert cli("verify", tmp_path / "run").status == 0
    last = pruned(cli, tmp_path / "run", "--keep-last", "1", "--yes")
    assert [r["step"] for r in last["removed"]] == ["main:5", "main:6", "main:1"]
    assert steps(tmp_path / "run") == ["main:4", "main:7"]


def test_leftovers_of_crashes(cli: Cli, two: Path) -> None:
    run = Run.open(two)
    write_part(run, 3, rank=0)
    write_part(run, 4, rank=1)
    for marker in two.glob("steps/main/*4/*.json"):
        marker.unlink()
    (two / "steps/main/000000000004/.x.json.12-ab.tmp").write_text("12345")
    (two / "notes.txt").write_text("x")
    told = pruned(cli, two, "--yes")
    assert [(r["kind"], r["step"]) for r in told["removed"]] == [
        ("incomplete", "main:3"), ("unrecorded", "main:4"), ("temporary", None),
    ]  # fmt: skip
    assert (told["kept"], told["proved"]) == (["main:1", "main:2"], [])
    assert {path.name for path in (two / "steps/main").iterdir()} == {
        "000000000001", "000000000002",
    }  # fmt: skip
    assert (two / "notes.txt").exists(), "not ours"


def test_steps_that_were_set_aside(cli: Cli, healthy: Path) -> None:
    flip(healthy, "steps/main/*3/*.model.safetensors", -1)
    Job().run(healthy, 3)
    assert (healthy / "damaged").exists()
    assert pruned(cli, healthy, "--yes")["removed"] == []
    told = pruned(cli, healthy, "--damaged", "--yes")
    assert [(r["kind"], r["step"]) for r in told["removed"]] == [("damaged", "main:3")]
    assert not (healthy / "damaged").exists()
    assert steps(healthy) == ["main:1", "main:2", "main:3"]


def test_a_run_that_is_being_trained_is_left_alone(cli: Cli, healthy: Path) -> None:
    job = Job()
    with everystep.Checkpointer(healthy, model=job.model, optimizer=job.optimizer):
        before = files(healthy)
        said = cli("prune", healthy, "--keep-last", "1", "--yes")
        assert (said.status, said.out) == (1, "")
        assert str(healthy) in said.err
        assert files(healthy) == before
        assert cli("prune", healthy, "--keep-last", "1", "--dry-run").status == 0
    assert pruned(cli, healthy, "--keep-last", "1", "--yes")["done"]


_HOLDER = """
import sys
from pathlib import Path
from everystep.store.local import LocalBackend
with LocalBackend(Path(sys.argv[1])).lock("owner.lock", int(sys.argv[2])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_every_rank_of_the_newest_session_counts(
    cli: Cli, two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "LOCK_PATIENCE_S", 0.0)
    for slot, status in ((0, 1), (1, 1), (2, 0)):
        with subprocess.Popen(
            [sys.executable, "-c", _HOLDER, str(two), str(slot)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        ) as holder:  # fmt: skip
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            said = cli("prune", two, "--yes")
            assert said.status == status
            assert (f"process {holder.pid} is using this run" in said.err) == bool(status)


class Typed(io.StringIO):
    """Somebody at a keyboard."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("answer", "status"), [("n\n", 1), ("\n", 1), ("", 130), ("y\n", 0)])
def test_it_asks_before_it_removes(
    cli: Cli, healthy: Path, monkeypatch: pytest.MonkeyPatch, answer: str, status: int
) -> None:
    monkeypatch.setattr(sys, "stdin", Typed(answer))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    said = cli("prune", healthy, "--keep-last", "1")
    assert said.status == status
    assert "main:1" in said.out and "would be freed" in said.out
    assert "Remove them?" in said.out + said.err
    assert steps(healthy) == (["main:3"] if status == 0 else ["main:1", "main:2", "main:3"])
    assert ("proved before" in said.out) == (status == 0)


def test_plain_text(cli: Cli, healthy: Path) -> None:
    said = cli("prune", healthy, "--keep-last", "2", "--yes")
    head, row, summary = said.out.splitlines()
    assert head.split() == ["removed", "because", "files", "size"]
    assert row.startswith("main:1   no rule keeps it      4  ")
    assert summary.endswith(" freed; 2 complete steps stay, main:3 proved before")
    assert cli("prune", healthy, "--yes").out == "nothing to remove; 2 complete steps stay\n"


def test_of_a_run_with_deltas_what_can_be_had_is_said(cli: Cli, tmp_path: Path) -> None:
    trained = train_run(tmp_path / "run", fulls=(2, 6, 9))
    told = pruned(cli, trained.path, "--keep-last", "1", "--dry-run")
    assert [(r["kind"], r["step"]) for r in told["removed"]] == [
        ("step", "main:2"), ("step", "main:6"),
    ]  # fmt: skip
    assert told["kept"] == [f"main:{step}" for step in range(9, 13)]
    assert pruned(cli, trained.path, "--keep-last", "1", "--yes")["kept"] == told["kept"]
    listed = cli("ls", trained.path, "--json").json
    assert [row["step"] for row in listed["steps"]] == told["kept"]
    assert cli("verify", trained.path, "--deep").status == 0
    assert "nothing to remove; 4 complete steps stay" in cli("prune", trained.path, "--yes").out
