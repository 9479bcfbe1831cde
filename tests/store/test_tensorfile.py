"""Safetensors headers: what we write every reader opens, what we read we trust in nothing."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load as load_bytes

from byte_runs import noise
from everystep.errors import Damaged
from everystep.state import raw
from everystep.store import tensorfile
from everystep.store.tensorfile import (
    decode_header,
    encode_header,
    header_length,
    lay_out,
    stored_form,
)
from everystep.types import _ITEM_BYTES, element_count, item_bytes

DTYPES = sorted(_ITEM_BYTES)

TINY = [("b", "float32", (2,)), ("a", "int8", (3,)), ("é", "complex64", ())]
TINY_HEADER = (
    b"\xf8\x00\x00\x00\x00\x00\x00\x00"
    b'{"__metadata__":{"format":"pt"},'
    b'"\xc3\xa9":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
    b'"b":{"dtype":"F32","shape":[2],"data_offsets":[8,16]},'
    b'"a":{"dtype":"I8","shape":[3],"data_offsets":[16,19]}}'
)


def test_the_bytes_of_a_tiny_header() -> None:
    header = encode_header(lay_out(TINY), {"format": "pt"})
    assert header == TINY_HEADER + b" " * (256 - len(TINY_HEADER))


@given(st.permutations(TINY))
def test_the_same_tensors_in_any_order_give_the_same_file(
    tensors: list[tuple[str, str, tuple[int, ...]]],
) -> None:
    assert encode_header(lay_out(tensors), {}) == encode_header(lay_out(TINY), {})


TENSORS = st.dictionaries(
    st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=4).map(tuple)),
    max_size=6,
)


def file_of(described: dict[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, dict[str, bytes]]:
    slots = lay_out([(name, *form) for name, form in described.items()])
    values = {slot.name: noise(slot.stop - slot.start, slot.name) for slot in slots}
    header = encode_header(slots, {"format": "pt"})
    return header + b"".join(values[slot.name] for slot in slots), values


@given(TENSORS)
def test_what_is_encoded_is_decoded(described: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    data, _ = file_of(described)
    slots = lay_out([(name, *form) for name, form in described.items()])
    length = header_length(data[:8], len(data), "path")
    assert length % 64 == 0
    decoded = decode_header(data[:length], len(data), "path")
    assert sorted(decoded) == sorted(slots)
    for slot in slots:
        assert slot.start % min(item_bytes(described[slot.name][0]) or 1, 8) == 0, "aligned"


@settings(max_examples=60)
@given(TENSORS)
def test_the_library_opens_what_we_write(
    described: dict[str, tuple[str, tuple[int, ...]]],
) -> None:
    data, values = file_of(described)
    opened = load_bytes(data)
    assert opened.keys() == described.keys()
    for name, found in opened.items():
        dtype, shape = described[name]
        assert tuple(found.shape) == stored_form(dtype, shape)[1]
        assert raw.bits_of({"it": found}, "it") == values[name]
        if hasattr(torch, dtype) and dtype in tensorfile._CODES:
            assert found.dtype == getattr(torch, dtype)


def test_the_library_opens_a_file_of_every_dtype(tmp_path: Path) -> None:
    data, values = file_of({dtype: (dtype, (2, 3)) for dtype in DTYPES})
    (tmp_path / "all.safetensors").write_bytes(data)
    with safe_open(tmp_path / "all.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
        assert sorted(opened.keys()) == DTYPES
        for name in DTYPES:
            assert raw.bits_of({"it": opened.get_tensor(name)}, "it") == values[name]


def test_every_dtype_has_a_form() -> None:
    for dtype in DTYPES:
        code, shape = stored_form(dtype, (2, 3))
        size = tensorfile._CODE_BYTES[code]
        assert element_count(shape) * size == 6 * (item_bytes(dtype) or 0)
    assert set(tensorfile._CODES.values()) <= set(tensorfile._CODE_BYTES)


# ---------------------------------------------------------------- headers that lie


def header_of(text: bytes | str | dict[str, object]) -> bytes:
    if isinstance(text, dict):
        text = json.dumps(text)
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def entry(dtype: str, shape: object, start: object, stop: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


GOOD = entry("U8", [4], 0, 4)


def test_the_header_that_the_lies_are_made_from() -> None:
    header = header_of({"a": GOOD, "b": entry("U8", [], 4, 5)})
    assert len(decode_header(header, len(header) + 5, "path")) == 2


@pytest.mark.parametrize(
    ("lie", "data_bytes"),
    [
        pytest.param({"a": GOOD, "b": entry("U8", [2], 2, 4)}, 4, id="overlap"),
        pytest.param({"a": GOOD, "b": GOOD}, 4, id="twice the same bytes"),
        pytest.param({"a": GOOD, "b": entry("U8", [1], 5, 6)}, 6, id="hole"),
        pytest.param({"a": entry("U8", [4], 1, 5)}, 5, id="hole at the start"),
        pytest.param({"a": GOOD}, 5, id="bytes after the last"),
        pytest.param({"a": GOOD}, 3, id="beyond the end"),
        pytest.param({}, 1, id="bytes of nothing"),
        pytest.param({"a": entry("U8", [4], 4, 0)}, 4, id="backwards"),
        pytest.param({"a": entry("U8", [4], -4, 0)}, 0, id="before the start"),
        pytest.param({"a": entry("U8", [-4], 0, -4)}, 0, id="negative length"),
        pytest.param({"a": entry("U8", [-2, -2], 0, 4)}, 4, id="two negative lengths"),
        pytest.param({"a": entry("U8", [5], 0, 4)}, 4, id="shape longer than bytes"),
        pytest.param({"a": entry("F32", [4], 0, 4)}, 4, id="dtype longer than bytes"),
        pytest.param({"a": entry("Q9", [4], 0, 4)}, 4, id="unknown dtype"),
        pytest.param({"a": entry("U8", [2**62, 2**62], 0, 4)}, 4, id="huge shape"),
        pytest.param({"a": entry("U8", [2**32, 2**32], 0, 0)}, 0, id="a product of 2**64"),
        pytest.param({"a": entry("U8", [1] * 65, 0, 1)}, 1, id="65 dimensions"),
        pytest.param({"a": entry("U8", [10**400] * 9 + [0], 0, 0)}, 0, id="a row of huge numbers"),
        pytest.param({"a": entry("U8", [2.5], 0, 4)}, 4, id="half an element"),
        pytest.param({"a": entry("U8", ["4"], 0, 4)}, 4, id="a length in words"),
        pytest.param({"a": entry("U8", [True], 0, 1)}, 1, id="a bool as length"),
        pytest.param({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0]}}, 4, id="one offset"),
        pytest.param({"a": {**GOOD, "data_offsets": [0, 2, 4]}}, 4, id="three offsets"),
        pytest.param({"a": {**GOOD, "x": 1}}, 4, id="unknown field"),
        pytest.param({"a": {"dtype": "U8"}}, 4, id="fields missing"),
        pytest.param({"a": None}, 0, id="null"),
        pytest.param("[]", 0, id="a list"),
        pytest.param("null", 0, id="nothing"),
        pytest.param("7", 0, id="a number"),
        pytest.param("", 0, id="empty"),
        pytest.param("{", 0, id="cut"),
        pytest.param('{"a":%s,"a":%s}' % ((json.dumps(GOOD),) * 2), 4, id="one name twice"),
        pytest.param("[" * 100_000, 0, id="deep"),
        pytest.param('{"a":' * 50_000, 0, id="deep objects"),
        pytest.param(b'{"\xff":1}', 0, id="not text"),
        pytest.param('{"a":' + "9" * 10_000 + "}", 0, id="a number of 10,000 digits"),
        pytest.param('{"a":NaN}', 0, id="NaN"),
        pytest.param("{}".encode("utf-16"), 0, id="UTF-16"),
        pytest.param("\ufeff{}", 0, id="a byte order mark"),
    ],
)
def test_headers_that_lie(lie: bytes | str | dict[str, object], data_bytes: int) -> None:
    header = header_of(lie)
    with pytest.raises(Damaged):
        decode_header(header, len(header) + data_bytes, "path")


@pytest.mark.parametrize(
    ("first", "file_bytes"),
    [
        (b"", 0),
        (b"1234567", 7),
        (struct.pack("<Q", 1), 8),
        (struct.pack("<Q", 2**64 - 1), 2**40),
        (struct.pack("<Q", 2**63), 100),
        (struct.pack("<Q", tensorfile.MAX_HEADER_BYTES + 1), 2**40),
    ],
)
def test_header_lengths_that_lie(first: bytes, file_bytes: int) -> None:
    with pytest.raises(Damaged):
        header_length(first, file_bytes, "path")


@given(st.binary(max_size=200) | st.text(alphabet='{}[]":,0aU8\\', max_size=80).map(str.encode))
def test_any_bytes_as_a_header_are_damage_or_a_header(text: bytes) -> None:
    header = header_of(text)
    try:
        slots = decode_header(header, len(header), "path")
    except Damaged:
        return
    assert all(slot.stop == 0 for slot in slots)
