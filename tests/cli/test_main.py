"""The door: exit codes, the `try:` line, interrupts, and what is imported."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

import everystep
from everystep.cli import main
from everystep.errors import UsageError
from everystep.store.local import LocalBackend
from everystep.store.measured import Measure, MeasuredBy, write_measures
from everystep.store.run import Run
from small_runs import Said

Cli = Callable[..., Said]

COMMANDS: dict[str, list[str]] = {
    "ls": [],
    "show": [],
    "verify": [],
    "diff": ["1", "2"],
    "export": ["--to", "target.pt"],
    "bisect": ["--good", "1", "--bad", "2", "--metric", "loss>1"],
    "prune": ["--yes"],
    "report": [],
}
"""Each command that takes a run, with what else it needs."""

PLAN = [
    *("--state", "2GB", "--forward", "0.1", "--backward", "0.2", "--update", "0.05"),
    *("--d2h", "20GB/s", "--storage", "1GB/s"),
]


def python(code: str, *words: object, **more: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, words)],
        capture_output=True, text=True, timeout=100, check=False, **more,  # type: ignore[call-overload]
    )  # fmt: skip


@pytest.fixture
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_version(cli: Cli) -> None:
    assert cli("--version") == (0, f"everystep {everystep.__version__}\n", "")


def test_without_a_command_the_help_is_printed_and_it_is_wrong_use(cli: Cli) -> None:
    said = cli()
    assert said.status == 2
    assert all(name in said.out for name in [*COMMANDS, "demo", "plan"])


@pytest.mark.parametrize("name", [*COMMANDS, "demo", "plan"])
def test_every_command_explains_itself_with_an_example(cli: Cli, name: str) -> None:
    status, out, err = cli(name, "--help")
    assert (status, err) == (0, "")
    assert f"Usage: everystep {name}" in out
    assert f"Example: everystep {name}" in out


@pytest.mark.parametrize(
    ("words", "problem", "hint"),
    [
        (["fly"], "fly", "everystep --help"),
        (["ls"], "RUN", "everystep ls --help"),
        (["ls", "r", "--fast"], "--fast", "everystep ls --help"),
        (["show", "r", "--rank", "x"], "'--rank'", "everystep show --help"),
        (["export", "r"], "--to", "everystep export --help"),
        (["diff", "r", "1"], "nothing to compare", "everystep diff RUN A B"),
        (["bisect", "r", "--good", "1", "--bad", "2"], "a command or --metric", "-- COMMAND"),
        (["bisect", "r", "--good", "1", "--bad", "2", "--metric", "x"], "condition", "loss>3.5"),
        (["verify", "r", "--deep", "--step", "1"], "whole runs", "--step"),
        (["prune", "r", "--max"], "--keep-best", None),
        (["prune", "r", "--keep-last", "0", "--yes"], "keep_last=0", None),
        (["prune", "r"], "nobody is here to be asked", "--yes"),
        (["export", "r", "--to", "x.ckpt"], "'.ckpt'", "--format"),
    ],
)  # fmt: skip
def test_wrong_use_ends_with_2_and_says_what_to_try(
    cli: Cli, words: list[str], problem: str, hint: str | None
) -> None:
    status, out, err = cli(*words)
    first, *rest = err.splitlines()
    assert (status, out) == (2, "")
    assert first.startswith("everystep: ") and problem in first
    assert hint is None or (rest[-1].startswith("  try: ") and hint in rest[-1])


@pytest.mark.usefixtures("_in_a_folder")
@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("missing", "there is no such directory"),
        ("empty", "has no run.json"),
        ("something else", "has no run.json"),
        ("file", "is not a directory"),
    ],
)
@pytest.mark.parametrize("form", [[], ["--json"]], ids=["plain", "json"])
def test_what_is_no_run_is_refused(
    cli: Cli, tmp_path: Path, name: str, kind: str, problem: str, form: list[str]
) -> None:
    path = tmp_path / "place"
    if kind == "file":
        path.write_text("x")
    elif kind != "missing":
        path.mkdir()
    if kind == "something else":
        (path / "notes.txt").write_text("x")
    before = sorted(tmp_path.rglob("*"))
    status, out, err = cli(name, path, *COMMANDS[name], *form)
    assert (status, out) == (1, "")
    headline, hint = err.splitlines()
    assert headline.startswith("everystep: ") and str(path) in headline and problem in headline
    assert hint.startswith("  try: ")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.usefixtures("_in_a_folder")
@pytest.mark.parametrize("name", ["show", "diff", "export", "bisect"])
def test_a_run_without_a_step_has_nothing_to_show(cli: Cli, fresh: Path, name: str) -> None:
    status, out, err = cli(name, fresh, *COMMANDS[name])
    assert (status, out) == (1, "")
    assert err.startswith("everystep: ") and "step" in err


@pytest.mark.usefixtures("_in_a_folder")
@pytest.mark.parametrize("name", ["ls", "verify", "prune"])
def test_a_run_without_a_step_is_fine(cli: Cli, fresh: Path, name: str) -> None:
    status, out, err = cli(name, fresh, *COMMANDS[name])
    assert (status, err) == (0, "")
    assert out


@pytest.mark.usefixtures("_in_a_folder")
@pytest.mark.parametrize("name", ["show", "verify", "export"])
def test_a_step_that_is_not_there(cli: Cli, healthy: Path, name: str) -> None:
    for step, status in (("99", 1), ("main:99", 1), ("side:1", 1), ("x", 2), ("-1", 2)):
        said = cli(name, healthy, *COMMANDS[name], f"--step={step}")
        assert (said.status, said.out) == (status, "")
        assert said.err.startswith("everystep: ")


def test_a_run_whose_identity_is_damaged_everywhere(cli: Cli, healthy: Path) -> None:
    (healthy / "run.json").write_text("{}")
    shutil.rmtree(healthy / "sessions")
    status, out, err = cli("ls", healthy)
    assert (status, out) == (1, "")
    assert "run.json" in err


def test_an_error_has_its_lines_and_no_traceback(
    cli: Cli, healthy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> Run:
        raise UsageError("one\n  two \x1b[31m", path="p", hint="three")

    monkeypatch.setattr(Run, "open", fail)
    said = cli("ls", healthy)
    assert said == (2, "", "everystep: p: one\n  two \\x1b[31m\n  try: three\n")


def test_an_interrupt_ends_with_130(
    cli: Cli, healthy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(path: Path) -> Run:
        raise KeyboardInterrupt

    monkeypatch.setattr(Run, "open", interrupted)
    assert cli("verify", healthy) == (130, "", "")


# a shell without job control starts background jobs with SIGINT ignored, and children inherit it
_SLOW_VERIFY = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from everystep.cli import main
from everystep.store.local import LocalBackend
def read(self, name, into, offset):
    print("reading", file=sys.stderr, flush=True)
    sys.stdin.read()
LocalBackend.read = read
sys.argv = ["everystep", "verify", sys.argv[1]]
main.main()
"""


