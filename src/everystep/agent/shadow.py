"""The shadow: a process on another host that holds the state of every rank at every step, writes it
now and then, and gives it back."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from everystep.agent import protocol as p
from everystep.agent import wire as w
from everystep.agent.certificates import server_context
from everystep.agent.copies import Copy
from everystep.agent.holder import Holder, is_lost
from everystep.agent.shadow_copy import GradientSource, Keeping, ShadowCopy
from everystep.agent.shadow_store import Offers
from everystep.agent.shadow_together import Together
from everystep.errors import EverystepError, StoreFailed


class Shadow(Holder):
    """Listens from its beginning to `close`.

    Args:
        keeping: where and how states are kept.
        host: an IP address to listen on.
        port: 0: any.
        token: what callers must know.
        source: of gradients that records do not hold; it is closed in the end.
        say: takes sentences for the user, and how urgent they are.

    Raises:
        StoreFailed: it cannot listen.
        UsageError: it is to be reached from other hosts, and has no certificate.
    """

    def __init__(
        self,
        keeping: Keeping,
        host: str,
        port: int,
        token: bytes,
        source: GradientSource | None,
        say: Callable[[int, str], None],
    ) -> None:
        context, binding = None, b""
        if not w.is_loopback(host):
            context, certificate = server_context()
            binding = bytes.fromhex(certificate)
        super().__init__(token, context, binding, say)
        self._keeping, self._source = keeping, source
        self._together = Together(keeping.path, token, self._all_copies, say)
        self._bind(host, port, "give --listen an address of this host")
        self._rescues = threading.Lock()
        self._start_listening()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._listener.getsockname()[1])

    @property
    def kept(self) -> dict[int, int]:
        """The step to which each rank's copy goes, of the copies that there are."""
        copies = self._all_copies()
        return {copy.begin.rank: copy.kept for copy in copies if copy.kept is not None}

    def _all_copies(self) -> list[ShadowCopy]:
        """Those that are being written before they go, too: the others must not pass them."""
        copies = {*self._copies.values(), *self._rescuing}
        return [copy for copy in copies if isinstance(copy, ShadowCopy)]

    # ------------------------------------------------------------ the threads

    def _talk(self, wire: w.Wire) -> None:
        first = wire.receive()
        if isinstance(first, w.Keep):
            self._keep(first.begin, wire)
            return
        while isinstance(first, w.Standing):
            wire.send(self._together.answer(first))
            if self._stop.is_set():  # the other would go on for ever
                return
            first = wire.receive()
        if not isinstance(first, w.Rescue):
            raise StoreFailed("a message came out of turn", found=type(first).__name__)
        self._hear_owners()
        wire.send(w.Rescued(self._write_all()))
        offers = Offers(self._keeping.path)
        while True:
            message = wire.receive()
            if isinstance(message, w.ListSteps):
                wire.send(offers.found(message))
            elif isinstance(message, w.GiveFile):
                offers.give(message.name, wire)
            else:
                raise StoreFailed("a message came out of turn", found=type(message).__name__)

    def _copy_for(self, begin: p.Begin, wire: w.Wire) -> Copy:
        tap = None if begin.shadow is None else begin.shadow.tap
        try:
            if tap == "wire" and self._source is None:
                raise StoreFailed(
                    "the shadow reads no network, and gradients are not sent to it",
                    hint='start it with --tap IFACE, or use everystep.Shadow(…, tap="software")',
                )
            with self._own:
                others = list(self._copies.values())
            if any(other.begin.session != begin.session for other in others):
                self._write_all()  # of a session that nobody has asked for
            with self._own:
                before = self._copies.pop(begin.rank, None)
            if before is not None:
                before.close()
            source = self._source if tap == "wire" else None
            copy = ShadowCopy(self._keeping, begin, self._together, wire, source, self._say)
            self._together.join(begin)
            return copy
        except EverystepError as error:
            self._say(logging.ERROR, error.headline())
            wire.send(w.NotKept(error.headline()))
            raise

    def _take(self, copy: Copy, message: object, wire: w.Wire) -> None:
        try:
            super()._take(copy, message, wire)
        except StoreFailed as error:
            self._say(logging.WARNING, f"rank {copy.begin.rank}: {error.headline()}")
            raise
        with self._own:
            others = list(self._copies.values())
        for other in others:
            if other is not copy:
                other.rouse()  # it may be folded further now
        self._together.further(begun=isinstance(message, w.Base))

    def _must_rescue(self, copies: Sequence[Copy]) -> bool:
        return all(map(is_lost, copies)) and self._together.is_over

    def _write_all(self) -> list[int]:
        with self._rescues:
            return self._rescue_all(owned=True)

    def close(self) -> None:
        """Write the newest step, and end all threads."""
        self._write_all()
        self._stop_listening()
        self._end()
        self._together.close()
        if self._source is not None:
            self._source.close()
