"""The real captures: every RoCE message as the truth beside them tells it, and every header."""

from __future__ import annotations

import json
import shutil
import subprocess
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from everystep.tap import capture
from everystep.tap.packets import Parser
from everystep.tap.pieces import LL, RAW, Messages, Table
from everystep.tap.roce import Tracker, unpack

CAPTURES = Path(__file__).resolve().parents[3] / "shared" / "captures"
NAMES = sorted(path.name.removesuffix(".pcapng") for path in CAPTURES.glob("*.pcapng"))

needs_captures = pytest.mark.skipif(not NAMES, reason="the captures are not beside this checkout")


class Decoded:
    """All messages of one capture, in the form of the truth files."""

    def __init__(self, name: str) -> None:
        self.parser = Parser()
        self.tracker = Tracker()
        self.streams: dict[int, Table] = {}
        self.messages: list[dict[str, Any]] = []
        self.acks = 0
        with capture.open(CAPTURES / f"{name}.pcapng") as file:
            for frames in file:
                for messages in self.tracker.feed(self.parser.parse(frames)):
                    self._take(messages)
        self._take(self.tracker.flush())
        self.messages.sort(key=lambda message: message["frame"])

    def _take(self, messages: Messages) -> None:
        self.acks += len(messages.acks)
        for stream in messages.opened:
            self.streams[int(stream["number"])] = stream
        for row in messages.table:
            assert row["form"] == RAW
            stream = self.streams[int(row["stream"])]
            ranges = messages.ranges[row["range_at"] : row["range_at"] + row["ranges"]]
            message = {
                "frame": int(row["frame"]),
                "last_frame": int(row["last_frame"]),
                "src": self.parser.address(int(stream["source"])).mac,
                "qp": int(stream["qp"]),
                "va": int(row["va"]),
                "rkey": int(row["rkey"]),
                "length": int(row["length"]),
                "imm": int(row["immediate"]) if row["has_immediate"] else None,
                "psn": int(row["psn"]),
                "packets": int(row["packets"]),
                "complete": bool(row["complete"]),
            }
            if row["is_split"]:
                message |= {"adaptive_routing": True, "imm_frame": int(row["immediate_frame"])}
            message["payload"] = messages.data[row["at"] : row["at"] + row["nbytes"]].copy()
            message["ranges"] = [(int(a), int(b)) for a, b in ranges]
            self.messages.append(message)


