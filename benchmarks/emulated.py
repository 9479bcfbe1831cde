"""Full checkpoints beside training on an emulated accelerator: hidden, in between, saturated."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

import everystep
from benchmarks.common import Setting, make_state, settle, tensors_of
from benchmarks.figures import Figure, median_of
from benchmarks.limits import Limits, measure_limits
from benchmarks.loop import Everystep, Nothing, Subject, Taken, drive
from benchmarks.peers import BLOCKING, PEERS
from everystep.planning.hiding import NEGLIGIBLE_S, Verdict, verdict
from everystep.planning.hiding import Figures as Rates
from everystep.store.measured import Measure
from everystep.types import StepStats

NOISE_S = 0.03
"""Differences of whole steps below this are not told from the machine's noise."""

CPU_REACH_S = 0.3 / 1.49e9
"""Per byte of the state."""


@dataclass(frozen=True)
class Ours:
    """A loop with everystep: the clocks around it, and what it says itself."""

    taken: Taken
    stats: list[StepStats]
    measures: list[Measure]

    @property
    def durable(self) -> int:
        """How many of the steps became durable."""
        return sum(stats.durable for stats in self.stats)

    def rate(self, name: str) -> float | None:
        """The median of a rate, in bytes per second; None: nothing was moved that way."""
        rates = [rate for m in self.measures if (rate := getattr(m, name)) is not None]
        return statistics.median(rates) if rates else None


class Bench:
    """One state, and the loops that are run with it."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.model, self.optimizer = make_state(setting.quick)
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Of the state."""
        return tensors_of(self.model, self.optimizer)

    def bare(self, compute_s: float) -> Taken:
        """No checkpoints."""
        steps = self.setting.steps
        return drive(self.optimizer, compute_s, Nothing, steps, at_least_before=1)[0]

    def ours(
        self,
        compute_s: float,
        strategy: everystep.Full,
        *,
        warm_after: int = 2,
        clean: bool = False,
    ) -> Ours:
        """Everystep in a new run, which is removed afterwards.

        Args:
            warm_after: so many steps must be durable first: with five, files are recycled, which
                counts where storage is the bottleneck.
        """
        run, steps = self.setting.directory / "run", self.setting.steps
        settle(self.setting.settle_s)
        made: list[Everystep] = []

        def make() -> Subject:
            one = Everystep(run, self.model, self.optimizer, strategy, warm_after=warm_after)
            made.append(one)
            return made[0]

        taken, _ = drive(self.optimizer, compute_s, make, steps, clean=clean)
        found = Ours(taken, list(made[0].ck.stats[-steps:]), made[0].measures()[-steps:])
        shutil.rmtree(run)
        return found

    def peer(
        self,
        kind: Callable[[Path, torch.nn.Module, torch.optim.Optimizer], Subject],
        compute_s: float,
        *,
        clean: bool,
    ) -> Taken:
        """Another way, with a checkpoint at every step."""
        directory = self.setting.directory / "peer"
        settle(self.setting.settle_s)
        taken, _ = drive(
            self.optimizer,
            compute_s,
            lambda: kind(directory, self.model, self.optimizer),
            self.setting.peer_steps,
            clean=clean,
            at_least_before=2,  # each of its two places has been written
        )
        shutil.rmtree(directory)
        return taken


def measure_emulated(setting: Setting) -> list[Figure]:
    """All of this part."""
    bench = Bench(setting)
    limits = measure_limits(setting, bench.tensors)
    hidden, offload_bytes_per_s = measure_hidden(bench, limits)
    return [
        *limits.figures(),
        *hidden,
        *measure_between(bench, limits, offload_bytes_per_s),
        *measure_others(bench),
        *measure_saturated(bench, limits),
    ]


SKIP = everystep.Full(policy="skip", every=1)
BLOCK = everystep.Full(policy="block", every=1)


def measure_hidden(bench: Bench, limits: Limits) -> tuple[list[Figure], float]:
    """Where storage keeps up: the stall, the step beside one without checkpoints, and CPU time of
    ours and of peers. Also the rate at which the state is copied beside training."""
    compute_s = bench.setting.hidden_s
    bare = bench.bare(compute_s)
    ours = bench.ours(compute_s, SKIP, clean=True)
    taken = ours.taken
    added = [wall - bare.wall_s for wall in taken.walls]
    noise_s = max(NOISE_S, max(bare.walls) - min(bare.walls))
    head = f"hidden, T {compute_s:g} s: "
    cpu_s = max(0.0, taken.cpu_s - bare.cpu_s)
    shares = [100 * s / w for s, w in zip(taken.stalls, taken.walls, strict=True)]
    told = [100 * s.stall_s / w for s, w in zip(ours.stats, taken.walls, strict=True)]
    figures = [
        median_of(head + "step without checkpoints", bare.walls, "s"),
        median_of(head + "its update U", bare.updates, "s"),
        median_of(head + "step", taken.walls, "s"),
        median_of(head + "stall by the clock around it", shares, "% of step", reach=0.5),
        median_of(head + "stall by its own count", told, "% of step"),
        median_of(head + "step beside none", added, "s", reach=noise_s),
        median_of(head + "durable steps", [ours.durable / len(ours.stats)], "share"),
        median_of(
            head + "CPU time per durable checkpoint",
            [cpu_s / max(1, ours.durable)],
            "s",
            reach=CPU_REACH_S * limits.nbytes,
        ),
    ]
    beside_training = {} if bench.setting.quick else PEERS
    for name, kind in beside_training.items():
        if name in BLOCKING:
            continue
        peer = bench.peer(kind, compute_s, clean=True)
        shares = [100 * s / w for s, w in zip(peer.stalls, peer.walls, strict=True)]
        figures += [
            median_of(f"{head}{name}: stall", shares, "% of step"),
            median_of(f"{head}{name}: CPU time per checkpoint", [beside(peer, bare)], "s"),
        ]
    return figures, ours.rate("offload_bytes_per_s") or limits.nbytes / limits.copy_s


