from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import given, settings

from everystep.errors import Unsupported
from everystep.state import raw
from everystep.types import TensorSpec, item_bytes
from states import FrozenTensor, assert_same_state
from strategies import tensors


def _all_dtypes() -> list[torch.dtype]:
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return sorted(found, key=str)


def _spec(tensor: torch.Tensor) -> TensorSpec:
    dtype, shape = raw.dtype_name(tensor.dtype), tuple(tensor.shape)
    return TensorSpec(key="/a", dtype=dtype, shape=shape, stride=raw.kept_stride(tensor))


def _bytes_of(tensor: torch.Tensor, start: int = 0, stop: int | None = None) -> bytes:
    stop = tensor.numel() if stop is None else stop
    return b"".join(raw.host_chunks(tensor, start, stop))


@pytest.mark.parametrize("dtype", _all_dtypes(), ids=str)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
def test_every_dtype_of_torch_is_stored_or_refused(dtype: torch.dtype) -> None:
    tensor = torch.empty(4, dtype=dtype)
    reason = raw.refusal(tensor)
    if "q" in str(dtype):
        assert reason is not None and "quantised" in reason
        return
    assert reason is None
    assert item_bytes(raw.dtype_name(dtype)) == tensor.element_size()
    data = bytes(range(250, 256)) * 20
    back, view = raw.empty_for(_spec(tensor))
    view[:] = data[: len(view)]
    assert back.dtype == dtype and _bytes_of(back) == data[: len(view)]
    copy, _ = raw.empty_for(_spec(tensor))
    assert raw.write_into(copy, back) and _bytes_of(copy) == _bytes_of(back)
    assert raw.same_bits(copy, back)


@given(tensors())
@settings(max_examples=100)
def test_any_stretch_of_any_tensor(tensor: torch.Tensor) -> None:
    whole = FrozenTensor(tensor).items.tobytes()
    size = tensor.element_size()
    assert _bytes_of(tensor) == whole
    for start in range(tensor.numel()):
        stop = min(start + 3, tensor.numel())
        assert _bytes_of(tensor, start, stop) == whole[start * size : stop * size]


@pytest.mark.parametrize("chunk_bytes", [1, 8, 24, 100])
@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(5, 7).t(),
        torch.randn(3, 4, 5, 6).to(memory_format=torch.channels_last),
        torch.randn(4, 6)[:, ::2],
        torch.randn(3, 1).expand(3, 5),
        torch.randn(9)[::3],
        torch.randn(2, 3, 4).permute(2, 0, 1)[1:],
        torch.randn(30).as_strided((4, 3), (2, 1)),
    ],
    ids=["transposed", "channels-last", "columns", "expanded", "strided", "permuted", "windows"],
)
def test_small_chunks_give_the_same_bytes(
    tensor: torch.Tensor, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raw, "CHUNK_BYTES", chunk_bytes)
    expected = FrozenTensor(tensor).items.tobytes()
    assert _bytes_of(tensor) == expected
    assert _bytes_of(tensor, 2, 9) == expected[8:36]
    for chunk in raw.host_chunks(tensor, 0, tensor.numel()):
        assert len(chunk) <= max(chunk_bytes, 4)


def test_a_row_major_tensor_is_not_copied() -> None:
    tensor = torch.zeros(4)
    (chunk,) = raw.host_chunks(tensor, 1, 3)
    tensor[1] = 1.0
    assert bytes(chunk) == bytes.fromhex("0000803f00000000")


def test_single_elements_of_any_stride() -> None:
    assert _bytes_of(torch.arange(4.0)[3:4:2].as_strided((1,), (7,))) == b"\0\0\x40\x40"
    assert _bytes_of(torch.arange(4.0)[1::3][:, None].expand(1, 1)) == b"\0\0\x80\x3f"


@given(tensors())
@settings(max_examples=100)
def test_memory_order_is_kept_where_memory_is_dense(tensor: torch.Tensor) -> None:
    back, view = raw.empty_for(_spec(tensor))
    view[:] = _bytes_of(tensor)
    assert_same_state(raw.restrided(back, _spec(tensor)), tensor)


