"""The trainer's end: starts the agent, feeds it, notices its death, and starts another.

Whatever the agent has not made durable yet, this end can hand to the next one: it has the same
staging memory mapped, and keeps the seals.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from everystep.agent import protocol as p
from everystep.agent.arena import Arena
from everystep.agent.channel import Channel
from everystep.agent.handover import Kept, Lost, handed_over, seal_of
from everystep.agent.process import START_S, adopted, is_there, started
from everystep.agent.sink import Place, Room, Sealed
from everystep.agent.tail import Tail
from everystep.errors import RunBusy, StoreFailed
from everystep.store.measured import Measure
from everystep.types import Piece, StepRef, TensorSpec

_log = logging.getLogger("everystep")

PING_S = 0.25
SILENT_S = 1.0
"""After so long without an answer, say so."""

REPLACE_S = 10.0
"""After so long, end the agent and start another."""

GIVE_UP_S = 60.0
"""After so long without an agent, nobody waits for one any more."""

_RETRY_S = 1.0


class Agent:
    """A running agent, as the trainer sees it; a `Sink`.

    Args:
        path: of the run.
        run: its identity.
        rank: whose agent.
    Raises:
        RunBusy: another process owns this rank's agent.
        StoreFailed: no agent can be started.
    """

    def __init__(self, path: Path, run: str, rank: int) -> None:
        self._whose, self._rank = (path, run, rank), rank
        self._heard: Callable[[Struct], None] = lambda message: None
        self._changed = threading.Condition()
        self.log = Tail(
            self._changed, self._send, self._until_sent, lambda: self._is_alone or self._closing
        )
        self._begin: p.Begin | None = None
        self._began = True
        self._still: p.Still | None = None
        self._described: p.Describe | None = None
        self._places: p.Places | None = None
        self._arena: Arena | None = None
        self._inode = 0
        self._granted: int | None = None
        self._taken: int | None = None
        self._kept: dict[int, Kept] = {}
        self._refused: tuple[int, str] | None = None
        self._settled: list[StepRef] | None = None
        self._settling = self._parting = self._closing = False
        self._silence_s = 0.0
        self._alone_since_s: float | None = None
        self._numbers = 0
        self._trainer = os.getpid()
        self._process, self._channel = adopted(path, run, rank) or started(path, run, rank)
        self._thread = threading.Thread(target=self._listen, name="everystep-agent", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ starting

    @staticmethod
    def left_behind(path: Path, run: str, rank: int) -> Agent | None:
        """The agent that an earlier process of this rank has left; None: there is none.

        Raises:
            RunBusy: another process owns it.
        """
        return Agent(path, run, rank) if is_there(run, rank) else None

    @property
    def pid(self) -> int:
        """Of the agent's process."""
        return self._process.pid

    # ------------------------------------------------------------ the thread

    def _listen(self) -> None:
        looked_s = time.monotonic()
        while not self._closing:
            channel = self._channel
            try:
                ready = channel.wait(PING_S)
                channel.flush()
                for message, fd in channel.receive() if ready else ():
                    self._silence_s = 0.0
                    self._take(message, fd)
                if not ready:
                    channel.send(p.Ping(0))
                now_s = time.monotonic()
                # time in which this process itself stood still is not the agent's silence
                self._check_silence(0.0 if ready else min(now_s - looked_s, 2 * PING_S))
                looked_s = now_s
            except (EOFError, OSError, ValueError, StoreFailed):
                if self._parting:  # it ends as it was told to
                    self._closing = True
                else:
                    self._replace("has died", wait_s=1.0)

    def _check_silence(self, more_s: float) -> None:
        before_s, self._silence_s = self._silence_s, self._silence_s + more_s
        if self._silence_s > REPLACE_S:
            self._replace(f"has not answered for {self._silence_s:.0f} s", wait_s=0.0)
        elif before_s <= SILENT_S < self._silence_s:
            _log.warning("the agent (process %s) does not answer", self.pid)

    def _take(self, message: Any, fd: int | None) -> None:
        with self._changed:
            if isinstance(message, p.Places):
                self._map(message, fd)
            elif fd is not None:
                os.close(fd)
            if isinstance(message, p.Began):
                self._began = self._begin is not None and message.session == self._begin.session
            elif isinstance(message, p.Settled):
                self._settled = message.unsaved
            elif isinstance(message, p.OF_STEPS):
                if not self._began:
                    return  # it is of an earlier session
                self._take_of_step(message)
            self._changed.notify_all()
        if isinstance(message, p.TOLD):
            self._heard(message)

    def _take_of_step(self, message: Any) -> None:
        if isinstance(message, p.Grant):
            self._granted = message.slot
            self._kept.pop(message.slot, None)
        elif isinstance(message, p.Logged | p.NotLogged | p.Folded):
            self.log.heard(message)
        elif isinstance(message, p.Stored):
            for slot in [s for s, k in self._kept.items() if k.seal.step == message.step]:
                del self._kept[slot]
        elif isinstance(message, p.NotStored) and message.error is not None:
            self._refused = message.step, message.error[1]

    def _map(self, places: p.Places, fd: int | None) -> None:
        if places.arena is not None and fd is not None:
            inode = os.fstat(fd).st_ino
            if self._arena is not None and inode == self._inode:
                os.close(fd)
            else:
                self._drop_arena()
                try:
                    self._arena, self._inode = Arena(fd, *places.arena), inode
                except StoreFailed as error:
                    facts = {"problem": error.headline(), "hint": error.hint}
                    places = msgspec.structs.replace(places, **facts)
        self._places = places

    def _drop_arena(self) -> None:
        arena, self._arena = self._arena, None
        if arena is not None:
            arena.close()
        self._kept.clear()
        self._granted = self._taken = None

    def _replace(self, why: str, wait_s: float) -> None:
        """Have another agent in place of one that is of no use any more, and give it what that
        one held.

        Args:
            wait_s: how long to wait for its end before it is forced.
        """
        _log.error("the agent (process %s) %s: starting another", self.pid, why)
        with self._changed:
            self._alone_since_s = time.monotonic()
            self._granted = None  # what is sealed from here on is the next one's
        self._heard(Lost())
        self._channel.close()
        self._process.end(wait_s)
        while not self._parting:
            try:
                process, channel = adopted(*self._whose) or started(*self._whose)
                break
            except (StoreFailed, RunBusy) as error:
                _log.error("%s; trying again", error.headline())
                with self._changed:
                    self._changed.wait(_RETRY_S)
        else:
            return
        with self._changed:
            is_needed = not self._parting
            if is_needed:
                self._process, self._channel = process, channel
                self._silence_s = 0.0
                self._alone_since_s = None
                with contextlib.suppress(OSError):  # should it have died too, that is seen next
                    self._hand_over(channel)
                self._changed.notify_all()
        if not is_needed:
            channel.close()
            process.end(0.0)

    def _hand_over(self, channel: Channel) -> None:
        """Tell all that a new agent must know, in the order in which the first one was told."""
        if self._begin is None:
            return
        channel.send(msgspec.structs.replace(self._begin, again=True))
        if self._begin.replica and not self._begin.compacts:
            self._kept.clear()  # the slot may have been folded in: it is of no use any more
        kept = list(self._kept.values())
        taken = [*self._kept, *([] if self._taken is None else [self._taken])]
        for message, fd in handed_over(kept, self._still, self._described, self._arena, taken):
            channel.send(message, fd)
        for message, fd in self.log.handed_over():
            channel.send(message, fd)
        if self._settled is None and self._settling:
            channel.send(p.Settle())

    def _send(self, message: Struct, fd: int | None = None) -> None:
        with contextlib.suppress(OSError):  # the thread sees it, and hands everything over
            self._channel.send(message, fd)

    def _until_sent(self) -> None:
        """Return when everything has left this process, so that its end takes nothing along."""
        while self._channel.pending and not self._closing and not self._is_alone:
            try:
                self._channel.wait(PING_S, to_receive=False)
                self._channel.flush()
            except (OSError, ValueError):  # the thread will see it, too
                with self._changed:
                    self._changed.wait(0.01)

    @property
    def _is_alone(self) -> bool:
        """Whether there has been no agent for too long."""
        since_s = self._alone_since_s
        return since_s is not None and time.monotonic() - since_s > GIVE_UP_S

    # ------------------------------------------------------------ for the checkpointer

    def listen(self, heard: Callable[[Struct], None]) -> None:
        """Hand what the agent tells of steps, and for the user, to this from now on, in a thread
        of this class."""
        self._heard = heard

    def begin(self, begin: p.Begin) -> None:
        """Begin a session. What an earlier one has left in memory is given up."""
        with self._changed:
            self._begin, self._began = begin, False
            self._still, self._described, self._places = None, None, None
            self._kept.clear()
            self.log.begin(begin.buffer_bytes, mirrored=begin.replica and not begin.compacts)
            self._granted = self._taken = None
            self._send(begin)
        self._until_sent()

    def keep(self, still: p.Still) -> None:
        """Tell of tensors that later steps refer to."""
        with self._changed:
            self._still = still
            self._send(still)
        self._until_sent()

    def measured(self, measure: Measure) -> None:
        """Hand on what a step has cost. There is no hurry, and the training thread calls this."""
        with contextlib.suppress(OSError, StoreFailed):
            self._channel.send(p.Measured(measure), later=True)

    def settle(self) -> list[StepRef]:
        """Wait until all that is staged is durable; returns the steps that are in memory only,
        since the store refused them, or nobody could be had to write them."""
        with self._changed:
            self._settled, self._settling = None, True
            self._send(p.Settle())
            while self._settled is None and not self._closing and not self._is_alone:
                self._changed.wait(_RETRY_S)
            self._settling = False
            if self._settled is None and self._begin is not None:
                steps = {k.seal.step for k in self._kept.values()} | set(self.log.unsaved())
                return [StepRef(self._begin.timeline, step) for step in sorted(steps)]
            return self._settled or []

    def close(self) -> None:
        """Wait until everything is durable, or the store has refused it, and end the agent. In a
        child that this process has forked it does nothing."""
        if self._closing or os.getpid() != self._trainer:
            return
        for ref in self.settle():
            _log.error("step %s is lost: %s", ref, self._why_not(ref.step))
        with self._changed:
            self._parting = True
            self._send(p.Bye())
        self._until_sent()
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self._process.end(START_S)
        self._channel.close()
        self._drop_arena()
        self.log.close()

    def _why_not(self, step: int) -> str:
        """Why a step is in memory only."""
        refused, why = self._refused or (None, "")
        return why if refused == step else self.log.refusal or "not stored"

    # ------------------------------------------------------------ a Sink

    def describe(
        self, specs: Sequence[TensorSpec], pieces: Sequence[Piece], rest_bytes: int
    ) -> Place:
        """See `Sink.describe`."""
        self._numbers += 1
        message = p.Describe(
            layout=self._numbers, specs=list(specs), pieces=list(pieces), rest_bytes=rest_bytes
        )
        with self._changed:
            if self._taken is not None:
                self._send(p.Release(self._taken))
                self._taken = None
            self._described, self._places = message, None
            self._send(message)
        self._until_sent()
        with self._changed:
            while self._places is None or self._places.layout != message.layout:
                if self._closing or self._is_alone:
                    raise StoreFailed("there is no agent", rank=self._rank)
                self._changed.wait(_RETRY_S)
            places, arena = self._places, self._arena
        if places.problem is not None or arena is None:
            problem = places.problem or "the agent gave no memory"
            raise StoreFailed(problem, rank=self._rank, hint=places.hint)
        return Place(places.layout, places.offsets, places.rest_offset, arena.slot_bytes)

    def acquire(self, wait_s: float) -> Room | None:
        """See `Sink.acquire`."""
        deadline_s = time.monotonic() + wait_s
        with self._changed:
            while self._granted is None:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or self._closing or self._is_alone:
                    return None
                self._changed.wait(min(left_s, _RETRY_S))
            slot, self._granted = self._granted, None
            arena = self._arena
            if arena is None:
                return None
            self._taken = slot
        return Room(slot, arena.address + slot * arena.slot_bytes, arena.slot(slot))

    def release(self, slot: int) -> None:
        """See `Sink.release`."""
        with self._changed:
            if self._taken == slot:
                self._taken = None
                self._send(p.Release(slot))

    def seal(self, sealed: Sealed) -> None:
        """See `Sink.seal`."""
        message = seal_of(sealed)
        problem: StoreFailed | None = None
        with self._changed:
            if self._taken != sealed.slot:
                problem = StoreFailed("its staging memory was lost while it was filled")
            else:
                self._taken = None
                self._kept[sealed.slot] = Kept(message, self._described, self._still)
                try:
                    self._send(message)
                except StoreFailed as error:
                    problem = error
                    del self._kept[sealed.slot]
                    self._send(p.Release(sealed.slot))
        if problem is not None:
            told = (type(problem).__name__, problem.headline(), problem.hint)
            self._heard(p.NotStored(step=sealed.step, error=told))
        self._until_sent()
