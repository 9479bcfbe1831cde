"""How far the copies of all ranks go: of those in this shadow, and in the others of its run.

A copy is folded in place, and there is no way back. So where several shadows split the ranks of a
run, each tells the first one how far its copies go, hears the least of all, and folds none beyond
that. A shadow that is not heard for a while holds back nobody: what it had is lost, or comes again.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from everystep.agent import protocol as p
from everystep.agent import wire as w
from everystep.agent.holder import is_lost
from everystep.agent.shadow_copy import ShadowCopy
from everystep.agent.shadow_link import connected, in_words
from everystep.errors import EverystepError, Missing, StoreError, StoreFailed
from everystep.store.backend import NewFile
from everystep.store.format import LAST_STEP
from everystep.store.local import LocalBackend
from everystep.store.newest import FOLDER, is_mark, new_mark

_SOON_STEPS = 4
"""So many steps later no copy has come yet."""

_ASK_S, _LOOK_S = 0.005, 0.05
"""Between two questions to the first shadow, at least, and at most where nothing changes here."""

_RETRY_S = 0.25

_HOLDS_S = 5.0
"""What a shadow of which nothing is heard any more has said holds for so long."""


class Together:
    """All methods may be called by any thread.

    Args:
        path: of the shadow's run.
        token: what shadows must know.
        copies: those that are here.
        say: takes sentences for the user, and how urgent they are.
    """

    def __init__(
        self,
        path: Path,
        token: bytes,
        copies: Callable[[], Sequence[ShadowCopy]],
        say: Callable[[int, str], None],
    ) -> None:
        self._path, self._token, self._copies, self._say = path, token, copies, say
        self._session, self._world_size, self._number = 0, 0, 0
        self._places: list[tuple[str, int]] = []
        self._heard: dict[int, tuple[w.Standing | w.Agreed, float]] = {}
        """By number what another has said, and when: to the first one all, to others that."""
        self._begun = 0
        self._settled: dict[int, int] | None = None
        """Of which states `_write_at` was chosen: how many had come to each."""
        self._write_at = 0
        self._mark = self._found = ""
        """What the first shadow has made in its directory; what of that is in this one."""
        self._alone_s: float | None = 0.0
        """Since when others are not there; None: it was said, and nothing is written."""
        self._problem: str | None = None
        """Why no copy can be kept."""
        self._said = ""
        self._own = threading.RLock()
        self._news, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="everystep-shadows", daemon=True)

    # ------------------------------------------------------------ of the copies here

    def step(self, newest: int) -> int:
        """How far all copies go; see `Beside.limit`."""
        kept = [copy.kept for copy in self._copies()]
        others = [word.least for word in self._words()]
        return min([step for step in kept if step is not None] + others, default=int(LAST_STEP))

    @property
    def is_over(self) -> bool:
        """Whether training has ended for all other shadows."""
        return all(word.over for word in self._words())

    def join(self, begin: p.Begin) -> None:
        """A rank is about to have a copy here.

        Raises:
            StoreError: the directory cannot be written, or is not that of the other shadows.
            StoreFailed: the session makes no sense.
        """
        places = [] if begin.shadow is None else begin.shadow.places
        if not all(map(_is_place, places)):
            raise StoreFailed("a session that makes no sense", path=ascii(places)[:100])
        number = begin.rank % max(1, len(places))
        with self._own:
            if begin.session != self._session:
                self._session, self._world_size = begin.session, begin.world_size
                self._places, self._number = places, number
                self._heard.clear()
                self._problem, self._alone_s = None, time.monotonic()
            elif (places, number) != (self._places, self._number):
                raise StoreFailed("a rank tells of other shadows than another", rank=begin.rank)
            if len(places) > 1:
                self._begin(is_first=number == 0)
            if self._problem is not None:
                raise StoreFailed(self._problem)

    def _begin(self, *, is_first: bool) -> None:
        if is_first and not self._mark:
            backend, mark = LocalBackend(self._path), new_mark()
            for entry in list(backend.list(FOLDER)):
                if is_mark(entry.name):
                    backend.delete(entry.name)
            backend.put([NewFile(mark, 0, [])])
            self._mark = mark
        if not self._thread.is_alive():
            self._thread.start()

    def further(self, *, begun: bool) -> None:
        """A copy here goes further, or has begun with a state."""
        if begun:
            with self._own:
                self._begun += 1
                self._settle()
                self._pause()
        self._news.set()

    def _standing(self) -> w.Standing:
        copies = self._copies()
        kept = [copy.kept for copy in copies if copy.kept is not None]
        return w.Standing(
            session=self._session,
            number=self._number,
            mark=self._found,
            begun=self._begun,
            copies=len(kept),
            least=min(kept, default=int(LAST_STEP)),
            most=max(kept, default=0),
            over=all(map(is_lost, copies)),
        )

    # ------------------------------------------------------------ of all shadows

    def _words(self) -> list[w.Standing | w.Agreed]:
        """What holds of what others have said."""
        since_s = time.monotonic() - _HOLDS_S
        return [word for word, at_s in list(self._heard.values()) if at_s > since_s]

    def _is_complete(self) -> bool:
        """Whether all shadows are there."""
        words = self._words()
        if self._number:
            return any(isinstance(word, w.Agreed) and word.complete for word in words)
        return len(words) >= len(self._places) - 1

    def answer(self, told: w.Standing) -> w.Agreed:
        """What the first shadow says to another."""
        with self._own:
            others = len(self._places) if self._number == 0 else 0
            if told.session != self._session or not 0 < told.number < others:
                return w.Agreed(
                    mark="", complete=False, write_at=0, least=int(LAST_STEP), over=True
                )
            before = self._heard.get(told.number)
            if told.mark == self._mark:
                self._heard[told.number] = told, time.monotonic()
                self._settle()
                self._look()
            agreed = w.Agreed(
                mark=self._mark,
                complete=self._is_complete(),
                write_at=self._write_at,
                least=self.step(0),
                over=self.is_over and self._standing().over,
            )
        if before is None or before[0].least != told.least:
            self._rouse()
        return agreed

    def _settle(self) -> None:
        """Have all ranks' states written at one step: they may have begun with different ones, of
        which none is a step of the run. The first shadow says at which."""
        if self._number:
            return
        others = [word for word in self._words() if isinstance(word, w.Standing)]
        all_told = [self._standing(), *others]
        begun = {word.number: word.begun for word in all_told}
        if sum(word.copies for word in all_told) < max(2, self._world_size):
            self._settled = None
        elif begun != self._settled:
            self._settled = begun
            self._write(max(word.most for word in all_told) + _SOON_STEPS)

    def _write(self, step: int) -> None:
        for copy in self._copies():
            copy.persist_at(step)
        self._write_at = step

    def _rouse(self) -> None:
        for copy in self._copies():
            copy.rouse()

    # ------------------------------------------------------------ the thread

    def _work(self) -> None:
        while not self._stop.is_set():
            try:
                if self._number:
                    self._ask(self._places[0], self._session)
            except w.Gone as error:
                self._complain(error)
            self._look()
            self._stop.wait(_RETRY_S)

    def _ask(self, first: tuple[str, int], session: int) -> None:
        """Tell the first shadow of each change here, and hear from it."""
        with contextlib.closing(connected(first, self._token)) as wire:
            while session == self._session and not self._stop.is_set():
                wire.send(self._standing())
                agreed = wire.receive()
                if not isinstance(agreed, w.Agreed):
                    raise StoreFailed("a message came out of turn", found=type(agreed).__name__)
                self._hear(agreed, session)
                self._look()
                self._stop.wait(_ASK_S)
                self._news.wait(_LOOK_S)
                self._news.clear()

    def _hear(self, agreed: w.Agreed, session: int) -> None:
        if agreed.mark != self._found:
            self._check(agreed.mark)
        with self._own:
            if session != self._session:
                return
            if agreed.write_at != self._write_at:
                self._write(agreed.write_at)  # before any of them may go so far
            before = self._heard.get(0)
            self._heard[0] = agreed, time.monotonic()
        if before is None or before[0].least != agreed.least:
            self._rouse()

    def _check(self, mark: str) -> None:
        """See whether the first shadow has this directory, too.

        Raises:
            StoreFailed: it has another.
        """
        try:
            if mark and not is_mark(mark):
                raise StoreFailed("a mark that is none", path=ascii(mark)[:100])
            if mark:
                LocalBackend(self._path).size(mark)
        except Missing as error:
            self._problem = (
                f"{self._path} is not the directory in which {in_words(self._places[0])} keeps"
                " this run: start all its shadows on one that their hosts share"
            )
            for copy in self._copies():
                copy.problem = self._problem
            raise StoreFailed(self._problem) from error
        self._found, self._problem = mark, None

    def _complain(self, error: Exception) -> None:
        """Say why the first shadow is not spoken to; that it is not there is said otherwise."""
        if isinstance(error, EverystepError) and error.headline() != self._said:
            self._said = error.headline()
            self._say(logging.ERROR, self._said)

    def _look(self) -> None:
        """Where a shadow is not there, no step is complete: nothing is written that would wait for
        it on the store, however long."""
        with self._own:
            is_complete, since_s = self._is_complete(), self._alone_s
            if is_complete:
                self._alone_s = time.monotonic()
                if since_s is None:
                    self._pause()
                    self._say(logging.INFO, "all shadows of the run are there")
            elif since_s is not None and self._copies():
                if time.monotonic() < since_s + _HOLDS_S:
                    return
                self._alone_s = None
                self._pause()
                self._rouse()
                told = "not all shadows of the run are there: no step is written until they are"
                self._say(logging.ERROR, told)

    def _pause(self) -> None:
        for copy in self._copies():
            copy.pause(on=self._alone_s is None)

    def close(self) -> None:
        """End the thread, and take the mark back."""
        self._stop.set()
        self._news.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._mark:
            with contextlib.suppress(StoreError):
                LocalBackend(self._path).delete(self._mark)


def _is_place(place: tuple[str, int]) -> bool:
    try:
        ipaddress.ip_address(place[0])
    except ValueError:
        return False
    return 0 < place[1] < 1 << 16
