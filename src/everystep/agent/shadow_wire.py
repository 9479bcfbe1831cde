"""Gradients that a shadow reads off the network, put into the records that do not hold them."""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from everystep.agent import protocol as p
from everystep.agent.shadow_copy import NotSeen, Unexplained
from everystep.deltas.delta import Delta, Form, Layout
from everystep.deltas.packing import pack, unpack, unpack_layout
from everystep.deltas.samples import ON_WIRE, Reduced
from everystep.errors import Damaged, TapError
from everystep.recovery.explained import explained
from everystep.tap.buckets import Bucket, ByParameter
from everystep.tap.gloo import Gloo
from everystep.tap.gradients import Gradients, Lacking
from everystep.tap.live import Mirror
from everystep.tap.packets import Parser
from everystep.tap.reduced import Reader
from everystep.tap.tcp import Reassembler

_LOOK_S = 0.05

_MOST_FRUITLESS = 2
"""After so many steps in a row that were not seen whole, each after a new state, reading begins
anew: what was damaged may have led a stream astray for as long as it lasts."""

_MOST_KEPT = 16
"""Steps whose gradients wait for a rank that needs its part of them."""


class WireSource:
    """Captures in a thread of its own, from `begin` to `close`. See `GradientSource`.

    Args:
        mirror: where frames come from; it is closed in the end.
        say: takes sentences for the user, and how urgent they are.
        budget_bytes: of reduced buffers that wait for their records.
        wait_s: what has not been seen so long after its record has come was not mirrored.
    """

    def __init__(
        self,
        mirror: Mirror,
        say: Callable[[int, str], None],
        budget_bytes: int = 8 << 30,
        wait_s: float = 3.0,
    ) -> None:
        self._mirror, self._say, self._budget_bytes = mirror, say, budget_bytes
        self._wait_s = wait_s
        self._changed = threading.Condition()
        self._gradients: Gradients | None = None
        self._session: tuple[int, int] | None = None
        self._hosts: dict[str, int] | None = None
        self._fruitless = 0
        """So many steps in a row were not seen whole, each after a new state, though buckets are
        certain."""
        self._buckets: list[Bucket] = []
        self._newest = -1
        """The newest step that was told."""
        self._told: set[int] = set()
        """Steps that were told, and not taken."""
        self._found: collections.OrderedDict[int, ByParameter | Lacking] = collections.OrderedDict()
        self._lost: int | None = None
        self._stop = False
        self._problem: str | None = None
        """Why nothing is seen any more."""
        self._is_behind = False
        self._thread = threading.Thread(target=self._work, name="everystep-tap", daemon=True)
        self._thread.start()

    def begin(self, session: int, ranks: int, hosts: Sequence[str]) -> None:
        """See `GradientSource.begin`."""
        with self._changed:
            if self._session == (session, ranks):
                return
            self._session, self._newest, self._lost = (session, ranks), -1, None
            self._buckets = []
            places = {host: rank for rank, host in enumerate(hosts)}
            self._hosts = places if len(places) == ranks else None
            self._found.clear()
            self._gradients = self._read_anew(ranks)

    def _read_anew(self, ranks: int) -> Gradients:
        """Read as if nothing had been seen before."""
        self._told.clear()
        self._fruitless = 0
        parser = Parser()
        decoder = Gloo(
            parser, ranks=ranks, hosts=self._hosts, reassembler=Reassembler(checksums=True)
        )
        return Gradients(Reader(parser, decoder), budget_bytes=self._budget_bytes)

    def begin_from(self, step: int) -> None:
        """See `GradientSource.begin_from`."""
        with self._changed:
            gradients, session = self._gradients, self._session
            if self._lost is None or self._lost > step or gradients is None or session is None:
                return
            gradients.forget(self._lost)
            self._lost = None
            if self._fruitless >= _MOST_FRUITLESS:
                self._gradients = self._read_anew(session[1])
                self._gradients.tell(self._buckets)

    def whole(
        self, record: p.Record, data: memoryview, layout: bytes, alive: Callable[[], None]
    ) -> memoryview:
        """See `GradientSource.whole`."""
        known = unpack_layout(layout)
        delta = unpack(data, known, on_wire=True)
        told = delta.tree.pop(ON_WIRE, None)
        if not any(c.form == Form.ON_WIRE for u in delta.updates for c in u.gradients):
            return data if told is None else _packed(delta)
        try:
            reduced = msgspec.convert(told, Reduced)
        except msgspec.MsgspecError as error:
            raise Damaged(f"what is told of all-reduces: {error}", step=delta.step) from error
        with self._changed:
            self._expect(delta.step, reduced)
        return _packed(self._with_gradients(delta, known, alive))

    def _expect(self, step: int, told: Reduced) -> None:
        if told.buckets is not None:
            self._buckets = [Bucket(tuple(n), tuple(s), dtype) for n, s, dtype in told.buckets]
        if step <= self._newest or self._gradients is None:
            return
        if not self._buckets:
            raise NotSeen("its buckets were not told", step=step)
        self._newest = step
        self._told.add(step)
        self._gradients.expect(step, self._buckets, through=told.through)

    def _with_gradients(self, delta: Delta, layout: Layout, alive: Callable[[], None]) -> Delta:
        ends_s = time.monotonic() + self._wait_s
        while True:
            with self._changed:
                if self._is_behind:  # what is on its way here may have been seen in time
                    ends_s = time.monotonic() + self._wait_s
                is_over = self._is_over or time.monotonic() >= ends_s
                taken, is_new = self._take(delta.step, is_over=is_over)
                if taken is None:
                    self._changed.wait(_LOOK_S)
            if taken is None:
                alive()
                continue
            if isinstance(taken, Lacking):
                kind = Unexplained if taken.is_wrong else NotSeen
                raise kind(f"gradients: {self._problem or taken.what}", step=delta.step)
            found = explained(delta, layout, taken)
            with self._changed:
                if found is not None:
                    self._keep(delta.step, taken)
                    self._fruitless = 0
                    return found
                if not is_new:  # it was right for another rank
                    raise Unexplained("gradients are not what was seen", step=delta.step)
                if self._gradients is not None and delta.step in self._told:
                    self._gradients.wrong(delta.step)

    def _take(self, step: int, *, is_over: bool) -> tuple[ByParameter | Lacking | None, bool]:
        """What there is of a step's gradients, and whether no rank has needed them before."""
        found = self._found.get(step)
        if found is not None:
            return found, False
        newest = next(reversed(self._found), -1)
        if self._gradients is None or step < newest or step not in self._told:
            return Lacking(step, "they are not here any more", {}), True
        if not is_over and min(self._told) < step:
            return None, True  # a rank that is behind needs those before first
        taken = self._gradients.take(step, is_over=is_over)
        if isinstance(taken, Lacking):
            self._keep(step, taken)
            self._lost = step
            is_fruitless = self._gradients.are_buckets_certain and not taken.is_wrong
            self._fruitless = self._fruitless + 1 if is_fruitless else 0
        return taken, True

    def _keep(self, step: int, found: ByParameter | Lacking) -> None:
        self._found[step] = found
        self._told = {told for told in self._told if told > step}
        while len(self._found) > _MOST_KEPT:
            self._found.popitem(last=False)

    @property
    def _is_over(self) -> bool:
        """Whether nothing will be seen any more."""
        return self._stop or self._problem is not None

    # ------------------------------------------------------------ the thread

    def _work(self) -> None:
        dropped = 0
        try:
            while not self._stop:
                frames = self._mirror.next(self._mirror.quiet_s)
                with self._changed:
                    self._is_behind = self._mirror.is_behind
                    if self._gradients is None:
                        continue
                    if frames is None:
                        self._gradients.flush()
                    else:
                        self._gradients.feed(frames)
                    self._changed.notify_all()
                if frames is None and (now := self._mirror.drops().dropped) > dropped:
                    self._say(logging.WARNING, f"the kernel dropped {now - dropped:,} frames")
                    dropped = now
        except TapError as error:
            self._say(logging.ERROR, str(error))
            with self._changed:
                self._problem, self._is_behind = error.headline(), False
                self._changed.notify_all()

    def close(self) -> None:
        """End the capture."""
        with self._changed:
            self._stop = True
            self._changed.notify_all()
        self._thread.join()
        self._mirror.close()


def _packed(delta: Delta) -> memoryview:
    nbytes, parts = pack(delta)
    data = bytearray(nbytes)
    at = 0
    for part in parts:
        data[at : at + len(part)] = part.data
        at += len(part)
    return memoryview(data)
