"""Where the agents of a session listen for each other, and the secret by which they know each
other, in small files of the run.

Whoever may read the secret may join, so only the user's own processes can. Such files are no part
of any state, and are lost without harm.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

import msgspec
from msgspec import Struct

from everystep.errors import Damaged, StoreError, StoreFailed
from everystep.store.backend import Backend, NewFile
from everystep.store.local import translated
from everystep.store.newest import FOLDER, parse_address, parse_token

TOKEN_BYTES = 32
_MAX_BYTES = 64 << 10


class Address(Struct, frozen=True, kw_only=True):
    """Where the agent of a rank listens."""

    rank: int
    host: str
    """An IP address."""
    port: int
    certificate: str | None
    """The SHA-256 of its certificate (DER), 64 hexadecimal digits; None: no TLS, which only an
    address of loopback may do without."""
    holds: list[int]
    """The ranks of whose states it holds copies."""


def address_file(session: int, rank: int) -> str:
    """The name of the file."""
    return f"{FOLDER}/address-s{session:06d}-r{rank:05d}.json"


def token_file(session: int) -> str:
    """The name of the file."""
    return f"{FOLDER}/token-s{session:06d}"


def put_address(backend: Backend, session: int, address: Address) -> None:
    """Tell where an agent listens.

    Raises:
        StoreError: the store refuses.
    """
    data = msgspec.json.encode(address)
    backend.put([NewFile(address_file(session, address.rank), len(data), [data])])


def read_address(backend: Backend, session: int, rank: int) -> Address | None:
    """Where the agent of a rank listens; None: it is not known (yet)."""
    name = address_file(session, rank)
    try:
        nbytes = backend.size(name)
        if nbytes > _MAX_BYTES:
            return None
        data = bytearray(nbytes)
        backend.read(name, memoryview(data), 0)
        found = msgspec.json.decode(data, type=Address)
    except (StoreError, msgspec.MsgspecError):
        return None
    return found if found.rank == rank else None


def newest_session(backend: Backend) -> tuple[int, list[Address]]:
    """The newest session whose agents had copies of each other, and where they listened; 0: there
    is none."""
    found: dict[int, list[int]] = {}
    with contextlib.suppress(StoreError):
        for entry in backend.list(FOLDER):
            place = parse_address(entry.name)
            if place is not None:
                found.setdefault(place[0], []).append(place[1])
    if not found:
        return 0, []
    session = max(found)
    addresses = [read_address(backend, session, rank) for rank in sorted(found[session])]
    return session, [address for address in addresses if address is not None]


def forget(backend: Backend, before: int) -> None:
    """Remove the files of sessions before this one."""
    with contextlib.suppress(StoreError):
        for entry in list(backend.list(FOLDER)):
            place = parse_address(entry.name)
            session = parse_token(entry.name) if place is None else place[0]
            if session is not None and session < before:
                backend.delete(entry.name)


def make_token(root: Path, session: int) -> None:
    """Make the secret of a session: a file that only this user may read.

    Args:
        root: of the run.

    Raises:
        StoreFailed: it cannot be written.
    """
    path = root / token_file(session)
    with translated(path):
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
    make_secret(path)


def make_secret(path: Path) -> None:
    """Make a file with a secret that only this user may read.

    Raises:
        StoreFailed: it is there already, or cannot be written.
    """
    with translated(path):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            os.write(fd, secrets.token_hex(TOKEN_BYTES).encode())
        finally:
            os.close(fd)


def read_token(root: Path, session: int) -> bytes:
    """The secret of a session.

    Args:
        root: of the run.

    Raises:
        Missing: there is none.
        Damaged: it is none.
        StoreFailed: others may read it.
    """
    return read_secret(root / token_file(session))


def read_secret(path: Path) -> bytes:
    """The secret in a file: 64 hexadecimal digits, which nobody else may read.

    Raises:
        Missing, Damaged, StoreFailed: as `read_token`.
    """
    with translated(path):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            found = os.fstat(fd)
            data = os.read(fd, 4 * TOKEN_BYTES)
        finally:
            os.close(fd)
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise StoreFailed(
            "others may read the secret of the agents", path=path, hint=f"chmod 600 {path}"
        )
    data = data.rstrip(b"\n")
    if len(data) != 2 * TOKEN_BYTES:
        raise Damaged("is not a secret of 64 hexadecimal digits", path=path, at=0)
    return data
