"""Notice that somebody has drawn from a random number generator."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from everystep.state import rng


class Draws:
    """Watches the global generators of Python, NumPy and torch, on every device, and others.

    Args:
        things: those of them that are generators are watched as well.
    """

    def __init__(self, things: Iterable[object]) -> None:
        self._others: list[Any] = [thing for thing in things if rng.is_generator(thing)]
        self._noted: list[Any] | None = None

    def note(self) -> None:
        """Look at all of them."""
        self._noted = self._marks()

    def drawn(self) -> bool:
        """Whether numbers were drawn since; asked once for each `note`."""
        noted, self._noted = self._noted, None
        return noted is not None and not rng.same(self._marks(), noted)

    def _marks(self) -> list[Any]:
        python, numpy = random.getstate(), np.random.get_state(legacy=False)
        marks = [python, numpy, torch.get_rng_state(), *rng.device_states()]
        return marks + [rng.generator_state(other) for other in self._others]
