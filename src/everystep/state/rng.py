"""Random number generators: Python, NumPy's global one, torch on the CPU and on every device."""

from __future__ import annotations

import array
import random
from typing import Any

import numpy as np
import torch

from everystep.state.rawmarks import numpy_mark, python_mark

Generator = random.Random | np.random.Generator | np.random.RandomState | torch.Generator
"""The generators a user may hand over as extras."""


def global_state() -> dict[str, Any]:
    """The state of all global generators as plain values; drawing nothing.

    Accelerator generators are listed only where that accelerator has been used: before that they
    have no state of their own.
    """
    state: dict[str, Any] = {
        "python": _python_state(random.getstate()),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    found = device_states()
    if found:
        state["cuda"] = found
    return state


class Watched:
    """The state of all global generators, asked for again and again."""

    def __init__(self) -> None:
        self._marks: list[object] = []
        self._devices: list[bytes] = []
        self._state: dict[str, Any] = {}

    def now(self) -> dict[str, Any]:
        """As `global_state`; the same dict, with the same tensors, while nobody has drawn."""
        # looked at before the state: what another thread draws meanwhile is seen the next time
        marks, devices = _marks(), [state.numpy().tobytes() for state in device_states()]
        if marks != self._marks or devices != self._devices:
            self._marks, self._devices, self._state = marks, devices, global_state()
        return self._state

    def drawn(self) -> bool:
        """Whether anything was drawn from those of the host since `now`."""
        return _marks() != self._marks


def _marks() -> list[object]:
    """What differs where the states of the host's generators do."""
    inst: Any = random._inst
    legacy: Any = np.random.mtrand._rand
    return [python_mark(inst), numpy_mark(legacy), torch.get_rng_state().numpy().tobytes()]


def device_states() -> list[torch.Tensor]:
    """Of the accelerators' generators, where they have been used."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.cuda.get_rng_state_all()
    return []


def check_devices(stored: int) -> str | None:
    """Why the states of so many accelerators cannot be set here; None if they can."""
    here = torch.cuda.device_count() if stored else 0
    if stored == here:
        return None
    return f"rng: the states of {stored} CUDA devices stored, {here} visible here"


def set_global_state(state: dict[str, Any]) -> None:
    """Put all global generators where `global_state` found them."""
    if state.get("cuda"):
        torch.cuda.set_rng_state_all(state["cuda"])
    random.setstate(_python_tuple(state["python"]))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])


def same_global_state(before: dict[str, Any]) -> bool:
    """Whether nothing has been drawn from the host's global generators since `before`."""
    return same(global_state() | {"cuda": None}, before | {"cuda": None})


def same(one: Any, other: Any) -> bool:
    """Whether two states of generators are equal."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, tuple):
        return bool(one == other)
    return bool(np.array_equal(one, other))


def is_generator(thing: object) -> bool:
    """Whether a user's extra is a generator, which has no `state_dict`."""
    if isinstance(thing, random.Random):  # others, such as SystemRandom, have no such state
        return type(thing).getstate is random.Random.getstate
    return isinstance(thing, np.random.Generator | np.random.RandomState | torch.Generator)


def generator_state(generator: Generator) -> Any:
    """The state of one generator as plain values."""
    if isinstance(generator, random.Random):
        return _python_state(generator.getstate())
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.get_state()


def set_generator_state(generator: Generator, state: Any) -> None:
    """Put a generator where `generator_state` found it."""
    if isinstance(generator, random.Random):
        generator.setstate(_python_tuple(state))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def _python_state(state: tuple[Any, ...]) -> dict[str, Any]:
    version, words, gauss = state
    return {
        "version": version,
        "words": torch.frombuffer(array.array("q", words), dtype=torch.int64),
        "gauss": gauss,
    }


def _python_tuple(state: dict[str, Any]) -> tuple[Any, ...]:
    return state["version"], tuple(state["words"].tolist()), state["gauss"]
