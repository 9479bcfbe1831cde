"""Deltas as bytes: what comes back is what was packed, and hostile bytes end in `Damaged`."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load as load_bytes

from everystep.deltas.delta import Delta, Form, Layout, Parameter, Stored, Update
from everystep.deltas.encodings import decode, decode_coo, encode
from everystep.deltas.metrics import METADATA_KEY
from everystep.deltas.packing import pack, pack_layout, unpack, unpack_layout
from everystep.errors import Damaged
from everystep.types import TensorSpec


def layout_of(**lengths: list[int]) -> Layout:
    return Layout(
        rank=1,
        world_size=2,
        optimizers={
            name: [Parameter(f"/models/m/{name}{i}", (n + 3,), 2, n + 2) for i, n in enumerate(ns)]
            for name, ns in lengths.items()
        },
        state=["/models/m/a0"],
        threads=2,
        versions={"torch": "2"},
    )


def blob_of(delta: Delta) -> bytes:
    nbytes, parts = pack(delta)
    assert all(part.dtype == np.uint8 and part.ndim == 1 for part in parts)
    blob = b"".join(part.tobytes() for part in parts)
    assert len(blob) == nbytes
    return blob


def stored(key: str, array: np.ndarray[Any, Any]) -> Stored:
    spec = TensorSpec(key=key, dtype=array.dtype.name, shape=array.shape)
    return Stored(spec, array.reshape(-1).view(np.uint8))


GRADIENTS: list[torch.Tensor | None] = [
    None,
    torch.zeros(7),
    torch.tensor([0.1] * 7, dtype=torch.float64),
    torch.tensor([1.5] * 7),
    torch.tensor([2.0**-24, 1.0009765625] * 3 + [0.0]),
    torch.tensor([1 + 2j] * 7),
    torch.tensor([0, 0, 0, 0, 0, 0.1, 0]),
    torch.tensor([0, 0, 0, 0, 0, 1.5, 0], dtype=torch.bfloat16),
    torch.tensor([0, 0, 0, 0, 0, 1.5, 0]),
    torch.tensor([0, 0, 0, 0, 0, 1.0009765625, 0]),
    torch.sparse_coo_tensor([[6, 2, 6]], [1.0, -0.0, 3.0], (7,), check_invariants=True),
]

LAYOUT = layout_of(gen=[7] * len(GRADIENTS), disc=[100_000, 0])


def full_delta() -> Delta:
    coded = [encode(g, 0, 7) for g in GRADIENTS]
    wide = torch.zeros(100_000)
    wide[::3] = 0.1
    others = [encode(wide, 0, 100_000), encode(torch.empty(0), 0, 0)]
    return Delta(
        12,
        [
            Update("disc", [{"lr": 0.1, "note": 'a"b'}], others),
            Update("gen", None, coded, scale=[1199570944, None]),
            Update("gen", None, coded[::-1]),
        ],
        [stored("/models/m/mean", np.arange(6.0).reshape(2, 3)), stored("/x", np.int64([5]))],
        {"rng": {"python": [3, "é"]}, "extras": None},
        {"loss": 0.25},
        np.array([[1, (1 << 64) - 1], [3, 4]], np.uint64),
    )


def plain(delta: Delta) -> Any:
    """For comparison."""
    updates = [
        (
            *(u.optimizer, u.options, u.scale),
            *((*c[:3], c.gaps.tobytes(), c.values.tobytes()) for c in u.gradients),
        )
        for u in delta.updates
    ]
    tensors = [(s.spec, s.data.tobytes()) for s in delta.tensors]
    prints = (delta.fingerprint.shape, delta.fingerprint.dtype, delta.fingerprint.tolist())
    return delta.step, updates, tensors, delta.tree, delta.metrics, prints


def test_every_form_is_in_the_sample() -> None:
    assert {c.form for u in full_delta().updates for c in u.gradients} == set(Form) - {Form.ON_WIRE}


@pytest.mark.parametrize(
    "delta",
    [full_delta(), Delta(1, [], [], {}, {}, np.empty(0, np.uint64))],
    ids=["full", "nothing"],
)
def test_what_was_packed_comes_back(delta: Delta) -> None:
    back = unpack(memoryview(blob_of(delta)), LAYOUT)
    assert plain(back) == plain(delta)
    assert blob_of(back) == blob_of(delta)


def test_gradients_are_views_of_the_bytes_and_decode_from_any_alignment() -> None:
    delta = full_delta()
    blob = blob_of(delta)
    for shift in range(8):
        moved = np.frombuffer(bytes(shift) + blob, np.uint8)[shift:]
        back = unpack(moved.data, LAYOUT)
        for coded, gradient in zip(back.updates[1].gradients, GRADIENTS, strict=True):
            assert not len(coded.values) or np.shares_memory(coded.values, moved)
            assert not len(coded.gaps) or np.shares_memory(coded.gaps, moved)
            if coded.form == Form.COO:
                assert decode_coo(coded)._values().tolist() == [1.0, -0.0, 3.0]
            elif gradient is not None:
                out = torch.empty_like(gradient)
                decode(coded, out)
                assert out.view(torch.uint8).equal(gradient.view(torch.uint8))


def test_the_safetensors_library_opens_a_blob(tmp_path: Any) -> None:
    blob = blob_of(full_delta())
    loaded = load_bytes(blob)
    assert sorted(loaded) == [
        *("counts", "dtypes", "fingerprint", "forms", "gap_bytes", "gaps", "tensors", "values")
    ]
    assert loaded["forms"].tolist()[2 : 2 + len(GRADIENTS)] == [
        int(c.form) for c in full_delta().updates[1].gradients
    ]
    assert loaded["counts"].tolist()[0] == 33_334
    assert loaded["fingerprint"].shape == (2, 2)
    path = tmp_path / "delta.safetensors"
    path.write_bytes(blob)
    with safe_open(path, framework="np") as opened:
        facts = json.loads(opened.metadata()[METADATA_KEY])
    assert facts["step"] == 12 and facts["metrics"] == {"loss": 0.25}


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 5.2), (torch.bfloat16, 3.2)])
def test_bytes_per_kept_element_all_in(dtype: torch.dtype, most: float) -> None:
    generator = torch.Generator().manual_seed(3)
    length = 1 << 20
    gradient = torch.randn(length, generator=generator).to(dtype)
    gradient[torch.rand(length, generator=generator) >= 0.01] = 0
    kept = int(gradient.count_nonzero())
    assert 10_000 < kept < 11_000
    update = Update("o", None, [encode(gradient, 0, length)])
    nbytes, _ = pack(Delta(1, [update], [], {}, {}, np.zeros(16, np.uint64)))
    assert nbytes / kept <= most


def test_many_parameters_make_few_parts() -> None:
    coded = [encode(torch.tensor([0.0] * 20 + [0.1]), 0, 21)] * 10_000
    delta = Delta(1, [Update("o", None, coded)], [], {}, {}, np.zeros(16, np.uint64))
    _, parts = pack(delta)
    assert len(parts) <= 8
    layout = layout_of(o=[21] * 10_000)
    assert plain(unpack(memoryview(blob_of(delta)), layout)) == plain(delta)


# ---------------------------------------------------------------- damage


def damaged(blob: bytes, layout: Layout = LAYOUT) -> str:
    with pytest.raises(Damaged) as raised:
        unpack(memoryview(blob), layout)
    return str(raised.value)


def test_other_parameters_than_the_layout_says() -> None:
    blob = blob_of(full_delta())
    seven = [7] * len(GRADIENTS)
    assert "that is not there" in damaged(blob, layout_of(gen=seven))
    assert "parameters" in damaged(blob, layout_of(gen=seven[1:], disc=[100_000, 0]))
    assert "parameters" in damaged(blob, layout_of(gen=[*seven, 7], disc=[100_000, 0]))
    assert "does not fit 6 elements" in damaged(blob, layout_of(gen=[6] * 11, disc=[100_000, 0]))
    assert "does not fit 33,333" in damaged(blob, layout_of(gen=seven, disc=[33_333, 0]))


def unpack_all(blob: bytes) -> None:
    """Read and decode all there is; only `Damaged` may come of it."""
    with contextlib.suppress(Damaged):
        for update in unpack(memoryview(blob), LAYOUT).updates:
            pieces = LAYOUT.optimizers[update.optimizer]
            for coded, piece in zip(update.gradients, pieces, strict=True):
                if coded.form == Form.COO:
                    decode_coo(coded)
                elif coded.form != Form.ABSENT:
                    dtype = getattr(torch, coded.dtype)
                    decode(coded, torch.empty(piece.stop - piece.start, dtype=dtype))


BLOB = blob_of(full_delta())
HEADER_BYTES = 8 + int.from_bytes(BLOB[:8], "little")


@given(st.data())
@settings(max_examples=500)
def test_flipped_and_cut_bytes(data: st.DataObject) -> None:
    blob = bytearray(BLOB)
    ends = [8, HEADER_BYTES, HEADER_BYTES + 900, len(blob)]
    at = data.draw(st.sampled_from(ends).flatmap(lambda end: st.integers(0, end - 1)))
    if data.draw(st.booleans()):
        blob[at] ^= data.draw(st.integers(1, 255))
        unpack_all(bytes(blob))
    else:
        damaged(bytes(blob[:at]))
        damaged(bytes(blob) + b"\0" * (1 + at % 9))


@given(st.data())
@settings(max_examples=300)
def test_extreme_numbers_in_the_table(data: st.DataObject) -> None:
    blob = bytearray(BLOB)
    header = json.loads(blob[8:HEADER_BYTES])
    name = data.draw(st.sampled_from(["counts", "gap_bytes"]))
    start, stop = header[name]["data_offsets"]
    numbers = np.frombuffer(blob, np.int64, (stop - start) // 8, HEADER_BYTES + start)
    at = data.draw(st.integers(0, len(numbers) - 1))
    extremes = st.sampled_from([-1, -(1 << 63), (1 << 63) - 1, 1 << 61, 1 << 40])
    before = numbers[at]
    numbers[at] = data.draw(extremes)
    damaged(bytes(blob))
    numbers[at] = before + 1
    numbers[(at + 1) % len(numbers)] -= 1  # sums stay
    unpack_all(bytes(blob))


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner: Any = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list):
        inner = enumerate(value)
    return [path, *(place for key, part in inner for place in _places(part, (*path, key)))]


def _with(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    changed = dict(value) if isinstance(value, dict) else list(value)
    changed[path[0]] = _with(value[path[0]], path[1:], new)
    return changed


@given(st.data())
@settings(max_examples=500)
def test_any_value_of_the_header_replaced(data: st.DataObject) -> None:
    header = json.loads(BLOB[8:HEADER_BYTES])
    facts = json.loads(header["__metadata__"][METADATA_KEY])
    new = data.draw(
        st.sampled_from([None, -1, 0, 1 << 46, 1 << 63, "", "float8_e4m3fn", "U8", [], {}, [[]]])
        | st.sampled_from([[1 << 46, 0], [-2, -3], 1.5, True, "/", ["float32"] * 300, "gen"])
    )
    if data.draw(st.booleans()):
        facts = _with(facts, data.draw(st.sampled_from(_places(facts))), new)
    else:
        header = _with(header, data.draw(st.sampled_from(_places(header))), new)
    with contextlib.suppress(TypeError, KeyError):
        header["__metadata__"][METADATA_KEY] = json.dumps(facts)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    unpack_all(len(text).to_bytes(8, "little") + text + BLOB[HEADER_BYTES:])


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{}", b"\xff", b'{"__metadata__":{}}', b"[" * 100_000, b'{"a":' * 9999]
)
def test_headers_that_are_none(text: bytes) -> None:
    damaged(len(text).to_bytes(8, "little") + text)


# ---------------------------------------------------------------- layouts


def test_a_layout_comes_back() -> None:
    assert unpack_layout(pack_layout(LAYOUT)) == LAYOUT
    assert unpack_layout(memoryview(pack_layout(LAYOUT))) == LAYOUT


@pytest.mark.parametrize(
    "change",
    [
        {"rank": 2},
        {"rank": -1},
        {"world_size": 0},
        {"state": None},
        {"optimizers": {"o": [["/a"]]}},
        *(
            {"optimizers": {"o": [{"key": "/a", "shape": shape, "start": start, "stop": stop}]}}
            for shape, start, stop in [
                ([3], 0, 4), ([3], -1, 2), ([3], 2, 1), ([-3, -1], 0, 3), ([1 << 40, 256], 0, 9),
            ]
        ),
    ],
)  # fmt: skip
def test_layouts_that_are_none(change: dict[str, Any]) -> None:
    described = {**json.loads(pack_layout(LAYOUT)), **change}
    with pytest.raises(Damaged):
        unpack_layout(json.dumps(described).encode())


@given(st.integers(0, 10_000), st.integers(0, 255))
@settings(max_examples=200)
def test_damaged_layouts(at: int, byte: int) -> None:
    data = bytearray(pack_layout(LAYOUT))
    data[at % len(data)] = byte
    with contextlib.suppress(Damaged):
        assert isinstance(msgspec.json.decode(pack_layout(unpack_layout(bytes(data)))), dict)
    with pytest.raises(Damaged):
        unpack_layout(bytes(data[: at % len(data)]))
