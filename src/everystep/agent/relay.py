"""What an agent gives to those that hold copies of its rank's state, and how far all ranks' copies
go: no replica folds beyond that, since there is no way back.

All ranks' agents tell that of rank 0 to which step copies of their state go, and hear the least of
these steps. A rank of which there is no copy (yet) holds back nobody.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from everystep.agent import protocol as p
from everystep.agent import wire as w
from everystep.agent.image import Image
from everystep.agent.link import Link, copied
from everystep.agent.pace import Pace
from everystep.agent.rings import Queued
from everystep.store.format import LAST_STEP

_ASK_S = 0.005
_ASK_PER_RANK_S = 0.0002
"""Between two questions to the agent of rank 0, at least, and for each rank: it has 5,000 a second
to answer at most."""

_SELDOM = 8
"""So many times as long it is where there is no news."""

_STEPS_ALONE = 4
"""Where so many steps more are trained although the agent of rank 0 says nothing, no host is lost:
a step needs all ranks."""


class Beside(Protocol):
    """What a replica asks and tells where there are copies on other hosts. Called with its guard
    held, but for `give` and `forward`."""

    is_copy: bool
    """The replica is one of another rank's state."""

    def limit(self, newest: int) -> int:
        """The step beyond which must not be folded while training goes on.

        Args:
            newest: the newest step that is known of.
        """
        ...

    def due(self, step: int, waiting: Sequence[Queued], *, is_still: bool) -> Queued | bool:
        """What is to be handed out now: a record that waits, or (True) the state; or nothing.

        Args:
            step: of the state.
            is_still: the state may be taken.
        """
        ...

    def give(self, image: Image) -> None:
        """Hand out the state, which does not change meanwhile."""
        ...

    def forward(self, queued: Queued, view: memoryview) -> None:
        """Hand out a record."""
        ...

    def is_settled(self) -> bool:
        """Whether all that was handed out has arrived, or never will."""
        ...


class Limit(Protocol):
    """How far all ranks' copies go."""

    def step(self, newest: int) -> int:
        """The step; see `Beside.limit`."""
        ...


