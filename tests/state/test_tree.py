from __future__ import annotations

import collections
import enum
import pathlib
import struct
import threading
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from everystep.errors import Damaged, Unsupported
from everystep.state import raw
from everystep.state.tree import MAX_DEPTH, Decoder, Encoder
from states import assert_same_state
from strategies import trees


def _through_json(value: Any) -> Any:
    """Encode, write the tensors' bytes and the JSON, and read both back."""
    encoder = Encoder()
    tree = msgspec.json.decode(msgspec.json.encode(encoder.encode(value, "/extras/it")))
    tensors = {}
    for key, held in encoder.held.items():
        data = b"".join(raw.host_chunks(held.tensor, 0, held.tensor.numel()))
        tensor, view = raw.empty_for(held.spec)
        view[:] = data
        tensors[key] = raw.restrided(tensor, held.spec)
    return Decoder(tensors).decode(tree)


@given(trees())
@settings(max_examples=150)
def test_a_tree_comes_back_as_it_was(value: Any) -> None:
    assert_same_state(_through_json(value), value)


@pytest.mark.parametrize(
    "value",
    [
        {1: torch.zeros(2), "1": torch.ones(2), (1,): torch.full((2,), 2.0), "(1,)": torch.ones(1)},
        {1: torch.zeros(1), "1#2": torch.ones(1), "1": torch.full((1,), 2.0)},
        {None: np.zeros(2), "None": np.ones(2)},
        {"$tensor": "/a"},
        {"$unknown": 1},
        {"": {"": ""}},
        {"\ud800": "\udfff", "\\ud800": torch.ones(1)},
        -(1 << 53),
        (1 << 53) - 1,
        10**400,
        -0.0,
        5e-324,
        1e16,
        1e22,
        struct.unpack(">d", bytes.fromhex("fff8000000000123"))[0],
        complex(-0.0, float("-inf")),
        np.float16("nan"),
        np.array(3, dtype=">i4"),
        np.empty((0, 3), dtype=np.complex64),
        np.arange(6).reshape(2, 3).T,
        torch.Size([2, 3]),
        collections.Counter({"a": 0, 3: -1}),
        collections.deque([1, (2,)], maxlen=2),
        frozenset({(1, "a"), (2, "b")}),
        torch.device("cuda:1"),
        torch.bfloat16,
    ],
    ids=lambda value: type(value).__name__,
)
def test_awkward_values_come_back(value: Any) -> None:
    assert_same_state(_through_json(value), value)


@pytest.mark.parametrize("shell", [lambda x: [x], lambda x: {"a": x}, lambda x: {0: x}])
def test_nesting_to_the_limit_and_no_further(shell: Any) -> None:
    value: Any = ""
    for _ in range(MAX_DEPTH):
        value = shell(value)
    assert_same_state(_through_json(value), value)
    with pytest.raises(Unsupported, match="nested more than 100 deep"):
        _through_json(shell(value))


def test_a_cycle_is_refused() -> None:
    cycle: list[Any] = []
    cycle.extend([cycle, cycle])
    with pytest.raises(Unsupported, match="nested"):
        _through_json(cycle)


class _Colour(enum.Enum):
    RED = 1


class _Level(enum.IntEnum):
    LOW = 1


class _Text(str):
    pass


