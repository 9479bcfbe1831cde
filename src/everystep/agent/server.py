"""The agent: a process beside the trainer that owns staging memory, writes, and outlives it.

It is started by `client.Agent` as `python -m everystep.agent.server OPTIONS`, in a session of its
own, and imports no torch. One thread waits for messages, others (`Writer`, `Logger`) write.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from everystep.agent import protocol as p
from everystep.agent.channel import Channel, address, same_user
from everystep.agent.priority import give_way
from everystep.agent.process import LOCK_SLOT, Options
from everystep.agent.records import MESSAGES, Records, Worker
from everystep.agent.staging import Staging
from everystep.agent.watched import Watched
from everystep.agent.writer import Writer
from everystep.errors import EverystepError, StoreFailed
from everystep.store import format as fmt
from everystep.store.local import LocalBackend
from everystep.types import StepRef

_TICK_S, _ORPHAN_S = 0.5, 30.0
_EVENTS = (selectors.EVENT_READ, selectors.EVENT_READ | selectors.EVENT_WRITE)


class Server:
    """The agent's state, and what each message does to it."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._backend = LocalBackend(Path(options.path))
        self._guard = threading.Condition()
        self._selector = selectors.DefaultSelector()
        self._wake, self._wakened = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._outbox: list[Struct] = []
        self._owner: Channel | None = None
        self._owners = 0
        self._born_s = time.monotonic()
        self._trainer = Watched(self._selector)
        self._linger_s = 0.0
        self._ends_at_s: float | None = None
        self._leaving = self._told_bye = self._settling = self._has_lock = False
        self._writer: Writer | None = None
        self._begin: p.Begin | None = None
        self._records: Records | None = None
        self._staging = Staging(self._guard)
        self._lock = contextlib.ExitStack()

    # ------------------------------------------------------------ life

    def serve(self) -> None:
        """Serve until there is nothing left to do."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        first = self._accept(socket.socket(fileno=self._options.fd))
        try:
            try:
                self._hold_lock()
                listener.bind(address(self._options.run, self._options.rank))
            except (OSError, EverystepError) as error:
                reason = error.headline() if isinstance(error, EverystepError) else str(error)
                with contextlib.suppress(OSError):
                    first.send(p.Ready(os.getpid(), f"no agent could start: {reason}"))
                return
            listener.listen()
            self._selector.register(listener, selectors.EVENT_READ, None)
            while not self._done():
                for channel in self._channels():
                    self._selector.modify(channel.fileno(), _EVENTS[channel.pending], channel)
                for key, _ in self._selector.select(_TICK_S):
                    self._turn_to(key, listener)
                self._act()
        finally:
            self._shut(listener)

    def _turn_to(self, key: selectors.SelectorKey, listener: socket.socket) -> None:
        if key.fileobj is listener:
            with contextlib.suppress(OSError):
                self._accept(listener.accept()[0])
        elif key.fileobj == self._wake:
            os.read(self._wake, 4096)
        elif key.data is None:
            if self._trainer.has_ended:
                self._lose_owner()
        elif key.data.fileno() >= 0:  # it may have been closed since
            self._read(key.data)

    def hurry(self) -> None:
        """Do not linger once the trainer is gone and everything is durable."""
        self._leaving = True

    def _hold_lock(self) -> None:
        if not self._has_lock:
            lock = self._backend.lock(fmt.LOCK_FILE, LOCK_SLOT + self._options.rank)
            self._lock.enter_context(lock)
            self._has_lock = True

    def _done(self) -> bool:
        if (self._owner is not None and not self._told_bye) or not self._is_idle():
            return False
        if self._owners == 0:  # the trainer that has started this one is about to say so
            return time.monotonic() >= self._born_s + _ORPHAN_S
        if self._leaving or self._told_bye:
            return True
        if self._ends_at_s is None:
            self._ends_at_s = time.monotonic() + self._linger_s
        if not self._unsaved():  # nothing more will be written: others may
            self._lock.close()
            self._has_lock = False
        return time.monotonic() >= self._ends_at_s

    def _is_idle(self) -> bool:
        with self._guard:
            return all(one.idle for one in self._workers())

    def _workers(self) -> list[Writer | Worker]:
        """All that have a thread."""
        records = [] if self._records is None else self._records.workers
        return [*records, *([] if self._writer is None else [self._writer])]

    def _unsaved(self) -> list[StepRef]:
        """The steps of which something is in memory only."""
        with self._guard:
            records = [] if self._records is None else self._records.unsaved()
        return sorted({image.ref for image in self._staging.unsaved()} | set(records))

    def _end_session(self) -> None:
        for one in (self._records, self._writer):
            if one is not None:
                one.close()
        self._records = self._writer = None

    def _shut(self, listener: socket.socket) -> None:
        listener.close()  # whoever comes now starts another, which waits for the lock
        self._end_session()
        self._trainer.forget()
        for channel in self._channels():
            self._drop(channel)
        self._selector.close()
        self._staging.close()
        os.close(self._wake)
        os.close(self._wakened)
        self._lock.close()

    def _accept(self, connection: socket.socket) -> Channel:
        channel = Channel(connection)
        if same_user(connection):
            self._selector.register(connection, selectors.EVENT_READ, channel)
        else:
            channel.close()
        return channel

    def _read(self, channel: Channel) -> None:
        try:
            received = channel.receive()
        except (EOFError, StoreFailed) as error:
            if isinstance(error, StoreFailed):
                print(error.headline(), file=sys.stderr, flush=True)
            if channel is self._owner:
                self._owner = None
                self._lose_owner()
            self._drop(channel)
            return
        for message, fd in received:
            try:
                self._handle(channel, message, fd)
            except EverystepError as error:
                self._tell(p.Notice(logging.ERROR, f"the agent: {error.headline()}"))

    def _drop(self, channel: Channel) -> None:
        self._selector.unregister(channel.fileno())
        channel.close()

    def _lose_owner(self) -> None:
        """The trainer is gone: make durable what there is, what it has sent last included."""
        self._trainer.forget()
        while self._owner is not None and self._owner.wait(0.0, to_send=False):
            self._read(self._owner)
        if self._owner is not None:
            self._drop(self._owner)
        self._owner = None
        self._staging.pending = None
        self._settling = False
        self._drain(True)

    def _channels(self) -> list[Channel]:
        return [key.data for key in self._selector.get_map().values() if key.data is not None]

    def _drain(self, on: bool) -> None:
        self._staging.drain(on=on, is_alone=self._owner is None)
        with self._guard:
            if self._records is not None:
                self._records.drain(on=on, is_alone=self._owner is None)

    # ------------------------------------------------------------ messages

    def _handle(self, channel: Channel, message: Any, fd: int | None) -> None:
        if isinstance(message, p.Describe) and channel is self._owner:
            self._on_describe(message, fd)
            return
        if isinstance(message, MESSAGES) and channel is self._owner:
            self._on_log(message, fd)
            return
        if fd is not None:
            os.close(fd)
        if isinstance(message, p.Hello):
            self._greet(channel, message)
        elif isinstance(message, p.ListFiles):
            self._list_files(channel)
        elif channel is self._owner:
            handler = getattr(self, f"_on_{type(message).__name__.lower()}", None)
            if handler is None:
                raise StoreFailed("a message that no trainer sends", found=type(message).__name__)
            handler(message)

    def _greet(self, channel: Channel, hello: p.Hello) -> None:
        problem = self._welcome(channel, hello)
        with contextlib.suppress(OSError):  # its end will be seen when it is read
            channel.send(p.Ready(os.getpid(), problem))

    def _welcome(self, channel: Channel, hello: p.Hello) -> str | None:
        if not hello.owner:
            return None
        if self._owner is not None and self._owner is not channel:
            return "the agent has an owner"
        try:
            self._hold_lock()
        except EverystepError as error:
            return error.headline()
        self._owner, self._ends_at_s, self._told_bye = channel, None, False
        self._owners += 1
        try:
            self._trainer.watch(hello.pid)
        except ProcessLookupError:
            self._lose_owner()
        return None

    def _on_ping(self, message: p.Ping) -> None:
        self._send(p.Pong(message.number))

    def _on_bye(self, message: p.Bye) -> None:
        self._told_bye = True
        self._drain(True)

    def _on_settle(self, message: p.Settle) -> None:
        self._settling = True
        self._drain(True)

    def _on_begin(self, message: p.Begin) -> None:
        """A new session; what an earlier one has left is durable, or given up."""
        self._end_session()
        self._staging.begin(message)
        self._begin, self._linger_s = message, message.linger_s
        self._writer = Writer(self._backend, message, self._guard, self._tell)
        self._records = Records(self._backend, message, self._guard, self._tell, self._rouse)

    def _on_log(self, message: Struct, fd: int | None) -> None:
        with self._guard:
            if self._records is not None:
                self._records.take(message, fd)
            elif fd is not None:
                os.close(fd)

    def _on_still(self, message: p.Still) -> None:
        self._staging.still = message

    def _on_describe(self, message: p.Describe, fd: int | None) -> None:
        if fd is not None and message.arena is not None:
            self._staging.adopt(fd, *message.arena)
        self._staging.pending = message
        self._place()

    def _place(self) -> None:
        """Answer a description, as soon as the memory for it is free."""
        if self._staging.pending is None:
            return
        answer = self._staging.place(is_idle=self._is_idle())
        if answer is None:
            self._drain(True)
            return
        with self._guard:
            if self._writer is not None:
                self._writer.slots = self._staging.slots
        self._send(*answer)

    def _on_release(self, message: p.Release) -> None:
        self._staging.release(message.slot)

    def _on_seal(self, message: p.Seal) -> None:
        try:
            image, slots = self._staging.image(message)
        except EverystepError as error:
            self._staging.release(message.slot)
            told = (type(error).__name__, error.headline(), error.hint)
            self._tell(p.NotStored(step=message.step, error=told))
            return
        with self._guard:
            if self._writer is not None:
                self._writer.seal(message.slot, image, slots)
            if self._records is not None:
                self._records.sealed(message.slot, image, slots)
            self._guard.notify_all()

    def _on_measured(self, message: p.Measured) -> None:
        with self._guard:
            if self._writer is not None:
                self._writer.measured(message.measure)

    def _list_files(self, channel: Channel) -> None:
        answer, fd = self._staging.files()
        with contextlib.suppress(OSError):  # its end will be seen when it is read
            try:
                channel.send(answer, fd)
            except StoreFailed:  # it is too much to tell: what is on the store must do
                channel.send(p.Files([]))

    # ------------------------------------------------------------ what is due

    def _act(self) -> None:
        """Send what the writer has to say, and do what has become possible."""
        self._empty_outbox()
        if not all(one.alive for one in self._workers()):
            raise StoreFailed("a thread that writes has ended")  # and with it this process
        for channel in self._channels():
            with contextlib.suppress(OSError):  # its end will be seen when it is read
                channel.flush()
        if self._owner is None:
            return
        self._place()
        if self._settling and self._is_idle():
            self._settling = False
            self._drain(False)
            self._empty_outbox()  # what has become of steps comes before that nothing is left
            self._send(p.Settled(self._unsaved()))
        self._grant()

    def _empty_outbox(self) -> None:
        with self._guard:
            outbox, self._outbox = self._outbox, []
        for message in outbox:
            self._send(message)

    def _grant(self) -> None:
        with self._guard:
            slots = self._staging.slots
            if slots is None or self._settling or self._staging.pending is not None:
                return
            if (granted := slots.grant()) is None:
                return
        self._empty_outbox()  # that its step is durable comes before that its slot is free
        index, lost = granted
        if lost is not None:
            self._send(p.NotStored(step=lost.ref.step, error=None))
        self._send(p.Grant(index))

    def _send(self, message: Struct, fd: int | None = None) -> None:
        if self._owner is not None:
            with contextlib.suppress(OSError):  # its end will be seen when it is read
                self._owner.send(message, fd)

    def _tell(self, message: Struct) -> None:
        """Take a message from any thread for the trainer."""
        with self._guard:
            self._outbox.append(message)
        self._rouse()

    def _rouse(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wakened, b"!")


def main() -> None:
    """Run an agent as the first argument, a JSON object, says."""
    logging.getLogger("everystep").addHandler(logging.NullHandler())
    os.chdir("/")
    give_way()
    server = Server(msgspec.json.decode(sys.argv[1], type=Options))
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: server.hurry())
    server.serve()


if __name__ == "__main__":
    main()
