"""Listens for the owners of states, and keeps a copy of each state for as long as its owner is
there, or until it is written in its owner's place."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from everystep.agent import protocol as p
from everystep.agent import wire as w
from everystep.agent.copies import Copy
from everystep.errors import EverystepError, StoreFailed

PATIENCE_S = 3.0
"""An owner that has been gone for so long is lost: an agent that has died has a successor by
then, which gives a new state."""

_COMPLAINS_S = 1.0
"""Between two sentences about connections that were ended."""

_MOST_GREETINGS = 64
"""So many may be about to show that they know the secret."""


class Refused(StoreFailed):
    """What an owner has sent is of no use, and it was told so."""


class Holder(ABC):
    """Serves each connection in a thread of its own, once `_start_listening` is called.

    Args:
        token: the secret that callers must know.
        context: TLS; None: there is none.
        binding: see `wire.welcomed`.
        say: takes sentences for the user, and how urgent they are.
    """

    def __init__(
        self,
        token: bytes,
        context: ssl.SSLContext | None,
        binding: bytes,
        say: Callable[[int, str], None],
    ) -> None:
        self._token, self._context, self._binding, self._say = token, context, binding, say
        self._copies: dict[int, Copy] = {}
        self._wires: set[w.Wire] = set()
        self._greetings = threading.Semaphore(_MOST_GREETINGS)
        self._threads: list[threading.Thread] = []
        self._own = threading.Lock()
        self._stop = threading.Event()
        self._rescuing: list[Copy] = []
        """What is being written in place of owners."""
        self._complains_s = 0.0
        """Not before then."""

    def _bind(self, host: str, port: int, hint: str) -> None:
        """Have a port.

        Raises:
            StoreFailed: it is not to be had.
        """
        try:
            self._listener = socket.create_server((host, port), family=_family(host))
        except OSError as error:
            raise StoreFailed(f"nobody could connect: {error}", path=host, hint=hint) from error

    def _start_listening(self) -> None:
        self._start(self._listen, "everystep-listen")
        self._start(self._watch, "everystep-watch")

    def _start(self, act: Callable[..., None], name: str, *given: Any) -> None:
        thread = threading.Thread(target=act, name=name, args=given, daemon=True)
        self._threads = [one for one in self._threads if one.is_alive()]
        self._threads.append(thread)
        thread.start()

    def _listen(self) -> None:
        while not self._stop.is_set():
            try:
                connection = self._listener.accept()[0]
            except OSError:
                self._stop.wait(0.05)
                continue
            if self._greetings.acquire(blocking=False):
                self._start(self._serve, "everystep-peer", connection)
            else:
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        """One connection, from its beginning to its end."""
        try:
            wire = w.welcomed(connection, self._context, self._token, self._binding)
        except w.Gone as error:
            self._complain(error)
            connection.close()
            return
        finally:
            self._greetings.release()
        with self._own:
            self._wires.add(wire)
        try:
            self._talk(wire)
        except (*w.Gone, EverystepError) as error:
            self._complain(error)  # whoever it was connects again, or is lost
        finally:
            with self._own:
                self._wires.discard(wire)
            wire.close()

    def _complain(self, error: Exception) -> None:
        """Say why a connection was ended here; seldom, since anybody may try as often as he can."""
        now_s = time.monotonic()
        if isinstance(error, Refused):
            return
        if isinstance(error, EverystepError) and now_s >= self._complains_s:
            self._complains_s = now_s + _COMPLAINS_S
            self._say(logging.WARNING, f"a connection was ended: {error.headline()}")

    @abstractmethod
    def _talk(self, wire: w.Wire) -> None:
        """Do what a caller that knows the secret wants, to its end."""

    @abstractmethod
    def _copy_for(self, begin: p.Begin, wire: w.Wire) -> Copy:
        """An empty copy for an owner.

        Raises:
            StoreFailed: it is not to be kept here.
        """

    def _keep(self, begin: p.Begin, wire: w.Wire) -> None:
        """Keep a copy for whoever has connected, until it is gone."""
        copy = self._copy_for(begin, wire)
        with self._own:
            before, self._copies[begin.rank] = self._copies.get(begin.rank), copy
        if before is not None:
            before.close()
        try:
            while not self._stop.is_set():
                if copy.problem is not None:
                    wire.send(w.NotKept(copy.problem, copy.is_lasting))
                    return
                if wire.has_come(w.ALIVE_S / 2):
                    message = wire.receive()
                    if isinstance(message, w.Ended):
                        self._forget(copy)
                        return
                    self._take(copy, message, wire)
                elif time.monotonic() > wire.heard_s + w.SILENT_S:
                    return
        finally:
            copy.lost_s, copy.is_owned = time.monotonic(), False

    def _take(self, copy: Copy, message: Any, wire: w.Wire) -> None:
        try:
            if isinstance(message, w.Base):
                copy.begin_from(message)
                wire.send(w.Kept(message.seal.step))
            elif isinstance(message, w.Next):
                copy.add(message)
                wire.send(w.Kept(message.record.step))
            elif isinstance(message, p.OpenLog):
                copy.open_log(message)
            else:
                wire.send(w.Alive())
        except (EverystepError, MemoryError) as error:
            reason = error.headline() if isinstance(error, EverystepError) else repr(error)
            wire.send(w.NotKept(reason, copy.is_lasting))
            raise Refused(reason) from error

    def _forget(self, copy: Copy) -> None:
        with self._own:
            if self._copies.get(copy.begin.rank) is copy:
                del self._copies[copy.begin.rank]
        copy.close()

    # ------------------------------------------------------------ when an owner is lost

    def _watch(self) -> None:
        while not self._stop.wait(w.ALIVE_S / 4):
            with self._own:
                copies = list(self._copies.values())
            if copies and self._must_rescue(copies):
                self._rescue_all()

    @abstractmethod
    def _must_rescue(self, copies: Sequence[Copy]) -> bool:
        """Whether the states of lost owners are to be written now."""

    def _hear_owners(self) -> None:
        """Wait until each owner has been heard once more, or is gone."""
        since_s = time.monotonic()
        while not self._stop.wait(0.02):
            with self._own:
                owned = [copy for copy in self._copies.values() if copy.is_owned]
            if all(copy.wire.heard_s > since_s for copy in owned):
                return

    def _rescue_all(self, *, owned: bool = False) -> list[int]:
        """Write the parts of those whose agents are gone; returns their ranks.

        Args:
            owned: of the others, too: training has stopped.
        """
        with self._own:
            gone = [copy for copy in self._copies.values() if owned or not copy.is_owned]
            self._rescuing += gone  # first: whoever reads both misses none
            for copy in gone:
                del self._copies[copy.begin.rank]
        rescued: list[int] = []

        def rescue(copy: Copy) -> None:
            try:
                if copy.rescue():
                    rescued.append(copy.begin.rank)
            except EverystepError as error:
                told = f"the state of rank {copy.begin.rank} is lost: {error.headline()}"
                self._say(logging.ERROR, told)
            finally:
                with self._own:
                    self._rescuing.remove(copy)

        threads = [threading.Thread(target=rescue, args=[copy], daemon=True) for copy in gone]
        for thread in threads:  # at once: they wait for each other
            thread.start()
        for thread in threads:
            thread.join()
        while not self._stop.is_set():
            with self._own:
                if not self._rescuing:
                    break
            self._stop.wait(0.02)
        return rescued

    def _stop_listening(self) -> None:
        self._stop.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends `accept`

    def _end(self) -> None:
        """Give up all that is held, and end all threads."""
        with self._own:
            for wire in self._wires:
                wire.interrupt()
            copies = list(self._copies.values())
        for copy in copies:
            copy.stop()
        for thread in self._threads:
            thread.join()
        self._listener.close()
        for copy in copies:
            copy.close()


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def is_lost(copy: Copy) -> bool:
    return not copy.is_owned and time.monotonic() > copy.lost_s + PATIENCE_S
