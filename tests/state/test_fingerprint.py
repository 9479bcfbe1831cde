from __future__ import annotations

import time

import numpy as np
import pytest
import torch
import xxhash

from everystep.state.fingerprint import Rota, fingerprint

_SIZES = [0, 1, 63, 64, 65, 1000, 16383, 16384, 16385, 100_003]


def _state(dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(size).to(dtype) for size in _SIZES]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
@pytest.mark.parametrize("first", [0, 5])
def test_a_round_covers_every_element_once(dtype: torch.dtype, first: int) -> None:
    seen = [np.zeros(size, int) for size in _SIZES]
    width = torch.empty(0, dtype=dtype).element_size()
    for step in range(first, first + 16):
        for position, start, stop in zip(
            *Rota(_SIZES, [width] * len(_SIZES)).turns(step), strict=True
        ):
            assert start < stop
            seen[position][start:stop] += 1
    assert all((count == 1).all() for count in seen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_every_flipped_bit_is_found_within_a_round_and_named(dtype: torch.dtype) -> None:
    state, other = _state(dtype), _state(dtype)
    rota = Rota.of(state)
    for position in range(1, len(state)):
        for element in {0, state[position].numel() // 2, state[position].numel() - 1}:
            bits = other[position].view(torch.uint8)
            bits[element * state[position].element_size()] ^= 1
            found: list[int] = []
            for step in range(7, 23):
                differs = fingerprint(state, step) != fingerprint(other, step)
                found += rota.turns(step).position[differs].tolist()
            assert found == [position]
            bits[element * state[position].element_size()] ^= 1


def test_it_is_the_xxh3_of_the_row_major_bytes() -> None:
    tensor = torch.randn(300, 200)
    [value] = fingerprint([tensor], 3).tolist()
    flat = tensor.numpy().tobytes()
    length = -(-60_000 // 16 // 64) * 64
    assert value == xxhash.xxh3_64_intdigest(flat[4 * 3 * length : 4 * 4 * length])


def test_memory_order_and_lazy_views_do_not_matter() -> None:
    base = torch.randn(200, 300)
    number = torch.randn(50, dtype=torch.complex64)
    plain = [base.t().contiguous(), base[::2, 1:7].contiguous(), number.conj().resolve_conj()]
    plain += [number.conj().imag.clone(), torch.tensor(2.0)]
    lazy = [base.t(), base[::2, 1:7], number.conj(), number.conj().imag]
    lazy.append(torch.nn.Parameter(torch.tensor(2.0)))
    assert number.conj().is_conj() and number.conj().imag.is_neg()
    for step in range(16):
        assert fingerprint(plain, step).tolist() == fingerprint(lazy, step).tolist()


def test_work_is_spread_evenly_over_a_round() -> None:
    elements = [1_000_000, 5, 1_000_000, 5, 16, *[4096] * 160]
    hashed = [int((due.stop - due.start).sum()) for due in (
        Rota(elements, [4] * len(elements)).turns(step) for step in range(16)
    )]  # fmt: skip
    assert sum(hashed) == sum(elements)
    assert max(hashed) - min(hashed) <= 2 * 16 * 64 + 4096


def test_fingerprints_of_other_tensors_are_told_apart_from_other_bits() -> None:
    state = _state(torch.float32)
    assert len(fingerprint(state, 2)) != len(fingerprint(state[:-1], 2))


def test_ten_thousand_tensors_are_chosen_from_at_once() -> None:
    rota = Rota([64] * 10_000, [4] * 10_000)
    rota.turns(0)
    best = min(_timed(rota, step) for step in range(20))
    assert best < 0.002  # a loop over the tensors in Python takes longer


def _timed(rota: Rota, step: int) -> float:
    start = time.thread_time()
    assert len(rota.turns(step).position) == 625
    return time.thread_time() - start
