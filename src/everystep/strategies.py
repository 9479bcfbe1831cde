"""How checkpoints are taken: frozen records of options, each documented where it stands."""

from __future__ import annotations

import ipaddress
from typing import Literal

from msgspec import Struct

from everystep.errors import UsageError

_NEVER = 10**12
"""Steps; more than a run can have."""


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
    numbers) is noticed, said, and stored in full instead, as by `Full()`: what the store cannot
    take in time is then left out, whatever `policy` says, and named.

    Raises:
        UsageError: a value that makes no sense.
    """

    full_every: int | Literal["auto"] = "auto"
    """A full checkpoint at every so many steps. `auto`: as the cost model says (docs/cost-model.md)
    from what this run measures."""
    batch: int | Literal["auto"] = "auto"
    """Steps become durable by so many at once; the loss of the host costs at most so many. Those
    that wait survive the loss of the training process. `auto`: as the cost model says."""
    compact: bool | Literal["auto"] = False
    """Let the agent make the full checkpoints after the first, from the log: it holds a second copy
    of the state, does each step that is durable again there, proves it, and writes the copy at
    every `full_every` steps. Training takes none. Needs an optimizer that gives the same bits on
    the host, so parameters in host memory. True: where that is so; else this is said, and training
    takes them. `auto`: where, besides, the state takes 64 MiB or more (less is copied in no time),
    and host memory has room for the copy. False: training takes them."""
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
    training, to know now that it can be replayed. Where the agent makes the full checkpoints, it
    has done each step again anyway."""
    staging_bytes: int | None = None
    """As in `Full`."""
    snapshot_bytes: int | None = None
    """As in `Full`."""
    linger_s: float = 120.0
    """As in `Full`."""

    def __post_init__(self) -> None:
        _check_count("Deltas", "full_every", self.full_every)
        _check_count("Deltas", "batch", self.batch)
        if self.compact != "auto" and not isinstance(self.compact, bool):
            raise UsageError(f"Deltas(compact={self.compact!r}): neither 'auto', True nor False")
        _check_rest("Deltas", self.mtbf_s, self.policy, self.slices, self.buffer_bytes)
        self.full()  # checks the rest

    def full(self, *, compacts: bool = False) -> Full:
        """How the full checkpoints among them are taken in training.

        Args:
            compacts: the agent makes those after the first.
        """
        every = 1 if self.full_every == "auto" else self.full_every
        return Full(
            every=_NEVER if compacts else every,
            policy="skip",
            staging_bytes=self.staging_bytes,
            snapshot_bytes=self.snapshot_bytes,
            linger_s=self.linger_s,
        )


class Peers(Struct, frozen=True, kw_only=True):
    """Copies of each rank's replica in the memory of agents on other hosts (Gemini, SOSP 2023): a
    host that is lost costs no step, as long as one that has the copy is left.

    Agents send each other a state once, and then the gradients of each step, beside training, over
    TCP with TLS 1.3; `pip install everystep[peers]` on every host. No replica folds a step before
    all copies have it.

    Raises:
        UsageError: a value that makes no sense.
    """

    copies: int = 2
    """So many hosts have the state of each rank, its own included: any `copies - 1` of them may die
    at once. Each copy takes as much memory there as the state; where there are fewer hosts, there
    are as many copies."""
    bytes_per_s: float | None = None
    """The most that each agent sends. Where that is less than training makes, copies are given up
    and made anew. None: as much as the network takes."""
    address: str | None = None
    """The IP address of this host on which its agents listen. None: the one from which
    `MASTER_ADDR` is reached."""

    def __post_init__(self) -> None:
        if type(self.copies) is not int or self.copies < 2:
            raise UsageError(f"Peers(copies={self.copies!r}): not a number of hosts, two at least")
        if self.bytes_per_s is not None and not self.bytes_per_s > 0:
            raise UsageError(f"Peers(bytes_per_s={self.bytes_per_s!r}): not a rate")
        try:
            ipaddress.ip_address(self.address or "127.0.0.1")
        except ValueError as error:
            raise UsageError(f"Peers(address={self.address!r}): not an IP address") from error


class Replica(Struct, frozen=True, kw_only=True):
    """Every step in memory, as a second copy of the state: the agent does each optimizer step again
    from the gradients that training used, and compares (LowDiff+, SC 2025).

    For gradients that are not compressed. Training hands over its gradients and never writes a full
    checkpoint but the first; a restart finds the last completed step in the agent's memory. The
    copy is written to the store now and then: the loss of the host costs the steps since. What
    cannot be done again from gradients is noticed, said, and stored in full instead.

    Raises:
        UsageError: a value that makes no sense.
    """

    persist_every: int | Literal["auto"] = "auto"
    """Write the copy after every so many steps. `auto`: as the cost model says
    (docs/cost-model.md) from what this run measures."""
    log: bool = False
    """Append the gradients to the log as well, so that every step can be had, not only those that
    are written: as many bytes as the gradients have."""
    mtbf_s: float | None = None
    """As in `Deltas`."""
    policy: Literal["block", "skip"] = "block"
    """Where the agent folds slower than steps come: `block` lets training wait; `skip` gives the
    step up, and takes the next one whole."""
    buffer_bytes: int | None = None
    """The most host memory for gradients that wait. None: for eight steps."""
    layerwise: bool = False
    """Copy gradients that do not stay as they are (`zero_grad(set_to_none=False)`, DDP with
    `gradient_as_bucket_view=True`) while backward computes the others, so that the optimizer's step
    waits for the last of them only. For training whose host has processors to spare, and that does
    not clip or unscale: gradients that change after backward are taken again, and this ends where
    all of them do. DDP is given a communication hook that computes what it computes without one."""
    peers: Peers | None = None
    """Copies on other hosts. None: there are none, and no port is opened."""
    slices: int | None = None
    """As in `Deltas`: so many steps prove all of the copy."""
    snapshot_bytes: int | None = None
    """As in `Full`."""
    linger_s: float = 120.0
    """As in `Full`."""

    def __post_init__(self) -> None:
        _check_count("Replica", "persist_every", self.persist_every)
        if not isinstance(self.layerwise, bool):
            raise UsageError(f"Replica(layerwise={self.layerwise!r}): neither True nor False")
        _check_rest("Replica", self.mtbf_s, self.policy, self.slices, self.buffer_bytes)
        self.full()  # checks the rest

    def full(self) -> Full:
        """How the full checkpoints among them are taken."""
        return Full(
            every=_NEVER,
            policy="block",
            snapshot_bytes=self.snapshot_bytes,
            linger_s=self.linger_s,
        )


