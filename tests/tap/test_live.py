"""The live ring on a pair of virtual interfaces: frames as sent, the filter, the counters."""

from __future__ import annotations

import os
import socket
import subprocess

import pytest

from everystep.errors import CaptureFailed
from everystep.tap.live import Live
from everystep.tap.packets import Parser
from everystep.tap.roce import Tracker
from tap import frames as f
from waiting import until

needs_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root"
)


def sender(interface: str) -> socket.socket:
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    sock.bind((interface, 0))
    return sock


def collect(live: Live, wanted: int) -> list[bytes]:
    """Frames until there are so many."""
    got: list[bytes] = []

    def more() -> bool:
        frames = live.next(0.01)
        if frames is not None:
            assert frames.first == len(got) + 1
            assert not frames.data.flags.writeable
            for row in frames.table:
                assert row["time_ns"] > 10**18
                got.append(frames.data[row["at"] : row["at"] + row["captured"]].tobytes())
        return len(got) >= wanted

    until(more, 60, f"{wanted} frames")
    return got


@needs_root
@pytest.mark.root
def test_frames_come_as_they_were_sent(pair: tuple[str, str]) -> None:
    a, b = pair
    roce = [frame for i in range(300) for frame in make(i)]
    noise = f.ethernet(f.ip4(f.udp(b"x" * 50, destination=53), 17), 0x0800)
    with Live(a, blocks=8, block_bytes=1 << 18) as live, sender(b) as out:
        for frame in roce:
            out.send(frame)
            out.send(noise)
        assert collect(live, len(roce)) == roce
        assert live.next(0.02) is None
        drops = live.drops()
        assert (drops.packets, drops.dropped) == (len(roce), 0)
        assert live.drops() == drops


def make(i: int) -> list[bytes]:
    return f.write(3 * i, bytes([i % 256]) * 2500, va=i)


@needs_root
@pytest.mark.root
def test_messages_live(pair: tuple[str, str]) -> None:
    a, b = pair
    parser, tracker = Parser(), Tracker()
    done: list[bytes] = []
    with Live(a) as live, sender(b) as out:
        for i in range(100):
            for frame in make(i):
                out.send(frame)

        def more() -> bool:
            frames = live.next(0.01)
            if frames is not None:
                for messages in tracker.feed(parser.parse(frames)):
                    for row in messages.table:
                        done.append(messages.data[row["at"] : row["at"] + row["nbytes"]].tobytes())
            return len(done) >= 100

        until(more, 60, "100 messages")
    assert done == [bytes([i % 256]) * 2500 for i in range(100)]


@needs_root
@pytest.mark.root
def test_tcp_ports_behind_a_tag_and_outgoing(pair: tuple[str, str]) -> None:
    a, b = pair
    wanted = f.ethernet(f.ip4(f.tcp(b"hello", destination=7777), 6), 0x0800, tags=[0x8100])
    with (
        Live(a, roce=False, tcp_ports=[7777]) as there,
        Live(b, roce=False, tcp_ports=[7777]) as here,
        Live(b, roce=False, tcp_ports=[7777], ignore_outgoing=True) as deaf,
        sender(b) as out,
    ):
        out.send(f.ethernet(f.ip4(f.tcp(b"no", destination=7778), 6), 0x0800))
        out.send(wanted)
        # the kernel takes the outer tag off
        untagged = wanted[:12] + wanted[16:]
        (got,) = collect(there, 1)
        assert got in (wanted, untagged)
        assert collect(here, 1)[0] in (wanted, untagged)
        assert deaf.next(0.02) is None


@needs_root
@pytest.mark.root
def test_what_has_no_room_is_counted(pair: tuple[str, str]) -> None:
    a, b = pair
    frame = f.roce(f.SEND_ONLY, 0, bytes(4000))
    with Live(a, blocks=2, block_bytes=1 << 16) as live, sender(b) as out:
        for _ in range(200):
            out.send(frame)
        until(lambda: live.drops().packets == 200, 60, "every frame to be counted")
        drops = live.drops()
        assert 0 < drops.dropped < 200 and drops.packets == 200
        got = collect(live, drops.packets - drops.dropped)
        assert got == [frame] * (drops.packets - drops.dropped)


@needs_root
@pytest.mark.root
def test_an_interface_that_goes_is_an_error(pair: tuple[str, str]) -> None:
    a, _ = pair
    with Live(a) as live:
        subprocess.run(["ip", "link", "set", a, "down"], check=True)
        with pytest.raises(CaptureFailed, match=a):
            live.next(5)


@needs_root
@pytest.mark.root
def test_no_such_interface() -> None:
    with pytest.raises(CaptureFailed, match="nothere"):
        Live("nothere")
