"""Tensors as raw bytes in host memory, and back.

Everything here moves bits, never values: NaN payloads, negative zeros and dtypes for which torch
has no arithmetic pass unchanged.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from everystep.errors import Unsupported
from everystep.types import TensorSpec, chunks_of, item_bytes, spoken

CHUNK_BYTES = 1 << 20
"""What is brought to host memory at a time from a tensor whose bytes do not lie there in order."""

_FEW_BYTES = 1 << 20
"""Memory for less is not worth a word with the kernel."""

Copy = Callable[[int, int, int], object]
"""Copies memory: to which address, from which, how many bytes."""

_Stretch = tuple[int, int, int]
"""What `Copy` is called with."""

_COPIERS = 4
_STRETCH_BYTES = 8 << 20
"""What one thread copies at a time."""

_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_CARRIERS = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}
"""For each item size a dtype for which torch copies any layout without touching the bits."""


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name of a dtype without `torch.`."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype of that name.

    Raises:
        Unsupported: the torch at hand has no such dtype.
    """
    dtype = getattr(torch, name, None)
    if item_bytes(name) is None or not isinstance(dtype, torch.dtype):
        raise Unsupported(f"torch {torch.__version__} has no dtype {name!r}")
    return dtype


def refusal(tensor: torch.Tensor) -> str | None:
    """Why this (local, not DTensor) tensor cannot be stored exactly; None if it can."""
    if tensor.is_quantized:
        return "a quantised tensor (store its int_repr(), scale and zero point)"
    if tensor.layout == torch.sparse_coo:
        return "a sparse tensor as parameter or buffer (in extras and optimizers it is stored)"
    if tensor.layout != torch.strided:
        return f"a tensor of layout {tensor.layout} (only strided and sparse COO are stored)"
    if tensor.is_meta:
        return "a tensor on the meta device, which has no values"
    if tensor.is_nested:
        return "a nested tensor"
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return f"a tensor subclass ({type(tensor).__module__}.{type(tensor).__qualname__})"
    if item_bytes(dtype_name(tensor.dtype)) is None:
        return f"a tensor of dtype {tensor.dtype}"
    if tensor.untyped_storage().nbytes() < _last_byte(tensor):
        return "a tensor whose storage has been freed"
    return None


def _last_byte(tensor: torch.Tensor) -> int:
    """How long the storage must be for the tensor to lie in it."""
    if tensor.numel() == 0:
        return 0
    if tensor.is_contiguous():
        return (int(tensor.storage_offset()) + tensor.numel()) * tensor.element_size()
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset() + reach + 1) * tensor.element_size()


def check_storable(tensor: torch.Tensor, key: str) -> None:
    """Refuse what cannot be stored exactly.

    Raises:
        Unsupported: with the place of the tensor and the reason.
    """
    reason = refusal(tensor)
    if reason is not None:
        raise Unsupported(f"{spoken(key)}: {reason}")


def plain_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory under a dtype that torch can copy; shape and strides unchanged."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.view(_CARRIERS[plain.element_size()])


def kept_stride(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The strides worth keeping: of a dense tensor in another than row-major order, else None."""
    if tensor.is_contiguous() or not _is_dense(tensor.shape, tensor.stride()):
        return None
    return tuple(tensor.stride())


def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    expected = 1
    for step, length in sorted((s, n) for s, n in zip(stride, shape, strict=True) if n != 1):
        if step != expected:
            return False
        expected *= length
    return True


def host_chunks(tensor: torch.Tensor, start: int, stop: int) -> Iterator[memoryview]:
    """Yield the bytes of elements `start` to `stop` (row-major order) of a tensor.

    A row-major tensor in host memory is not copied: the views alias it. Of any other, at most
    CHUNK_BYTES are held at a time; such a view is valid until the next one is asked for.
    """
    if stop <= start:
        return
    carrier = plain_bits(tensor)
    if carrier.is_contiguous():
        flat = carrier.reshape(-1)[start:stop]
        if flat.device.type == "cpu":
            yield from chunks_of(_bytes_view(flat), CHUNK_BYTES)
            return
    size = carrier.element_size()
    for first, last in _ranges(start, stop, max(1, CHUNK_BYTES // size)):
        yield _bytes_view(_gather(carrier, first, last).to("cpu"))


def _ranges(start: int, stop: int, length: int) -> Iterator[tuple[int, int]]:
    for first in range(start, stop, length):
        yield first, min(first + length, stop)


def _gather(carrier: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Elements first to last in row-major order, contiguous, without copying the whole tensor."""
    if carrier.is_contiguous():
        return carrier.reshape(-1)[first:last]
    if carrier.dim() == 1:
        return carrier[first:last].contiguous()
    row = math.prod(carrier.shape[1:])
    top, bottom = first // row, (last - 1) // row
    if bottom == top:
        return _gather(carrier[top], first - top * row, last - top * row)
    if (bottom + 1 - top) * row <= 2 * (last - first):
        rows = carrier[top : bottom + 1].contiguous().reshape(-1)
        return rows[first - top * row : last - top * row]
    middle = (top + 1) * row
    return torch.cat([_gather(carrier, first, middle), _gather(carrier, middle, last)])


def _bytes_view(flat: torch.Tensor) -> memoryview:
    # a single element may have any stride, and then torch refuses to see it as bytes
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8).numpy().data


def bytes_of(tensor: torch.Tensor) -> memoryview | None:
    """The bytes of a row-major tensor in host memory, where they lie; None: it is another one."""
    return _bytes_view(plain_bits(tensor).reshape(-1)) if is_plain(tensor) else None


