"""What is read of generators in place of their states tells every draw."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from everystep.state import rawmarks
from everystep.state.rawmarks import numpy_mark, python_mark

PYTHON: list[Callable[[random.Random], object]] = [
    lambda one: one.random(),
    lambda one: one.getrandbits(1),
    lambda one: one.gauss(0, 1),
    lambda one: one.gauss(0, 1),
    lambda one: one.shuffle([1, 2, 3]),
    lambda one: one.seed(7),
]

NUMPY: list[Callable[[Any], object]] = [
    lambda one: one.rand(),
    lambda one: one.randn(),
    lambda one: one.randn(),
    lambda one: one.randint(2),
    lambda one: one.binomial(10, 0.3),
    lambda one: one.bytes(1),
    lambda one: one.seed(7),
]


@pytest.fixture(params=["from memory", "asked for"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "asked for":
        monkeypatch.setattr(rawmarks, "_python_tells", lambda: False)
        monkeypatch.setattr(rawmarks, "_numpy_tells", lambda: False)


@pytest.mark.usefixtures("_way")
def test_every_draw_of_pythons_shows() -> None:
    one = random.Random(3)
    seen = [python_mark(one)]
    for draw in PYTHON:
        draw(one)
        assert python_mark(one) == python_mark(one)
        assert python_mark(one) not in seen
        seen.append(python_mark(one))
    state = one.getstate()
    one.random()
    one.setstate(state)
    assert python_mark(one) == seen[-1]


@pytest.mark.usefixtures("_way")
def test_every_draw_of_numpys_shows() -> None:
    one = np.random.RandomState(3)
    seen = [numpy_mark(one)]
    for draw in NUMPY:
        draw(one)
        assert numpy_mark(one) == numpy_mark(one)
        assert numpy_mark(one) not in seen
        seen.append(numpy_mark(one))


def test_a_generator_of_another_kind_is_asked() -> None:
    one = np.random.RandomState(np.random.PCG64(1))
    before = numpy_mark(one)
    one.rand()
    assert numpy_mark(one) != before

    class Own(random.Random):
        pass

    mine = Own(1)
    first = python_mark(mine)
    mine.random()
    assert python_mark(mine) != first


def test_here_they_are_read_from_memory() -> None:
    assert rawmarks._python_tells() and rawmarks._numpy_tells()
