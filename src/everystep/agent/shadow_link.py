"""The agent's end of a shadow: hands states and records on, and folds nothing.

Training never waits for it: what the shadow cannot take is given up, and a new state is asked for.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from everystep.agent import protocol as p
from everystep.agent import wire as w
from everystep.agent.image import Image
from everystep.agent.keeper import Base
from everystep.agent.link import Link, copied
from everystep.agent.pace import Pace
from everystep.agent.rings import Memory, Queued
from everystep.agent.slots import Slots
from everystep.store import addresses as at
from everystep.types import StepRef

_MOST_WAITING = 6
_MOST_WAITING_BYTES = 2 << 20
"""More records than both do not wait for the state that they lead on from: memory for the trainer's
next ones must be left."""

_LOOK_S = 0.2
_PATIENCE_S = 10.0
"""Where there is no shadow for so long, it is said."""


def connected(place: tuple[str, int], token: bytes) -> w.Wire:
    """A connection to a shadow.

    Raises:
        OSError, EOFError, StoreFailed: there is none, or it does not know the secret.
    """
    host, port = place
    certificate = None if w.is_loopback(host) else w.UNKNOWN
    address = at.Address(rank=0, host=host, port=port, certificate=certificate, holds=[])
    return w.connected(address, token)


def in_words(place: tuple[str, int]) -> str:
    """A shadow, for the user."""
    host, port = place
    return f"the shadow at {host}:{port}"


class Teller:
    """All methods but `close` are called with `guard` held.

    Args:
        begin: the session, with `Begin.shadow`.
        plan: that.
        rings: where records lie.
        guard: the agent's; notified whenever there may be something to do.
        tell: takes messages for the trainer.
        wake: lets the agent look for what has become possible.
    """

    def __init__(
        self,
        begin: p.Begin,
        plan: p.ShadowPlan,
        rings: Memory,
        guard: threading.Condition,
        tell: Callable[[Struct], None],
        wake: Callable[[], None],
    ) -> None:
        self._rings, self._guard, self._tell, self._wake = rings, guard, tell, wake
        place = plan.places[begin.rank % len(plan.places)]
        self._place = in_words(place)

        def connect() -> w.Wire:
            return connected(place, at.read_secret(Path(plan.token_file)))

        self._link = Link(self._place, begin, connect, Pace(None), guard, self._say, ends=False)
        self._waiting: collections.deque[Queued] = collections.deque()
        self._base: Base | None = None
        self._given = self._passed = -1
        """The steps of the state that was given last, and of the newest that has come."""
        self._told = -1
        self._asked = self._stop = False
        self._alone_s: float | None = time.monotonic()
        """Since when there is no shadow; None: there is one, or it was said."""
        self._thread = threading.Thread(target=self._work, name="everystep-tell", daemon=True)
        self._thread.start()

    def _say(self, level: int, text: str) -> None:
        self._tell(p.Notice(level, text))

    # ------------------------------------------------------------ called with `guard` held

    def take(self, message: p.Persist | p.Rebase) -> None:
        """Nothing is folded here, so that nothing is to be done."""

    def begin_from(self, index: int, image: Image, slots: Slots[Image]) -> None:
        """Hand a state on. It goes from here once it is on the trainer's store."""
        self._base, self._passed = Base(index, image, slots), image.ref.step
        link = self._link
        if not link.is_there:
            return
        describe, nbytes = image.described()
        try:
            payload = copied(image.slot[:nbytes])
        except MemoryError:
            link.give_up(f"there is no memory for {nbytes:,} bytes")
            return
        link.give_state(w.Base(describe=describe, seal=image.seal, nbytes=nbytes), payload)
        self._given, self._asked = image.ref.step, False
        waiting = list(self._waiting)
        self._waiting.clear()
        for queued in waiting:
            self._hand_on(queued)

    def add(self, queued: Queued) -> None:
        """Hand a record on, or keep it for the state that it leads on from."""
        is_ahead = queued.opened.base > self._passed and not queued.opened.stale
        if not (self._link.is_there and is_ahead):
            self._hand_on(queued)
            return
        self._waiting.append(queued)
        nbytes = sum(one.record.nbytes for one in self._waiting)
        if len(self._waiting) > _MOST_WAITING and nbytes > _MOST_WAITING_BYTES:
            self._drop_waiting()
            self._link.give_up("the state that its records lead on from has not come")

    def _hand_on(self, queued: Queued) -> None:
        link, record = self._link, queued.record
        if link.is_there and link.next_step == record.step:
            try:
                payload = copied(self._rings.view(record))
            except MemoryError:
                link.give_up(f"there is no memory for {record.nbytes:,} bytes")
            else:
                link.give_record(queued, payload)
        self._free(queued)

    def _free(self, queued: Queued) -> None:
        record = queued.record
        self._rings.free(record)
        self._tell(p.Folded(number=record.number, step=record.step, took_s=0.0, at_s=0.0))

    def _drop_waiting(self) -> None:
        while self._waiting:
            self._free(self._waiting.popleft())

    def drain(self, *, on: bool, is_alone: bool) -> None:
        """Whatever there is, is on its way."""

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def idle(self) -> bool:
        """Whether the shadow has all that it can have."""
        return not self._link.is_there or self._link.is_settled

    def unsaved(self) -> list[StepRef]:
        """Nothing is kept here."""
        return []

    # ------------------------------------------------------------ the thread

    def _work(self) -> None:
        with self._guard:
            while not self._stop:
                self._act()
                self._guard.wait(_LOOK_S)

    def _act(self) -> None:
        link, base = self._link, self._base
        if base is not None and base.is_written:
            self._base = None
            base.slots.give_up(base.slot)
            self._wake()
        if not link.is_there:
            self._drop_waiting()
            self._given, self._asked = -1, False
            self._look_how_long()
            return
        self._alone_s = None
        if link.next_step is None and not self._asked:
            self._ask()
        if link.kept is not None and link.kept != self._told:
            self._told = link.kept
            self._tell(p.InShadow(step=link.kept, led=link.kept > self._given))
            self._wake()

    def _ask(self) -> None:
        refusal, self._link.refusal = self._link.refusal, None
        self._asked = True
        if refusal is None:
            self._tell(p.StateWanted(reason=f"{self._place} has no state yet"))
        else:
            self._tell(p.StateWanted(reason=refusal.reason, lasting=refusal.lasting))

    def _look_how_long(self) -> None:
        if self._alone_s is not None and time.monotonic() > self._alone_s + _PATIENCE_S:
            self._alone_s = None
            self._say(logging.ERROR, f"{self._place} is not there: steps are held nowhere else")

    def close(self) -> None:
        """End the connection; the shadow keeps what it has. Call it without `guard`."""
        with self._guard:
            self._stop = True
            self._guard.notify_all()
        self._thread.join()
        self._link.close()
