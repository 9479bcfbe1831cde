"""The seam between CPU and CUDA: how bytes leave live tensors. The only caller of torch.cuda but
for random number generators.

Sources and targets are one-dimensional, contiguous, and of one dtype; targets lie in staging
memory. Every method but `copy`, `digest`, `copy_group`, `reading` and `fingerprint`
is for the training thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import xxhash

from everystep.state import raw

_digest: Callable[[int, int, int], str] | None = None
"""Copies and hashes in one pass; None: it cannot be done here."""

try:
    from everystep.engine import _stream
except ImportError:  # it was built without a compiler
    _copy: Callable[[int, int, int], object] = ctypes.memmove
else:
    _copy = _stream.copy
    _trial = ctypes.create_string_buffer(bytes(range(256)) * 9)
    if _stream.can_digest and (  # what hashes is to be proved by what others check hashes with
        _stream.digest(0, ctypes.addressof(_trial), len(_trial))
        == xxhash.xxh3_128(_trial).hexdigest()
    ):
        _digest = _stream.digest

copy_memory = _copy
"""Copies between two addresses; past the cache, where a compiler was at hand."""

Hash = xxhash.xxh3_128

_LEAST_DIGESTED_BYTES = 4096
"""Below this, the library that others check hashes with is as fast."""

CACHED_BYTES = 256 << 10
"""A stretch that is still in the cache when it is copied after it was hashed."""

_PRINT_WORDS = 1 << 20
_PRINT_STEP = 0x5851F42D4C957F2D
"""An odd multiplier, so that the order of stretches matters."""

_LINK_CHUNK_BYTES = 32 << 20
"""What may be under way on the link when training wants to write."""


class Staging(Protocol):
    """How a device prepares for staging memory."""

    def pin(self, address: int, nbytes: int) -> None:
        """Prepare a stretch of staging memory for fast copies."""
        ...

    def unpin(self) -> None:
        """Forget all such stretches: other memory may soon lie at their addresses."""
        ...

    def close(self) -> None:
        """Give up everything."""
        ...


class Device(Staging, Protocol):
    """Seven verbs more, and two facts."""

    @property
    def hashes(self) -> bool:
        """Whether hashing on the way costs less than doing it later."""
        ...

    @property
    def snapshots(self) -> bool:
        """Whether what is about to be overwritten is first copied within the device; False: such a
        copy would cost as much as one to staging memory."""
        ...

    def stable(self) -> None:
        """Note that all that has been asked of the device so far makes the state to be copied."""
        ...

    def copy(
        self, source: torch.Tensor, target: torch.Tensor | None, hashes: Sequence[Hash]
    ) -> None:
        """Copy to staging memory; returns when the bytes are there.

        Args:
            target: where to; None: nowhere, the bytes are only hashed.
            hashes: brought forward by the same bytes.
        """
        ...

    def digest(self, source: torch.Tensor, target: torch.Tensor | None) -> str:
        """Copy as `copy` does, and return the xxh3-128 of the bytes, in hexadecimal."""
        ...

    def copy_group(self, sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
        """Copy many small tensors, of any strides, in one call; returns when the bytes are
        there."""
        ...

    def snapshot(self, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies within the device, of the values now, in the order of the training's own work."""
        ...

    def fingerprint(self, source: torch.Tensor) -> str:
        """What differs, with all but certainty, if a bit of the tensor differs: taken where the
        tensor is. Comparable within this process only."""
        ...

    def reading(self, source: torch.Tensor) -> AbstractContextManager[None]:
        """Inside, what this thread asks of torch reads the values that `copy` would."""
        ...


def _hashed(device: Device, source: torch.Tensor, target: torch.Tensor | None) -> str:
    state = xxhash.xxh3_128()
    device.copy(source, target, [state])
    return state.hexdigest()


