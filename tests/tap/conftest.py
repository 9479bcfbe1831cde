"""What tests of live capture share."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest


@pytest.fixture
def pair() -> Iterator[tuple[str, str]]:
    """Names of two interfaces of which each receives what the other sends."""
    a, b = f"tap{os.getpid() % 100_000}a", f"tap{os.getpid() % 100_000}b"
    made = subprocess.run(
        ["ip", "link", "add", a, "type", "veth", "peer", "name", b],
        capture_output=True,
        check=False,
    )
    if made.returncode:
        pytest.skip("virtual interfaces cannot be made here")
    try:
        for name in (a, b):
            subprocess.run(["ip", "link", "set", name, "mtu", "9000", "up"], check=True)
        yield a, b
    finally:
        subprocess.run(["ip", "link", "del", a], check=True)
