"""A port of a switch whose frames, of both directions, come to another host as well."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator

from peers.hosts import Host

INTERFACE = "mirror0"
"""Of the host that sees them."""


def missing() -> str | None:
    """Why there can be no such mirror here; None: there can."""
    return None if shutil.which("tc") else "needs the command tc"


def _run(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


@contextlib.contextmanager
def mirrored(seen: Host, by: Host) -> Iterator[None]:
    """Let `by` see all frames of the port of `seen`, on `INTERFACE`."""
    place = seen.name.rindex("h")
    switch, number = seen.name[:place] + "s", seen.name[place + 1 :]
    port, shown = f"port{number}", f"mirror{number}"
    _run("ip", "-n", switch, "link", "add", shown, "type", "veth", "peer", "name", INTERFACE,
         "netns", by.name)  # fmt: skip
    try:
        _run("ip", "-n", switch, "link", "set", shown, "up")
        _run("ip", "-n", by.name, "link", "set", INTERFACE, "up")
        _run("tc", "-n", switch, "qdisc", "add", "dev", port, "clsact")
        for way in ("ingress", "egress"):
            rule = ["protocol", "all", "u32", "match", "u32", "0", "0"]
            copy = ["action", "mirred", "egress", "mirror", "dev", shown]
            _run("tc", "-n", switch, "filter", "add", "dev", port, way, *rule, *copy)
        yield
    finally:
        subprocess.run(["tc", "-n", switch, "qdisc", "del", "dev", port, "clsact"], check=False)
        _run("ip", "-n", switch, "link", "del", shown)


def sent_bytes(host: Host) -> int:
    """What the host has sent over its port."""
    return _counted(host)[8]


def passed_bytes(host: Host) -> int:
    """What the host has sent and received over its port."""
    return _counted(host)[0] + _counted(host)[8]


def _counted(host: Host) -> list[int]:
    text = _run("ip", "netns", "exec", host.name, "cat", "/proc/net/dev")
    line = next(line for line in text.splitlines() if line.strip().startswith("eth0:"))
    return [int(number) for number in line.split(":")[1].split()]