_MEMORY = ctypes.c_char * (1 << 46)
"""All of it: making a view of a part takes a tenth of the time that a NumPy array does."""


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous one-dimensional host tensor, for as long as it lives."""
    return memoryview(_MEMORY.from_address(tensor.data_ptr()))[: tensor.nbytes]


class CpuDevice:
    """Live tensors in host memory: copies are the work of the thread that calls."""

    def __init__(self, snapshots: bool = False) -> None:
        self._snapshots = snapshots

    @property
    def snapshots(self) -> bool:
        """See `Device.snapshots`; can be set, so that tests go the way of an accelerator."""
        return self._snapshots

    @property
    def hashes(self) -> bool:
        """See `Device.hashes`: what was just hashed is in the cache."""
        return True

    def stable(self) -> None:
        """See `Device.stable`."""

    def copy(
        self, source: torch.Tensor, target: torch.Tensor | None, hashes: Sequence[Hash]
    ) -> None:
        """See `Device.copy`. Each stretch is hashed, and copied while it is in the cache."""
        view, from_ = bytes_of(source), source.data_ptr()
        to = 0 if target is None else target.data_ptr()
        once = len(hashes) + bool(to) == 1
        step = max(1, len(view)) if once else CACHED_BYTES
        for start in range(0, len(view), step):
            stretch = view[start : start + step]
            for state in hashes:
                state.update(stretch)
            if to:
                _copy(to + start, from_ + start, len(stretch))

    def digest(self, source: torch.Tensor, target: torch.Tensor | None) -> str:
        """See `Device.digest`: one pass, in which nothing is kept in the cache for longer."""
        nbytes = source.nbytes
        if _digest is None or nbytes < _LEAST_DIGESTED_BYTES:
            return _hashed(self, source, target)
        return _digest(0 if target is None else target.data_ptr(), source.data_ptr(), nbytes)

    def copy_group(self, sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
        """See `Device.copy_group`."""
        torch._foreach_copy_(targets, sources)

    def snapshot(self, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See `Device.snapshot`."""
        return [source.clone() for source in sources]

    def fingerprint(self, source: torch.Tensor) -> str:
        """See `Device.fingerprint`."""
        state = xxhash.xxh3_128()
        for chunk in raw.host_chunks(source, 0, source.numel()):
            state.update(chunk)
        return state.hexdigest()

    def reading(self, source: torch.Tensor) -> AbstractContextManager[None]:
        """See `Device.reading`."""
        return contextlib.nullcontext()

    def pin(self, address: int, nbytes: int) -> None:
        """See `Device.pin`."""

    def unpin(self) -> None:
        """See `Device.unpin`."""

    def close(self) -> None:
        """See `Device.close`."""


