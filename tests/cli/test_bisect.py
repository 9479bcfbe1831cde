"""`everystep bisect`: the first bad step, in few runs of a command."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from hypothesis import given
from hypothesis import strategies as st

from delta_runs import Trained, losses, record_of, train_run
from everystep.cli.bisect import Trial, search
from everystep.state import raw
from everystep.types import StepRef
from small_runs import Said, flip
from waiting import until

Cli = Callable[..., Said]


@pytest.fixture
def trained(tmp_path: Path) -> Trained:
    """Steps main:2 to main:18, of which the loss is high from main:11 on."""
    return train_run(tmp_path / "run", upto=18, metrics=losses(18, spike=11))


def from_step(first: int, skip: tuple[int, ...] = ()) -> list[str]:
    """A command to which steps from `first` on are bad."""
    code = (
        "import os, sys; step = int(os.environ['EVERYSTEP_STEP'].split(':')[1]); "
        "assert os.path.exists(sys.argv[1]); print('seen', step); "
        f"sys.exit(125 if step in {skip!r} else 3 if step >= {first} else 0)"
    )
    return [sys.executable, "-c", code]


def bisect(cli: Cli, path: Path, *words: object) -> tuple[int, Any]:
    said = cli("bisect", path, "--json", *words)
    return said.status, said.json


# ---------------------------------------------------------------- the search


class Where:
    """What `search` asks of a range."""

    def __init__(self, n: int) -> None:
        self.refs = [StepRef("main", step) for step in range(1, n + 1)]

    def chain(self, ref: StepRef) -> StepRef:
        return ref


def searched(n: int, first: int, skipped: set[int]) -> tuple[list[int], list[Trial]]:
    def judge(ref: Any) -> Trial:
        result = "skip" if ref.step in skipped else "bad" if ref.step >= first else "good"
        return Trial(step=str(ref), result=result, status=None, value=None)  # type: ignore[arg-type]

    trials: list[Trial] = []
    found = search(Where(n), judge, trials)  # type: ignore[arg-type]
    return [ref.step for ref in found], trials


@given(st.data())
def test_the_first_bad_step_is_found_in_few_runs(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 300))
    first = data.draw(st.integers(1, n))
    skipped = data.draw(st.sets(st.integers(1, n - 1), max_size=8)) if n > 1 else set()
    found, trials = searched(n, first, skipped)
    assert first in found
    skips = sum(trial.result == "skip" for trial in trials)
    assert len(trials) <= math.ceil(math.log2(n)) + skips
    assert len({trial.step for trial in trials}) == len(trials), "no step is looked at twice"
    assert set(found) - {found[-1]} <= skipped, "only skipped steps leave doubt"
    assert skipped or found == [first]


# ---------------------------------------------------------------- commands


def test_the_first_bad_step_of_a_command(cli: Cli, trained: Trained) -> None:
    status, found = bisect(cli, trained.path, "--good", 2, "--bad", 18, "--", *from_step(13))
    assert (status, found["first_bad"], found["candidates"]) == (0, "main:13", ["main:13"])
    assert (found["good"], found["bad"], found["steps"]) == ("main:2", "main:18", 16)
    assert len(found["trials"]) <= 4
    assert {t["status"] for t in found["trials"]} == {0, 3}
    assert {t["step"]: t["result"] for t in found["trials"]}["main:13"] == "bad"
    said = cli("bisect", trained.path, "--good", 2, "--bad", 18, "--", *from_step(13))
    last = said.out.splitlines()[-1]
    assert last.startswith("main:13 is the first bad step (") and last.endswith(" for 16 steps)")


def test_what_the_command_is_given(cli: Cli, trained: Trained, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    command = ["sh", "-c", f'cp "$1" {out}/$EVERYSTEP_STEP; exit 1', "sh", "{}"]
    status, found = bisect(cli, trained.path, "--good", "main:2", "--bad", 9, "--", *command)
    assert (status, found["first_bad"]) == (0, "main:3")
    seen = sorted(out.iterdir())
    assert [file.name for file in seen] == sorted(t["step"] for t in found["trials"])
    for file in seen:
        state = trained.tensors(int(file.name.split(":")[1]))
        loaded = safetensors.torch.load_file(file)
        for name in loaded:
            assert raw.bits_of(loaded, name) == raw.bits_of(state, f"/models/model/{name}")


@pytest.mark.parametrize(("form", "suffix"), [("pt", ".pt"), ("dcp", "")])
def test_other_forms(cli: Cli, trained: Trained, form: str, suffix: str) -> None:
    test = "-d" if form == "dcp" else "-f"
    command = ["sh", "-c", f'case "$1" in *{suffix}) test {test} "$1" || exit 125;; esac', "sh"]
    words = ["--good", 2, "--bad", 4, "--format", form, "--", *command]
    status, found = bisect(cli, trained.path, *words)
    assert (status, found["first_bad"]) == (0, "main:4")
    assert found["trials"][0]["status"] == 0


def test_skipped_steps_may_hide_it(cli: Cli, trained: Trained) -> None:
    words = ["--good", 2, "--bad", 18, "--"]
    status, found = bisect(cli, trained.path, *words, *from_step(9, skip=(8,)))
    assert (status, found["first_bad"]) == (1, None)
    assert found["candidates"] == ["main:8", "main:9"]
    text = cli("bisect", trained.path, *words, *from_step(9, skip=(8,))).out
    assert "the first bad step is one of main:8, main:9" in text
    status, found = bisect(cli, trained.path, *words, *from_step(9, skip=(3, 10, 14)))
    assert (status, found["first_bad"]) == (0, "main:9")


def test_a_damaged_step_is_skipped(cli: Cli, trained: Trained) -> None:
    name, offset, _ = record_of(trained, 10)
    flip(trained.path, name, offset + 9)
    status, found = bisect(cli, trained.path, "--good", 2, "--bad", 18, "--", *from_step(7))
    skips = [t["step"] for t in found["trials"] if t["result"] == "skip"]
    assert skips[0] == "main:10", "and others that are folded through it"
    assert all(int(step.split(":")[1]) >= 10 for step in skips)
    assert (status, found["first_bad"]) == (0, "main:7")


@pytest.mark.parametrize(
    ("command", "problem", "status"),
    [
        (["sh", "-c", "exit 200"], "exit status 200", 1),
        (["sh", "-c", "kill -9 $$"], "signal 9", 1),
        (["no such program"], "cannot run 'no such program'", 2),
    ],
)
def test_what_says_nothing_ends_the_search(
    cli: Cli, trained: Trained, command: list[str], problem: str, status: int
) -> None:
    said = cli("bisect", trained.path, "--good", 2, "--bad", 9, "--", *command)
    assert (said.status, said.out) == (status, "")
    assert problem in said.err


@pytest.mark.parametrize(
    ("words", "problem", "status"),
    [
        (["--good", 9, "--bad", 3], "is not before", 2),
        (["--good", 9, "--bad", 9], "is not before", 2),
        (["--good", 1, "--bad", 9], "step 1 is not there", 1),
        (["--good", 3, "--bad", 99], "step 99 is not there", 1),
        (["--good", "main@5:7", "--bad", "main:8"], "not on the line", 2),
        (["--good", 3, "--bad", 9, "--check", "--metric", "loss>5"], "main@5:9 is not bad", 2),
        (["--good", 12, "--bad", 13, "--check", "--metric", "loss>5"], "main@5:12 is not good", 2),
    ],
)
def test_wrong_ends(
    cli: Cli, tmp_path: Path, words: list[object], problem: str, status: int
) -> None:
    trained = train_run(tmp_path / "r", upto=13, metrics=losses(13, spike=11), fork=5)
    command = [] if "--metric" in words else ["--", "true"]
    said = cli("bisect", trained.path, *words, *command)
    assert (said.status, said.out) == (status, "")
    assert problem in said.err


def test_a_fork_is_searched_along_its_line(cli: Cli, tmp_path: Path) -> None:
    trained = train_run(tmp_path / "r", upto=9, fork=5)
    status, found = bisect(cli, trained.path, "--good", 2, "--bad", 9, "--", *from_step(7))
    assert (status, found["first_bad"], found["steps"]) == (0, "main@5:7", 7)
    status, found = bisect(cli, trained.path, "--good", 2, "--bad", "main:9", "--", *from_step(7))
    assert (status, found["first_bad"]) == (0, "main:7")


# ---------------------------------------------------------------- metrics


def test_the_first_step_at_which_a_metric_is_bad(cli: Cli, trained: Trained) -> None:
    words = ["--good", 2, "--bad", 18, "--check"]
    status, found = bisect(cli, trained.path, *words, "--metric", "loss > 5")
    assert (status, found["first_bad"]) == (0, "main:11")
    assert len(found["trials"]) <= 2 + 4
    assert found["trials"][0] == {
        "step": "main:2", "result": "good", "status": None, "value": 0.5
    }  # fmt: skip
    assert bisect(cli, trained.path, *words[:4], "--metric", "loss<=0.125")[1]["first_bad"] == (
        "main:8"
    )
    status, found = bisect(cli, trained.path, *words[:4], "--metric", "other>1")
    assert (status, {t["result"] for t in found["trials"]}) == (1, {"skip"})


def test_what_is_no_number_is_bad(cli: Cli, tmp_path: Path) -> None:
    values = {step: math.nan if step >= 5 else 1.0 for step in range(1, 9)}
    trained = train_run(tmp_path / "r", upto=8, fulls=(2,), metrics=values)
    assert (
        bisect(cli, trained.path, "--good", 2, "--bad", 8, "--metric", "loss>3")[1]["first_bad"]
        == "main:5"
    )


# ---------------------------------------------------------------- what is left


# a shell without job control starts background jobs with SIGINT ignored, and children inherit it
_MAIN = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from everystep.cli import main
main.main()
"""


def test_nothing_is_left_after_ctrl_c(trained: Trained, tmp_path: Path) -> None:
    place = tmp_path / "temporary"
    place.mkdir()
    words = [trained.path, "--good", "2", "--bad", "9", "--"]
    words += ["sh", "-c", f"echo here > {tmp_path}/mark; cat"]
    with subprocess.Popen(
        [sys.executable, "-c", _MAIN, "bisect", *map(str, words)],
        env=os.environ | {"TMPDIR": str(place)}, start_new_session=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        until(lambda: (tmp_path / "mark").exists(), 60, "the command runs")
        assert len(list(place.rglob("*.safetensors"))) == 1
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) == 130
    assert list(place.iterdir()) == []


def test_nothing_is_left_otherwise(
    cli: Cli, trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(place))
    for command in (from_step(7), ["sh", "-c", "exit 200"]):
        cli("bisect", trained.path, "--good", 2, "--bad", 9, "--", *command)
        assert list(place.iterdir()) == []