def truth(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((CAPTURES / f"{name}.json").read_text(encoding="utf-8"))
    return loaded


KEYS = (
    *("frame", "last_frame", "src", "qp", "va", "rkey", "length", "imm", "psn", "packets"),
    *("complete", "adaptive_routing", "imm_frame"),
)


@needs_captures
@pytest.mark.parametrize("name", NAMES)
def test_every_message_is_that_of_the_truth(name: str) -> None:
    expected = truth(name)["messages"]
    got = Decoded(name).messages
    assert [{key: m.get(key) for key in KEYS} for m in got] == [
        {key: m.get(key) for key in KEYS} for m in expected
    ]
    for message, true in zip(got, expected, strict=True):
        parts = true.get("present", [{"start": 0, "stop": true["length"], "crc32": true["crc32"]}])
        spans = [(part["start"], part["stop"]) for part in parts]
        assert message["ranges"] == [span for span in spans if span[0] < span[1]]
        for (start, stop), part in zip(spans, parts, strict=True):
            payload = message["payload"][start:stop]
            if true["kind"] == "LL":
                words = np.zeros(true["length"] // 2, np.uint8)
                assert unpack(LL, payload, words, start) == (true["flag"], True)
                payload = words[start // 2 : stop // 2]
            assert zlib.crc32(payload.tobytes()) == part["crc32"]


@needs_captures
@pytest.mark.parametrize("name", NAMES)
def test_every_packet_is_accounted_for(name: str) -> None:
    decoded, true = Decoded(name), truth(name)
    kinds = true["packet_kinds"]
    counts = decoded.tracker.counts()
    assert {what: count for what, count in counts.items() if count} == {
        what: count
        for what, count in {
            "requests": kinds["WRITE"],
            "acknowledgements": kinds["ACK"],
            "other transport": kinds.get("UD_SEND_ONLY", 0),
            "not RoCE": kinds.get("not RoCE (ICRC/version)", 0),
            "messages given up": sum(not m["complete"] for m in true["messages"]),
        }.items()
        if count
    }
    assert decoded.acks == kinds["ACK"]
    assert not decoded.parser.cut


@needs_captures
@pytest.mark.parametrize("name", NAMES)
def test_flags_left_out_in_c_give_the_data_of_the_truth(name: str) -> None:
    """Every key is placed as LL from its second message on."""
    expected = {m["frame"]: m for m in truth(name)["messages"]}
    parser, tracker = Parser(), Tracker()
    lines = {(m["src"], m["qp"], m["rkey"]) for m in expected.values() if m["kind"] == "LL"}
    streams: dict[int, tuple[str, int]] = {}
    placed = 0
    with capture.open(CAPTURES / f"{name}.pcapng") as file:
        (frames,) = file  # a batch holds every capture
    for row in range(len(frames.table)):
        one = capture.Frames(frames.data, frames.table[row : row + 1], row + 1)
        for messages in tracker.feed(parser.parse(one)):
            for stream in messages.opened:
                mac = parser.address(int(stream["source"])).mac
                streams[int(stream["number"])] = (mac, int(stream["qp"]))
            for got in messages.table:
                true = expected[int(got["frame"])]
                number, rkey = int(got["stream"]), int(got["rkey"])
                if got["form"] == LL and true["kind"] == "LL":
                    placed += 1
                    data = messages.data[got["at"] : got["at"] + got["nbytes"]]
                    assert zlib.crc32(data.tobytes()) == true["crc32"]
                    assert got["flag"] == true["flag"]
                if (*streams[number], rkey) in lines:
                    assert tracker.place(number, rkey, LL)
    known: set[tuple[str, int, int]] = set()
    later = 0
    for message in sorted(expected.values(), key=lambda m: int(m["last_frame"])):
        key = (message["src"], message["qp"], message["rkey"])
        if message["complete"]:
            later += message["kind"] == "LL" and key in known
            known.add(key)
    assert placed == later > 0
    assert tracker.counts()["wrong flags"] == 0


# ---------------------------------------------------------------- tshark

FIELDS = (
    *("frame.number", "udp.srcport", "infiniband.bth.opcode", "infiniband.bth.destqp"),
    *("infiniband.bth.psn", "infiniband.reth.va", "infiniband.reth.r_key"),
    *("infiniband.reth.dmalen", "infiniband.aeth.msn"),
)


@needs_captures
@pytest.mark.skipif(shutil.which("tshark") is None, reason="tshark is not installed")
@pytest.mark.parametrize("name", NAMES)
def test_headers_are_those_of_tshark(name: str) -> None:
    command = ["tshark", "-r", str(CAPTURES / f"{name}.pcapng"), "-Y", "infiniband", "-T", "fields"]
    for field in FIELDS:
        command += ["-e", field]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100).stdout
    seen = []
    for line in shown.splitlines():
        cells = line.split("\t")
        if int(cells[2], 0) <= 17:
            seen.append(tuple(int(cell, 0) if cell else None for cell in cells))
    decoded = Decoded(name)
    heads = {row[0]: row for row in seen if row[5] is not None}
    for message in decoded.messages:
        row = heads[message["frame"]]
        assert row[3:7] == (message["qp"], message["psn"], message["va"], message["rkey"])
        if "adaptive_routing" not in message:
            assert row[7] == message["length"]
    assert sum(row[8] is not None for row in seen) == decoded.acks
    assert len(seen) == decoded.acks + decoded.tracker.counts()["requests"]
    ports = {int(stream["source_port"]) for stream in decoded.streams.values()}
    assert ports == {row[1] for row in seen if row[8] is None}
