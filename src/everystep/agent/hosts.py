"""The trainer's part in copies on other hosts: which rank is where, the session's secret, and the
call to those that hold copies of ranks that are lost."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import struct
import threading
import time
from pathlib import Path

from everystep.agent import protocol as p
from everystep.agent import wire as w
from everystep.agent.certificates import is_installed
from everystep.errors import EverystepError, UsageError
from everystep.recovery.agree import on_first_rank
from everystep.state.ranks import Ranks
from everystep.store import addresses as at
from everystep.store.backend import Backend
from everystep.strategies import Peers

_log = logging.getLogger("everystep")

_INTERFACE_ADDRESS = 0x8915
"""SIOCGIFADDR, linux/sockios.h."""

RESCUE_S = 120.0
"""For so long a restart waits for the states of lost ranks to be written."""


def host() -> str:
    """What tells this host from others: its name, its start, and its network."""
    boot, network = "", ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with contextlib.suppress(OSError):
        network = str(os.stat("/proc/self/ns/net").st_ino)
    return f"{socket.gethostname()} {boot} {network}"


def address() -> str:
    """The IP address of this host that gloo was told to use, or that on the way to rank 0, where
    torch has been told where that is; else that of loopback."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        asked = struct.pack("256s", name.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(probe, _INTERFACE_ADDRESS, asked)[20:24])
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(os.environ.get("MASTER_ADDR", ""), 1, type=socket.SOCK_DGRAM)
        with socket.socket(found[0][0], socket.SOCK_DGRAM) as probe:
            probe.connect(found[0][4])  # sends nothing
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def plan(path: Path, session: int, ranks: Ranks, peers: Peers | None) -> p.PeerPlan | None:
    """How the agents of a session find each other; None: there is only one host, or nothing is
    wanted. Collective.

    Args:
        path: of the run.

    Raises:
        UsageError: a rank has no address that others reach, or cannot make a certificate.
        StoreError: the secret cannot be written.
    """
    if peers is None:
        return None
    own = peers.address or address()
    told = ranks.gather([host(), own, is_installed()])
    hosts = [str(one[0]) for one in told]
    if len(set(hosts)) < 2:
        _log.error("all ranks are on one host: there are no copies on others")
        return None
    for rank, (_, other, has_certificates) in enumerate(told):
        if w.is_loopback(other):
            raise UsageError(
                f"rank {rank} has no address that other hosts reach",
                found=other,
                hint="give Peers(address=…) an address of that host",
            )
        if not has_certificates:
            raise UsageError(
                f"rank {rank} cannot make a certificate: cryptography is not installed",
                hint="pip install everystep[peers] on every host",
            )
    on_first_rank(ranks, lambda: at.make_token(path, session))
    return p.PeerPlan(hosts=hosts, copies=peers.copies, bytes_per_s=peers.bytes_per_s, address=own)


def rescue(backend: Backend, path: Path) -> list[int]:
    """Let the agents of the last session write the states of ranks whose agents are gone. Call it
    on one rank, before any has an agent of its own; where nobody had copies it does nothing.

    Args:
        path: of the run.

    Returns:
        The ranks whose states were written.
    """
    session, addresses = at.newest_session(backend)
    rescued: list[int] = []
    try:
        token = at.read_token(path, session) if session else b""
    except EverystepError:
        return rescued
    threads = [
        threading.Thread(target=_ask, args=(one, token, rescued), daemon=True)
        for one in addresses
        if one.holds
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if rescued:
        _log.warning("rank %s is lost, and was had from another host", sorted(rescued))
    return rescued


def _ask(one: at.Address, token: bytes, rescued: list[int]) -> None:
    """Ask one agent."""
    wire: w.Wire | None = None
    try:
        wire = w.connected(one, token)
        wire.send(w.Rescue())
        ends_s = time.monotonic() + RESCUE_S
        while time.monotonic() < ends_s:
            if wire.has_come(w.ALIVE_S):
                answer = wire.receive()
                if isinstance(answer, w.Rescued):
                    rescued += answer.ranks
                    return
    except w.Gone as error:  # it is lost itself
        if isinstance(error, EverystepError):
            _log.error("the agent of rank %s: %s", one.rank, error.headline())
    finally:
        if wire is not None:
            wire.close()
