"""`everystep tap`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from small_runs import Said
from tap.generator import Wire, mirrored, random_inputs, write
from tap.socket_wire import SocketJob

CAPTURES = Path(__file__).parents[2].parent / "shared" / "captures"
needs_captures = pytest.mark.skipif(not CAPTURES.is_dir(), reason="the captures are not here")

Cli = Callable[..., Said]


@needs_captures
@pytest.mark.parametrize(
    ("name", "dtype"), [("iter_40000_p2p_iter2", "float32"), ("rdma32", "int32")]
)
def test_json_is_the_ground_truth(cli: Cli, tmp_path: Path, name: str, dtype: str) -> None:
    out = tmp_path / "reduced.npy"
    file = CAPTURES / f"{name}.pcapng"
    said = cli("tap", "decode", file, "--json", "--dtype", dtype, "--reduced", out)
    assert (said.status, said.err) == (0, "")
    truth = json.loads((CAPTURES / f"{name}.json").read_text(encoding="utf-8"))
    for key in ("messages", "connections", "collectives", "reduced", "packet_kinds"):
        assert said.json[key] == truth[key], key
    expected, found = np.load(CAPTURES / f"{name}.reduced.npy"), np.load(out)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert found.tobytes() == expected.tobytes()


@needs_captures
def test_the_table_tells_buffers_and_connections(cli: Cli) -> None:
    said = cli("tap", "decode", CAPTURES / "iter_80000_p2p.pcapng", "--counts", "10000")
    assert (said.status, said.err) == (0, "")
    assert "RoCE: 9 ACK, 183 WRITE" in said.out
    assert "collectives: 1 allgather, 2 broadcast, 1 allreduce, 1 p2p" in said.out
    last = said.out.splitlines()[-1].split()
    assert last == ["0", "10,000", "nothing", "20b2a6b9"]


@needs_captures
def test_a_cut_capture_has_gaps(cli: Cli, tmp_path: Path) -> None:
    whole = (CAPTURES / "iter_40000_p2p.pcapng").read_bytes()
    cut = tmp_path / "cut.pcapng"
    cut.write_bytes(whole[: 70 * len(whole) // 102])
    out = tmp_path / "reduced.npy"
    said = cli("tap", "decode", cut, "--json", "--counts", "5000", "--reduced", out)
    assert said.status == 1
    (buffer,) = said.json["reduced"]
    assert buffer["missing"] and not any(gap["start"] < 0 for gap in buffer["missing"])
    values = np.load(out)
    absent = np.zeros(5000, bool)
    for gap in buffer["missing"]:
        absent[gap["start"] : gap["stop"]] = True
    assert np.array_equal(np.isnan(values), absent)


def test_what_is_no_capture_is_said_to_be_none(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("gradients\n" * 9, encoding="utf-8")
    said = cli("tap", "decode", path)
    assert said.status == 1
    assert said.out == "" and str(path) in said.err


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_capture_of_sockets(cli: Cli, tmp_path: Path, ranks: int) -> None:
    wire = Wire(ranks=ranks, version=27, mtu=1448)
    made = SocketJob(wire)
    for n in (5000, 40_001):
        made.all_reduce(random_inputs(wire, n, n))
    seen = mirrored(made.packets, 0)
    whole, holed = tmp_path / "whole.pcap", tmp_path / "holed.pcap"
    write(whole, seen)
    write(holed, [packet for i, packet in enumerate(seen) if i % 100 != 99])
    out = tmp_path / "reduced.npy"
    words = ("--ranks", ranks, "--counts", "5000,40001", "--nccl", "2.27.3", "--hosts")
    words = (*words, ",".join(f"10.0.0.{rank + 1}" for rank in range(ranks)), "--checksums")
    said = cli("tap", "decode", whole, "--json", "--reduced", out, *words)
    assert (said.status, said.err) == (0, "")
    for row, reduction in zip(np.load(out), made.reductions, strict=True):
        assert row.tobytes().startswith(reduction.reduced.tobytes())
    assert said.json["sockets"]["messages"] == len(said.json["messages"])
    said = cli("tap", "decode", holed, "--json", "--reduced", out, *words)
    assert said.status == 1
    assert any(buffer["missing"] for buffer in said.json["reduced"])
    assert np.isnan(np.load(out)[1]).any()


@pytest.mark.parametrize(
    "words",
    [
        ("--counts", "many"), ("--counts", "0"), ("--ranks", "1"), ("--dtype", "float8"),
        ("--nccl", "19"), ("--nccl", "2.x"), ("--hosts", "10.0.0.1"), ("--hosts", "a,b"),
        ("--hosts", "10.0.0.1,10.0.0.1"),
    ],
)  # fmt: skip
def test_wrong_use(cli: Cli, tmp_path: Path, words: tuple[str, ...]) -> None:
    said = cli("tap", "decode", tmp_path / "absent.pcap", *words)
    assert said.status == 2 and said.out == ""
