"""What a run shows of itself while it trains: the facts from which a strategy is chosen."""

from __future__ import annotations

import collections
import statistics
from collections.abc import Iterable, Iterator, Mapping

import torch
from msgspec import Struct

from everystep.agent import protocol as p
from everystep.engine.meter import Cost
from everystep.engine.sampling import Gradients, Sampler
from everystep.planning.facts import Facts
from everystep.state.objects import Objects
from everystep.state.ranks import Ranks
from everystep.state.shards import shard_of

ENOUGH_STEPS = 8

_KEPT = 64

_DEVICE_IS_FASTER = 10
"""So many times as fast as over its link a device copies within itself, at least, as long as no
copy was measured."""

_BESIDE_BYTES = 8 << 10
"""Of a delta, besides its gradients: generators, fingerprints, what changed elsewhere."""


class Observed:
    """The newest figures of one process.

    Args:
        objects: the state's owners. Hooks are set on their optimizers until `close`.
        ranks: this process's place in the job.
    """

    def __init__(self, objects: Objects, ranks: Ranks) -> None:
        self._objects, self._ranks = objects, ranks
        self._costs: collections.deque[Cost] = collections.deque(maxlen=_KEPT)
        self._writes: collections.deque[tuple[int, float]] = collections.deque(maxlen=8)
        """(bytes, seconds) of whole states, or what has changed of one."""
        self._folds: collections.deque[float] = collections.deque(maxlen=_KEPT)
        self._known: dict[str, float] = {}
        """The newest medians: those of copies last, while a strategy makes none."""
        self._sampler = Sampler(objects.optimizers.values())
        self._gradients: Gradients | None = None
        self._local_bytes = 0

    # ------------------------------------------------------------ what is seen

    def step(self, cost: Cost) -> None:
        """A step is about to end."""
        self._costs.append(cost)

    def heard(self, message: Struct) -> None:
        """Take what the agent tells, in its thread."""
        if isinstance(message, p.Stored) and message.written_bytes and message.took_s > 0:
            self._writes.append((message.written_bytes, message.took_s))
        elif isinstance(message, p.Folded):
            self._folds.append(message.took_s)

    def begin_again(self) -> None:
        """Another strategy begins: steps are no more what they were."""
        self._learn()
        self._costs.clear()

    @property
    def is_ready(self) -> bool:
        """Whether enough steps were seen."""
        return len(self._costs) > ENOUGH_STEPS  # the first is unlike the others

    def look_at_gradients(self) -> None:
        """At those of one of the next steps."""
        self._sampler.ask()

    def has_looked(self) -> bool:
        """Whether that has happened since; to be asked at the end of each step."""
        found = self._sampler.answer()
        if found is None:
            return False
        self._gradients, self._local_bytes = found, _local_bytes(self._objects)
        return True

    # ------------------------------------------------------------ what follows

    def _learn(self) -> None:
        costs = [cost for cost in list(self._costs)[1:] if cost.ended_s]
        medians = {
            "state_bytes": _median(cost.state_bytes or None for cost in costs),
            "window_s": _median(cost.forward_s + cost.backward_s or None for cost in costs),
            "offload_bytes_per_s": _median(cost.offload_bytes_per_s for cost in costs),
            "snapshot_bytes_per_s": _median(cost.snapshot_bytes_per_s for cost in costs),
            "step_s": _median(c.ended_s - c.begun_s - c.stall_s for c in costs),
            "delta_bytes": _median(cost.logged_bytes or None for cost in costs),
        }
        self._known |= {name: value for name, value in medians.items() if value is not None}

    def facts(
        self, *, mtbf_s: float, sync_s: float, deltas: bool, excluded: Mapping[str, str]
    ) -> Facts | None:
        """What is known; None: something that is needed is not known yet.

        Args:
            mtbf_s: see `Facts`.
            sync_s: see `Facts`.
            deltas: whether records are deltas now, which tells what those take.
            excluded: see `Facts`.
        """
        self._learn()
        known, writes = self._known, list(self._writes)
        link = known.get("offload_bytes_per_s") or known.get("snapshot_bytes_per_s")
        if not {"state_bytes", "window_s"} <= known.keys() or link is None:
            return None
        if not writes or self._gradients is None:
            return None
        on_device = any(one.device.type != "cpu" for one in _parameters(self._objects))
        within = known.get("snapshot_bytes_per_s", link * (_DEVICE_IS_FASTER if on_device else 1))
        update_s = max(0.0, known["step_s"] - known["window_s"])
        share = min(1.0, known["state_bytes"] / max(1, self._local_bytes))
        coded = share * self._gradients.coded_bytes + _BESIDE_BYTES
        folds = list(self._folds)
        # it is the same arithmetic on the same kind of memory, each rank with its share of it
        fold_s = None if on_device else share * update_s
        return Facts(
            state_bytes=int(known["state_bytes"]),
            gradient_bytes=max(1, round(share * self._gradients.nbytes)),
            delta_bytes=round(known.get("delta_bytes", coded) if deltas else coded),
            window_s=known["window_s"],
            update_s=update_s,
            offload_bytes_per_s=link,
            snapshot_bytes_per_s=within,
            write_bytes_per_s=_rate(writes, sync_s),
            sync_s=sync_s,
            record_stall_s=0.0 if self._gradients.lasting else None,
            fold_s=statistics.median(folds) if folds else fold_s,
            mtbf_s=mtbf_s,
            on_device=on_device,
            world_size=self._ranks.world_size,
            excluded=dict(excluded),
        )

    def close(self) -> None:
        """Take the hooks away."""
        self._sampler.close()


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _rate(writes: list[tuple[int, float]], sync_s: float) -> float:
    """Bytes per second, without what each write takes besides its bytes."""
    return statistics.median(nbytes / max(took / 2, took - sync_s) for nbytes, took in writes)


def _parameters(objects: Objects) -> Iterator[torch.Tensor]:
    for model in objects.models.values():
        yield from model.parameters()


def _local_bytes(objects: Objects) -> int:
    """Of parameters, buffers and slots in this process; each counts once."""
    tensors = {id(one): one for model in objects.models.values() for one in model.buffers()}
    tensors |= {id(one): one for one in _parameters(objects)}
    for optimizer in objects.optimizers.values():
        for slots in optimizer.state.values():
            values = slots.values() if isinstance(slots, Mapping) else ()
            tensors |= {id(one): one for one in values if isinstance(one, torch.Tensor)}
    return sum(shard_of(one)[0].nbytes for one in tensors.values())
