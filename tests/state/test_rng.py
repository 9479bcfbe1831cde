from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from everystep.state import rng
from everystep.state.tree import Decoder, Encoder
from states import assert_same_state, rng_state


@pytest.fixture(autouse=True)
def _generators_go_back() -> Iterator[None]:
    before = rng.global_state()
    yield
    rng.set_global_state(before)


def _draws() -> list[Any]:
    return [
        random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(),
        torch.rand(3), torch.randn(1), torch.randn(17),
    ]  # fmt: skip


def _through_json(state: Any) -> Any:
    encoder = Encoder()
    tree = msgspec.json.decode(msgspec.json.encode(encoder.encode(state, "/rng")))
    return Decoder({key: held.tensor.clone() for key, held in encoder.held.items()}).decode(tree)


@pytest.mark.parametrize("gaussians_before", [0, 1])
def test_all_global_generators_go_on_where_they_were(gaussians_before: int) -> None:
    for _ in range(gaussians_before):  # the second of a pair is kept back
        random.gauss(0, 1), np.random.randn(), torch.randn(1)
    stored = _through_json(rng.global_state())
    expected = _draws()
    for _ in range(3):
        _draws()
    rng.set_global_state(stored)
    assert_same_state(_draws(), expected)


def test_looking_draws_nothing() -> None:
    before = rng_state()
    assert rng.same_global_state(rng.global_state())
    assert_same_state(rng_state(), before)


@pytest.mark.parametrize("gaussians_before", [0, 1])
@pytest.mark.parametrize(
    "draw",
    [
        random.random,
        lambda: random.gauss(0, 1),
        np.random.rand,
        np.random.randn,
        lambda: torch.rand(1),
        lambda: torch.randn(1),
    ],
)
def test_every_draw_is_noticed(draw: Any, gaussians_before: int) -> None:
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    for _ in range(gaussians_before):
        random.gauss(0, 1), np.random.randn(), torch.randn(1)
    before, watched = rng.global_state(), rng.Watched()
    found = watched.now()
    assert_same_state(found, before)
    assert watched.now() is found and not watched.drawn()
    draw()
    assert not rng.same_global_state(before)
    assert watched.drawn()
    assert_same_state(watched.now(), rng.global_state())
    assert not watched.drawn()


@pytest.mark.parametrize("kind", [np.random.PCG64, np.random.Philox, np.random.SFC64])
def test_another_bit_generator_in_numpy(kind: Any) -> None:
    original = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(kind(3))
        stored, watched = _through_json(rng.global_state()), rng.Watched()
        assert rng.same_global_state(stored)
        found = watched.now()
        assert watched.now() is found
        expected = np.random.rand(3)
        assert not rng.same_global_state(stored)
        assert watched.drawn()
        rng.set_global_state(stored)
        assert_same_state(np.random.rand(3), expected)
    finally:
        np.random.set_bit_generator(original)


_GENERATORS: dict[str, tuple[Any, Any]] = {
    "random.Random": (lambda seed: random.Random(seed), lambda g: g.gauss(0, 1)),
    "RandomState": (np.random.RandomState, lambda g: g.randn()),
    "PCG64": (np.random.default_rng, lambda g: g.integers(0, 100, dtype=np.int32)),
    "MT19937": (lambda s: np.random.Generator(np.random.MT19937(s)), lambda g: g.random()),
    "Philox": (lambda s: np.random.Generator(np.random.Philox(s)), lambda g: g.random()),
    "SFC64": (lambda s: np.random.Generator(np.random.SFC64(s)), lambda g: g.random()),
    "torch": (lambda s: torch.Generator().manual_seed(s), lambda g: torch.randn(3, generator=g)),
}


@pytest.mark.parametrize("kind", _GENERATORS)
def test_generators_as_extras(kind: str) -> None:
    make, draw = _GENERATORS[kind]
    generator, other = make(1), make(2)
    assert rng.is_generator(generator)
    draw(generator)
    stored = _through_json(rng.generator_state(generator))
    expected = [draw(generator) for _ in range(3)]
    rng.set_generator_state(other, stored)
    assert_same_state([draw(other) for _ in range(3)], expected)


def test_a_generator_without_a_state_is_none() -> None:
    assert not rng.is_generator(random.SystemRandom())


def test_the_number_of_accelerators_must_fit() -> None:
    assert rng.check_devices(0) is None
    line = rng.check_devices(1000)
    assert line is not None and "1000 CUDA devices stored" in line


def test_random_state_stays_in_host_memory() -> None:
    state = rng.global_state()
    assert {state["torch"].device.type, state["python"]["words"].device.type} == {"cpu"}