@pytest.mark.parametrize(
    "stride", [(-1, 3), (1, -3), (0, 0), (2, 1), (1,), (1 << 70, 1), (1, 1 << 62)]
)
def test_strides_from_a_hostile_file_do_no_harm(stride: tuple[int, ...]) -> None:
    for shape in ((3, 2), (1, 2), (0, 2)):
        tensor, view = raw.empty_for(TensorSpec(key="/a", dtype="float32", shape=shape))
        view[:] = bytes(len(view))
        spec = TensorSpec(key="/a", dtype="float32", shape=shape, stride=stride)
        assert raw.restrided(tensor, spec).tolist() == torch.zeros(shape).tolist()


def test_a_shape_beyond_memory_is_an_error() -> None:
    spec = TensorSpec(key="/models/model/w", dtype="float32", shape=(1 << 62,))
    with pytest.raises(Unsupported, match=r"models.model.w: no room for"):
        raw.empty_for(spec)


@given(tensors())
@settings(max_examples=100)
def test_written_into_a_tensor_of_other_strides(source: torch.Tensor) -> None:
    for live in (
        torch.zeros_like(source, memory_format=torch.contiguous_format),
        torch.zeros(source.shape[::-1], dtype=source.dtype).permute(
            tuple(range(source.dim())[::-1])
        ),
        torch.zeros((*source.shape, 2), dtype=source.dtype)[..., 1],
    ):
        strides = live.stride()
        assert raw.write_into(live, source)
        assert live.stride() == strides
        assert _bytes_of(live) == _bytes_of(source)


def test_expanded_and_overlapping_targets() -> None:
    live = torch.zeros(3, 1).expand(3, 4)
    assert raw.write_into(live, torch.tensor([[1.0] * 4, [float("nan")] * 4, [3.0] * 4]))
    assert live[2, 3] == 3 and live[1].isnan().all()
    assert not raw.write_into(live, torch.arange(12.0).reshape(3, 4))
    assert not raw.write_into(live.to(torch.complex128).expand(3, 4)[:, :1].expand(3, 4),
                              torch.arange(12).reshape(3, 4).to(torch.complex128))  # fmt: skip
    windows = torch.zeros(5).as_strided((4, 2), (1, 1))
    assert raw.write_into(windows, torch.tensor([[1.0, 2], [2, 3], [3, 4], [4, 5]]))
    assert not raw.write_into(windows, torch.arange(8.0).reshape(4, 2))


def test_many_pairs_are_written_as_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raw, "_STRETCH_BYTES", 7)
    copied: list[int] = []

    def copy(to: int, origin: int, nbytes: int) -> None:
        copied.append(nbytes)
        ctypes.memmove(to, origin, nbytes)

    sources = [
        torch.randn(5, 3),
        torch.randn(3, 5).t(),
        torch.tensor(float("nan")),
        torch.arange(4.0),
        torch.empty(0),
        torch.randn(5),
    ]
    lives = [
        torch.zeros(5, 3),
        torch.zeros(5, 3),
        torch.zeros(()),
        torch.zeros(1).expand(4),
        torch.empty(0),
        torch.zeros(5),
    ]
    versions = [live._version for live in lives]
    assert raw.write_all(list(zip(lives, sources, strict=True)), copy) == [
        True, True, True, False, True, True,
    ]  # fmt: skip
    for live, source in zip(lives, sources, strict=True):
        if live.stride() != (0,):
            assert _bytes_of(live) == _bytes_of(source)
    assert sorted(copied) == sorted([7] * 8 + [4] + [4] + [7] * 2 + [6])
    assert all(live._version > was for live, was in zip(lives, versions, strict=True))


def test_conjugate_targets() -> None:
    live = torch.zeros(2, dtype=torch.complex64).conj()
    source = torch.tensor([1 + 2j, -0.0j])
    assert raw.write_into(live, source)
    assert _bytes_of(live) == _bytes_of(source)


def test_same_bits_compares_bits() -> None:
    nan = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    other = torch.tensor([0x7FC00002], dtype=torch.int32).view(torch.float32)
    assert raw.same_bits(nan, nan.clone()) and not raw.same_bits(nan, other)
    assert not raw.same_bits(torch.tensor(0.0), torch.tensor(-0.0))
    zero, minus = torch.zeros(2, dtype=torch.complex128), -torch.zeros(2, dtype=torch.complex128)
    assert raw.same_bits(zero, zero.clone()) and not raw.same_bits(zero, minus)


def test_unknown_dtypes() -> None:
    for name in ("quint8", "Tensor", "float128", "load"):
        with pytest.raises(Unsupported, match=f"no dtype '{name}'"):
            raw.dtype_of(name)
