"""Copies past the cache; and what only an accelerator can get wrong: the order of its own work."""

from __future__ import annotations

import builtins
import ctypes
import gc
import importlib
import mmap
import sys
import threading
from typing import Any

import pytest
import torch
import xxhash

from engine.harness import Run
from everystep.engine import device as device_module
from everystep.engine.device import CACHED_BYTES, CpuDevice, CudaDevice, device_for
from everystep.engine.tasks import Found
from everystep.planning.partition import pieces_of
from everystep.state import raw

_stream = pytest.importorskip("everystep.engine._stream", reason="it was built without a compiler")

# ---------------------------------------------------------------- copies past the cache


class _Arena:
    """Bytes at a known alignment, with guards around what is written."""

    def __init__(self, nbytes: int) -> None:
        self.data = torch.zeros(nbytes + 256, dtype=torch.uint8)
        address = self.data.data_ptr()
        self.base = (-address) % 64 + 64

    def address(self, offset: int) -> int:
        """Of a byte, from a multiple of 64 on."""
        return self.data.data_ptr() + self.base + offset


def _check_copy(to: _Arena, from_: _Arena, target: int, source: int, nbytes: int) -> None:
    to.data.fill_(0xEE)
    _stream.copy(to.address(target), from_.address(source), nbytes)
    start = to.base + target
    wanted = from_.data[from_.base + source : from_.base + source + nbytes]
    assert torch.equal(to.data[start : start + nbytes], wanted), (target, source, nbytes)
    assert bool((to.data[:start] == 0xEE).all()), (target, source, nbytes)
    assert bool((to.data[start + nbytes :] == 0xEE).all()), (target, source, nbytes)


def test_stream_copies_every_length() -> None:
    from_, to = _Arena(400), _Arena(400)
    from_.data.random_(0, 256, generator=torch.Generator().manual_seed(1))
    for nbytes in range(301):
        _check_copy(to, from_, nbytes % 17, nbytes % 13, nbytes)


def test_stream_copies_at_every_alignment() -> None:
    from_, to = _Arena(400), _Arena(400)
    from_.data.random_(0, 256, generator=torch.Generator().manual_seed(2))
    for target in range(17):
        for source in range(17):
            for nbytes in (0, 1, 15, 16, 17, 63, 64, 65, 79, 80, 127, 128, 129, 207):
                _check_copy(to, from_, target, source, nbytes)


hashes = pytest.mark.skipif(not _stream.can_digest, reason="the processor has no AVX2")


def _check_digest(to: _Arena, from_: _Arena, target: int, source: int, nbytes: int) -> None:
    to.data.fill_(0xEE)
    first = from_.base + source
    wanted = from_.data[first : first + nbytes]
    right = xxhash.xxh3_128(wanted.numpy().tobytes()).hexdigest()
    assert _stream.digest(0, from_.address(source), nbytes) == right, (source, nbytes)
    assert _stream.digest(to.address(target), from_.address(source), nbytes) == right
    start = to.base + target
    assert torch.equal(to.data[start : start + nbytes], wanted), (target, source, nbytes)
    assert bool((to.data[:start] == 0xEE).all()), (target, source, nbytes)
    assert bool((to.data[start + nbytes :] == 0xEE).all()), (target, source, nbytes)


@hashes
def test_digest_of_every_length() -> None:
    """Ends of stripes (64 bytes) and of blocks (1,024) lie at every place."""
    from_, to = _Arena(3400), _Arena(3400)
    from_.data.random_(0, 256, generator=torch.Generator().manual_seed(3))
    for nbytes in range(241, 3300):
        _check_digest(to, from_, nbytes % 33, nbytes % 13, nbytes)


@hashes
@pytest.mark.parametrize("nbytes", [16_384, 16_385, 17_409, 1 << 20, (5 << 20) - 3])
def test_digest_of_much(nbytes: int) -> None:
    from_, to = _Arena(nbytes + 64), _Arena(nbytes + 64)
    from_.data.random_(0, 256)
    for target, source in ((0, 0), (32, 0), (1, 0), (0, 1), (7, 9)):
        _check_digest(to, from_, target, source, nbytes)


