"""What a run and its machine are like, as far as the choice of a strategy depends on it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from everystep.errors import UsageError
from everystep.planning.hiding import Figures, verdict
from everystep.planning.intervals import Costs

FOLD_BYTES_PER_S = 4e9
"""Of the state, for one step done again from gradients, until that was measured."""

HOST_SHARE = 0.5
"""Of failures, those that take the host, where nobody says."""


class Facts(Struct, frozen=True, kw_only=True):
    """What a run and its machine are like, measured or assumed. Per rank; the slowest decides.

    Raises:
        UsageError: a figure that makes no sense.
    """

    state_bytes: int
    """What this rank stores of a whole state."""
    gradient_bytes: int
    """What it hands over of one step's gradients where they are not compressed."""
    window_s: float
    """Forward and backward: the state is stable."""
    update_s: float
    """The optimizer's step."""
    offload_bytes_per_s: float
    """From the device to host memory, beside computing."""
    snapshot_bytes_per_s: float
    """Copies within the device; without a device, of memory."""
    write_bytes_per_s: float
    """From host memory to the store."""
    mtbf_s: float
    """Mean time between failures of the job; may be infinite."""
    host_share: float = HOST_SHARE
    """Of failures, those that take the host; the others take the training process."""
    delta_bytes: int | None = None
    """Of one step's record. None: as `gradient_bytes`."""
    sync_s: float = 0.0
    """Time of storage that each write takes besides its bytes."""
    fold_s: float | None = None
    """One step is done again from its gradients. None: `state_bytes / FOLD_BYTES_PER_S`."""
    record_stall_s: float | None = None
    """By how much a record holds up training. None: as long as a copy of it within the device."""
    load_s: float | None = None
    """A full is read from the store and put where it belongs. None: as long as its write."""
    restart_s: float = 0.0
    """From a failure until the new processes begin to restore."""
    host_memory_bytes: int | None = None
    """What this rank's agent may take. None: no limit."""
    on_device: bool = True
    """False: training runs in host memory."""
    world_size: int = 1
    """Ranks. With more than one, fulls among deltas come at powers of two."""
    excluded: dict[str, str] = {}
    """Strategies that are out of the question, by name, and why."""

    def __post_init__(self) -> None:
        for name in ("state_bytes", "gradient_bytes", "window_s", "offload_bytes_per_s"):
            _require(0 < getattr(self, name) < math.inf, name, getattr(self, name))
        for name in ("snapshot_bytes_per_s", "write_bytes_per_s", "world_size"):
            _require(0 < getattr(self, name) < math.inf, name, getattr(self, name))
        for name in ("update_s", "sync_s", "restart_s"):
            _require(0 <= getattr(self, name) < math.inf, name, getattr(self, name))
        for name in ("fold_s", "record_stall_s", "load_s", "host_memory_bytes"):
            value = getattr(self, name)
            _require(value is None or 0 <= value < math.inf, name, value)
        _require(self.delta_bytes is None or self.delta_bytes > 0, "delta_bytes", self.delta_bytes)
        _require(self.mtbf_s > 0, "mtbf_s", self.mtbf_s)
        _require(0 <= self.host_share <= 1, "host_share", self.host_share)

    def mirrored(self) -> Facts:
        """As a replica finds them: gradients are handed over as they are, compressed or not."""
        return replace(self, delta_bytes=None)

    @property
    def step_s(self) -> float:
        """A step without checkpoints."""
        return self.window_s + self.update_s

    @property
    def record_bytes(self) -> int:
        """Of one step, as it is handed over."""
        return self.gradient_bytes if self.delta_bytes is None else self.delta_bytes

    @property
    def record_s(self) -> float:
        """By how much a record lengthens each step: its capture, and what the link to the host
        cannot carry within a step."""
        stall_s = self.record_stall_s
        if stall_s is None:
            stall_s = self.record_bytes / self.snapshot_bytes_per_s
        return stall_s + max(0.0, self.handover_s - self.step_s)

    @property
    def handover_s(self) -> float:
        """From the end of a step until its record is in the agent's memory."""
        return self.record_bytes / self.offload_bytes_per_s

    @property
    def refold_s(self) -> float:
        """One step is done again from its gradients, measured or not."""
        return self.state_bytes / FOLD_BYTES_PER_S if self.fold_s is None else self.fold_s

    @property
    def write_s(self) -> float:
        """A full is written."""
        return self.state_bytes / self.write_bytes_per_s + self.sync_s

    @property
    def read_s(self) -> float:
        """A full is loaded from the store."""
        return self.write_s if self.load_s is None else self.load_s

    @property
    def reload_s(self) -> float:
        """A full is loaded from the agent's memory: over the same link, at the same rate."""
        return self.state_bytes / self.offload_bytes_per_s

    def figures(self, more_bytes: int = 0) -> Figures:
        """Of the model of what hides.

        Args:
            more_bytes: leave over the link in the same window.
        """
        return Figures(
            state_bytes=self.state_bytes + more_bytes,
            forward_s=self.window_s,
            backward_s=0.0,
            update_s=self.update_s,
            offload_bytes_per_s=self.offload_bytes_per_s,
            snapshot_bytes_per_s=self.snapshot_bytes_per_s,
            write_bytes_per_s=self.write_bytes_per_s,
            on_device=self.on_device,
        )

    def costs(self) -> Costs:
        """Of the model of deltas. It has one time to load for all failures: here the mean of what
        memory takes after a process died and the store after a host did; and a record that was
        still on its way is as much work lost as it would be time to load."""
        full = verdict(self.figures(self.record_bytes))
        process_s, host_s = self.reload_s + self.handover_s, self.read_s
        return Costs(
            step_s=self.step_s,
            state_bytes=self.state_bytes,
            delta_bytes=self.record_bytes,
            write_bytes_per_s=self.write_bytes_per_s,
            replay_s=self.refold_s,
            mtbf_s=self.mtbf_s,
            load_s=(1 - self.host_share) * process_s + self.host_share * host_s,
            restart_s=self.restart_s,
            host_share=self.host_share,
            sync_s=self.sync_s,
            record_stall_s=self.record_s,
            full_stall_s=full.snapshot_s,
        )


def slowest(facts: Sequence[Facts]) -> Facts:
    """The facts to choose by for all ranks together: of each figure the worst that is known.

    Args:
        facts: of each rank, at least one.
    """
    least = {"mtbf_s", "host_memory_bytes"}
    worst: dict[str, object] = {"excluded": {}}
    for one in reversed(facts):  # where several say why, the first rank does
        worst["excluded"] = {**worst["excluded"], **one.excluded}  # type: ignore[dict-item]
    for name in Facts.__struct_fields__:
        if name in worst:
            continue
        known = [value for one in facts if (value := getattr(one, name)) is not None]
        is_best = name in least or name.endswith("_bytes_per_s")
        worst[name] = (min if is_best else max)(known) if known else None
    return Facts(**worst)  # type: ignore[arg-type]  # it checks them itself


def _require(sensible: bool, name: str, value: object) -> None:
    if not sensible:
        raise UsageError(f"{name}={value!r} makes no sense")
