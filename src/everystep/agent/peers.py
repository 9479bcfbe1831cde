"""The agent's part among those of other hosts: where they find it, what it holds for them, and what
it does when one of them is lost."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import Struct

from everystep.agent import protocol as p
from everystep.agent import wire as w
from everystep.agent.certificates import server_context
from everystep.agent.copies import Copy
from everystep.agent.pace import Pace
from everystep.agent.relay import Relay
from everystep.errors import EverystepError, StoreError, StoreFailed
from everystep.planning.placement import placement
from everystep.store import addresses as at
from everystep.store.format import LAST_STEP
from everystep.store.local import LocalBackend
from everystep.types import StepRef

PATIENCE_S = 3.0
"""An owner that has been gone for so long is lost: an agent that has died has a successor by
then, which gives a new state."""

_MOST_GREETINGS = 64
"""So many may be about to show that they know the secret."""


class Peers:
    """What an agent with a replica has among others. All methods but `close` are called with
    `guard` held.

    Args:
        path: of the run.
        begin: the session.
        plan: its `Begin.peers`.
        guard: the agent's.
        tell: takes messages for the trainer.

    Raises:
        EverystepError: it cannot listen, or the session has no secret.
    """

    def __init__(
        self,
        path: Path,
        begin: p.Begin,
        plan: p.PeerPlan,
        guard: threading.Condition,
        tell: Callable[[Struct], None],
    ) -> None:
        self._path, self._begin, self._plan, self._tell = path, begin, plan, tell
        self._backend = LocalBackend(path)
        self._token = at.read_token(path, begin.session)
        self._context: ssl.SSLContext | None = None
        certificate = None
        if not w.is_loopback(plan.address):
            self._context, certificate = server_context()
        w.require_safe(plan.address, has_tls=self._context is not None)
        held_by = placement(plan.hosts, plan.copies)
        self._owners = [rank for rank, holders in enumerate(held_by) if begin.rank in holders]
        self._copies: dict[int, Copy] = {}
        self._kept: dict[int, int] = {}
        self._wires: set[w.Wire] = set()
        self._greetings = threading.Semaphore(_MOST_GREETINGS)
        self._threads: list[threading.Thread] = []
        self._own = threading.Lock()
        self._stop = threading.Event()
        self._drains = False
        self._rescuing = 0
        if begin.rank == 0:
            at.forget(self._backend, before=begin.session)
        try:
            self._listener = socket.create_server((plan.address, 0), family=_family(plan.address))
        except OSError as error:
            raise StoreFailed(
                f"no agent of another host could connect: {error}",
                path=plan.address,
                hint="give Peers(address=…) an address of this host",
            ) from error
        self._publish(certificate)
        self.relay = Relay(
            begin, held_by[begin.rank], self._connect, Pace(plan.bytes_per_s), guard, self._say,
            self._rouse,
        )  # fmt: skip
        self._start(self._listen, "everystep-listen")
        self._start(self._watch, "everystep-watch")

    def _publish(self, certificate: str | None) -> None:
        port = self._listener.getsockname()[1]
        address = at.Address(
            rank=self._begin.rank, host=self._plan.address, port=port, certificate=certificate,
            holds=self._owners,
        )  # fmt: skip
        try:
            at.put_address(self._backend, self._begin.session, address)
        except StoreError:
            self._listener.close()
            raise

    def _say(self, level: int, text: str) -> None:
        self._tell(p.Notice(level, text))

    def _start(self, act: Callable[..., None], name: str, *given: Any) -> None:
        thread = threading.Thread(target=act, name=name, args=given, daemon=True)
        self._threads = [one for one in self._threads if one.is_alive()]
        self._threads.append(thread)
        thread.start()

    def _connect(self, rank: int) -> w.Wire:
        address = at.read_address(self._backend, self._begin.session, rank)
        if address is None:
            raise ConnectionRefusedError("it has not told yet where it listens")
        return w.connected(address, self._token)

    # ------------------------------------------------------------ for the agent, `guard` held

    @property
    def alive(self) -> bool:
        """Whether the threads run that must."""
        return True

    @property
    def idle(self) -> bool:
        """Whether there is nothing to be written in place of another agent."""
        if not self._drains:
            return True
        with self._own:
            return not self._rescuing and not any(map(_awaits_rescue, self._copies.values()))

    def unsaved(self) -> list[StepRef]:
        """Of the rank's own steps none are here."""
        return []

    def drain(self, *, on: bool) -> None:
        """Whether training has stopped: what belongs to agents that are lost is written."""
        self._drains = on

    # ------------------------------------------------------------ the threads

    def _rouse(self) -> None:
        """Copies may be folded further."""
        with self._own:
            copies = list(self._copies.values())
        for copy in copies:
            copy.rouse()

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
            wire = w.welcomed(connection, self._context, self._token)
        except w.Gone:
            connection.close()
            return
        finally:
            self._greetings.release()
        with self._own:
            self._wires.add(wire)
        try:
            self._talk(wire)
        except (*w.Gone, EverystepError):
            pass  # whoever it was connects again, or is lost
        finally:
            with self._own:
                self._wires.discard(wire)
            wire.close()

    def _talk(self, wire: w.Wire) -> None:
        first = wire.receive()
        if isinstance(first, w.Keep):
            self._keep(first.begin, wire)
        elif isinstance(first, w.Rescue):
            self._hear_owners()
            wire.send(w.Rescued(self._rescue_all()))
        while isinstance(first, w.Share):
            self._kept[first.rank] = first.step
            least = min(self._kept.get(n, LAST_STEP) for n in range(self._begin.world_size))
            wire.send(w.Shared(least))
            first = wire.receive()

    def _keep(self, begin: p.Begin, wire: w.Wire) -> None:
        """Keep a copy for whoever has connected, until it is gone."""
        if begin.session != self._begin.session or begin.rank not in self._owners:
            raise StoreFailed("a copy that is not for this agent", rank=begin.rank)
        copy = Copy(self._path, begin, self.relay.bound, wire)
        with self._own:
            before, self._copies[begin.rank] = self._copies.get(begin.rank), copy
        if before is not None:
            before.close()
        try:
            while not self._stop.is_set():
                if copy.problem is not None:
                    wire.send(w.NotKept(copy.problem))
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
            wire.send(w.NotKept(reason))
            raise StoreFailed(reason) from error

    def _forget(self, copy: Copy) -> None:
        with self._own:
            if self._copies.get(copy.begin.rank) is copy:
                del self._copies[copy.begin.rank]
        copy.close()

    # ------------------------------------------------------------ when an owner is lost

    def _watch(self) -> None:
        while not self._stop.wait(w.ALIVE_S / 4):
            if self._drains:
                with self._own:
                    lost = any(_is_lost(copy) for copy in self._copies.values())
                if lost:
                    self._rescue_all()

    def _hear_owners(self) -> None:
        """Wait until each owner has been heard once more, or is gone."""
        since_s = time.monotonic()
        while not self._stop.wait(0.02):
            with self._own:
                owned = [copy for copy in self._copies.values() if copy.is_owned]
            if all(copy.wire.heard_s > since_s for copy in owned):
                return

    def _rescue_all(self) -> list[int]:
        """Write the parts of those whose agents are gone; returns their ranks."""
        with self._own:
            gone = [copy for copy in self._copies.values() if not copy.is_owned]
            for copy in gone:
                del self._copies[copy.begin.rank]
            self._rescuing += len(gone)
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
                    self._rescuing -= 1

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

    def close(self) -> None:
        """Give up all that is held for others, and end all threads. Call it without `guard`."""
        with contextlib.suppress(StoreError):
            self._backend.delete(at.address_file(self._begin.session, self._begin.rank))
        self._stop.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends `accept`
        self.relay.close()
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


def _is_lost(copy: Copy) -> bool:
    return not copy.is_owned and time.monotonic() > copy.lost_s + PATIENCE_S


def _awaits_rescue(copy: Copy) -> bool:
    return copy.is_there and not copy.is_owned
