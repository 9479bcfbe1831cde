"""`everystep diff`."""

from __future__ import annotations

import math
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import everystep
from everystep.recovery.compare import difference_of
from everystep.state import raw
from everystep.store.local import LocalBackend
from small_runs import Said, flip
from trips import BLOCKING

Cli = Callable[..., Said]


def differences(cli: Cli, *words: object) -> tuple[int, Any]:
    said = cli("diff", *words, "--json")
    assert said.err == ""
    return said.status, said.json


def counted_by_hand(a: torch.Tensor, b: torch.Tensor) -> dict[str, Any]:
    """What differs between two float32 tensors, by Python's own arithmetic."""
    left = struct.unpack(f"<{a.numel()}I", raw.bits_of({"": a}, ""))
    right = struct.unpack(f"<{b.numel()}I", raw.bits_of({"": b}, ""))
    places = [i for i in range(a.numel()) if left[i] != right[i]]
    values = list(zip(a.flatten().tolist(), b.flatten().tolist(), strict=True))
    l2 = a.double().sub(b.double()).square().sum().sqrt().item()
    norm = a.double().square().sum().sqrt().item()
    return {
        "dtype": "float32",
        "shape": list(a.shape),
        "elements": a.numel(),
        "differing": len(places),
        "max_abs": max(abs(values[i][0] - values[i][1]) for i in places),
        "l2": pytest.approx(l2, rel=1e-12),
        "relative_l2": pytest.approx(l2 / norm, rel=1e-12) if norm else "inf",
        "nan_a": 0,
        "nan_b": 0,
        "first": places[0],
        "first_a": f"{left[places[0]]:08x}",
        "first_b": f"{right[places[0]]:08x}",
    }


def test_two_steps_of_a_run(cli: Cli, forked: Path) -> None:
    status, found = differences(cli, forked, "main:4", "6")
    assert status == 1
    assert list(found) == [
        "equal", "a", "b", "tensors", "forms", "only_a", "only_b", "values",
    ]  # fmt: skip
    assert not found["equal"]
    assert found["a"] == {"path": str(forked), "step": "main:4", "world_size": 1}
    assert found["b"]["step"] == "main@3:6"
    a, b = everystep.load(forked, "main:4").tensors, everystep.load(forked, "main@3:6").tensors
    by_key = {tensor["key"]: tensor for tensor in found["tensors"]}
    same = {key for key in a if raw.bits_of(a, key) == raw.bits_of(b, key)}
    assert by_key.keys() == a.keys() - same and same
    for key, tensor in by_key.items():
        assert tensor == {"key": key, "rank": None, **counted_by_hand(a[key], b[key])}
    assert {value["place"]: (value["a"], value["b"]) for value in found["values"]} == {
        "extras.schedule.last_epoch": (4, 6),
        "extras.schedule._step_count": (5, 7),
    }
    assert (found["forms"], found["only_a"], found["only_b"]) == ([], [], [])


def test_equal_steps(cli: Cli, forked: Path) -> None:
    status, found = differences(cli, forked, "main:4", "main@3:4")
    assert (status, found["equal"], found["tensors"], found["values"]) == (0, True, [], [])
    said = cli("diff", forked, "main:4", "main@3:4")
    assert said == (0, "a: main:4\nb: main@3:4\nequal, bit for bit\n", "")


def test_two_runs(cli: Cli, forked: Path, healthy: Path) -> None:
    assert differences(cli, forked, "main:3", "--with", healthy)[0] == 0
    status, found = differences(cli, forked, "main:5", "3", "--with", healthy)
    assert (status, found["a"]["step"], found["b"]["step"]) == (1, "main:5", "main:3")
    assert found["b"]["path"] == str(healthy)
    said = cli("diff", forked, "main:3", "--with", healthy)
    assert said.out.splitlines()[:2] == [f"a: main:3 of {forked}", f"b: main:3 of {healthy}"]


def test_a_path_may_hold_colons(cli: Cli, healthy: Path) -> None:
    odd = healthy.with_name("a:1 b")
    shutil.copytree(healthy, odd)
    assert cli("diff", odd, "1", "--with", healthy).status == 0


