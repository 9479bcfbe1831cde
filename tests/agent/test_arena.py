"""Staging memory: it outlives its maker, needs no file system, and is given back."""

from __future__ import annotations

import array
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from everystep.agent import arena as module
from everystep.agent.arena import PAGE_BYTES, Arena, available_bytes, whole_pages
from everystep.errors import StoreFailed
from waiting import until

_MAKER = """
import array, os, signal, socket, sys
from everystep.agent.arena import Arena
arena = Arena.made(2, 1 << 16)
arena.slot(1)[:5] = b"alive"
end = socket.socket(fileno=int(sys.argv[1]))
rights = array.array("i", [arena.fd])
end.sendmsg([b"!"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
signal.pause()
"""


def maps() -> list[str]:
    return [
        line for line in Path("/proc/self/maps").read_text().splitlines() if "everystep" in line
    ]


def descriptors() -> list[str]:
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    targets = [os.readlink(link) for link in links if os.path.lexists(link)]
    return [target for target in targets if "everystep" in target]


def resident_bytes(of: str = "Rss:") -> int:
    """How much of all arenas this process has mapped with pages (`of` a kind)."""
    found, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.split()[0].count("-") == 1:
            counts = "everystep-staging" in line
        elif counts and line.startswith(of):
            found += int(line.split()[1]) << 10
    return found


def test_it_outlives_its_maker() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = subprocess.Popen([sys.executable, "-c", _MAKER, str(theirs.fileno())],
                                 pass_fds=[theirs.fileno()])  # fmt: skip
        _, ancillary, _, _ = ours.recvmsg(1, socket.CMSG_SPACE(4))
        child.send_signal(signal.SIGKILL)
        child.wait()
        rights = array.array("i")
        rights.frombytes(ancillary[0][2])
        arena = Arena(rights[0], 2, 1 << 16)
        assert bytes(arena.slot(1)[:6]) == b"alive\0"
        arena.slot(0)[:] = b"x" * (1 << 16)
        arena.close()


def test_nothing_appears_in_a_file_system() -> None:
    before = set(os.listdir("/dev/shm"))
    arena = Arena.made(2, 1 << 20)
    arena.populate()
    assert set(os.listdir("/dev/shm")) == before
    arena.close()


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts")
def test_a_tiny_shared_memory_mount_is_no_obstacle() -> None:
    program = (
        "from everystep.agent.arena import Arena; import shutil\n"
        "assert shutil.disk_usage('/dev/shm').total <= 65536\n"
        "arena = Arena.made(2, 8 << 20); arena.view(0, 16 << 20)[:] = b'x' * (16 << 20)\n"
        "assert arena.populate(); print('fine')"
    )
    command = 'mount -t tmpfs -o size=64k none /dev/shm && exec "$0" -c "$1"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command, sys.executable, program],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"this machine lets nobody mount: {done.stderr.strip()}")
    assert done.stdout == "fine\n", done.stderr


def test_populating_brings_pages_and_changes_nothing() -> None:
    arena = Arena.made(3, 1 << 20)
    arena.slot(1)[7:12] = b"bytes"
    before = resident_bytes()
    assert before < 3 << 20
    if not arena.populate():
        arena.close()
        pytest.skip("the kernel is older than Linux 5.14")
    assert resident_bytes() == 3 << 20
    assert bytes(arena.slot(1)[6:13]) == b"\0bytes\0"
    assert not any(arena.slot(0))
    arena.close()


def test_populating_brings_large_pages_where_there_are_any() -> None:
    arena = Arena.made(2, 3 << 20)
    arena.slot(0)[7:12] = b"bytes"
    populated, large = arena.populate(), resident_bytes("ShmemPmdMapped:")
    can = [
        module._libc.madvise(arena.address + offset, 2 << 20, module._COLLAPSE) == 0
        for offset in range(0, len(arena), 2 << 20)
    ]
    resident, content = resident_bytes(), bytes(arena.view(0, len(arena)))
    arena.close()
    if not populated or not any(can):
        pytest.skip("the kernel has no large pages of 2 MiB, or is older than Linux 6.7")
    assert large == sum(can) * (2 << 20)
    assert resident == 6 << 20
    assert content == b"\0" * 7 + b"bytes" + b"\0" * ((6 << 20) - 12)


