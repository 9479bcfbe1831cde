"""What the demo found: the price of every kill, and whether both runs ended in the same bits."""

from __future__ import annotations

import hashlib
import statistics
from pathlib import Path
from typing import Literal

import msgspec

from everystep.cli.demo_run import Event, Job, Strike, newest_saved

ROOTS = {
    "weights": "/models/",
    "optimizer": "/optimizers/",
    "schedule": "/extras/schedule",
    "loader": "/extras/loader",
    "RNG": "/rng",
}


class Kill(msgspec.Struct, frozen=True):
    """What a strike cost."""

    rank: int
    step: int
    """the step that the rank was in"""
    phase: Literal["training", "saving"]
    resumed_after_step: int
    repeated_steps: int
    """steps that had to be trained again although `Checkpointer.step` had returned on every rank:
    one that was still being copied when the process died"""
    resume_s: float
    """from the kill to the end of the first newly completed step"""
    restore_s: float
    """the part of it that `Checkpointer.restore` took"""


class Part(msgspec.Struct, frozen=True):
    """The SHA-256 of one part of the end state in both runs."""

    uninterrupted: str
    killed: str
    identical: bool


class Price(msgspec.Struct, frozen=True):
    """What checkpoints cost in the run that nobody disturbed."""

    train_s: float
    """median time of a step without its checkpoint"""
    checkpoint_s: float
    """median time of a checkpoint"""
    share: float
    """time of all checkpoints / time of all steps with their checkpoints"""
    copied_bytes: int
    """median per rank and step"""


def cost(strike: Strike, events: list[list[Event]]) -> Kill:
    """Read from the journals what a kill cost."""
    victim = [e for e in events[strike.rank] if e.life == strike.life][-1]
    completed = min(newest_saved(told, strike.at_s) for told in events)
    after = [[e for e in told if e.life == strike.life + 1] for told in events]
    restored = [next(e for e in told if e.name == "restored") for told in after]
    again = [next(e for e in told if e.name == "saved") for told in after]
    resumed_after_step = min(e.step for e in restored)
    return Kill(
        rank=strike.rank,
        step=victim.step + (victim.name == "saved"),
        phase="saving" if victim.name == "trained" else "training",
        resumed_after_step=resumed_after_step,
        repeated_steps=max(0, completed - resumed_after_step),
        resume_s=max(e.at_s for e in again) - strike.at_s,
        restore_s=max(e.took_s for e in restored),
    )


def price(events: list[list[Event]]) -> Price:
    """Read from the journals what checkpoints cost."""
    train_s = [e.took_s for told in events for e in told if e.name == "trained"]
    saves = [e for told in events for e in told if e.name == "saved"]
    save_s = [e.took_s for e in saves]
    return Price(
        train_s=statistics.median(train_s),
        checkpoint_s=statistics.median(save_s),
        share=sum(save_s) / (sum(save_s) + sum(train_s)),
        copied_bytes=int(statistics.median(e.copied_bytes for e in saves)),
    )


def compare(reference: Job, killed: Job) -> tuple[dict[str, Part], str | None]:
    """Hash every part of both end states; also gives the first name that differs."""
    one, two = end_state(reference), end_state(killed)
    ours, theirs = digests(one), digests(two)
    parts = {p: Part(ours[p], theirs[p], ours[p] == theirs[p]) for p in ours}
    differing = [name for name in sorted(one.keys() | two.keys()) if one.get(name) != two.get(name)]
    return parts, differing[0] if differing else None


def digests(state: dict[str, bytes]) -> dict[str, str]:
    """Part to the hash of all that belongs to it."""
    hashes = {part: hashlib.sha256() for part in [*ROOTS, "losses", "live memory", "the rest"]}
    for name in sorted(state):
        path = name.partition(": ")[2]
        part = next((p for p, root in ROOTS.items() if path.startswith(root)), path)
        body = f"{name}\n{len(state[name])}\n".encode() + state[name]
        hashes[part if part in hashes else "the rest"].update(body)
    return {part: h.hexdigest() for part, h in hashes.items()}


def end_state(job: Job) -> dict[str, bytes]:
    """Name to bytes, for all that the ranks have stored of the last step and told in journals."""
    found: dict[str, bytes] = {}
    for rank, told in enumerate(job.events):
        found |= {f"rank {rank}: {name}": raw for name, raw in stored(job.run, rank).items()}
        # The set of all losses: a step that was trained twice must have had the same one twice.
        losses = {(e.step, e.loss) for e in told if e.name == "trained"}
        found[f"rank {rank}: losses"] = repr(sorted(losses)).encode()
        found[f"rank {rank}: live memory"] = told[-1].live.encode()
    return found


def stored(run: Path, rank: int) -> dict[str, bytes]:
    """Name to dtype, shape and bytes of every tensor, and to every value of the tree."""
    import torch

    import everystep

    state = everystep.load(run, rank=rank)
    found = {"/step": str(state.step).encode()}
    for name, tensor in state.tensors.items():
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        found[f"{name} (tensor)"] = f"{tensor.dtype} {tuple(tensor.shape)}\n".encode() + raw
    nodes: list[tuple[str, object]] = [("", state.tree)]
    while nodes:
        path, node = nodes.pop()
        if isinstance(node, dict):
            nodes += [(f"{path}/{key}", node[key]) for key in node]
        else:
            found[path] = msgspec.json.encode(node)
    return found