@hashes
@pytest.mark.parametrize("byte", [0x00, 0xFF])
def test_digest_of_one_byte_again_and_again(byte: int) -> None:
    """Sums that carry, and products of nothing."""
    from_, to = _Arena(70_000), _Arena(70_000)
    from_.data.fill_(byte)
    for nbytes in (241, 1024, 1025, 65_536, 69_999):
        _check_digest(to, from_, 0, 0, nbytes)


@hashes
def test_digest_does_not_read_past_the_end() -> None:
    """The last bytes of what is mapped."""
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 4 * page, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(address + 3 * page), ctypes.c_size_t(page), 0) == 0
    for nbytes in (241, 1024, 1025, 3 * page):
        right = xxhash.xxh3_128(bytes(nbytes)).hexdigest()
        assert _stream.digest(0, address + 3 * page - nbytes, nbytes) == right


@hashes
@pytest.mark.parametrize("nbytes", [-1, 0, 240])
def test_digest_refuses_what_is_short(nbytes: int) -> None:
    with pytest.raises(ValueError):
        _stream.digest(0, 0, nbytes)


@pytest.mark.parametrize("nbytes", [1 << 20, (1 << 20) + 1, (5 << 20) - 3])
def test_stream_copies_much(nbytes: int) -> None:
    from_, to = _Arena(nbytes + 64), _Arena(nbytes + 64)
    from_.data.random_(0, 256)
    for target, source in ((0, 0), (1, 0), (0, 1), (7, 9)):
        _check_copy(to, from_, target, source, nbytes)


@pytest.mark.parametrize(
    "arguments", [(0, 0, -1), (0, 0), (0, 0, 0, 0), ("a", 0, 0), (0, 0, 1.5), (0, 0, 1 << 70)]
)
def test_stream_refuses(arguments: tuple[Any, ...]) -> None:
    with pytest.raises((ValueError, TypeError, OverflowError)):
        _stream.copy(*arguments)


def test_stream_lets_other_threads_run() -> None:
    from_, to = _Arena(64 << 20), _Arena(64 << 20)
    over, turns = threading.Event(), []

    def turn() -> None:
        while not over.is_set():
            turns.append(1)
            over.wait(1e-4)

    other = threading.Thread(target=turn)
    other.start()
    try:
        before = len(turns)
        for _ in range(40):
            _stream.copy(to.address(0), from_.address(0), 64 << 20)
            if len(turns) > before + 1:
                break
    finally:
        over.set()
        other.join()
    assert len(turns) > before + 1


def test_without_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it could not be built, the C library copies."""
    real = builtins.__import__

    def refuse(name: str, globals_: Any = None, locals_: Any = None, fromlist: Any = (), *r: Any):  # type: ignore[no-untyped-def]
        if "_stream" in (fromlist or ()):
            raise ImportError(name)
        return real(name, globals_, locals_, fromlist, *r)

    name = "everystep.engine.device"
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", refuse)
    package: Any = sys.modules["everystep.engine"]
    kept = package.device
    try:
        without = importlib.import_module(name)
    finally:
        package.device = kept
    assert without is not device_module
    assert without._copy is ctypes.memmove and device_module._copy is _stream.copy
    assert without._digest is None
    assert (device_module._digest is _stream.digest) == _stream.can_digest
    source = torch.randint(0, 256, (3 * CACHED_BYTES + 5,), dtype=torch.uint8)
    target, state = torch.zeros_like(source), xxhash.xxh3_128()
    without.CpuDevice().copy(source, target, [state])
    assert torch.equal(source, target)
    assert state.digest() == xxhash.xxh3_128(source.numpy().tobytes()).digest()
    assert without.CpuDevice().digest(source, target) == state.hexdigest()


def test_a_hash_that_is_not_the_one_of_others_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried when the module is loaded."""
    monkeypatch.setattr(_stream, "digest", lambda to, from_, nbytes: "0" * 32)
    monkeypatch.delitem(sys.modules, "everystep.engine.device")
    package: Any = sys.modules["everystep.engine"]
    kept = package.device
    try:
        wary = importlib.import_module("everystep.engine.device")
    finally:
        package.device = kept
    assert wary is not device_module and wary._digest is None


