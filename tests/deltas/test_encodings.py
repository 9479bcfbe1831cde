"""Encodings of gradients: every bit comes back in the fewest bytes; nothing read is trusted."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everystep.deltas import encodings, loops
from everystep.deltas.delta import Coded, Form
from everystep.deltas.encodings import decode, decode_coo, encode, encode_known, positions
from everystep.errors import Damaged, Unsupported, UsageError
from everystep.state import raw
from states import FrozenTensor
from strategies import tensors

try:
    from everystep.deltas import _codec
except ImportError:
    CODECS: list[Any] = [loops, pytest.param(None, marks=pytest.mark.skip("it was not compiled"))]
else:
    CODECS = [loops, _codec]

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")

each_codec = pytest.mark.parametrize("codec", CODECS, ids=["numpy", "compiled"])

FLOATS = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64,
    torch.complex128, torch.complex32, torch.float8_e5m2,
)  # fmt: skip

SPARSE_FORMS = (Form.SPARSE, Form.SPARSE_BFLOAT16, Form.SPARSE_FLOAT16)

SPECIAL = {  # -0.0, infinities, quiet and signalling NaNs with payloads, denormals, largest
    4: [
        *(0x80000000, 0x7F800000, 0xFF800000, 0x7FC00001, 0xFF812345, 0x7F801000, 1, 0x807FFFFF),
        *(0x7F7FFFFF, 0x33800000, 0x387FC000, 0x38800000, 0x477FE000, 0x47800000, 0x3F800000),
    ],
    2: [0x8000, 0x7F80, 0xFF80, 0x7FC1, 0x7F81, 1, 0x807F, 0x7C00, 0x7C01, 0xFE00, 0x3C00],
}


@contextlib.contextmanager
def using(codec: ModuleType) -> Iterator[None]:
    with mock.patch.object(encodings, "codec", codec):
        yield


def bits(tensor: torch.Tensor) -> bytes:
    """Row-major."""
    return FrozenTensor(tensor).items.tobytes()


def decoded(coded: Coded, length: int, dtype: torch.dtype) -> bytes:
    """Through memory that is not aligned and has guards at both ends."""
    size = dtype.itemsize
    whole = torch.full(((length + 2) * size,), 0xA5, dtype=torch.uint8)
    out = whole.view(dtype)[1:-1] if length else torch.empty(0, dtype=dtype)
    try:
        decode(coded, out)
    finally:
        guards = bytes(whole[:size].numpy()), bytes(whole[len(whole) - size :].numpy())
        assert guards == (b"\xa5" * size,) * 2
    return bits(out)


def same(one: Coded, other: Coded) -> bool:
    return (*one[:3], bytes(one.gaps), bytes(one.values)) == (
        *(*other[:3], bytes(other.gaps), bytes(other.values)),
    )


def nbytes(coded: Coded) -> int:
    return len(coded.gaps) + len(coded.values)


@st.composite
def sparse_gradients(draw: st.DrawFn) -> torch.Tensor:
    """1-d, of any floating-point dtype, with any bits at a few places (or at most of them)."""
    dtype = draw(st.sampled_from(FLOATS))
    size = dtype.itemsize
    length = draw(st.sampled_from([1, 7, 63, 64, 65, 300, 4000, 70000]))
    places = draw(st.lists(st.integers(0, length - 1), max_size=40, unique=True))
    unit = 2 if size == 2 else 1 if size == 1 else 4
    word = st.binary(min_size=unit, max_size=unit)
    if unit > 1:
        word |= st.sampled_from([n.to_bytes(unit, "little") for n in SPECIAL[unit]])
    items = np.zeros((length, size), np.uint8)
    for place in places:
        item = b"".join(draw(word) for _ in range(size // unit))
        items[place] = np.frombuffer(item, np.uint8)
    if draw(st.booleans()):
        items[draw(st.integers(0, length)) :] = items[0]  # a cluster
    return torch.from_numpy(items.reshape(-1)).view(dtype)


@given(tensors(), st.data())
@settings(max_examples=200)
def test_any_stretch_of_any_tensor_comes_back(tensor: torch.Tensor, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, tensor.numel()))
    stop = data.draw(st.integers(start, tensor.numel()))
    size = tensor.element_size()
    found = []
    for codec in (loops, encodings.codec):
        with using(codec):
            found.append(encode(tensor, start, stop))
            back = decoded(found[-1], stop - start, tensor.dtype)
        assert back == bits(tensor)[start * size : stop * size]
    assert same(*found)


@given(sparse_gradients(), st.data())
@settings(max_examples=200)
def test_searched_and_known_sparse_gradients_are_the_same(
    tensor: torch.Tensor, data: st.DataObject
) -> None:
    length, dtype = tensor.numel(), raw.dtype_name(tensor.dtype)
    start = data.draw(st.integers(0, length))
    stop = data.draw(st.integers(start, length))
    items = FrozenTensor(tensor).items
    where = items.any(axis=1)
    where[data.draw(st.integers(0, length - 1))] = True  # perhaps a zero that is said to be kept
    kind = data.draw(st.sampled_from([torch.int32, torch.int64]))
    known = torch.from_numpy(np.flatnonzero(where)).to(kind)
    values = torch.from_numpy(items[where].reshape(-1)).view(tensor.dtype)
    found = []
    for codec in (loops, encodings.codec):
        with using(codec):
            found += [
                encode(tensor, start, stop),
                encode(tensor, start, stop, indices=known),
                encode_known(known.numpy(), values, dtype, start, stop),
            ]
            assert decoded(found[-1], stop - start, tensor.dtype) == items[start:stop].tobytes()
            if found[-1].form in SPARSE_FORMS:
                places = np.flatnonzero(items[start:stop].any(axis=1))
                assert positions(found[-1]).tolist() == places.tolist()
    assert all(same(found[0], other) for other in found[1:])
    _check_that_it_is_the_smallest(found[0], items[start:stop])


def _gap_bytes(gap: int) -> int:
    bounds = (
        240,
        240 + 13 * 256,
        240 + 13 * 256 + (1 << 16),
        240 + 13 * 256 + (1 << 16) + (1 << 24),
    )
    return 1 + sum(more for bound, more in zip(bounds, (1, 1, 1, 3), strict=True) if gap >= bound)


def _check_that_it_is_the_smallest(coded: Coded, items: np.ndarray[Any, Any]) -> None:
    places = np.flatnonzero(items.any(axis=1))
    if not len(places):
        assert coded.form == Form.ZERO and nbytes(coded) == 0
        return
    gaps = sum(map(_gap_bytes, (np.diff(places, prepend=-1) - 1).tolist()))
    width = 2 if coded.form in (Form.BFLOAT16, Form.FLOAT16, *SPARSE_FORMS[1:]) else items.shape[1]
    if coded.dtype == "float32" and width == 4:
        assert not _is_narrow(items)
    assert nbytes(coded) == min(len(items) * width, gaps + len(places) * width)


def _is_narrow(items: np.ndarray[Any, Any]) -> bool:
    single = np.ascontiguousarray(items).view(np.uint32).reshape(-1)
    fits = []
    for kind in (torch.bfloat16, torch.float16):
        back = torch.from_numpy(single.view(np.float32)).to(kind).to(torch.float32)
        numbers = ~np.isnan(single.view(np.float32))
        mask = 0xFFFF if kind == torch.bfloat16 else 0x1FFF  # what a NaN must leave out
        exact = np.where(numbers, back.numpy().view(np.uint32) == single, single & mask == 0)
        fits.append(bool(exact.all()))
    return any(fits)


# ---------------------------------------------------------------- forms


def test_absent_is_not_zero() -> None:
    assert encode(None, 3, 9)[:3] == (Form.ABSENT, "", 0)
    assert encode(torch.zeros(9), 3, 9)[:3] == (Form.ZERO, "float32", 0)


def test_negative_zero_is_kept() -> None:
    gradient = torch.zeros(100, dtype=torch.float64)
    gradient[70] = -0.0
    coded = encode(gradient, 0, 100)
    assert coded.form == Form.SPARSE and positions(coded).tolist() == [70]
    assert bytes(coded.values) == b"\0\0\0\0\0\0\0\x80"


@pytest.mark.parametrize(
    ("values", "form"),
    [
        ([1.5, -2.0, float("inf")], Form.BFLOAT16),
        ([1.0009765625, 2.0**-24, -65504.0], Form.FLOAT16),
        ([1.0009765625, 1e30], Form.DENSE),  # each is narrow, but not of one kind
        ([0.1, 0.2], Form.DENSE),
    ],
)
@each_codec
def test_narrow_values_take_half(codec: ModuleType, values: list[float], form: Form) -> None:
    dense = torch.tensor(values)
    sparse = torch.zeros(1000)
    sparse[500 : 500 + len(values)] = dense
    wide = {Form.BFLOAT16: Form.SPARSE_BFLOAT16, Form.FLOAT16: Form.SPARSE_FLOAT16}
    with using(codec):
        for gradient, expected in ((dense, form), (sparse, wide.get(form, Form.SPARSE))):
            coded = encode(gradient, 0, len(gradient))
            assert coded.form == expected
            assert len(coded.values) == len(values) * (4 if form == Form.DENSE else 2)
            assert decoded(coded, len(gradient), torch.float32) == bits(gradient)


@each_codec
def test_every_16_bit_number_widens_as_in_torch_and_narrows_back(codec: ModuleType) -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    for half, kind in ((True, torch.float16), (False, torch.bfloat16)):
        wide, back = np.empty(1 << 18, np.uint8), np.empty(1 << 17, np.uint8)
        codec.widen(every.view(np.uint8), half, wide)
        assert codec.narrow(wide, half, back)
        assert (back.view(np.uint16) == every).all()
        ours = wide.view(np.uint32)
        by_torch = torch.from_numpy(every).view(kind).float().numpy()
        numbers = ~np.isnan(by_torch)
        assert (ours[numbers] == by_torch.view(np.uint32)[numbers]).all()
        assert np.isnan(ours.view(np.float32)[~numbers]).all()
        assert len(np.unique(ours)) == 1 << 16


@each_codec
def test_no_other_number_narrows(codec: ModuleType) -> None:
    generator = np.random.default_rng(4)
    near = np.concatenate([np.arange(s - 2, s + 3) for s in SPECIAL[4] if s > 2])
    singles = np.concatenate([near, generator.integers(0, 1 << 32, 1000)]).astype(np.uint32)
    singles[-500:] &= 0xFFFFE000  # numbers, most of which have too large an exponent
    for single in singles:
        for half in (True, False):
            data, out = np.array([single]).view(np.uint8), np.empty(2, np.uint8)
            wide = np.empty(4, np.uint8)
            fits = codec.narrow(data, half, out)
            codec.widen(out, half, wide)
            kind = torch.float16 if half else torch.bfloat16
            value = torch.from_numpy(data).view(torch.float32)
            expected = bits(value.to(kind).float()) == bytes(data)
            if value.isnan():
                expected = int(single) & (0x1FFF if half else 0xFFFF) == 0
            assert fits == expected, hex(single)
            assert not fits or bytes(wide) == bytes(data), hex(single)


def test_lazy_conjugates_and_negatives_are_resolved() -> None:
    gradient = torch.tensor([1 + 2j, 0, -0.0 + 3j] * 3)
    for lazy in (gradient.conj(), torch.imag(gradient.conj())):
        assert lazy.is_conj() or lazy.is_neg()
        coded = encode(lazy, 0, 9)
        assert decoded(coded, 9, lazy.dtype) == bits(lazy)


def test_dense_values_alias_the_gradient() -> None:
    gradient = torch.randn(10, requires_grad=True)
    assert np.shares_memory(encode(gradient, 2, 9).values, gradient.detach().numpy())


def test_known_indices_spare_the_search() -> None:
    gradient = torch.full((4, 50), 7.25)
    gradient.T[3, 2] = 0.1
    for view, at in ((gradient, 2 * 50 + 3), (gradient.T, 3 * 4 + 2)):
        coded = encode(view, 0, 200, indices=np.array([at]))
        assert positions(coded).tolist() == [at]
        assert bytes(coded.values) == np.float32(0.1).tobytes()


# ---------------------------------------------------------------- gaps

SPELLED = [
    (0, "00"), (239, "ef"), (240, "f0 00"), (495, "f0 ff"), (496, "f1 00"), (3567, "fc ff"),
    (3568, "fd 0000"), (69103, "fd ffff"), (69104, "fe 000000"), (16846319, "fe ffffff"),
    (16846320, "ff 000000000000"), (16846320 + (1 << 40), "ff 000000000001"),
]  # fmt: skip


@pytest.mark.parametrize(("gap", "spelled"), SPELLED, ids=lambda value: str(value))
@each_codec
def test_how_gaps_are_written(codec: ModuleType, gap: int, spelled: str) -> None:
    first, _, more = spelled.partition(" ")
    expected = bytes.fromhex("05" + first + "00" + more)
    start = 1000
    indices = np.array([start + 5, start + 6 + gap, start + 7 + gap])
    room = np.empty(loops.gap_room(3, gap + 10), np.uint8)
    used = codec.gaps(indices.view(np.uint8), 8, start, start + gap + 8, room)
    assert bytes(room[:used]) == expected
    out = np.empty(3, np.int64)
    assert codec.positions(room[:used], gap + 8, out)
    assert (out + start == indices).all()
    assert not codec.positions(room[:used], gap + 7, out), "beyond the limit"


@pytest.mark.parametrize("density", [0.00001, 0.0003, 0.01, 0.3])
@pytest.mark.parametrize("clustered", [False, True])
def test_any_density(density: float, clustered: bool) -> None:
    generator = np.random.default_rng(7)
    length = 3_000_000
    if clustered:  # rows of an embedding
        rows = generator.random(length // 100) < density
        rows[12_345] = True
        where = np.flatnonzero(np.repeat(rows, 100))
    else:
        where = np.flatnonzero(generator.random(length) < density)
    gradient = torch.zeros(length)
    gradient[torch.from_numpy(where)] = torch.rand(len(where)) + 0.1
    found = []
    for codec in (loops, encodings.codec):
        with using(codec):
            found.append(encode(gradient, 0, length))
            assert decoded(found[-1], length, torch.float32) == bits(gradient)
            assert (positions(found[-1]) == where).all()
    assert same(*found)
    assert nbytes(found[0]) <= len(where) * 8


def test_threads_encode_and_decode_at_once() -> None:
    gradients = [torch.zeros(200_000) for _ in range(4)]
    for seed, gradient in enumerate(gradients):
        gradient[:: 50 + seed] = seed + 0.1
    results: dict[int, list[bytes]] = {}

    def work(which: int) -> None:
        gradient = gradients[which]
        coded = [encode(gradient, 0, len(gradient)) for _ in range(10)]
        results[which] = [decoded(c, len(gradient), torch.float32) for c in coded]

    threads = [threading.Thread(target=work, args=(which,)) for which in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {which: [bits(gradients[which])] * 10 for which in range(4)}


# ---------------------------------------------------------------- sparse COO


def coo_gradients() -> dict[str, torch.Tensor]:
    embedding = torch.nn.Embedding(10, 3, sparse=True)
    embedding(torch.tensor([7, 2, 7])).sum().backward()  # type: ignore[no-untyped-call]
    repeated = embedding.weight.grad
    assert repeated is not None and not repeated.is_coalesced()
    nowhere = torch.empty(0, 1, dtype=torch.int64)
    scalar = torch.sparse_coo_tensor(nowhere, torch.ones(1), (), check_invariants=True)
    return {
        "repeated": repeated,
        "coalesced": repeated.coalesce(),
        "no values": torch.sparse_coo_tensor(size=(4, 5), check_invariants=True),
        "bfloat16": repeated.coalesce().to(torch.bfloat16),
        "all sparse": torch.tensor([[0, 1.5], [-0.0, float("nan")]]).to_sparse(),
        "scalar": scalar,
        "no elements": torch.sparse_coo_tensor(size=(0, 5), check_invariants=True),
    }


def assert_same_coo(one: torch.Tensor, other: torch.Tensor) -> None:
    assert (one.shape, one.dtype, one.is_coalesced()) == (
        *(other.shape, other.dtype, other.is_coalesced()),
    )
    for part in ("_indices", "_values"):
        line = FrozenTensor(getattr(one, part)()).difference(FrozenTensor(getattr(other, part)()))
        assert line is None, f"{part}: {line}"


@pytest.mark.parametrize(
    "name",
    ["repeated", "coalesced", "no values", "bfloat16", "all sparse", "scalar", "no elements"],
)
def test_sparse_tensors_come_back_as_they_are(name: str) -> None:
    gradient = coo_gradients()[name]
    coded = encode(gradient, 0, gradient.numel())
    encodings.check(coded, gradient.numel())
    assert coded.form == Form.COO and coded.count == gradient._values().numel()
    assert_same_coo(decode_coo(coded), gradient)
    with pytest.raises(Damaged, match="size"):
        encodings.check(coded, gradient.numel() + 1)


@given(st.data())
@settings(max_examples=300)
def test_a_damaged_sparse_tensor_is_refused_or_well_formed(data: st.DataObject) -> None:
    gradient = coo_gradients()[data.draw(st.sampled_from(["repeated", "coalesced", "scalar"]))]
    coded = encode(gradient, 0, gradient.numel())
    numbers = coded.gaps.copy().view(np.int64)
    at = data.draw(st.integers(0, len(numbers) - 1))
    extreme = st.sampled_from([-1, 0, 1, 2, 1 << 31, 1 << 62, (1 << 63) - 1, -(1 << 63)])
    numbers[at] = data.draw(extreme | st.integers(0, 12))
    cut = data.draw(st.sampled_from([0, 0, 1, 8]))
    gaps = numbers.view(np.uint8)[: numbers.nbytes - cut]
    with contextlib.suppress(Damaged):
        torch.sparse_coo_tensor(
            (back := decode_coo(coded._replace(gaps=gaps)))._indices(),
            back._values(),
            back.shape,
            check_invariants=True,
            is_coalesced=back.is_coalesced(),
        )


# ---------------------------------------------------------------- what is refused

SOME = torch.zeros(10)


@pytest.mark.parametrize(
    "call",
    [
        lambda: encode(SOME, 0, 11),
        lambda: encode(SOME, -1, 5),
        lambda: encode(SOME, 6, 5),
        lambda: encode(torch.ones(10), 0, 10, indices=np.array([3, 3])),
        lambda: encode(torch.ones(10), 0, 10, indices=np.array([5, 3])),
        lambda: encode(torch.ones(10), 0, 10, indices=np.array([-1, 99, 3])),
        lambda: encode(torch.ones(10), 0, 10, indices=np.array([0.5])),
        lambda: encode(torch.ones(10), 0, 10, indices=np.array([[1]])),
        lambda: encode_known(np.array([1, 2]), torch.ones(1), "float32", 0, 10),
        lambda: encode_known(np.array([1]), torch.ones(1), "float64", 0, 10),
        lambda: encode_known(np.array([2, 1]), torch.ones(2), "float32", 0, 10),
        lambda: encode_known(np.array([1]), torch.ones(1), "float32", 5, 4),
        lambda: encode(torch.eye(3).to_sparse(), 0, 5),
        lambda: decode(encode(SOME, 0, 10), torch.empty(10, dtype=torch.float64)),
        lambda: decode(encode(SOME, 0, 10), torch.empty(20)[::2]),
        lambda: decode(encode(None, 0, 10), torch.empty(10)),
        lambda: decode(encode(torch.eye(3).to_sparse(), 0, 9), torch.empty(9)),
        lambda: positions(encode(SOME, 0, 10)),
        lambda: decode_coo(encode(SOME, 0, 10)),
    ],
)
def test_wrong_calls_are_refused(call: Callable[[], object]) -> None:
    with pytest.raises(UsageError):
        call()


def test_layouts_that_are_not_stored_are_refused() -> None:
    with pytest.warns(UserWarning, match="Sparse CSR"):
        compressed = torch.eye(3).to_sparse_csr()
    with pytest.raises(Unsupported, match="sparse_csr"):
        encode(compressed, 0, 9)


def test_a_gradient_that_changes_under_our_hands_is_refused() -> None:
    gradient = torch.zeros(1000)
    gradient[5] = 0.1

    def survey(data: Any, width: int) -> tuple[int, int]:
        found = loops.survey(data, width)
        gradient[6] = 0.1
        return found

    with (
        mock.patch.object(encodings, "codec", mock.Mock(wraps=encodings.codec, survey=survey)),
        pytest.raises(UsageError, match="written while"),
    ):
        encode(gradient, 0, 1000)


@given(sparse_gradients(), st.data())
@settings(max_examples=300)
def test_damaged_bytes_are_refused_or_decode_within_bounds(
    tensor: torch.Tensor, data: st.DataObject
) -> None:
    length = tensor.numel()
    coded = encode(tensor, 0, length)
    what = data.draw(st.sampled_from(["flip", "cut", "longer", "count", "form", "noise"]))
    gaps, values = bytearray(coded.gaps), bytearray(coded.values)
    count, form = coded.count, coded.form
    if what == "flip" and gaps:
        gaps[data.draw(st.integers(0, len(gaps) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    elif what == "cut":
        gaps = gaps[: data.draw(st.integers(0, len(gaps)))]
    elif what == "longer":
        gaps += data.draw(st.binary(max_size=3))
    elif what == "count":
        count = data.draw(st.sampled_from([-1, count + 1, 1 << 40, (1 << 63) - 1]))
    elif what == "form":
        form = data.draw(
            st.sampled_from([f for f in Form if f not in (Form.COO, Form.ABSENT, Form.ON_WIRE)])
        )
    else:
        gaps = bytearray(data.draw(st.binary(min_size=len(gaps), max_size=len(gaps) + 2)))
    hostile = Coded(
        form, coded.dtype, count, np.frombuffer(gaps, np.uint8), np.frombuffer(values, np.uint8)
    )
    verdicts = []
    for codec in (loops, encodings.codec):
        with using(codec):
            try:
                verdicts.append(decoded(hostile, length, tensor.dtype))
            except Damaged:
                verdicts.append(b"damaged")
            if form in SPARSE_FORMS:
                with contextlib.suppress(Damaged):
                    assert (np.diff(positions(hostile)) > 0).all()
    assert verdicts[0] == verdicts[1]


U8 = np.empty(80, np.uint8)


@pytest.mark.skipif(encodings.codec is loops, reason="it was not compiled")
@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("survey", (U8, 3)),
        ("survey", (U8[:7], 4)),
        ("extract", (U8, 4, U8[:4], U8[:20])),  # no room for gaps
        ("extract", (U8, 4, U8, U8[:7])),
        ("gather", (U8, 4, U8[:16], 8, U8[:12])),
        ("gather", (U8, 4, U8[:16], 3, U8[:8])),
        ("gaps", (U8, 8, 0, 1000, U8[:9])),
        ("gaps", (U8, 8, 5, 4, U8)),
        ("gaps", (U8, 8, -1, 4, U8)),
        ("positions", (U8[:2], 1000, U8[:24])),
        ("positions", (U8, -1, U8[:24])),
        ("positions", (U8, 9, U8[:23])),
        ("scatter", (U8[:2], U8[:12], 4, U8)),
        ("scatter", (U8, U8[:12], 5, U8)),
        ("scatter", (U8, U8[:12], 4, U8[:79])),
        ("narrow", (U8, True, U8[:36])),
        ("widen", (U8[:38], True, U8)),
    ],
)
def test_the_compiled_loops_check_the_lengths(name: str, args: tuple[object, ...]) -> None:
    with pytest.raises(ValueError, match="lengths of the buffers"):
        getattr(encodings.codec, name)(*args)
