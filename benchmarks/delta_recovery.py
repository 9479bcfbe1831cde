"""Recovery of a full state and 100 deltas, beside the same steps done one after another."""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

import everystep
from benchmarks.common import Setting, forget, peak_added_bytes, resident_bytes, settle, timed
from benchmarks.delta_sets import Prepared
from benchmarks.figures import Figure, median_of
from benchmarks.loop import Everystep
from everystep.deltas.encodings import decode
from everystep.recovery import reach
from everystep.recovery.fold import fold
from everystep.recovery.load import LoadedState, load_chain
from everystep.recovery.part import read_part
from everystep.recovery.plan import plan_restore
from everystep.recovery.proof import Step
from everystep.store.chains import Chain
from everystep.store.run import Run
from everystep.types import Json

DELTAS, QUICK_DELTAS = 100, 50
ONE_BY_ONE = 5
"""One in so many is done one after another, which takes long."""

MOST_BYTES = 12e9
DEADLINE_S = 60.0


@dataclass
class Shared:
    """What other parts of the same benchmark may use."""

    replay_s: float | None = None
    """R: one step of the whole state is read and folded."""
    load_s: float | None = None
    """The full state is read."""


SHARED = Shared()

T = TypeVar("T")


class Timed(NamedTuple):
    """Seconds."""

    chain_cold: float
    chain_warm: float
    full_cold: float
    full_warm: float
    read: float
    """All deltas, and no more."""
    steps: int
    """In the next two."""
    fold: float
    """Deltas in memory, decoded and folded."""
    one_by_one: float
    """Deltas in memory, decoded to dense gradients and given to `optimizer.step()`."""
    peak_bytes: float


def record(run: Path, quick: bool, deltas: int) -> None:
    """Train: a full at step 1, and so many deltas."""
    prepared = Prepared(quick)
    strategy = everystep.Deltas(full_every=10_000, batch=1)
    subject = Everystep(run, prepared.model, prepared.optimizer, strategy)
    try:
        for _ in range(1 + deltas):
            prepared.put_next()
            prepared.optimizer.step()
            subject.step()
        subject.finish()
    finally:
        subject.close()


def chain_to(run: Run, step: int) -> Chain:
    """The way to a step.

    Raises:
        ValueError: it is not the full at step 1 with all the deltas after it.
    """
    listing = run.listing()
    chain = plan_restore(listing, run.segments(listing), step).chain
    if chain is None or len(chain.links) != step - 1:
        raise ValueError(f"step {step} is not to be had from a full at step 1: {chain}")
    return chain


def measure_recovery(setting: Setting) -> list[Figure]:
    """All of this part."""
    place = setting.directory / "run"
    settle(setting.settle_s)
    deltas = QUICK_DELTAS if setting.quick else DELTAS
    record(place, setting.quick, deltas)
    gc.collect()
    took = _measure(place, deltas)
    shutil.rmtree(place)
    if not setting.quick:
        SHARED.replay_s = (took.chain_cold - took.full_cold) / deltas
        SHARED.load_s = took.full_cold
    return _figures(took, deltas)


def _figures(took: Timed, deltas: int) -> list[Figure]:
    after, folded = took.chain_warm - took.full_warm, took.steps
    one_by_one = took.read + took.one_by_one * deltas / folded
    slower = (took.full_cold + one_by_one) / took.chain_cold
    by = f", of {folded} steps times {deltas / folded:g}"
    head = f"recovery of a full and {deltas} deltas: "
    share = 100 * (after - took.read) / took.chain_warm
    return [
        median_of(head + "all, cold files", [took.chain_cold], "s"),
        median_of(head + "all, warm files", [took.chain_warm], "s"),
        median_of(head + "the full alone, cold", [took.full_cold], "s"),
        median_of(head + "the full alone, warm", [took.full_warm], "s"),
        median_of(head + "the deltas read and unpacked, no more", [took.read], "s"),
        median_of(head + "decoding's and the fold's share", [share], "%"),
        median_of(head + f"one by one, with decoding{by}", [one_by_one - took.read], "s"),
        median_of(head + f"one by one / fold, of {folded}", [took.one_by_one / took.fold], "x"),
        median_of(
            head + "one by one / ours, after the full is read",
            [one_by_one / after],
            "x",
            reach=3.0,
            at_least=True,
        ),
        median_of(head + "one by one / ours, everything, cold", [slower], "x"),
        median_of(head + "memory at its peak", [took.peak_bytes / 1e9], "GB", MOST_BYTES / 1e9),
    ]


