"""What fingerprints say of each tensor after a step, and what a fold has made of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
import xxhash

from everystep.deltas.delta import Delta, Layout
from everystep.errors import Damaged
from everystep.state import raw
from everystep.state.fingerprint import Rota, digest
from everystep.types import TensorSpec, item_bytes, spoken


class Step(NamedTuple):
    """The deltas of one step, of all ranks that matter, with their layouts."""

    step: int
    parts: list[tuple[Layout, Delta]]
    rank: int
    """Whose own tensors and tree are folded."""

    @property
    def own(self) -> tuple[Layout, Delta]:
        """The part of that rank.

        Raises:
            Damaged: it is not there.
        """
        for layout, delta in self.parts:
            if layout.rank == self.rank:
                return layout, delta
        raise Damaged("the rank's own delta is not there", step=self.step, rank=self.rank)


class Expected(NamedTuple):
    """The hash of elements `start` to `stop` of one tensor, as ranks have told it."""

    start: int
    stop: int
    told: list[tuple[int, int]]
    """(rank, hash)"""


class Mismatch(NamedTuple):
    """A tensor that a fold has not made what it was."""

    step: int
    position: int
    """Among the tensors of the layout."""
    key: str
    rank: int
    expected: int
    found: int

    def error(self) -> Damaged:
        """The error that says so."""
        return Damaged(
            f"{spoken(self.key)} is not what it was in training",
            step=self.step,
            rank=self.rank,
            expected=f"{self.expected:016x}",
            found=f"{self.found:016x}",
            hint="restore an earlier step; everystep verify --deep RUN tells which can be had",
        )


class Prover:
    """Reads fingerprints. Of other ranks it takes what they say of replicated tensors, where they
    list the same tensors as this one; what they hold alone is proved when they restore."""

    def __init__(self) -> None:
        self._rotas: dict[int, tuple[Layout, Rota]] = {}
        self._positions: dict[int, dict[str, int]] = {}

    def expected(self, step: Step, specs: Mapping[str, TensorSpec]) -> dict[str, Expected]:
        """What is told of the state after a step, by key.

        Args:
            specs: of the tensors after it.

        Raises:
            Damaged: the own fingerprint is not of these tensors.
        """
        own, _ = step.own
        found: dict[str, Expected] = {}
        for layout, delta in sorted(step.parts, key=lambda part: part[0].rank != step.rank):
            mine = layout is own
            if not mine and layout.state != own.state:
                continue
            due = self._rota(layout, specs).turns(step.step)
            if len(due.position) != len(delta.fingerprint):
                if mine:
                    raise Damaged(
                        "the fingerprint is of other tensors",
                        step=step.step, rank=layout.rank,
                        expected=len(due.position), found=len(delta.fingerprint),
                    )  # fmt: skip
                continue
            entries = zip(*(a.tolist() for a in (*due, delta.fingerprint)), strict=True)
            for position, start, stop, told in entries:
                key = layout.state[position]
                if mine:
                    found[key] = Expected(start, stop, [(layout.rank, told)])
                elif key in found and specs[key].replicated and (start, stop) == found[key][:2]:
                    found[key].told.append((layout.rank, told))
        return found

    def _rota(self, layout: Layout, specs: Mapping[str, TensorSpec]) -> Rota:
        known = self._rotas.get(id(layout))
        if known is None:
            missing = next((key for key in layout.state if key not in specs), None)
            if missing is not None:
                raise Damaged(f"the log speaks of {spoken(missing)}, which is not there")
            its = [specs[key] for key in layout.state]
            widths = [item_bytes(s.dtype) or 0 for s in its]
            rota = Rota([s.elements for s in its], widths, layout.slices)
            known = self._rotas[id(layout)] = layout, rota
        return known[1]

    def differing(
        self, step: Step, expected: Mapping[str, Expected], found: Iterable[tuple[str, int]]
    ) -> list[Mismatch]:
        """Where the hashes found, by key, are not those that were told."""
        layout = step.own[0]
        if id(layout) not in self._positions:
            self._positions[id(layout)] = {key: i for i, key in enumerate(layout.state)}
        at = self._positions[id(layout)]
        return [
            Mismatch(step.step, at[key], key, rank, told, value)
            for key, value in found
            for rank, told in expected[key].told
            if told != value
        ]


class Hasher:
    """Hashes parts of a state's tensors at every step. Finding out where their bytes lie would take
    as long as hashing many of them: of those in host memory that is known from the step before."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[torch.Tensor, int, memoryview | None]] = {}
        """Each tensor, its address, and its bytes there; None: they do not lie in order there."""

    def hashes(
        self, tensors: Mapping[str, torch.Tensor], expected: Mapping[str, Expected]
    ) -> list[tuple[str, int]]:
        """The hashes of the elements that are asked for, by key."""
        return [
            (key, self._hash(key, tensors[key], one.start, one.stop))
            for key, one in expected.items()
        ]

    def _hash(self, key: str, tensor: torch.Tensor, start: int, stop: int) -> int:
        known, address = self._known.get(key), tensor.data_ptr()
        if known is None or known[0] is not tensor or known[1] != address:
            known = self._known[key] = tensor, address, raw.bytes_of(tensor)
        view, size = known[2], tensor.element_size()
        if view is None:
            return digest(tensor, start, stop)
        return xxhash.xxh3_64_intdigest(view[start * size : stop * size])
