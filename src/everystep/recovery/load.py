"""A stored state as named tensors, without any model."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from everystep.errors import CannotRestore, Damaged, Missing, NothingToRestore, ReplicasDiffer
from everystep.recovery.part import Proved
from everystep.recovery.plan import plan_restore
from everystep.recovery.reach import How, blamed, by_name, read_chain
from everystep.recovery.stream import Whole
from everystep.state import raw
from everystep.state.tree import Decoder
from everystep.store.chains import Chain, Excluded
from everystep.store.run import Run
from everystep.types import Json, StepRef, split_key

_log = logging.getLogger("everystep")


@dataclass(frozen=True)
class LoadedState:
    """A training state read from a run, proved, in host memory."""

    run: str
    """The identity of the run."""
    ref: StepRef
    rank: int
    tensors: dict[str, torch.Tensor]
    """By key (a JSON pointer such as `/models/model/fc.weight`). Sharded ones are whole."""
    tree: Json
    """All that is not a tensor, as stored."""
    metrics: dict[str, Any]

    @property
    def step(self) -> int:
        """How many training steps were done."""
        return self.ref.step

    @property
    def models(self) -> dict[str, dict[str, Any]]:
        """Parameters, buffers and extra state by model and FQN, tied ones under all their names,
        as `load_state_dict` of an unwrapped model takes them."""
        states: dict[str, dict[str, Any]] = {name: {} for name in self.tree["models"]}
        for key, tensor in self.tensors.items():
            parts = split_key(key)
            if parts[0] == "models" and len(parts) == 3:
                states[parts[1]][parts[2]] = tensor
        for name, facts in self.tree["models"].items():
            for alias, fqn in facts["aliases"].items():
                states[name][alias] = states[name][fqn]
            for fqn, value in facts["extra_state"].items():
                states[name][fqn] = Decoder(self.tensors).decode(value)
        return states

    def optimizer(self, name: str = "optimizer") -> dict[str, Any]:
        """An optimizer's state with parameters by name: `state` is {parameter: slots},
        `param_groups` is [{"params": names, …options}]. A parameter is named by its FQN, with
        `MODEL.` before it where there is more than one model."""
        saved = self.tree["optimizers"][name]
        decoder = Decoder(self.tensors)
        return {
            "state": {self._name(owner): decoder.decode(slot) for owner, slot in saved["slots"]},
            "param_groups": [
                {
                    "params": [self._name(owner) for owner in group["parameters"]],
                    **decoder.decode(group["options"]),
                }
                for group in saved["groups"]
            ],
        }

    def extra(self, name: str) -> Any:
        """What an extra's `load_state_dict` would be given."""
        return Decoder(self.tensors).decode(self.tree["extras"][name])

    def _name(self, owner: list[str]) -> str:
        return owner[1] if len(self.tree["models"]) == 1 else ".".join(owner)


def load(
    run: str | os.PathLike[str],
    step: int | str | StepRef | None = None,
    *,
    rank: int = 0,
    progress: Callable[[int], None] | None = None,
    optimizers: Iterable[type[Optimizer]] = (),
) -> LoadedState:
    """Read a step of a run without any model.

    Args:
        run: the run directory.
        step: a step number on the current timeline, or `"main:900"`; None: the newest step that
            can be proved.
        rank: whose own parts (buffers, RNG, extras) to give; tensors that are sharded over the
            ranks are put together.
        progress: called with the number of bytes just read, from any thread.
        optimizers: classes that are not torch's, where steps were stored as deltas.

    Returns:
        The state; every byte has been compared with the hash taken when it was written, and every
        step that was folded with its fingerprint.

    Raises:
        NotARun: there is no run in this directory.
        NothingToRestore: no such step.
        CannotRestore: no step can be proved.
    """
    opened = Run.open(run)
    listing = opened.listing()
    if isinstance(step, str):
        timeline = "" if ":" in step else listing.current_timeline() + ":"
        step = StepRef.parse(timeline + step)
    segments = opened.segments(listing)
    excluded, reasons = Excluded(), []
    how = How(progress=progress, classes=by_name(optimizers))
    while (chain := plan_restore(listing, segments, step, excluded).chain) is not None:
        try:
            return load_chain(opened, chain, rank, how)
        except (Damaged, Missing, ReplicasDiffer) as error:
            _log.warning("step %s cannot be used: %s", chain.ref, error.headline())
            reasons.append(f"\n  {chain.ref}: {error.headline()}")
            excluded = blamed(chain, error, excluded)
    if not reasons:
        raise NothingToRestore("the run has no complete step yet", path=run)
    raise CannotRestore(
        f"no step can be proved:{''.join(reasons)}", hint="everystep verify RUN shows the damage"
    )


def load_chain(run: Run, chain: Chain, rank: int = 0, how: How = How()) -> LoadedState:  # noqa: B008
    """Read one given step; see `load`.

    Raises:
        Damaged, Missing, ReplicasDiffer: it is not what was written.
    """
    proved = read_chain(run, chain, rank, how)
    tensors = {
        key: raw.restrided(tensor, proved.specs[key]) for key, tensor in proved.tensors.items()
    }
    if any(spec.shard is not None for spec in proved.specs.values()):
        tensors |= _whole_tensors(run, chain, rank, proved, how)
    record = proved.record
    return LoadedState(run.id, chain.ref, rank, tensors, record.tree, _metrics(record.metrics))


def _metrics(stored: Mapping[str, Json]) -> dict[str, Any]:
    decoder = Decoder({})
    return {name: decoder.decode(value) for name, value in stored.items()}


def _whole_tensors(
    run: Run, chain: Chain, rank: int, own: Proved, how: How
) -> dict[str, torch.Tensor]:
    """Put tensors that are sharded over the ranks together from all their parts."""
    whole: dict[str, Whole] = {}
    for part in _parts(run, chain, rank, own, how):
        for key, spec in part.specs.items():
            if spec.shard is not None and key in part.tensors:
                whole.setdefault(key, Whole(spec)).add(spec, part.tensors[key])
    return {key: joined.tensor() for key, joined in whole.items()}


def _parts(run: Run, chain: Chain, rank: int, own: Proved, how: How) -> Iterator[Proved]:
    yield own
    how = how._replace(wanted=lambda spec: spec.shard is not None)
    for other in range(chain.full.world_size):
        if other != rank:
            yield read_chain(run, chain, other, how)
