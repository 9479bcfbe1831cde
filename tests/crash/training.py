"""A training in this process whose weights say which step they are of."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch

from everystep import Checkpointer, Retention, load
from everystep.store import durable
from everystep.store.run import Run
from everystep.store.verify import verify_run
from trips import BLOCKING


class Training:
    """A model of one number per step, so that a state tells which step it is."""

    def __init__(self, run: Path, elements: int = 50, **options: object) -> None:
        self.run = run
        self.model = torch.nn.Linear(elements, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.steps = 0
        options.setdefault("strategy", BLOCKING)
        options.setdefault("retention", Retention(keep_last=2))
        self.ck = Checkpointer(run, model=self.model, optimizer=self.optimizer, **options)  # type: ignore[arg-type]
        with contextlib.ExitStack() as undo:
            undo.callback(self.ck.close)
            self.steps = self.ck.restore()
            undo.pop_all()

    def step(self) -> None:
        """A step after which all weights are its number."""
        self.steps += 1
        with torch.no_grad():
            self.model.weight.fill_(self.steps)
        self.ck.step(loss=float(self.steps))

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *raised: Any) -> None:
        self.ck.__exit__(*raised)


def is_whole(run: Path, step: int) -> bool:
    """Whether a step holds what that step held."""
    weight = load(run, step).models["model"]["weight"]
    return torch.equal(weight, torch.full_like(weight, step))


def leftovers(run: Path) -> list[str]:
    """Temporary files, data without a record, and parts that belong to no complete step."""
    opened = Run.open(run)
    listing = opened.listing()
    found = [str(path) for path in durable.temporaries(run)]
    found += [f"{ref} {stem}" for ref, stem in listing.loose]
    found += [f"{entry.ref} incomplete" for entry in listing.steps if not entry.complete]
    return found + [finding.what for finding in verify_run(opened, listing)]