def test_where_the_kernel_has_no_large_pages_small_ones_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "_LARGE_PAGE", tmp_path / "none")
    arena = Arena.made(2, 3 << 20)
    populated, resident = arena.populate(), resident_bytes()
    large = resident_bytes("ShmemPmdMapped:")
    arena.close()
    if not populated:
        pytest.skip("the kernel is older than Linux 5.14")
    assert (resident, large) == (6 << 20, 0)


def test_slots_lie_one_after_the_other() -> None:
    arena = Arena.made(2, PAGE_BYTES)
    arena.slot(1)[0] = 7
    assert arena.view(PAGE_BYTES, 1)[0] == 7
    assert len(arena.slot(0)) == len(arena.slot(1)) == PAGE_BYTES
    arena.close()


def test_closing_gives_the_memory_back() -> None:
    before = maps(), descriptors()
    arena = Arena.made(2, 1 << 20)
    arena.populate()
    assert len(maps()) == len(before[0]) + 1
    assert len(descriptors()) > len(before[1])
    arena.close()
    assert (maps(), descriptors()) == before


def test_a_view_keeps_the_memory_until_it_is_gone() -> None:
    before = maps(), descriptors()
    arena = Arena.made(2, PAGE_BYTES)
    view = arena.slot(1)
    arena.close()
    view[0] = 3
    assert view[0] == 3
    view.release()
    del arena
    until(lambda: (maps(), descriptors()) == before, 60, "the memory to be given back")


@pytest.mark.parametrize("slot_bytes", [1 << 46, 1 << 61, 1 << 62, 1 << 70])
def test_too_large_a_wish_is_refused_with_a_hint(
    slot_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = maps(), descriptors()
    with pytest.raises(StoreFailed) as caught:
        Arena.made(2, slot_bytes)
    assert "blocking=True" in (caught.value.hint or "")
    monkeypatch.setattr(module, "available_bytes", lambda: None)  # the kernel alone must say so
    with pytest.raises(StoreFailed) as caught:
        Arena.made(2, slot_bytes << 10)
    assert "blocking=True" in (caught.value.hint or "")
    assert (maps(), descriptors()) == before


def test_more_than_there_is_memory_for_is_refused_before_it_is_touched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "available_bytes", lambda: 5 << 20)
    with pytest.raises(StoreFailed, match=r"not enough memory .*2 x 3,145,728.*5,242,880"):
        Arena.made(2, 3 << 20)
    arena = Arena.most(3, 2 << 20)  # room for two of three
    assert arena.slots == 2
    arena.close()
    with pytest.raises(StoreFailed):
        Arena.most(3, 3 << 20)


def test_the_memory_that_is_left_is_the_least_of_host_and_control_groups(tmp_path: Path) -> None:
    def write(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    assert available_bytes(tmp_path) is None
    write("proc/meminfo", "MemTotal: 900 kB\nMemAvailable:      700 kB\n")
    assert available_bytes(tmp_path) == 700 << 10
    write("proc/self/cgroup", "1:cpu:/elsewhere\n0::/job/trainer\n")
    assert available_bytes(tmp_path) == 700 << 10
    group = "sys/fs/cgroup/job"
    write(f"{group}/trainer/memory.max", "max\n")
    write(f"{group}/memory.max", "500000\n")
    write(f"{group}/memory.current", "400000\n")
    write(f"{group}/memory.stat", "anon 300000\nactive_file 20000\ninactive_file 30000\n")
    assert available_bytes(tmp_path) == 150_000
    write(f"{group}/memory.current", "900000\n")
    assert available_bytes(tmp_path) == 1
    assert available_bytes() is not None


def test_nobody_can_cut_it_under_the_other() -> None:
    arena = Arena.made(2, PAGE_BYTES)
    for nbytes in (0, PAGE_BYTES, 4 * PAGE_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, nbytes)
    arena.close()


def test_a_descriptor_of_something_else_is_refused_and_closed() -> None:
    read, write = os.pipe()
    os.close(write)
    with pytest.raises(StoreFailed, match="cannot be mapped"):
        Arena(read, 2, PAGE_BYTES)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(read)


@pytest.mark.parametrize(("nbytes", "expected"), [(0, 0), (1, 1), (PAGE_BYTES, 1)])
def test_whole_pages(nbytes: int, expected: int) -> None:
    assert whole_pages(nbytes) == expected * PAGE_BYTES
