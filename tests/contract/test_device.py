"""The laws of `engine.device.Device`, for every implementation."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import xxhash

from everystep.engine import device as device_module
from everystep.engine.device import CpuDevice, CudaDevice, Device, device_for

_CARDS = torch.accelerator.is_available() and torch.accelerator.current_accelerator() is not None

IMPLEMENTATIONS: dict[str, Any] = {
    "CpuDevice": (torch.device("cpu"), CpuDevice),
    "CpuDevice with snapshots": (torch.device("cpu"), lambda: CpuDevice(snapshots=True)),
    "CudaDevice": (torch.device("cuda", 0), lambda: CudaDevice(torch.device("cuda", 0))),
}


@pytest.fixture(
    params=[
        pytest.param(name, marks=pytest.mark.cuda if name.startswith("Cuda") else ())
        for name in IMPLEMENTATIONS
    ]
)
def made(request: pytest.FixtureRequest) -> Iterator[tuple[torch.device, Device]]:
    """Where tensors are, and the device; closed afterwards."""
    where, make = IMPLEMENTATIONS[request.param]
    if where.type == "cuda" and not (_CARDS and torch.accelerator.device_count()):
        pytest.skip("there is no NVIDIA card")
    device = make()
    yield where, device
    device.close()


def _numbers(where: torch.device, count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    size = dtype.itemsize
    flat = torch.randint(0, 256, (count * size,), dtype=torch.uint8)
    return flat.view(dtype).to(where)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _target(like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(like.shape, dtype=like.dtype)


def test_every_implementation_is_here() -> None:
    verbs = [name for name in vars(Device) if not name.startswith("_")]
    classes = [
        thing.__name__
        for thing in vars(device_module).values()
        if isinstance(thing, type)
        and thing is not Device
        and all(hasattr(thing, verb) for verb in verbs)
    ]
    assert set(classes) <= set(IMPLEMENTATIONS) and len(classes) == 2


@pytest.mark.parametrize("count", [1, 3, 1000, 70_000, 9_000_001])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64], ids=str)
def test_copy(made: tuple[torch.device, Device], count: int, dtype: torch.dtype) -> None:
    where, device = made
    source = _numbers(where, min(count, 3_000_000) if dtype.itemsize == 8 else count, dtype)
    device.stable()
    target, states = _target(source), [xxhash.xxh3_128() for _ in range(2)]
    device.copy(source, target, states)
    assert _bytes(target) == _bytes(source)
    assert {state.digest() for state in states} == {xxhash.xxh3_128(_bytes(source)).digest()}


@pytest.mark.parametrize("count", [1, 4095, 4096, 70_001, 5_000_003])
@pytest.mark.parametrize("copies", [True, False])
def test_digest(made: tuple[torch.device, Device], count: int, copies: bool) -> None:
    """It copies, or only reads, and finds the hash that everybody else finds."""
    where, device = made
    source = _numbers(where, count + 3, torch.uint8)[3:]
    device.stable()
    around = torch.full((count + 10,), 7, dtype=torch.uint8)
    found = device.digest(source, around[5 : 5 + count] if copies else None)
    assert found == xxhash.xxh3_128(_bytes(source)).hexdigest()
    wanted = b"\7" * 5 + (_bytes(source) if copies else b"\7" * count) + b"\7" * 5
    assert _bytes(around) == wanted


def test_copy_of_a_part(made: tuple[torch.device, Device]) -> None:
    """Nothing beside the target is touched."""
    where, device = made
    source = _numbers(where, 1000)
    target = torch.full((1200,), 7, dtype=torch.int32)
    device.stable()
    device.copy(source[13:977], target[101 : 101 + 964], [])
    assert _bytes(target[101:1065]) == _bytes(source[13:977])
    assert bool((target[:101] == 7).all()) and bool((target[1065:] == 7).all())


def test_hashes_go_on_from_stretch_to_stretch(made: tuple[torch.device, Device]) -> None:
    where, device = made
    source = _numbers(where, 500_000)
    device.stable()
    state = xxhash.xxh3_128()
    for start, stop in ((0, 1), (1, 300_000), (300_000, 500_000)):
        device.copy(source[start:stop], None, [state])
    assert state.digest() == xxhash.xxh3_128(_bytes(source)).digest()


def test_two_threads_hash_at_once(made: tuple[torch.device, Device]) -> None:
    """The training thread copies beside the other."""
    where, device = made
    sources = [_numbers(where, 2_000_003) for _ in range(2)]
    device.stable()
    found: dict[int, list[str]] = {0: [], 1: []}

    def work(number: int) -> None:
        for _ in range(5):
            state = xxhash.xxh3_128()
            device.copy(sources[number], None, [state])
            found[number].append(state.hexdigest())

    threads = [threading.Thread(target=work, args=(number,)) for number in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, source in enumerate(sources):
        assert found[number] == [xxhash.xxh3_128(_bytes(source)).hexdigest()] * 5


def test_copy_group(made: tuple[torch.device, Device]) -> None:
    where, device = made
    sources = [
        _numbers(where, 1).reshape(()),
        _numbers(where, 12).reshape(3, 4).t(),
        _numbers(where, 120).reshape(2, 3, 4, 5).permute(0, 3, 1, 2),
        _numbers(where, 6).reshape(6, 1).expand(6, 3),
        _numbers(where, 20)[::2],
        _numbers(where, 9, torch.uint8),
        _numbers(where, 4, torch.int64),
    ]
    device.stable()
    targets = [_target(source) for source in sources]
    device.copy_group(sources, targets)
    for source, target in zip(sources, targets, strict=True):
        assert target.is_contiguous() and _bytes(target) == _bytes(source)


def test_a_snapshot_is_of_its_moment(made: tuple[torch.device, Device]) -> None:
    where, device = made
    sources = [_numbers(where, 5), _numbers(where, 100_000), _numbers(where, 12).reshape(3, 4).t()]
    before = [_bytes(source) for source in sources]
    device.stable()
    kept = device.snapshot(sources)
    for source in sources:
        source.zero_()
    assert [copy.shape for copy in kept] == [source.shape for source in sources]
    target = _target(kept[1])
    device.copy(kept[1], target, [])
    assert _bytes(target) == before[1]
    targets = [_target(copy) for copy in kept]
    device.copy_group(kept, targets)
    assert [_bytes(each) for each in targets] == before
    assert {copy.device.type for copy in kept} == {where.type}


def test_a_snapshot_of_nothing(made: tuple[torch.device, Device]) -> None:
    assert made[1].snapshot([]) == []


@pytest.mark.parametrize("shape", [(1,), (3,), (5, 7), (1 << 20,), ((1 << 20) + 3,), (2_100_001,)])
def test_fingerprints_tell_one_bit(made: tuple[torch.device, Device], shape: Sequence[int]) -> None:
    where, device = made
    count = int(torch.Size(shape).numel())
    one = _numbers(where, count, torch.uint8).reshape(shape)
    device.stable()
    first = device.fingerprint(one)
    assert device.fingerprint(one) == first == device.fingerprint(one.clone())
    flat = one.reshape(-1)
    for index in {0, count // 2, count - 1}:
        for bit in (0, 7):
            flat[index] ^= 1 << bit
            device.stable()
            assert device.fingerprint(one) != first
            flat[index] ^= 1 << bit
    device.stable()
    assert device.fingerprint(one) == first


def test_fingerprints_tell_the_order(made: tuple[torch.device, Device]) -> None:
    where, device = made
    one = torch.arange(3 << 20, dtype=torch.int32, device=where)
    device.stable()
    first = device.fingerprint(one)
    for a, b in ((0, 1), (0, 1 << 20), (5, (2 << 20) + 5)):
        swapped = one.clone()
        swapped[a], swapped[b] = one[b].clone(), one[a].clone()
        device.stable()
        assert device.fingerprint(swapped) != first


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_fingerprints_are_of_bits(made: tuple[torch.device, Device], dtype: torch.dtype) -> None:
    """0 and -0 are two, and a NaN is itself; the order of elements in memory does not matter."""
    where, device = made
    zero, minus = torch.zeros(4, 5, dtype=dtype), -torch.zeros(4, 5, dtype=dtype)
    nan = torch.full((4, 5), float("nan"), dtype=dtype)
    prints = []
    for tensor in (zero, minus, nan):
        there = tensor.to(where)
        device.stable()
        prints.append(device.fingerprint(there))
        turned = there.t().contiguous().t()
        device.stable()
        assert device.fingerprint(turned) == prints[-1]
    assert len(set(prints)) == 3


def test_reading_and_pinning_change_nothing(made: tuple[torch.device, Device]) -> None:
    where, device = made
    memory = ctypes.create_string_buffer(3 * 4096)
    address = -(-ctypes.addressof(memory) // 4096) * 4096
    for _ in range(2):
        device.pin(address, 4096)
        device.pin(address, 4096)  # again: nothing
        device.unpin()
        device.unpin()
    source = _numbers(where, 100)
    device.stable()
    with device.reading(source):
        assert _bytes(source.cpu()) == _bytes(source)


def test_the_device_of_a_state() -> None:
    assert isinstance(device_for([]), CpuDevice)
    assert isinstance(device_for([torch.zeros(3)]), CpuDevice)
    assert not device_for([torch.zeros(3)]).snapshots
