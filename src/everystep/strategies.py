"""How checkpoints are taken: frozen records of options, each documented where it stands."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from everystep.errors import UsageError


class Full(Struct, frozen=True, kw_only=True):
    """The full state, copied out while training computes, and written by an agent beside it
    (Checkflow, IEEE CAL 2025).

    `step()` returns at once. While the next forward and backward run, nothing writes parameters
    and optimizer slots, so they are copied to the agent's memory then; what is left when the
    optimizer is about to write is copied before it does. A step is *staged* when the agent holds
    all of it, and *durable* when it is on the store; `Checkpointer.stats` tells both.

    Raises:
        UsageError: a value that makes no sense.
    """

    every: int | Literal["auto"] = "auto"
    """Take a checkpoint at every so many steps. `auto`: at every step, or, where steps are too
    short to copy the state out in one, at every second, fourth, …; adapts."""
    policy: Literal["block", "skip"] = "skip"
    """Where the store is slower than steps come: `block` lets training wait, and every checkpoint
    becomes durable; `skip` stages every checkpoint, and as many become durable as the store can
    take."""
    staging_bytes: int | None = None
    """The most host memory that this rank's agent may use for staging. None: what three
    checkpoints take with `skip`, two with `block`. At least two must fit."""
    snapshot_bytes: int | None = None
    """The most device memory for copies of what is about to be overwritten. None: as needed; what
    the device has no room for is copied to the host while training waits."""
    linger_s: float = 120.0
    """How long the agent keeps the newest steps in memory after the training process has died, so
    that a restart finds them there."""
    blocking: bool = False
    """Write each step from the training process itself before `step()` returns. No agent, no
    staging memory, and all of the cost."""

    def __post_init__(self) -> None:
        if self.every != "auto" and (type(self.every) is not int or self.every < 1):
            raise UsageError(f"Full(every={self.every!r}): neither 'auto' nor a number of steps")
        if self.policy not in ("block", "skip"):
            raise UsageError(f"Full(policy={self.policy!r}): neither 'block' nor 'skip'")
        for name in ("staging_bytes", "snapshot_bytes"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 0):
                raise UsageError(f"Full({name}={value!r}): not a number of bytes")
        if not 0 <= self.linger_s <= 86_400:
            raise UsageError(f"Full(linger_s={self.linger_s!r}): not between 0 and 86,400 seconds")
