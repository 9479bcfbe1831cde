"""What becomes of the trainer's records in the agent: appended to the log, folded onto a copy of
the state, or both, in this order."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from everystep.agent import protocol as p
from everystep.agent.compaction import Compaction
from everystep.agent.image import Image
from everystep.agent.logger import Logger
from everystep.agent.peers import Peers
from everystep.agent.replica import Replica
from everystep.agent.rings import Queued, Rings
from everystep.agent.shadow_link import Teller
from everystep.agent.slots import Slots
from everystep.errors import EverystepError
from everystep.store.backend import Backend
from everystep.store.log import Appended
from everystep.types import StepRef

MESSAGES = (p.OpenLog, p.OpenRing, p.Record, p.Batch, p.Flush, p.Persist, p.Rebase)
"""Those of the trainer that are for `Records`."""

Worker = Logger | Replica | Compaction | Peers | Teller
"""Has threads, and may have something to do."""


class Records:
    """The records of one session. All methods but `close` are called with `guard` held.

    Args:
        guard: notified whenever there may be something to do.
        tell: takes messages for the trainer.
        wake: lets the agent look for what has become possible.
    """

    def __init__(
        self,
        backend: Backend,
        begin: p.Begin,
        guard: threading.Condition,
        tell: Callable[[Struct], None],
        wake: Callable[[], None],
    ) -> None:
        self._facts = (backend, begin, guard, tell)
        self._guard, self._logs = guard, begin.logs
        self._rings = Rings()
        self._logger: Logger | None = None
        self._peers: Peers | None = None
        self.replica: Replica | None = None
        self.compaction: Compaction | None = None
        self.teller: Teller | None = None
        if begin.shadow is not None:
            self.teller = Teller(begin, begin.shadow, self._rings, guard, tell, wake)
        elif begin.compacts:
            self.compaction = Compaction(backend, begin, guard, tell, wake)
        elif begin.replica:
            self._peers = self._meet(Path(backend.abilities.location))
            beside = None if self._peers is None else self._peers.relay
            self.replica = Replica(
                backend, begin, self._rings, guard, tell, wake, beside, self._is_appending
            )

    def _meet(self, path: Path) -> Peers | None:
        """Be among the agents of other hosts, if that is wanted; without it all goes on."""
        _, begin, guard, tell = self._facts
        if begin.peers is None:
            return None
        try:
            return Peers(path, begin, begin.peers, guard, tell)
        except EverystepError as error:
            told = f"there are no copies on other hosts: {error.headline()}"
            tell(p.Notice(logging.ERROR, told))
            return None

    def _is_appending(self) -> bool:
        """Whether more records will come to be folded by themselves."""
        return self._logger is not None and not self._logger.idle

    @property
    def workers(self) -> list[Worker]:
        """All that have a thread, in the order in which they may end."""
        every = (self._logger, self.replica, self.compaction, self._peers, self.teller)
        return [one for one in every if one is not None]

    def take(self, message: Struct, fd: int | None) -> None:
        """Act on one of `MESSAGES`.

        Args:
            fd: came along; it is taken over.

        Raises:
            StoreFailed: memory cannot be mapped, or nothing was said of what a record is.
        """
        if isinstance(message, p.OpenRing):
            self._rings.open(message, fd)
            return
        if fd is not None:
            os.close(fd)
        if self._logs and self._logger is None:
            self._logger = Logger(*self._facts, self._rings, self._appended)
        if isinstance(message, p.OpenLog):
            self._rings.describe(message)
        if isinstance(message, p.Record):
            queued = self._rings.add(message)
            if self._logger is not None:
                self._logger.add(queued)
            else:
                self._appended(queued, None)
            return
        if isinstance(message, p.Persist | p.Rebase) and self.keeper is not None:
            self.keeper.take(message)
        if self._logger is not None and not isinstance(message, p.Rebase):
            self._logger.take(message)

    @property
    def keeper(self) -> Replica | Compaction | Teller | None:
        """Who has a copy of the state, or hands it on."""
        return self.replica or self.compaction or self.teller

    def _appended(self, queued: Queued, place: Appended | None) -> None:
        """A record is durable, or (no place) need not be."""
        folds = self.replica or self.teller
        if folds is not None:
            folds.add(queued)
            return
        if self.compaction is not None and place is not None:
            self.compaction.add(queued, place)
        self._rings.free(queued.record)

    def sealed(self, index: int, image: Image, slots: Slots[Image]) -> None:
        """The trainer has filled a slot."""
        if self.keeper is not None:
            self.keeper.begin_from(index, image, slots)

    def drain(self, *, on: bool, is_alone: bool) -> None:
        """Make all durable at once from now on, or (`on=False`) as it comes again.

        Args:
            is_alone: whether the trainer is gone.
        """
        if self._logger is not None:
            self._logger.drain(on=on)
        if self.keeper is not None:
            self.keeper.drain(on=on, is_alone=is_alone)
        if self._peers is not None:
            self._peers.drain(on=on)

    def unsaved(self) -> list[StepRef]:
        """The steps of which something is in memory only."""
        return [ref for one in self.workers for ref in one.unsaved()]

    def close(self) -> None:
        """End all threads once nothing is left that they can do. Call it without `guard`."""
        for one in self.workers:
            one.close()
        self._rings.close()
