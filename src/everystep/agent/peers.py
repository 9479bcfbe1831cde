"""The agent's part among those of other hosts: where they find it, what it holds for them, and what
it does when one of them is lost."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct

from everystep.agent import protocol as p
from everystep.agent import wire as w
from everystep.agent.certificates import server_context
from everystep.agent.copies import Copy
from everystep.agent.holder import Holder, is_lost
from everystep.agent.pace import Pace
from everystep.agent.relay import Relay
from everystep.errors import StoreError, StoreFailed
from everystep.planning.placement import placement
from everystep.store import addresses as at
from everystep.store.format import LAST_STEP
from everystep.store.local import LocalBackend
from everystep.types import StepRef


class Peers(Holder):
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
        self._path, self._begin, self._plan = path, begin, plan
        self._backend = LocalBackend(path)
        token = at.read_token(path, begin.session)
        context, certificate = None, None
        if not w.is_loopback(plan.address):
            context, certificate = server_context()
        w.require_safe(plan.address, has_tls=context is not None)
        super().__init__(token, context, b"", lambda level, text: tell(p.Notice(level, text)))
        held_by = placement(plan.hosts, plan.copies)
        self._owners = [rank for rank, holders in enumerate(held_by) if begin.rank in holders]
        self._kept: dict[int, int] = {}
        self._drains = False
        if begin.rank == 0:
            at.forget(self._backend, before=begin.session)
        self._bind(plan.address, 0, "give Peers(address=…) an address of this host")
        self._publish(certificate)
        self.relay = Relay(
            begin, held_by[begin.rank], self._connect, Pace(plan.bytes_per_s), guard, self._say,
            self._rouse,
        )  # fmt: skip
        self._start_listening()

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

    def _copy_for(self, begin: p.Begin, wire: w.Wire) -> Copy:
        if begin.session != self._begin.session or begin.rank not in self._owners:
            raise StoreFailed("a copy that is not for this agent", rank=begin.rank)
        return Copy(self._path, begin, self.relay.bound, wire)

    def _must_rescue(self, copies: Sequence[Copy]) -> bool:
        return self._drains and any(map(is_lost, copies))

    def close(self) -> None:
        """Give up all that is held for others, and end all threads. Call it without `guard`."""
        with contextlib.suppress(StoreError):
            self._backend.delete(at.address_file(self._begin.session, self._begin.rank))
        self._stop_listening()
        self.relay.close()
        self._end()


def _awaits_rescue(copy: Copy) -> bool:
    return copy.is_there and not copy.is_owned