# ---------------------------------------------------------------- with a card

cuda = pytest.mark.cuda
needs_card = pytest.mark.skipif(
    not torch.accelerator.is_available(), reason="there is no NVIDIA card"
)
WHERE = torch.device("cuda", 0)


@pytest.fixture
def card() -> Any:
    """A CudaDevice; closed afterwards."""
    device = CudaDevice(WHERE)
    yield device
    device.close()


def _late(target: torch.Tensor, value: float) -> None:
    """Fill a tensor at the end of some tenths of a second of kernels on the current stream: whoever
    reads it without waiting for them reads something else."""
    square = torch.full((4096, 4096), 1e-3, device=WHERE)
    for _ in range(60):
        square = square @ square
    target.copy_(square[0, 0] * 0 + value)


def _host(like: torch.Tensor) -> torch.Tensor:
    return torch.full(like.shape, -1.0, dtype=like.dtype)


@cuda
@needs_card
def test_a_copy_waits_for_what_was_asked_before_it(card: CudaDevice) -> None:
    source = torch.zeros(1 << 20, device=WHERE)
    _late(source, 1.0)
    card.stable()
    target = _host(source)
    card.copy(source, target, [])
    assert bool((target == 1.0).all())


@cuda
@needs_card
def test_a_copy_does_not_wait_for_what_is_asked_after_it(card: CudaDevice) -> None:
    """Streams are really used: the copy is over while the training stream is still busy."""
    source = torch.ones(1 << 20, device=WHERE)
    other = torch.zeros(8, device=WHERE)
    torch.accelerator.synchronize()
    card.stable()
    _late(other, 2.0)
    training = torch.accelerator.current_stream()
    target = _host(source)
    card.copy(source, target, [])
    assert not training.query()
    assert bool((target == 1.0).all())
    torch.accelerator.synchronize()


@cuda
@needs_card
@pytest.mark.parametrize("way", ["copy", "copy_group", "reading", "fingerprint"])
def test_a_snapshot_lies_between_what_was_and_what_comes(card: CudaDevice, way: str) -> None:
    """Asked for behind slow kernels, and before the update: the copy has the values between."""
    source = torch.zeros(3000, 1000, device=WHERE)
    source = source.t() if way in ("copy_group", "reading") else source.reshape(-1)
    _late(source, 1.0)
    card.stable()
    (kept,) = card.snapshot([source])
    source.fill_(2.0)
    if way == "fingerprint":
        found = card.fingerprint(kept)
        expected = torch.ones_like(kept)
        card.stable()
        assert found == card.fingerprint(expected)
        return
    target = _host(source)
    if way == "copy":
        card.copy(kept, target, [])
    elif way == "copy_group":
        card.copy_group([raw.plain_bits(kept)], [raw.plain_bits(target)])
    else:
        with card.reading(kept):
            target.copy_(kept.cpu())
    assert bool((target == 1.0).all())


@cuda
@needs_card
def test_what_a_finished_copy_read_may_be_overwritten_at_once(card: CudaDevice) -> None:
    for value in range(20):
        source = torch.full((8 << 20,), float(value), device=WHERE)
        card.stable()
        target = _host(source)
        card.copy(source, target, [])
        source.fill_(-2.0)
        assert bool((target == float(value)).all())