def _measure(place: Path, deltas: int) -> Timed:
    run = Run.open(place)
    chain = chain_to(run, 1 + deltas)
    forget(place)
    cold: list[float] = []
    peak = peak_added_bytes(lambda: cold.append(timed(lambda: reach.read_chain(run, chain, 0))))
    peak += resident_bytes("VmRSS")
    chain_warm = timed(lambda: reach.read_chain(run, chain, 0))
    forget(place)
    full_cold = timed(lambda: read_part(run, chain.full, 0))
    full, full_warm = _kept(lambda: read_part(run, chain.full, 0))
    steps, read_s = _kept(lambda: list(_steps(run, chain)))
    few = steps[: deltas // ONE_BY_ONE]
    tree, specs, tensors = full.record.tree, full.specs, full.tensors
    folded, fold_s = _kept(lambda: fold(tree, specs, tensors, few, classes={}))
    again = OneByOne(load_chain(run, Chain(chain.full, ())))
    one_by_one = timed(lambda: [again.step(step) for step in few])
    again.check(folded.tree, folded.tensors)
    return Timed(
        chain_cold=cold[0],
        chain_warm=chain_warm,
        full_cold=full_cold,
        full_warm=full_warm,
        read=read_s,
        steps=len(few),
        fold=fold_s,
        one_by_one=one_by_one,
        peak_bytes=float(peak),
    )


def _kept(action: Callable[[], T]) -> tuple[T, float]:
    started_s = time.perf_counter()
    found = action()
    return found, time.perf_counter() - started_s


def _steps(run: Run, chain: Chain) -> Iterator[Step]:
    metrics: dict[str, Json] = {}
    return reach._steps(run, chain.links, 0, metrics, None)


class OneByOne:
    """torch's own optimizer on dense gradients."""

    def __init__(self, state: LoadedState) -> None:
        saved = state.optimizer()
        (group,) = saved["param_groups"]
        self._parameters = {
            name: torch.nn.Parameter(state.models["model"][name]) for name in group["params"]
        }
        self._optimizer = torch.optim.AdamW(self._parameters.values())
        for name, parameter in self._parameters.items():
            self._optimizer.state[parameter] = saved["state"][name]
        self._dense = [torch.empty(p.numel(), dtype=p.dtype) for p in self._parameters.values()]

    def step(self, step: Step) -> None:
        """Decode one delta, and update."""
        (update,) = step.own[1].updates
        for parameter, coded, dense in zip(
            self._parameters.values(), update.gradients, self._dense, strict=True
        ):
            decode(coded, dense)
            parameter.grad = dense.view(parameter.shape)
        self._optimizer.step()

    def check(self, tree: Json, tensors: dict[str, torch.Tensor]) -> None:
        """Compare every bit with a folded state.

        Raises:
            ValueError: something differs.
        """
        for (_, name), slot in tree["optimizers"]["optimizer"]["slots"]:
            parameter = self._parameters[name]
            pairs = {f"/models/model/{name}": parameter.detach()}
            for part, value in slot.items():
                pairs[value["$tensor"]] = self._optimizer.state[parameter][part]
            for key, mine in pairs.items():
                theirs = tensors[key].view(mine.shape)
                if not torch.equal(mine.view(torch.int32), theirs.view(torch.int32)):
                    raise ValueError(f"{key} differs from what the steps one by one give")