def test_plain_text(cli: Cli, healthy: Path) -> None:
    said = cli("diff", healthy, "1", "2")
    lines = said.out.splitlines()
    assert said.status == 1
    assert lines[2].split("  ")[0] == "tensor"
    assert lines[2].split()[-7:] == ["|a-b|", "|a-b|/|a|", "first:", "bits", "a,", "bits", "b"]
    assert lines[3].startswith("/models/model/0.bias ")
    assert lines[-1].startswith("they differ: ") and lines[-1].endswith(" 2 other values")


def test_only_what_differs_is_read(
    cli: Cli, healthy: Path, forked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    original = LocalBackend.read

    def recorded(self: LocalBackend, name: str, into: memoryview, offset: int) -> None:
        read.append(name)
        original(self, name, into, offset)

    monkeypatch.setattr(LocalBackend, "read", recorded)
    assert cli("diff", forked, "main:3", "--with", healthy).status == 0
    assert read and not [name for name in read if name.endswith(".safetensors")]
    assert cli("diff", forked, "main:2", "3", "--with", healthy).status == 1
    assert [name for name in read if name.endswith(".safetensors")]


def test_damage_is_no_difference(cli: Cli, healthy: Path) -> None:
    flip(healthy, "steps/main/*2/*.model.safetensors", -1)
    said = cli("diff", healthy, "1", "2")
    assert (said.status, said.out) == (1, "")
    assert "hash of bytes" in said.err


def test_ranks_are_compared_with_their_like(cli: Cli, two: Path) -> None:
    status, found = differences(cli, two, "1", "2")
    assert status == 1
    rows, *own = sorted(found["tensors"], key=lambda t: (t["key"] != "/models/model/rows", str(t)))
    assert rows == {  # put together from both ranks
        "key": "/models/model/rows", "rank": None, "dtype": "float32", "shape": [4, 3],
        "elements": 12, "differing": 1, "max_abs": 0.5, "l2": 0.5,
        "relative_l2": 0.5 / math.sqrt(sum(n * n for n in range(12))), "nan_a": 0, "nan_b": 0,
        "first": 11, "first_a": "41300000", "first_b": "41380000",
    }  # fmt: skip
    assert [(t["key"], t["rank"], t["max_abs"], t["first_a"][-2:]) for t in own] == [
        ("/models/model/own", 0, None, "01"),
        ("/models/model/own", 1, None, "0b"),
    ]
    assert [(v["place"], v["rank"], v["a"], v["b"]) for v in found["values"]] == [
        ("extras.counter.done", 0, 1, 2)  # once: the same on every rank
    ]
    assert cli("diff", two, "1", "1").status == 0


def test_other_tensors_forms_and_values(cli: Cli, tmp_path: Path) -> None:
    torch.manual_seed(0)
    for name, model, value in (
        ("a", torch.nn.Linear(2, 3), {"x": -0.0, "gone": 1}),
        ("b", torch.nn.Linear(2, 4, bias=False), {"x": 0.0, "new": [1, True]}),
    ):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 if name == "a" else 0.2)
        with everystep.Checkpointer(
            tmp_path / name,
            model=model,
            optimizer=optimizer,
            extras={"e": value},
            strategy=BLOCKING,
        ) as ck:
            ck.step()
    status, found = differences(cli, tmp_path / "a", "1", "--with", tmp_path / "b")
    assert status == 1
    assert found["forms"] == [
        {"key": "/models/model/weight", "rank": None, "a": "float32 [3, 2]", "b": "float32 [4, 2]"}
    ]
    assert (found["only_a"], found["only_b"]) == (["/models/model/bias"], [])
    values = {value["place"]: (value["a"], value["b"]) for value in found["values"]}
    assert values["optimizers.optimizer.groups.0.options.lr"] == (0.1, 0.2)
    assert values["extras.e.gone"] == (1, None)
    assert (values["extras.e.new.0"], values["extras.e.new.1"]) == ((None, 1), (None, True))
    assert repr(values["extras.e.x"]) == "(-0.0, 0.0)"
    text = cli("diff", tmp_path / "b", "1", "--with", tmp_path / "a").out
    assert "only in b: /models/model/bias" in text


