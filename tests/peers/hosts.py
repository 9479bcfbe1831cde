"""Hosts of one machine: network namespaces that share a file system, joined by a switch."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from waiting import until
from zygote import Child, Zygote

DEADLINE_S = 150.0
"""On a machine that others use, too."""

_NAMESPACES = Path("/run/netns")
"""Where `ip` keeps those that have a name."""

_NEW_NETWORK = 0x40000000
"""CLONE_NEWNET."""


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


def enter(host: str) -> None:
    """Let this thread, and all that it starts, be in the network of that host.

    Args:
        host: its name.
    """
    library = ctypes.CDLL(None, use_errno=True)
    fd = os.open(_NAMESPACES / host, os.O_RDONLY)
    failed = library.setns(fd, _NEW_NETWORK)
    os.close(fd)
    if failed:
        raise OSError(ctypes.get_errno(), f"no way to {host}")


def move_to(host: str) -> None:
    """Let this process, which has one thread, and all that it starts be of that host.

    Args:
        host: its name.
    """
    enter(host)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"


@contextlib.contextmanager
def network() -> Iterator[str]:
    """A network with a loopback interface, in which nobody else is; its name."""
    name = f"evs{secrets.token_hex(3)}"
    _ip("netns", "add", name)
    try:
        _ip("-n", name, "link", "set", "lo", "up")
        yield name
    finally:
        _ip("netns", "del", name)


class Host:
    """A host: its network, and the processes that were started there."""

    def __init__(self, name: str, number: int, zygote: Zygote) -> None:
        self.name, self.address = name, f"10.77.0.{number + 1}"
        self.started: list[Child] = []
        self._zygote = zygote

    def start(self, function: str, out: Path, **arguments: object) -> Child:
        """A process of this host, forked: `function(host=…, **arguments)`, which moves there.

        Args:
            out: takes what it says.
        """
        child = self._zygote.start(function, out, host=self.name, **arguments)
        self.started.append(child)
        return child

    def pids(self) -> list[int]:
        """All processes here, each of which comes from one that was started."""
        return [int(pid) for pid in _ip("netns", "pids", self.name).split()]

    def kill(self) -> None:
        """All of them end at once, as with the host."""
        for child in self.started:  # one may not have moved here yet
            child.kill()
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for child in self.started:
            child.wait(DEADLINE_S)
        self.started.clear()
        until(lambda: not self.pids(), DEADLINE_S, f"the processes of {self.name} to end")

    def cut_off(self) -> None:
        """Nothing comes through to or from it any more, and nobody is told."""
        _ip("-n", self.name, "link", "set", "eth0", "down")

    def come_back(self) -> None:
        """As new: nothing runs there, and it is reached again."""
        self.kill()
        _ip("-n", self.name, "link", "set", "eth0", "up")


@contextlib.contextmanager
def hosts(count: int, zygote: Zygote) -> Iterator[list[Host]]:
    """So many hosts, each of which reaches all others; in the end nothing is left of them."""
    tag = f"evs{secrets.token_hex(3)}"
    switch = f"{tag}s"
    found = [Host(f"{tag}h{n}", n, zygote) for n in range(count)]
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
