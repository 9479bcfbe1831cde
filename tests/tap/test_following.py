"""A capture that is read while it is written: the same frames, however the writing is cut."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import numpy as np
import pytest

from everystep.errors import CaptureFailed, NotACapture
from everystep.tap import capture
from everystep.tap.following import Followed
from everystep.tap.pieces import Frames
from tap import frames as f
from waiting import until

SOME = [f.ethernet(bytes([i]) * (40 + 7 * i), 0x88CC) for i in range(30)]
DEADLINE_S = 100.0

FILES = {
    "pcap": f.pcap(SOME),
    "pcap, big-endian": f.pcap(SOME, big=True),
    "pcapng": f.section() + f.interface() + b"".join(f.enhanced(one, 5) for one in SOME),
    "two sections": b"".join(
        f.section(big=big) + f.interface(big=big)
        + b"".join(f.enhanced(one, 5, big=big) for one in SOME)
        for big in (False, True)
    ),
}  # fmt: skip


def taken(batches: list[Frames]) -> list[tuple[bytes, int, int]]:
    """Frames, their lengths on the wire, their times."""
    found = []
    for batch in batches:
        assert batch.first == len(found) + 1
        assert not batch.data.flags.writeable
        for at, time_ns, captured, length in batch.table.tolist():
            found.append((batch.data[at : at + captured].tobytes(), length, time_ns))
    return found


def drained(followed: Followed, batches: list[Frames]) -> None:
    while (frames := followed.next(0.0)) is not None:
        batches.append(frames)


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("seed", range(5))
def test_a_file_that_grows(kind: str, seed: int, tmp_path: Path) -> None:
    data, path, rng = FILES[kind], tmp_path / "growing", random.Random(seed)
    whole = taken(list(capture.File(np.frombuffer(data, np.uint8))))
    path.touch()
    batches: list[Frames] = []
    with path.open("ab", buffering=0) as out, Followed(path) as followed:
        assert followed.next(0.0) is None
        at = 0
        while at < len(data):
            at += out.write(data[at : at + rng.choice([1, 3, 17, 200, 2000])])
            drained(followed, batches)
            assert taken(batches) == whole[: len(taken(batches))]
        assert followed.next(0.02) is None
        assert followed.drops().packets == len(whole)
    assert taken(batches) == whole


def test_a_pipe_ends_with_its_writer(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    data = FILES["pcapng"]

    def write() -> None:
        with path.open("wb", buffering=0) as out:
            for at in range(0, len(data), 100):
                out.write(data[at : at + 100])
            is_read.wait(DEADLINE_S)

    is_read = threading.Event()
    writer = threading.Thread(target=write)
    writer.start()
    batches: list[Frames] = []
    with Followed(path) as followed:

        def is_whole() -> bool:
            drained(followed, batches)
            return len(taken(batches)) == len(SOME)

        until(is_whole, DEADLINE_S, "all frames")
        is_read.set()
        writer.join()
        with pytest.raises(CaptureFailed, match="has ended"):
            followed.next(DEADLINE_S)
    assert [frame for frame, _, _ in taken(batches)] == SOME


def test_what_is_not_read_yet_is_told(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(f.pcap([bytes(60_000)] * 200))
    with Followed(path) as followed:
        assert followed.is_behind
        batches: list[Frames] = []
        drained(followed, batches)
        assert not followed.is_behind
    assert len(taken(batches)) == 200


def test_a_file_that_is_not_what_it_was_ends_it(tmp_path: Path) -> None:
    path = tmp_path / "capture"
    path.write_bytes(FILES["pcap"])
    batches: list[Frames] = []
    with Followed(path) as followed:
        drained(followed, batches)
        os.truncate(path, 30)
        with pytest.raises(CaptureFailed, match="shorter"):
            followed.next(0.0)
    path.write_bytes(FILES["pcap"])
    with Followed(path) as followed:
        drained(followed, batches)
        path.unlink()
        assert followed.next(0.0) is None
        path.write_bytes(FILES["pcap"])
        with pytest.raises(CaptureFailed, match="another file"):
            followed.next(0.0)


HOSTILE = {
    "no capture": (b"GET / HTTP/1.1\r\nHost: here\r\n", "neither"),
    "a frame of 4 GB": (f.pcap([])[:24] + b"\0" * 8 + b"\xff" * 8, "contradicts itself"),
    "a block of 4 GB": (
        f.section() + f.interface() + b"\x06\0\0\0\xfc\xff\xff\xff" + bytes(64 << 20),
        "impossible length",
    ),
    "a block of no length": (f.section() + f.interface() + bytes(64), "contradicts itself"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_files_end_in_a_sentence(kind: str, tmp_path: Path) -> None:
    data, said = HOSTILE[kind]
    path = tmp_path / "hostile"
    path.write_bytes(data)
    with Followed(path) as followed, pytest.raises(NotACapture, match=said):
        drained(followed, [])


def test_what_cannot_be_opened_is_said(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(NotACapture, match="cannot be read"):
            Followed(path)