def beside(taken: Taken, bare: Taken) -> float:
    """CPU seconds per checkpoint, beside the same steps without."""
    return (taken.cpu_s - bare.cpu_s) / len(taken.walls)


def measure_between(bench: Bench, limits: Limits, offload_bytes_per_s: float) -> list[Figure]:
    """Where half of the state is left when the update begins: the stall beside the model's."""
    compute_s = limits.nbytes / offload_bytes_per_s / 2
    head = f"in between, T {compute_s:.3g} s: "
    ours = bench.ours(compute_s, SKIP)
    model = predicted(compute_s, ours, limits)
    by_model_s = max(model.snapshot_s, NEGLIGIBLE_S)
    away = [abs(stall / by_model_s - 1) for stall in ours.taken.stalls]
    left = 100 * model.snapshot_bytes / limits.nbytes
    off = abs(ours.taken.stall_s / by_model_s - 1)
    return [
        median_of(head + "left when the update begins, by the model", [left], "% of state"),
        median_of(head + "stall", ours.taken.stalls, "s"),
        median_of(head + "stall by the model", [model.snapshot_s], "s"),
        Figure(head + "away from the model", off, "share", len(away), spread(away), 0.15),
    ]


def spread(runs: list[float]) -> float:
    """Largest minus smallest."""
    return max(runs) - min(runs)


def predicted(compute_s: float, ours: Ours, limits: Limits) -> Verdict:
    """What the model says, with the rates and times that this loop has measured itself."""
    offload = ours.rate("offload_bytes_per_s")
    snapshot = ours.rate("snapshot_bytes_per_s")
    rates = Rates(
        state_bytes=ours.measures[-1].state_bytes,
        forward_s=compute_s / 2,
        backward_s=compute_s / 2,
        update_s=ours.taken.update_s,
        offload_bytes_per_s=offload or limits.nbytes / limits.copy_s,
        snapshot_bytes_per_s=snapshot or limits.nbytes / limits.copy_s,
        write_bytes_per_s=ours.rate("write_bytes_per_s") or limits.write_bytes_per_s,
        on_device=False,
    )
    return verdict(rates, "skip", 1)


def measure_others(bench: Bench) -> list[Figure]:
    """The stall at other lengths of a step."""
    figures = []
    for compute_s in bench.setting.others_s:
        taken = bench.ours(compute_s, SKIP).taken
        figures.append(median_of(f"T {compute_s:g} s: stall", taken.stalls, "s"))
    return figures


def measure_saturated(bench: Bench, limits: Limits) -> list[Figure]:
    """Where storage is the bottleneck: with every step durable, beside peers; and with every step
    staged."""
    compute_s = bench.setting.saturated_s
    head = f"saturated, T {compute_s:g} s: "
    bare = bench.bare(compute_s)
    block = bench.ours(compute_s, BLOCK, warm_after=5)
    skip = None if bench.setting.quick else bench.ours(compute_s, SKIP)
    bound_s = max(bare.wall_s, limits.write_s)
    lengths = block.taken.means()
    compared = dict(list(PEERS.items())[:1]) if bench.setting.quick else PEERS
    peers = {name: bench.peer(kind, compute_s, clean=False) for name, kind in compared.items()}
    best_s = min(statistics.median(peer.means()) for peer in peers.values())
    durable = len(block.stats) / max(1, block.durable)
    return [
        median_of(head + "step without checkpoints", bare.walls, "s"),
        median_of(head + "the limit max(T + U, S / W)", [bound_s], "s"),
        median_of(head + "block: step", lengths, "s"),
        median_of(head + "block: stall", block.taken.stalls, "s"),
        median_of(head + "block: steps per durable one", [durable], "", reach=1.0),
        median_of(
            head + "block: step / limit", [length / bound_s for length in lengths], "x", reach=1.15
        ),
        *(median_of(f"{head}{name}: step", peer.means(), "s") for name, peer in peers.items()),
        *(median_of(f"{head}{name}: stall", peer.stalls, "s") for name, peer in peers.items()),
        *(
            median_of(f"{head}{name}: CPU time per checkpoint", [beside(peer, bare)], "s")
            for name, peer in peers.items()
        ),
        median_of(
            head + "best peer's step / ours",
            [best_s / length for length in lengths],
            "x",
            reach=2.0,
            at_least=True,
        ),
        *([] if skip is None else _skipped(head, skip, limits)),
    ]


def _skipped(head: str, skip: Ours, limits: Limits) -> list[Figure]:
    """Where storage is the bottleneck, and steps that find no room are not written."""
    copies = [stall / limits.copy_s for stall in skip.taken.stalls]
    staged = sum(stats.staged for stats in skip.stats) / len(skip.stats)
    return [
        median_of(head + "skip: staged steps", [staged], "share", reach=1.0, at_least=True),
        median_of(head + "skip: durable steps", [skip.durable / len(skip.stats)], "share"),
        median_of(head + "skip: step", skip.taken.means(), "s"),
        median_of(head + "skip: stall / one memory copy", copies, "x", reach=1.15),
    ]