@cuda
@needs_card
def test_memory_that_is_freed_while_it_is_copied_is_not_given_away(card: CudaDevice) -> None:
    """The allocator may hand a snapshot's memory to training only when its copy is over."""
    source = torch.full((16 << 20,), 3.0, device=WHERE)
    card.stable()
    for _ in range(20):
        (kept,) = card.snapshot([source])
        target = _host(source)
        worker = threading.Thread(target=card.copy, args=(kept, target, []))
        worker.start()
        del kept
        torch.full((16 << 20,), 5.0, device=WHERE)
        worker.join()
        assert bool((target == 3.0).all())


@cuda
@needs_card
def test_pinned_staging_memory(card: CudaDevice) -> None:
    """Registered memory is pinned as long as it is registered, and not a moment longer."""
    nbytes = 8 << 20
    memory = torch.zeros(nbytes + 4096, dtype=torch.uint8)
    start = -memory.data_ptr() % 4096
    slot = memory[start : start + nbytes]
    assert not slot.is_pinned()
    card.pin(slot.data_ptr(), nbytes)
    assert slot.is_pinned()
    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=WHERE)
    card.stable()
    card.copy(source, slot, [])
    assert torch.equal(slot, source.cpu())
    card.unpin()
    assert not slot.is_pinned()
    card.pin(slot.data_ptr(), nbytes)
    card.close()
    assert not slot.is_pinned()


@cuda
@needs_card
@pytest.mark.parametrize("budget", [None, 0, 3 << 20])
@pytest.mark.parametrize("side_stream", [False, True])
def test_training_on_a_card(budget: int | None, side_stream: bool) -> None:
    """As over the matrix, with kernels that are still under way whenever the host goes on."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(8, 256, 3).to(memory_format=torch.channels_last),
        torch.nn.BatchNorm2d(256),
        torch.nn.Flatten(),
        torch.nn.Linear(256 * 36, 512),
    ).to(WHERE)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    stream: Any = torch.Stream(WHERE) if side_stream else torch.accelerator.current_stream()
    stream.wait_stream(torch.accelerator.current_stream())
    with stream, Run(model, optimizer, device=None, snapshot_bytes=budget) as run:
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(4, 8, 8, 8, device=WHERE)).square().sum().backward()
            optimizer.step()
            run.step()
        run.check()
        assert isinstance(run.engine._device, CudaDevice)
    torch.accelerator.synchronize()


@cuda
@needs_card
def test_device_memory_returns_to_where_it_was() -> None:
    model = torch.nn.Linear(2048, 2048, device=WHERE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(run: Run | None, steps: int) -> int:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(4, 2048, device=WHERE)).square().sum().backward()
            optimizer.step()
            if run is not None:
                run.step()
        optimizer.zero_grad()
        if run is not None:
            run.engine.settle()
        gc.collect()
        torch.accelerator.synchronize()
        return torch.accelerator.memory_allocated()

    before = train(None, 3)
    with Run(model, optimizer, truth=False) as run:
        first = train(run, 3)
        assert train(run, 30) == first
    del run
    gc.collect()
    assert train(None, 3) == before


@cuda
@needs_card
def test_the_device_of_a_state_on_a_card() -> None:
    device = device_for([torch.zeros(3), torch.zeros(3, device=WHERE)])
    try:
        assert isinstance(device, CudaDevice) and device.snapshots and not device.hashes
    finally:
        device.close()


def test_a_cpu_hashes_on_the_way() -> None:
    """So that a sink need not read a step once more."""
    from engine.test_tasks import cut, held_of

    tensor = torch.randn(300, 300)
    (task,), sink, _ = cut(held_of([tensor]), [None])
    room = sink.acquire(0)
    assert room is not None
    found = Found()
    task.run(CpuDevice(), torch.frombuffer(room.view, dtype=torch.uint8), found)
    assert found.pieces == {0: xxhash.xxh3_128(tensor.numpy().tobytes()).hexdigest()}
    assert pieces_of([held_of([tensor])[0].spec], 0, 1)[0].stop == tensor.numel()
