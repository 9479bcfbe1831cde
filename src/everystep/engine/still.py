"""Large tensors that do not change, such as the frozen weights of an adapter run: stored once, and
proved to be the same at every step."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from everystep.engine.capture import versions_of
from everystep.engine.device import Device
from everystep.state.tree import Held
from everystep.types import spoken

LEAST_BYTES = 64 << 10
"""Smaller tensors are copied at every step."""

WORTH_BYTES = 1 << 20
"""Less than this in all is not worth a file."""

_address = operator.methodcaller("data_ptr")


class Still:
    """The tensors that a run stores once.

    A tensor that no optimizer writes is taken to be still until it is seen to have changed: by its
    version or address at the next `step()`, or, where it was written behind torch's back, by its
    fingerprint. Then it is copied like any other for the rest of the run.
    """

    def __init__(self) -> None:
        self._held: list[Held] = []
        self._prints: list[str] = []
        self._device: Device | None = None
        self._facts: list[object] = []
        self._restless: set[str] = set()

    @property
    def known(self) -> bool:
        """Whether there are such tensors."""
        return bool(self._held)

    def moved(self) -> bool:
        """Whether any of them has visibly changed since it was stored."""
        now = self._now()
        if now == self._facts:
            return False
        for held, before, after in zip(self._held, self._facts or now, now, strict=True):
            if before != after:
                self._restless.add(held.spec.key)
        return True

    def _now(self) -> list[object]:
        tensors = [held.tensor for held in self._held]
        return list(zip(versions_of(tensors), map(_address, tensors), strict=True))

    def chosen(self, fixed: Sequence[Held], writers: Sequence[str | None]) -> set[str]:
        """The keys of tensors to store once.

        Args:
            fixed: the tensors of the state.
            writers: for each, the optimizer that writes it.
        """
        found = {
            held.spec.key: held.spec.nbytes
            for held, writer in zip(fixed, writers, strict=True)
            if writer is None
            and held.spec.nbytes >= LEAST_BYTES
            and held.spec.key not in self._restless
        }
        return set(found) if sum(found.values()) >= WORTH_BYTES else set()

    def keep(self, held: Sequence[Held], device: Device) -> None:
        """Note what has just been stored."""
        self._held, self._device = list(held), device
        device.stable()
        self._prints = [device.fingerprint(one.tensor) for one in self._held]
        self._facts = self._now()

    def forget(self) -> None:
        """There are none any more."""
        self._held, self._prints, self._facts = [], [], []

    def check(self) -> str | None:
        """Prove that all are as they were stored; returns what is not, in words."""
        if self._device is None:
            return None
        changed = [
            held.spec.key
            for held, before in zip(self._held, self._prints, strict=True)
            if self._device.fingerprint(held.tensor) != before
        ]
        if not changed:
            return None
        self._restless.update(changed)
        self._facts = []
        others = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        return (
            f"{spoken(changed[0])}{others} was written behind torch's back (through .data?) after "
            "it had not changed; from now on it is stored with every step"
        )