_ORDERED = collections.OrderedDict(a=1)
_ORDERED.note = "here"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("value", "described"),
    [
        (_Colour.RED, "_Colour"),
        (_Level.LOW, "_Level"),
        (_Text("a"), "_Text"),
        (pathlib.PurePosixPath("a"), "pathlib.PurePosixPath"),
        (lambda: 0, "a function or class (<lambda>)"),
        (int, "a function or class (int)"),
        (threading.Lock(), "_thread.lock"),
        (collections.defaultdict(list), "collections.defaultdict"),
        (np.array([object()]), "dtype object"),
        (np.datetime64("2020-01-01"), "numpy.datetime64"),
        ({torch.zeros(1): 1}, "a tensor as key"),
        (_ORDERED, "attributes ['note']"),
        (torch.zeros(2, device="meta"), "meta device"),
        (torch.zeros(2, 2).to_mkldnn(), "_mkldnn"),
        (torch.zeros(2).as_subclass(type("Odd", (torch.Tensor,), {})), "a tensor subclass"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_is_not_plain_is_refused_by_its_path(value: Any, described: str) -> None:
    with pytest.raises(Unsupported) as caught:
        Encoder().encode({"outer": [0, {"in.ner": value}]}, "/extras/it")
    assert "extras.it.outer.1.in.ner" in str(caught.value)
    assert described in str(caught.value)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_quantised_tensors_are_refused() -> None:
    quantised = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    with pytest.raises(Unsupported, match=r"extras.it: a quantised tensor"):
        Encoder().encode(quantised, "/extras/it")


def test_a_freed_storage_is_refused_and_not_read() -> None:
    tensor = torch.zeros(1000)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(Unsupported, match="storage has been freed"):
        Encoder().encode(tensor, "/extras/it")


def test_one_tensor_in_two_places_is_one_tensor_again() -> None:
    tensor = torch.randn(3)
    back = _through_json({"a": tensor, "b": [tensor, tensor.clone()]})
    assert back["a"] is back["b"][0]
    assert back["b"][1].data_ptr() != back["a"].data_ptr()


def test_a_conjugate_view_is_not_taken_for_its_base() -> None:
    base = torch.tensor([1 + 2j, 3 - 4j])
    value = {"base": base, "conj": base.conj(), "re": base.imag, "neg": base.conj().imag}
    assert_same_state(_through_json(value), {k: v.clone() for k, v in value.items()})


def test_overlapping_views_store_what_is_seen() -> None:
    big = torch.arange(1_000_000)
    encoder = Encoder()
    encoder.encode([big[:10], big[5:15], big[::100_000]], "/a")
    assert [held.spec.nbytes for held in encoder.held.values()] == [80, 80, 80]


@pytest.mark.parametrize(
    "sparse",
    [
        torch.sparse_coo_tensor(
            [[0, 0, 1], [1, 1, 0]], [1.0, 2.0, float("nan")], (2, 3), check_invariants=True
        ),
        torch.sparse_coo_tensor(
            [[0, 1]], [[1.0, 2.0], [3.0, 4.0]], (2, 2), check_invariants=True
        ).coalesce(),
        torch.sparse_coo_tensor(
            torch.empty(1, 0, dtype=torch.int64), torch.empty(0), (4,), check_invariants=True
        ),
    ],
    ids=["twice the same index", "hybrid", "empty"],
)
def test_sparse_tensors(sparse: torch.Tensor) -> None:
    assert_same_state(_through_json([sparse]), [sparse])


def test_leaves_and_parameters_stay_what_they_are() -> None:
    values = {
        "leaf": torch.ones(2, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "frozen": torch.nn.Parameter(torch.ones(2), requires_grad=False),
        "plain": torch.ones(2),
    }
    values["computed"] = values["leaf"] * 2
    values["again"] = values["parameter"]
    back = _through_json(values)
    kinds = {name: (type(t), t.requires_grad, t.is_leaf) for name, t in values.items()}
    kinds["computed"] = (torch.Tensor, False, True)
    assert {name: (type(t), t.requires_grad, t.is_leaf) for name, t in back.items()} == kinds
    assert back["again"] is back["parameter"]


def test_the_versions_in_a_modules_state_dict_are_kept() -> None:
    state = torch.nn.BatchNorm1d(2).state_dict()
    back = _through_json(state)
    assert_same_state(back, state)
    assert back._metadata == state._metadata  # type: ignore[attr-defined]


def test_same_value_same_json() -> None:
    one = Encoder().encode({"s": {"b", "a", "c"}, "x": [1]}, "/a")
    assert one == {"s": {"$set": ["a", "b", "c"]}, "x": [1]}


@pytest.mark.parametrize(
    "tree",
    [
        {"$tensor": "/not/there"},
        {"$tensor": ["/a"]},
        {"$parameter": None},
        {"$unknown": 1},
        {"$int": "zz"},
        {"$int": 3},
        {"$float": "00"},
        {"$complex": [1]},
        {"$bytes": "***"},
        {"$text": "gICA"},
        {"$dtype": "load"},
        {"$dtype": "Tensor"},
        {"$device": "nowhere"},
        {"$scalar": ["O8", "00"]},
        {"$scalar": ["<f8", "00"]},
        {"$array": ["/a", "|O8", [1]]},
        {"$array": ["/a", "<f8", [10**9]]},
        {"$array": ["/missing", "<f8", [1]]},
        {"$coo": ["/a", "/a", [3], True]},
        {"$coo": []},
        {"$dict": [[{"$dict": []}, 1]]},
        {"$dict": 3},
        {"$set": [[1]]},
        {"$deque": [[1], -1]},
        {"$module": [1]},
        {"$size": ["a"]},
    ],
    ids=str,
)
def test_malformed_json_is_damage(tree: Any) -> None:
    with pytest.raises((Damaged, Unsupported)):
        Decoder({"/a": torch.zeros(3)}).decode({"outer": [tree]})


def test_deep_json_is_damage() -> None:
    tree: Any = 0
    for _ in range(3 * MAX_DEPTH):
        tree = [tree]
    with pytest.raises(Damaged, match="too deep"):
        Decoder({}).decode(tree)
