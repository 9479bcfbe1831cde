"""Hosts of one machine: network namespaces that share a file system, joined by a switch."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from waiting import until

DEADLINE_S = 60.0


def missing() -> str | None:
    """Why there can be no such hosts here; None: there can."""
    if os.geteuid() != 0:
        return "needs root for network namespaces"
    if shutil.which("ip") is None:
        return "needs the command ip"
    name = f"evs{secrets.token_hex(3)}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        return "network namespaces cannot be made here"
    _ip("netns", "del", name)
    return None


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=True)
    return done.stdout


class Host:
    """A host: its network, and the processes that were started there."""

    def __init__(self, name: str, number: int) -> None:
        self.name, self.address = name, f"10.77.0.{number + 1}"
        self.started: list[subprocess.Popen[str]] = []

    def start(
        self, command: Sequence[str], out: Path, env: dict[str, str]
    ) -> subprocess.Popen[str]:
        """A process of this host.

        Args:
            out: takes what it says.
        """
        with out.open("w") as said:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.name, *command],
                stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT, text=True,
                env={**os.environ, **env, "GLOO_SOCKET_IFNAME": "eth0"},
            )  # fmt: skip
        self.started.append(process)
        return process

    def pids(self) -> list[int]:
        """All processes here, each of which comes from one that was started."""
        return [int(pid) for pid in _ip("netns", "pids", self.name).split()]

    def kill(self) -> None:
        """All of them end at once, as with the host."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.started:
            process.wait(DEADLINE_S)
        self.started.clear()
        until(lambda: not self.pids(), DEADLINE_S, f"the processes of {self.name} to end")

    def cut_off(self) -> None:
        """Nothing comes through to or from it any more, and nobody is told."""
        _ip("-n", self.name, "link", "set", "eth0", "down")


@contextlib.contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """So many hosts, each of which reaches all others; in the end nothing is left of them."""
    tag = f"evs{secrets.token_hex(3)}"
    switch = f"{tag}s"
    found = [Host(f"{tag}h{n}", n) for n in range(count)]
    with contextlib.ExitStack() as made:
        _ip("netns", "add", switch)
        made.callback(_ip, "netns", "del", switch)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        for number, host in enumerate(found):
            _ip("netns", "add", host.name)
            made.callback(_ip, "netns", "del", host.name)
            made.callback(host.kill)
            port = f"port{number}"
            _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0",
                "netns", host.name)  # fmt: skip
            _ip("-n", switch, "link", "set", port, "master", "br0", "up")
            _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
            _ip("-n", host.name, "link", "set", "eth0", "up")
            _ip("-n", host.name, "link", "set", "lo", "up")
        yield found