def test_many_differences_are_cut_for_people_only(cli: Cli, tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    extra: dict[str, Any] = {f"k{i}": i for i in range(70)}
    with everystep.Checkpointer(
        tmp_path / "r", model=model, extras={"e": extra}, strategy=BLOCKING
    ) as ck:
        ck.step()
        extra.update({key: value + 1 for key, value in extra.items()})
        ck.step()
    assert len(differences(cli, tmp_path / "r", "1", "2")[1]["values"]) == 70
    text = cli("diff", tmp_path / "r", "1", "2").out
    assert "… and 20 more; --json has all" in text and text.count("extras.e.k") == 50


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("dtype", "a", "b", "differing", "largest", "nans", "first"),
    [
        ("float32", [1.0, 2.0], [1.0, 2.5], 1, 0.5, (0, 0), 1),
        ("float32", [0.0, 2.0], [-0.0, 2.0], 1, 0.0, (0, 0), 0),
        ("float32", [NAN, 1.0, NAN], [NAN, 3.0, 1.0], 2, 2.0, (2, 1), 1),
        ("float64", [INF, 1.0], [-INF, 1.0], 1, "inf", (0, 0), 0),
        ("float64", [NAN], [1.0], 1, None, (1, 0), 0),
        ("bfloat16", [1.0, 1.0], [1.0, 2.0], 1, 1.0, (0, 0), 1),
        ("float8_e4m3fn", [1.0, 1.0], [1.0, 2.0], 1, 1.0, (0, 0), 1),
        ("complex64", [1 + 1j], [1 - 1j], 1, 2.0, (0, 0), 0),
        ("int64", [1, 2**62], [1, 0], 1, None, (0, 0), 1),
        ("bool", [True, False], [True, True], 1, None, (0, 0), 1),
    ],
)
def test_what_is_said_of_a_tensor(
    dtype: str, a: list[Any], b: list[Any], differing: int, largest: object,
    nans: tuple[int, int], first: int,
) -> None:  # fmt: skip
    kind = getattr(torch, dtype)
    left, right = torch.tensor(a).to(kind), torch.tensor(b).to(kind)
    assert difference_of("k", None, left, left.clone()) is None
    found = difference_of("k", 3, left, right)
    assert found is not None
    assert (found.key, found.rank, found.dtype, found.shape) == ("k", 3, dtype, [len(a)])
    assert (found.elements, found.differing, found.first) == (len(a), differing, first)
    assert (found.max_abs, (found.nan_a, found.nan_b)) == (largest, nans)


@pytest.mark.parametrize(
    ("a", "b", "l2", "relative"),
    [
        ([3.0, 4.0], [3.0, 7.0], 3.0, 0.6),
        ([0.0, 0.0], [3.0, 4.0], 5.0, "inf"),
        ([0.0], [-0.0], 0.0, 0.0),
        ([NAN], [1.0], None, None),
        ([3.0, NAN, 4.0], [3.0, 1.0, 9.0], 5.0, 1.0),
        ([1.0, INF], [1.0, 1.0], "inf", "inf"),
    ],
)
def test_how_far_a_tensor_moved(
    a: list[float], b: list[float], l2: object, relative: object
) -> None:
    found = difference_of("k", None, torch.tensor(a), torch.tensor(b))
    assert found is not None
    assert (found.l2, found.relative_l2) == (l2, relative)


def test_payloads_of_nan_are_bits_like_others() -> None:
    a = torch.tensor([0x7FC00000, 0x7FC00000], dtype=torch.int32).view(torch.float32)
    b = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    found = difference_of("k", None, a, b)
    assert found is not None
    assert (found.differing, found.max_abs, found.nan_a, found.nan_b) == (1, None, 2, 2)
    assert (found.first_a, found.first_b) == ("7fc00000", "7fc00001")


def test_a_tensor_of_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raw, "CHUNK_BYTES", 16)
    a = torch.arange(10, dtype=torch.float32)
    b = a.clone()
    b[5], b[9] = 7.0, NAN
    found = difference_of("k", None, a, b)
    assert found is not None
    assert (found.differing, found.first, found.max_abs, found.nan_b) == (2, 5, 2.0, 1)
