"""`everystep shadow`: what it needs, what it takes, and how it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from small_runs import Said
from waiting import until

Cli = Callable[..., Said]

DEADLINE_S = 60.0


def words(folder: Path, *more: object, listen: str = "127.0.0.1:1") -> list[object]:
    token = folder / "token"
    return ["shadow", folder / "run", "--listen", listen, "--token-file", token, *more]


@pytest.mark.parametrize(
    ("more", "status", "problem"),
    [
        (["--tap", "eth1", "--capture", "port.pcapng"], 2, "in one place"),
        (["--capture", "/nowhere/port.pcapng"], 1, "cannot be read"),
        (["--persist-every", "0"], 2, "greater than or equal to 1"),
    ],
)
def test_wrong_use(cli: Cli, tmp_path: Path, more: list[object], status: int, problem: str) -> None:
    found = cli(*words(tmp_path, *more))
    assert found.status == status
    assert problem in found.err


def test_no_address(cli: Cli, tmp_path: Path) -> None:
    found = cli(*words(tmp_path, listen="host"))
    assert found.status == 2
    assert "--listen" in found.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_listens_until_a_signal(tmp_path: Path, number: int) -> None:
    capture, told = tmp_path / "port.pcapng", tmp_path / "told"
    capture.touch()  # the program that captures has just begun
    with socket.create_server(("127.0.0.1", 0)) as free:
        listen = f"127.0.0.1:{free.getsockname()[1]}"
    command = words(tmp_path, "--capture", capture, "--deltas", listen=listen)
    with told.open("wb") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "everystep.cli.main", *map(str, command)],
            stdout=subprocess.PIPE, stderr=err,
        )  # fmt: skip
        try:
            until(lambda: "listening" in told.read_text(), DEADLINE_S, "it to listen")
            os.kill(process.pid, number)
            out, _ = process.communicate(timeout=DEADLINE_S)
        finally:
            process.kill()
            process.wait()
    assert process.returncode == 0
    assert b"nothing was held" in out
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
