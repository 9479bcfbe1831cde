"""`everystep tap stats`: what it counts, and what it says where it may not."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from everystep.cli import main, tap_stats
from everystep.cli.tap_stats import Stats
from everystep.cli.tap_watched import Watched
from everystep.tap import live
from everystep.tap.pieces import Frames
from tap.generator import Job, Wire, mirrored, random_inputs
from tap.gloo_wire import Group
from tap.recording import frames_of
from waiting import until

SIZES = (5_001, 701, 40_001)
"""Elements: the last segment of gloo's ring is shorter than the others, which tells the ranks."""
ITERATIONS = 4


def nccl(ranks: int) -> list[bytes]:
    """What the port of rank 0 shows of some iterations."""
    wire = Wire(ranks=ranks)
    job = Job(wire)
    for i in range(ITERATIONS):
        for n in SIZES:
            job.all_reduce(random_inputs(wire, n, i))
    return [packet.frame for packet in mirrored(job.packets, 0)]


def gloo(ranks: int) -> list[bytes]:
    group = Group(ranks)
    for _ in range(ITERATIONS):
        for n in SIZES:
            group.all_reduce([np.ones(n, np.float32)] * ranks)
    group.close()
    return group.packets


class Nobody:
    """A live interface at which nothing is dropped."""

    interface = "eth9"

    def drops(self) -> live.Drops:
        return live.Drops(0, 0, 0)


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_is_counted(ranks: int) -> None:
    watched = Watched(ranks, 4, SIZES)
    roce, tcp = nccl(ranks), gloo(ranks)
    frames = [*roce, *tcp, b"\0" * 60]
    for at in range(0, len(frames), 100):
        watched.take(frames_of(frames[at : at + 100], at + 1))
    record = watched.record(Nobody(), 2.0)
    assert (record.interface, record.seconds, record.dropped) == ("eth9", 2.0, 0)
    assert record.frames == len(frames)
    assert record.wire_bytes == sum(map(len, frames))
    assert (record.roce_packets, record.tcp_packets) == (len(roce), len(tcp))
    assert record.roce_connections == record.gloo_streams == 2
    assert record.nccl_collectives == record.gloo_collectives == len(SIZES) * ITERATIONS
    assert record.collectives_per_s == len(SIZES) * ITERATIONS
    assert record.doubts == 0
    assert record.skipped["not IP"] == 1


class Clock:
    """Stands still until so many frames were taken, then goes on by three seconds: on a machine
    that is slow, too, all of them come in time."""

    def __init__(self, frames: int) -> None:
        self._left, self._began_s = frames, time.monotonic()

    def counted(self, take: Callable[[Watched, Frames], None]) -> Callable[[Watched, Frames], None]:
        def counting(watched: Watched, frames: Frames) -> None:
            take(watched, frames)
            self._left -= len(frames.table)

        return counting

    def monotonic(self) -> float:
        is_over = self._left <= 0 or time.monotonic() > self._began_s + 100.0
        return 3.0 * is_over


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize("as_json", [True, False])
def test_live(
    pair: tuple[str, str],
    as_json: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a, b = pair
    frames = nccl(2)
    clock = Clock(len(frames))
    monkeypatch.setattr(tap_stats, "time", clock)
    monkeypatch.setattr(Watched, "take", clock.counted(Watched.take))
    index = str(socket.if_nametoindex(a))

    def is_bound() -> bool:
        """Whether a packet socket runs at this interface."""
        lines = Path("/proc/net/packet").read_text(encoding="ascii").splitlines()
        return any(line.split()[4:6] == [index, "1"] for line in lines)

    def send() -> None:
        until(is_bound, 60, "the capture to begin")
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0) as out:
            out.bind((b, 0))
            for frame in frames:
                out.send(frame)

    sender = threading.Thread(target=send)
    sender.start()
    counts = ["--counts", ",".join(map(str, SIZES))]
    more = ["--json"] if as_json else []
    status = main.run(["tap", "stats", a, "--seconds", "3", *counts, *more])
    sender.join()
    said = capsys.readouterr()
    assert (status, said.err) == (0, "")
    if not as_json:
        assert f"{a}: {len(frames):,} frames in 3 s" in said.out
        assert "0 frames dropped by the kernel" in said.out
        return
    record = msgspec.json.decode(said.out, type=Stats)
    assert (record.frames, record.roce_packets, record.dropped) == (len(frames), len(frames), 0)
    assert record.roce_connections == 2
    assert record.nccl_collectives == len(SIZES) * ITERATIONS


def test_without_the_right_to_capture(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*arguments: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(live.socket, "socket", refused)
    assert main.run(["tap", "stats", "eth0"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "cannot capture eth0: [Errno 1] Operation not permitted" in said.err
    assert "try: run as root" in said.err


@pytest.mark.parametrize(
    "words",
    [
        ["--seconds", "0"],
        ["--seconds", "soon"],
        ["--ports", "x"],
        ["--ports", "70000"],
        ["--counts", "0"],
    ],
)
def test_wrong_use(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["tap", "stats", "eth0", *words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert words[1] in said.err or "nothing" in said.err
