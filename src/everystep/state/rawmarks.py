"""What differs where a generator's state does, read from where Python and NumPy keep it.

To ask NumPy for a state takes over a hundred microseconds, and Python builds a tuple of 625
numbers; both keep what they draw from in one stretch of memory. Whether it is there is tried once,
on generators of our own; where it is not, or for another kind of generator, the state itself is
asked for.
"""

from __future__ import annotations

import ctypes
import functools
import random
from typing import Any

import numpy as np

_HEAD = object.__basicsize__
"""Reference count and type stand first in every object."""

_TWISTER_BYTES = 624 * 4 + 4
"""Of the state of MT19937: the words, and which is next."""


def python_mark(generator: random.Random) -> object:
    """Of a Mersenne twister of Python's; two are equal only where nothing was drawn between."""
    if type(generator) is random.Random and _python_tells():
        return _python_memory(generator)
    return generator.getstate()


def numpy_mark(generator: np.random.RandomState) -> object:
    """The same of NumPy's legacy generator."""
    its: Any = generator
    if type(its._bit_generator) is np.random.MT19937 and _numpy_tells():
        return _numpy_memory(its)
    return _comparable(generator.get_state(legacy=False))


def _python_memory(generator: random.Random) -> tuple[bytes, object]:
    size = type(generator).__basicsize__ - _HEAD
    return ctypes.string_at(id(generator) + _HEAD, size), generator.gauss_next  # type: ignore[attr-defined]


def _numpy_memory(generator: Any) -> tuple[bytes, int, bytes]:
    """Of the object, which holds what is left of a pair of normal numbers, and of its twister."""
    address = generator._bit_generator.ctypes.state_address
    own = ctypes.string_at(id(generator) + _HEAD, type(generator).__basicsize__ - _HEAD)
    return own, address, ctypes.string_at(address, _TWISTER_BYTES)


@functools.cache
def _python_tells() -> bool:
    try:
        one = random.Random(1)
        marks = [_python_memory(one)]
        for draw in (one.random, lambda: one.gauss(0, 1), lambda: one.gauss(0, 1)):
            draw()
            marks.append(_python_memory(one))
        one.setstate(one.getstate())
        return _all_differ(marks) and _python_memory(one) == marks[-1]
    except (AttributeError, ValueError):
        return False


@functools.cache
def _numpy_tells() -> bool:
    try:
        one: Any = np.random.RandomState(1)
        marks = [_numpy_memory(one)]
        for draw in (one.random_sample, one.randn, one.randn, one.tomaxint):
            draw()
            marks.append(_numpy_memory(one))
        return _all_differ(marks) and _numpy_memory(one) == marks[-1]
    except (AttributeError, ValueError, TypeError):
        return False


def _all_differ(marks: list[Any]) -> bool:
    return all(one != other for n, one in enumerate(marks) for other in marks[:n])


def _comparable(state: Any) -> Any:
    """NumPy's state with bytes in place of arrays, which have no plain equality."""
    if isinstance(state, dict):
        return {name: _comparable(value) for name, value in state.items()}
    return state.tobytes() if isinstance(state, np.ndarray) else state