class Shadow(Struct, frozen=True, kw_only=True):
    """Every step in the memory of another host, by a process that reads the gradients off the
    network: training copies nothing (FlowCheck).

    `everystep shadow` runs there. This rank's agent sends it a state once, and then of each step
    what the network does not show: hyperparameters, buffers, random numbers, a fingerprint, and a
    few elements of each gradient, by which the shadow knows that those which it has seen are the
    ones that were used. It does each step again, compares, and writes the state now and then. A
    restart with this strategy finds the last completed step there. What it cannot have is asked
    for: the state is sent anew. Where gradients are not what the all-reduce gave times one number,
    that is said, and steps are stored in full instead.

    Raises:
        UsageError: a value that makes no sense.
    """

    address: str
    """`host:port` on which the shadow listens; the host is an IP address (`[…]:port` for IPv6).
    Several with commas in between: shadows that split the ranks among them. All are started on one
    directory, which their hosts share, and each must be reached from the others, too."""
    token_file: str
    """A file with the secret by which they know each other, the same as the shadow's: 64
    hexadecimal digits, readable by nobody else."""
    tap: Literal["wire", "software"] = "wire"
    """`wire`: the shadow sees a mirror of the port of one training host. `software`: it sees
    nothing, and each rank's agent sends it its share of the reduced gradients."""
    buffer_bytes: int | None = None
    """The most host memory for records that wait. None: for eight steps."""
    slices: int | None = None
    """As in `Deltas`: so many steps prove all of the shadow's state."""
    snapshot_bytes: int | None = None
    """As in `Full`."""
    linger_s: float = 120.0
    """As in `Full`."""

    def __post_init__(self) -> None:
        self.places()  # checks them
        if self.tap not in ("wire", "software"):
            raise UsageError(f"Shadow(tap={self.tap!r}): neither 'wire' nor 'software'")
        _check_rest("Shadow", None, self.policy, self.slices, self.buffer_bytes)
        self.full()  # checks the rest

    @property
    def policy(self) -> Literal["block", "skip"]:
        """Training may wait for this host's own agent, and never for the shadow."""
        return "block"

    def places(self) -> list[tuple[str, int]]:
        """The IP address and the port of each shadow.

        Raises:
            UsageError: one is no such address, or the same as another.
        """
        found = [parse_place("Shadow(address=…)", one) for one in self.address.split(",")]
        if len({*found}) < len(found):
            raise UsageError(f"Shadow(address={self.address!r}): the same shadow twice")
        return found

    def full(self) -> Full:
        """How a state is taken that the shadow asks for."""
        return Full(
            every=_NEVER,
            policy="block",
            snapshot_bytes=self.snapshot_bytes,
            linger_s=self.linger_s,
        )


def parse_place(what: str, address: str) -> tuple[str, int]:
    """An IP address and a port.

    Args:
        what: that has the value, in words.
        address: `host:port`.

    Raises:
        UsageError: it is no such address.
    """
    host, _, port = address.rpartition(":")
    try:
        found = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
        number = int(port)
    except ValueError as error:
        raise UsageError(f"{what}: {address!r} is not host:port with an IP address") from error
    if not 0 < number < 1 << 16:
        raise UsageError(f"{what}: {address!r} has no port from 1 to 65,535")
    return str(found), number


def _check_count(strategy: str, name: str, value: object) -> None:
    if value != "auto" and (type(value) is not int or value < 1):
        raise UsageError(f"{strategy}({name}={value!r}): neither 'auto' nor a number of steps")


def _check_rest(
    strategy: str,
    mtbf_s: float | None,
    policy: str,
    slices: int | None,
    buffer_bytes: int | None,
) -> None:
    if mtbf_s is not None and not mtbf_s > 0:
        raise UsageError(f"{strategy}(mtbf_s={mtbf_s!r}): not a number of seconds")
    if policy not in ("block", "skip"):
        raise UsageError(f"{strategy}(policy={policy!r}): neither 'block' nor 'skip'")
    if slices is not None and (type(slices) is not int or not 1 <= slices <= 1024):
        raise UsageError(f"{strategy}(slices={slices!r}): not a number from 1 to 1,024")
    if buffer_bytes is not None and (type(buffer_bytes) is not int or buffer_bytes < 1):
        raise UsageError(f"{strategy}(buffer_bytes={buffer_bytes!r}): not a number of bytes")
