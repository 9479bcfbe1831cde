"""Replays the steps from one full checkpoint to the next, and compares: a process of its own.

`python -m everystep.recovery.check ORDER` takes an `Order` as JSON, and prints a `Verdict` as JSON.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from msgspec import Struct

from everystep.errors import CannotRestore, Damaged, EverystepError
from everystep.recovery.classes import Names, imported
from everystep.recovery.part import Proved, read_part
from everystep.recovery.reach import How, left_out, read_chain
from everystep.state import raw
from everystep.store.chains import plan_chains
from everystep.store.run import Run
from everystep.types import StepRef, split_key, spoken

_NICE = 19


class Order(Struct, frozen=True, kw_only=True):
    """What to replay."""

    path: str
    step: StepRef
    """It has a full checkpoint, and so has an earlier one."""
    rank: int
    classes: Names
    """Optimizers that are not torch's."""
    threads: int = 1


class Verdict(Struct, frozen=True, kw_only=True):
    """What came of it."""

    steps: int = 0
    """So many were replayed."""
    took_s: float = 0.0
    """Of one processor: at a restore nobody else wants it."""
    problem: str | None = None
    """Where the replay differs from what was stored."""
    skipped: str | None = None
    """Why it could not be done."""


def check(order: Order) -> Verdict:
    """Replay, and compare every bit of tensors and every value of the tree."""
    started_s = time.process_time()
    run = Run.open(order.path)
    listing = run.listing()
    chains = plan_chains(listing, run.segments(listing), order.step.timeline)
    proof, way = chains.proof(order.step.step), chains.to(order.step.step)
    if proof is None or way is None or way.links:
        return Verdict(skipped="there is no earlier full checkpoint, or none at the step")
    try:
        classes = imported(order.classes)
    except (ImportError, AttributeError) as error:
        return Verdict(skipped=f"an optimizer cannot be imported by another process: {error}")
    try:
        replayed = read_chain(run, proof, order.rank, How(classes=classes))
    except Damaged as error:
        if error.path is not None:
            return Verdict(skipped=error.headline())
        return Verdict(steps=len(proof.links), problem=error.headline())
    except CannotRestore as error:
        if isinstance(error.__cause__, torch.OutOfMemoryError | MemoryError):
            return Verdict(skipped=error.headline())
        return Verdict(problem=error.headline())
    stored = read_part(run, way.full, order.rank)
    problem = _difference(replayed, stored, tuple(left_out(proof, order.rank)))
    took_s = time.process_time() - started_s
    return Verdict(steps=len(proof.links), took_s=took_s, problem=problem)


def _difference(replayed: Proved, stored: Proved, apart: tuple[str, ...]) -> str | None:
    """How a replay differs from what was stored, without what deltas leave out."""
    kept = {key: t for key, t in stored.tensors.items() if not key.startswith(apart)}
    if replayed.specs.keys() != kept.keys():
        return "other tensors"
    for key, tensor in kept.items():
        if not raw.same_bits(tensor, replayed.tensors[key]):
            return f"{spoken(key)} is not what it was in training"
    if _plain(replayed.record.tree, apart) != _plain(stored.record.tree, apart):
        return "a value that is in no tensor is not what it was in training"
    return None


def _plain(tree: Any, apart: Sequence[str]) -> bytes:
    """A tree as bytes, without what deltas leave out."""
    own = msgspec.json.decode(msgspec.json.encode(tree))
    for prefix in apart:
        _, name, entry = split_key(prefix.rstrip("/"))
        own["extras"].get(name, {}).pop(entry, None)
    return msgspec.json.encode(own, order="sorted")


def main() -> None:
    """Do what the first argument orders."""
    os.nice(_NICE)
    order = msgspec.json.decode(sys.argv[1], type=Order)
    torch.set_num_threads(order.threads)
    try:
        verdict = check(order)
    except EverystepError as error:
        verdict = Verdict(skipped=error.headline())
    print(msgspec.json.encode(verdict).decode(), flush=True)


if __name__ == "__main__":
    main()