def test_a_real_sigint_ends_with_130_and_says_nothing(healthy: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _SLOW_VERIFY, str(healthy)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stderr is not None and process.stdout is not None
        assert process.stderr.readline() == "reading\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == main.INTERRUPTED
        assert (process.stdout.read(), process.stderr.read()) == ("", "")


def test_a_reader_that_has_gone_is_no_error(healthy: Path) -> None:
    end, write_end = os.pipe()
    os.close(end)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "everystep.cli.main", "ls", str(healthy)],
            stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        )  # fmt: skip
    finally:
        os.close(write_end)
    assert (done.returncode, done.stderr) == (141, "")


def test_the_module_can_be_run(healthy: Path) -> None:
    done = python("import runpy, sys; runpy.run_module('everystep.cli.main', run_name='__main__')",
                  "ls", healthy, "--json")  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith('{"path":')


_WITHOUT = """
import sys
from everystep.cli.main import run
status = run(sys.argv[1:])
heavy = {"torch", "numpy", "rich"} & sys.modules.keys()
print(status, sorted(heavy), file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("words", "loaded"),
    [
        (["--help"], ["rich"]),
        (["--version"], []),
        (["ls", "{}"], []),
        (["ls", "{}", "--json"], []),
        (["show", "{}"], []),
        (["verify", "{}"], []),
        (["prune", "{}", "--keep-last", "1", "--yes"], []),
        (["bisect", "{}", "--good", "1", "--bad", "3", "--metric", "at>1"], []),
        (["diff", "{}", "1", "2", "--help"], ["rich"]),
        (["report", "--help"], ["rich"]),
        (["plan", "full", *PLAN], []),
    ],
    ids=" ".join,
)
def test_nothing_heavy_is_imported_for_light_work(
    healthy: Path, words: list[str], loaded: list[str]
) -> None:
    done = python(_WITHOUT, *(word.format(healthy) for word in words))
    assert done.stderr.splitlines()[-1] == f"0 {loaded}"


def test_nothing_heavy_is_imported_for_a_report(
    healthy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    needed = [field.name for field in msgspec.structs.fields(Measure) if field.required]
    zeros = dict.fromkeys(needed, 0) | {"timeline": "main", "step": 1}
    measure = Measure(**zeros)  # type: ignore[arg-type]
    write_measures(LocalBackend(healthy), MeasuredBy(1, 0, 1), [measure])
    done = python(_WITHOUT, "report", healthy)
    assert done.stderr == "0 []\n"


def test_the_heavy_check_sees_torch(healthy: Path) -> None:
    done = python(_WITHOUT, "diff", healthy, "1", "1")
    assert done.stderr == "0 ['numpy', 'torch']\n"
