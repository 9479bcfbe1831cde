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


class Deltas(Struct, frozen=True, kw_only=True):
    """Every step as what changed: the gradients that the optimizer consumed, written down exactly,
    appended to a log, and folded onto a full checkpoint at restore (LowDiff, SC 2025).

    Pays where gradients are sparse, as after `everystep.compress`: a step takes about five bytes
    for each kept element. A full checkpoint is staged now and then, as with `Full`. What cannot be
    done again from gradients (closures, parameters changed by hand, optimizers that draw random
    numbers) is noticed, said, and stored in full instead.

    Raises:
        UsageError: a value that makes no sense.
    """

    full_every: int | Literal["auto"] = "auto"
    """A full checkpoint at every so many steps. `auto`: as the cost model says (docs/cost-model.md)
    from what this run measures."""
    batch: int | Literal["auto"] = "auto"
    """Steps become durable by so many at once; the loss of the host costs at most so many. Those
    that wait survive the loss of the training process. `auto`: as the cost model says."""
    mtbf_s: float | None = None
    """The mean time between failures that `auto` reckons with. None: from the run's restarts."""
    policy: Literal["block", "skip"] = "block"
    """Where the store is slower than steps come: `block` lets training wait; `skip` gives the delta
    up, and the step is stored in full."""
    buffer_bytes: int | None = 1 << 30
    """The most host memory for deltas that wait for the store."""
    slices: int | None = None
    """Each delta holds the hashes of one slice of the state after the step, the next one each time;
    so many slices make up all of it. What no optimizer did to a slice since its last turn is found
    only at its next. 1: all of the state is hashed at every step. None: 1 where the parameters take
    at most 2 MiB (with the most slots of Adam, 8 MiB of state), else 16."""
    check: bool = True
    """Replay each stretch between two full checkpoints in a process of low priority beside
    training, to know now that it can be replayed."""
    staging_bytes: int | None = None
    """As in `Full`."""
    snapshot_bytes: int | None = None
    """As in `Full`."""
    linger_s: float = 120.0
    """As in `Full`."""

    def __post_init__(self) -> None:
        for name in ("full_every", "batch"):
            value = getattr(self, name)
            if value != "auto" and (type(value) is not int or value < 1):
                raise UsageError(f"Deltas({name}={value!r}): neither 'auto' nor a number of steps")
        if self.mtbf_s is not None and not self.mtbf_s > 0:
            raise UsageError(f"Deltas(mtbf_s={self.mtbf_s!r}): not a number of seconds")
        if self.policy not in ("block", "skip"):
            raise UsageError(f"Deltas(policy={self.policy!r}): neither 'block' nor 'skip'")
        slices = self.slices
        if slices is not None and (type(slices) is not int or not 1 <= slices <= 1024):
            raise UsageError(f"Deltas(slices={self.slices!r}): not a number from 1 to 1,024")
        value = self.buffer_bytes
        if value is not None and (type(value) is not int or value < 1):
            raise UsageError(f"Deltas(buffer_bytes={value!r}): not a number of bytes")
        self.full()  # checks the rest

    def full(self) -> Full:
        """How the full checkpoints among them are taken."""
        return Full(
            every=1 if self.full_every == "auto" else self.full_every,
            policy="skip",
            staging_bytes=self.staging_bytes,
            snapshot_bytes=self.snapshot_bytes,
            linger_s=self.linger_s,
        )