class CudaDevice:
    """Live tensors on one CUDA device, copied on a stream of their own.

    Order: `stable` records an event on the current (training) stream, and every copy waits for it
    on the device. Before training may overwrite a source, `snapshot` has copied it on the training
    stream, or the host has waited for the copy that was under way; a source that is only read by
    finished copies needs neither.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._ready: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done: list[Any] = [
                torch.cuda.Event(),  # type: ignore[no-untyped-call]
                torch.cuda.Event(),  # type: ignore[no-untyped-call]
            ]
        self._bounce = torch.empty(0, dtype=torch.uint8)
        self._bouncing = threading.Lock()
        self._registered: dict[int, bool] = {}
        self._weights: torch.Tensor | None = None

    @property
    def snapshots(self) -> bool:
        """See `Device.snapshots`."""
        return True

    @property
    def hashes(self) -> bool:
        """See `Device.hashes`: the copies cost this process no time."""
        return False

    def stable(self) -> None:
        """See `Device.stable`."""
        self._ready.record(torch.cuda.current_stream(self._device))

    def copy(
        self, source: torch.Tensor, target: torch.Tensor | None, hashes: Sequence[Hash]
    ) -> None:
        """See `Device.copy`. Hashes are taken of the target, which is in host memory; where there
        is none, of a pinned buffer."""
        if target is None:
            with self._bouncing:  # the training thread copies too
                self._pass_by(source, hashes)
            return
        step = max(1, _LINK_CHUNK_BYTES // source.element_size())
        pending: list[tuple[Any, torch.Tensor]] = []
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(self._ready)
            if source.is_cuda:
                source.record_stream(self._stream)
            for number, start in enumerate(range(0, source.numel(), step)):
                part = target[start : start + step]
                part.copy_(source[start : start + step], non_blocking=True)
                event = self._done[number % 2]
                event.record(self._stream)
                pending.append((event, part))
                if len(pending) == 2:
                    self._finish(*pending.pop(0), hashes)
            for event, part in pending:
                self._finish(event, part, hashes)

    def digest(self, source: torch.Tensor, target: torch.Tensor | None) -> str:
        """See `Device.digest`."""
        return _hashed(self, source, target)

    def _finish(self, event: Any, part: torch.Tensor, hashes: Sequence[Hash]) -> None:
        event.synchronize()
        for state in hashes:
            state.update(bytes_of(part))

    def _pass_by(self, source: torch.Tensor, hashes: Sequence[Hash]) -> None:
        if self._bounce.numel() == 0:
            self._bounce = torch.empty(_LINK_CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)
        step = _LINK_CHUNK_BYTES // source.element_size()
        for start in range(0, source.numel(), step):
            part = source[start : start + step]
            nbytes = part.numel() * part.element_size()
            self.copy(part, self._bounce[:nbytes].view(part.dtype), hashes)

    def copy_group(self, sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
        """See `Device.copy_group`."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(self._ready)
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)
                if source.is_cuda:
                    source.record_stream(self._stream)
            self._done[0].record(self._stream)
            self._done[0].synchronize()

    def snapshot(self, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See `Device.snapshot`. The copies are of the training stream, whose next kernels come
        after them; the event lets their own copying wait for them."""
        copies = [torch.empty_like(source) for source in sources]
        if copies:
            torch._foreach_copy_(copies, list(sources))
        self.stable()
        return copies

    def fingerprint(self, source: torch.Tensor) -> str:
        """See `Device.fingerprint`. Sums of 32-bit words times secret odd 64-bit numbers, modulo
        2^64, twice (multilinear hashing: Lemire and Kaser, The Computer Journal, 2014)."""
        if not source.is_cuda:
            return CpuDevice().fingerprint(source)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(self._ready)
            source.record_stream(self._stream)
            if self._weights is None:
                generator = torch.Generator(self._device).manual_seed(secrets.randbits(62))
                self._weights = torch.randint(
                    -(1 << 62), 1 << 62, (2, _PRINT_WORDS),
                    dtype=torch.int64, device=self._device, generator=generator,
                ) * 2 + 1  # fmt: skip
            words = _words(raw.plain_bits(source))
            sums = torch.zeros(2, dtype=torch.int64, device=self._device)
            for start in range(0, words.numel(), _PRINT_WORDS):
                part = words[start : start + _PRINT_WORDS].to(torch.int64)
                sums = sums * _PRINT_STEP + (part * self._weights[:, : part.numel()]).sum(1)
            return str(sums.tolist())

    def pin(self, address: int, nbytes: int) -> None:
        """See `Device.pin`: registers the memory with the driver, so that copies to it do not
        pass through a buffer. Where the driver refuses, copies are slower."""
        if address not in self._registered:
            result = _driver().cudaHostRegister(address, nbytes, 0)
            self._registered[address] = int(result) == 0

    def close(self) -> None:
        """See `Device.close`."""
        self._stream.synchronize()
        self.unpin()

    @contextlib.contextmanager
    def reading(self, source: torch.Tensor) -> Iterator[None]:
        """See `Device.reading`."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(self._ready)
            if source.is_cuda:
                source.record_stream(self._stream)
            yield

    def unpin(self) -> None:
        """See `Device.unpin`."""
        for address in [a for a, registered in self._registered.items() if registered]:
            with contextlib.suppress(RuntimeError):
                _driver().cudaHostUnregister(address)
        self._registered.clear()


def _driver() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _words(plain: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor as 32-bit numbers, the last one padded with zeros."""
    flat = plain.reshape(-1).view(torch.uint8)
    missing = -flat.numel() % 4
    if missing:
        flat = torch.nn.functional.pad(flat, (0, missing))
    return flat.view(torch.int32)


def device_for(tensors: Sequence[torch.Tensor]) -> Device:
    """The device of a state: that of its first tensor on an accelerator, else the CPU."""
    for tensor in tensors:
        if tensor.device.type == "cuda":
            return CudaDevice(tensor.device)
    return CpuDevice()