def empty_for(spec: TensorSpec) -> tuple[torch.Tensor, memoryview]:
    """A new row-major host tensor as `spec` describes, with a writable view of its bytes.

    Raises:
        Unsupported: the dtype is not known, or host memory does not suffice.
    """
    dtype = dtype_of(spec.dtype)
    try:  # by way of the carrier, since torch warns about some dtypes
        carrier = torch.empty(spec.shape, dtype=_CARRIERS[item_bytes(spec.dtype) or 1])
    except (RuntimeError, MemoryError) as error:
        raise Unsupported(f"{spoken(spec.key)}: no room for {spec.nbytes:,} bytes") from error
    _prefer_huge_pages(carrier)
    return carrier.view(dtype), _bytes_view(carrier.reshape(-1))


def over(view: memoryview, spec: TensorSpec) -> torch.Tensor:
    """A row-major host tensor over bytes that somebody else keeps; only to be read."""
    flat = torch.frombuffer(view, dtype=torch.uint8)
    return (
        flat.view(_CARRIERS[item_bytes(spec.dtype) or 1])
        .view(dtype_of(spec.dtype))
        .view(spec.shape)
    )


def _prefer_huge_pages(tensor: torch.Tensor) -> None:
    """Let fresh memory come in large pages: the first write to it is several times faster. Those of
    neighbours count together: a large page may hold the end of one and the start of the next."""
    if tensor.nbytes >= _FEW_BYTES:
        start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        length = tensor.data_ptr() + tensor.nbytes - start
        _libc.madvise(start, length, mmap.MADV_HUGEPAGE)


def restrided(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The tensor in the memory order that `spec` keeps (itself if that is row-major)."""
    stride = spec.stride
    if stride is None or len(stride) != tensor.dim() or not _is_dense(spec.shape, stride):
        return tensor
    # of a dimension of length 1 the stride says nothing, and a file may say anything
    stride = tuple(s if n != 1 else 1 for s, n in zip(stride, spec.shape, strict=True))
    values = plain_bits(tensor)
    ordered = torch.empty_strided(spec.shape, stride, dtype=values.dtype).copy_(values)
    return ordered.view(tensor.dtype)


def write_into(live: torch.Tensor, source: torch.Tensor) -> bool:
    """Copy the bits of `source` into `live` (same dtype and shape), keeping live's strides.

    Returns False where elements of `live` share memory (it is expanded, or its windows overlap)
    and `source` holds different bits for them.
    """
    if live.is_conj() or live.is_neg():
        live.detach().copy_(source)
        return True
    target, values = _in_place_carrier(live), plain_bits(source)
    narrowed = target
    for dim, (step, length) in enumerate(zip(target.stride(), target.shape, strict=True)):
        if step == 0 and length > 1:
            narrowed, values = narrowed.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    narrowed.copy_(values)
    return _is_dense(live.shape, live.stride()) or same_bits(live, source)


def write_all(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], copy: Copy) -> list[bool]:
    """`write_into` for many pairs of (live, source), in several threads; its answers, in order."""
    answers = [True] * len(pairs)
    stretches: list[_Stretch] = []
    for index, (live, source) in enumerate(pairs):
        if is_plain(live) and is_plain(source):
            torch.autograd.graph.increment_version(live)  # as any other writing would
            to, origin = live.data_ptr(), source.data_ptr()
            for start in range(0, live.nbytes, _STRETCH_BYTES):
                length = min(_STRETCH_BYTES, live.nbytes - start)
                stretches.append((to + start, origin + start, length))
        else:
            answers[index] = write_into(live, source)
    with ThreadPoolExecutor(_COPIERS, thread_name_prefix="everystep-copy") as pool:
        for copied in [pool.submit(_copy_all, some, copy) for some in _together(stretches)]:
            copied.result()
    return answers


def _together(stretches: Sequence[_Stretch]) -> Iterator[list[_Stretch]]:
    """Small stretches together: each word with a thread takes as long as copying some."""
    some: list[_Stretch] = []
    nbytes = 0
    for stretch in stretches:
        some.append(stretch)
        nbytes += stretch[2]
        if nbytes >= _STRETCH_BYTES // 2:
            yield some
            some, nbytes = [], 0
    if some:
        yield some


def _copy_all(stretches: Sequence[_Stretch], copy: Copy) -> None:
    for stretch in stretches:
        copy(*stretch)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether its bytes lie in host memory as they are, row-major, and whoever has them counts
    the writings."""
    if tensor.layout != torch.strided or tensor.device.type != "cpu":
        return False
    odd = tensor.is_conj() or tensor.is_neg() or tensor.is_inference()
    return tensor.is_contiguous() and not odd


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of equal shape and item size hold the same bits, on any device."""
    left, right = plain_bits(one), plain_bits(other)
    if left.dtype == torch.complex128:
        left, right = (torch.view_as_real(t).view(torch.int64) for t in (left, right))
    return bool(torch.equal(left, right.to(left.device)))


def _in_place_carrier(live: torch.Tensor) -> torch.Tensor:
    return live.detach().view(_CARRIERS[live.element_size()])


def same_memory(tensor: torch.Tensor) -> tuple[object, ...] | None:
    """What two tensors have in common that are one tensor; None for a tensor without memory."""
    if tensor.numel() == 0 or tensor.is_meta or tensor.layout != torch.strided:
        return None
    lazy = (tensor.is_conj(), tensor.is_neg())
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    return (tensor.device, tensor.data_ptr(), tensor.dtype, shape, stride, lazy)


def bits_of(tensors: Mapping[str, torch.Tensor], key: str) -> bytes:
    """All bytes of one tensor, row-major: for small tensors and for comparisons."""
    tensor = tensors[key]
    return b"".join(host_chunks(tensor, 0, tensor.numel()))
