"""Records as tables, plain text and JSON."""

from __future__ import annotations

import errno
import math
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from delta_runs import train_run
from everystep.cli.output import (
    Cell,
    Column,
    Line,
    Output,
    Table,
    as_text,
    clean,
    counted,
    number,
    plain,
    size,
    spoken_value,
)


def test_a_plain_table_is_aligned_and_as_wide_as_its_content() -> None:
    columns = [Column("name"), Column("empty"), Column("n", right=True), Column("last")]
    long = "x" * 200
    rows = [["a", "", "1", "end"], [Cell(long, "red"), "", "1,000", ""]]
    assert as_text(Table(columns, rows)).splitlines() == [
        "name" + " " * 196 + "      n  last",
        "a" + " " * 199 + "      1  end",
        long + "  1,000",
    ]


def test_names_from_files_cannot_command_a_terminal() -> None:
    hostile = "a\x1b[2J\n\u202eb\udc80"
    shown = "a\\x1b[2J\\n\\u202eb\\udc80"
    assert clean(hostile) == shown
    assert as_text(Line(hostile, "red")) == shown + "\n"
    assert as_text(Table([Column("x")], [[Cell(hostile)]])) == "x\n" + shown + "\n"
    assert clean("schöne Grüße") == "schöne Grüße"


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (999_949, "999.9 kB"), (999_951, "1.0 MB"),
     (12_345_678, "12.3 MB"), (10**12, "1.0 TB"), (10**19, "10,000.0 PB")],
)  # fmt: skip
def test_lengths_for_people(nbytes: int, text: str) -> None:
    assert size(nbytes) == text


def test_numbers_of_things() -> None:
    assert [counted(n, "step") for n in (0, 1, 2048)] == ["0 steps", "1 step", "2,048 steps"]
    assert [number(x) for x in (1.5, math.inf, -math.inf, math.nan)] == [1.5, "inf", "-inf", "nan"]


def test_stored_values_in_plain_json() -> None:
    nan = struct.pack(">d", math.nan).hex()
    stored = {
        "lr": 0.1,
        "betas": {"$tuple": [0.9, {"$float": nan}]},
        "big": {"$int": hex(2**80)},
        "lrs": [{"$tensor": "/a/b"}, {"$array": ["/c", "<f4", [2]]}],
        "pairs": {"$dict": [[1, {"$set": [2]}]]},
        "kind": {"$dtype": "float32"},
        "odd": {"$float": "zz"},
        "none": None,
    }
    assert plain(stored) == {
        "lr": 0.1,
        "betas": [0.9, "nan"],
        "big": 2**80,
        "lrs": ["tensor /a/b", "tensor /c"],
        "pairs": [[1, [2]]],
        "kind": "float32",
        "odd": {"$float": "zz"},
        "none": None,
    }
    assert spoken_value([0.9, "x"]) == '[0.9,"x"]'
    assert spoken_value(0.123456789) == "0.123457"
    assert spoken_value("x" * 50, 10) == "x" * 9 + "…"


def test_without_a_terminal_there_is_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with Output(as_json=False).progress("reading", 10) as progress:
        progress(10)
    assert capsys.readouterr() == ("", "")


def on_a_terminal(*words: object, columns: int) -> tuple[int, str]:
    """Status and output of a command whose three streams are a terminal."""
    ours, theirs = os.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns)}
    environment.pop("NO_COLOR", None)
    with subprocess.Popen(
        [sys.executable, "-m", "everystep.cli.main", *map(str, words)],
        stdin=theirs, stdout=theirs, stderr=theirs, env=environment,
    ) as process:  # fmt: skip
        os.close(theirs)
        said = b""
        try:
            while chunk := os.read(ours, 65536):
                said += chunk
        except OSError as error:
            if error.errno != errno.EIO:  # the end of a pseudo-terminal
                raise
        finally:
            os.close(ours)
    return process.returncode, said.decode()


def test_a_terminal_gets_colours_and_a_bar_and_nothing_is_cut(forked: Path) -> None:
    status, said = on_a_terminal("verify", forked, columns=300)
    assert status == 0
    assert "\x1b[32m" in said, "no green"
    assert "verifying" in said, "no bar"
    status, said = on_a_terminal("show", forked, "--tensors", columns=40)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", said)
    squeezed = re.sub(r"\s", "", text)
    assert status == 0
    assert "…" not in text
    assert "step" in squeezed and max(map(len, text.splitlines())) <= 40


def test_json_on_a_terminal_is_json(healthy: Path) -> None:
    status, said = on_a_terminal("ls", healthy, "--json", columns=40)
    assert status == 0
    assert said.startswith('{"path":') and said.count("\n") == 1 and "\x1b" not in said


def test_a_fold_has_a_bar_that_counts_steps(tmp_path: Path) -> None:
    trained = train_run(tmp_path / "run")
    status, said = on_a_terminal("verify", trained.path, "--deep", columns=200)
    assert status == 0
    assert re.search(r"folding.*10/10", said), said


def test_a_search_tells_how_far_it_is(tmp_path: Path) -> None:
    trained = train_run(tmp_path / "run", upto=6)
    words = ["--good", "2", "--bad", "6", "--metric", "loss<0.3"]
    status, said = on_a_terminal("bisect", trained.path, *words, columns=200)
    assert status == 0
    assert "main:4: bad (2 steps left)\r\nmain:3: good (1 step left)\r\n" in said