class Bound:
    """How far all ranks' copies go, as the agent of rank 0 tells. Its thread tells, and asks.

    Args:
        rank: whose agent this is.
        world_size: among how many.
        connect: makes a connection to the agent of rank 0; raises one of `wire.Gone` while there
            is none to be had.
        own: the step to which copies of this rank's state go.
        changed: called when there is news.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        connect: Callable[[], w.Wire],
        own: Callable[[], int],
        changed: Callable[[], None],
    ) -> None:
        self._rank, self._connect, self._own, self._changed = rank, connect, own, changed
        self._pause_s = max(_ASK_S, _ASK_PER_RANK_S * world_size)
        self._step = int(LAST_STEP)
        self._is_alone, self._alone_from = True, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="everystep-bound", daemon=True)
        self._thread.start()

    def step(self, newest: int) -> int:
        """The step; see `Beside.limit`."""
        if not self._is_alone:
            self._alone_from = 0
            return self._step
        self._alone_from = self._alone_from or newest
        return self._step if newest <= self._alone_from + _STEPS_ALONE else int(LAST_STEP)

    def _work(self) -> None:
        while not self._stop.is_set():
            wire: w.Wire | None = None
            try:
                wire = self._connect()
                self._talk(wire)
            except w.Gone:
                pass  # it is tried again, and what was said last holds
            finally:
                if wire is not None:
                    wire.close()
            self._is_alone = True
            self._stop.wait(w.ALIVE_S / 4)

    def _talk(self, wire: w.Wire) -> None:
        pause_s, told = self._pause_s, -1
        while not self._stop.wait(pause_s):
            own = self._own()
            wire.send(w.Share(self._rank, own))
            answer = wire.receive()
            pause_s = min(2 * pause_s, _SELDOM * self._pause_s)
            if own != told:
                pause_s, told = self._pause_s, own
            if isinstance(answer, w.Shared) and (self._is_alone or answer.step != self._step):
                self._step, self._is_alone, pause_s = answer.step, False, self._pause_s
                self._changed()

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()


class Relay:
    """A rank's links to those that hold copies of its state.

    Args:
        begin: the owner's session.
        holders: their ranks.
        connect: makes a connection to the agent of a rank; raises one of `wire.Gone`.
        pace: of all that is sent.
        guard: the replica's.
        tell: takes sentences for the user, and how urgent they are.
        changed: called when all ranks' copies have come further.
    """

    is_copy = False

    def __init__(
        self,
        begin: p.Begin,
        holders: Sequence[int],
        connect: Callable[[int], w.Wire],
        pace: Pace,
        guard: threading.Condition,
        tell: Callable[[int, str], None],
        changed: Callable[[], None],
    ) -> None:
        self._guard, self._changed = guard, changed
        self._links = [
            Link(f"rank {rank}", begin, functools.partial(connect, rank), pace, guard, tell)
            for rank in holders
        ]
        self.bound = Bound(
            begin.rank, begin.world_size, functools.partial(connect, 0), self._kept, self._notify
        )

    def _notify(self) -> None:
        with self._guard:
            self._guard.notify_all()
        self._changed()

    def _kept(self) -> int:
        """The step to which all copies go that there are."""
        with self._guard:
            return min((n.kept for n in self._links if n.kept is not None), default=int(LAST_STEP))

    def limit(self, newest: int) -> int:
        """See `Beside.limit`."""
        return self.bound.step(newest)

    def due(self, step: int, waiting: Sequence[Queued], *, is_still: bool) -> Queued | bool:
        """See `Beside.due`."""
        there = [link for link in self._links if link.is_there]
        if is_still and any(_lacks_state(link, step) for link in there):
            return True
        wanted = {link.next_step for link in there}
        return next((queued for queued in waiting if queued.record.step in wanted), False)

    def give(self, image: Image) -> None:
        """See `Beside.give`. The copy is one for all of them, and goes when they have it."""
        describe, nbytes = image.described()
        try:
            payload = copied(image.slot[:nbytes])
        except MemoryError:
            self._give_up(f"there is no memory for {nbytes:,} bytes")
            return
        base = w.Base(describe=describe, seal=image.seal, nbytes=nbytes)
        with self._guard:
            for link in self._links:
                if link.is_there and _lacks_state(link, image.ref.step):
                    link.give_state(base, payload)

    def forward(self, queued: Queued, view: memoryview) -> None:
        """See `Beside.forward`."""
        try:
            payload = copied(view)
        except MemoryError:
            self._give_up(f"there is no memory for {len(view):,} bytes")
            return
        with self._guard:
            for link in self._links:
                if link.is_there and link.next_step == queued.record.step:
                    link.give_record(queued, payload)

    def _give_up(self, why: str) -> None:
        with self._guard:
            for link in self._links:
                link.give_up(why)

    def is_settled(self) -> bool:
        """See `Beside.is_settled`."""
        return all(link.is_settled for link in self._links)

    def close(self) -> None:
        """Let the others forget the copies: all is durable. Call it without `guard`."""
        self.bound.close()
        for link in self._links:
            link.close()


class Copied:
    """Beside a replica of another rank's state: nobody has a copy of a copy.

    Args:
        bound: how far all ranks' copies go.
    """

    is_copy = True

    def __init__(self, bound: Limit) -> None:
        self._bound = bound

    def limit(self, newest: int) -> int:
        """See `Beside.limit`."""
        return self._bound.step(newest)

    def due(self, step: int, waiting: Sequence[Queued], *, is_still: bool) -> Queued | bool:
        """See `Beside.due`."""
        return False

    def give(self, image: Image) -> None:
        """See `Beside.give`."""

    def forward(self, queued: Queued, view: memoryview) -> None:
        """See `Beside.forward`."""

    def is_settled(self) -> bool:
        """See `Beside.is_settled`."""
        return True


def _lacks_state(link: Link, step: int) -> bool:
    return link.next_step is None or link.next_step <= step
