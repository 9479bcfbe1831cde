"""SIGTERM, which schedulers send before they take a machine: let the step end, then the signal."""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import logging
import os
import select
import signal
import threading
from types import FrameType

from msgspec import Struct

from everystep.errors import UsageError

_log = logging.getLogger("everystep")


class SaveOnSignal(Struct, frozen=True, kw_only=True):
    """On a signal, let the current training step end and become durable, then let the signal go
    on to whoever had it before (by default it ends the process).

    Raises:
        UsageError: a deadline that is not positive, or a signal that cannot be caught.
    """

    deadline_s: float = 30.0
    """Seconds from the signal after which it goes on even if the step has not ended. Set it below
    the scheduler's own grace time."""
    signal_number: int = int(signal.SIGTERM)
    """Which signal."""

    def __post_init__(self) -> None:
        if not self.deadline_s > 0:
            raise UsageError(f"SaveOnSignal(deadline_s={self.deadline_s!r}): not a positive time")
        caught = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
        if self.signal_number not in caught:
            raise UsageError(f"SaveOnSignal(signal_number={self.signal_number!r}): cannot be held")


class SignalHold:
    """Holds a signal back from its arrival to the end of the step, or to the deadline.

    The handler only notes that the signal came: a checkpoint taken inside it could catch the
    model in the middle of an update, and a thread started or a line logged in it could meet a
    lock that the interrupted code holds. A thread watches the deadline. Install from the main
    thread.
    """

    def __init__(self, options: SaveOnSignal) -> None:
        self._number, self._deadline_s = options.signal_number, options.deadline_s
        self._pid = os.getpid()
        self._guard = threading.Lock()  # never taken in the handler
        self._held = self._due = self._closed = False
        self._arrivals, self._tell = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._stopped, self._stop = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._watch = threading.Thread(target=self._watch_deadline, daemon=True)
        try:
            self._before = signal.signal(self._number, self._arrived)
        except ValueError as error:
            self._close_pipes()
            raise UsageError(
                f"on_signal: {error}", hint="make the Checkpointer in the main thread"
            ) from error
        self._watch.start()

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a forked child (a loader's worker) has no step to end
            self._pass_on(frame)
        elif self._due or self._closed:
            self._due = False
            self._pass_on(frame)
        elif not self._held:
            self._held = True
            with contextlib.suppress(BlockingIOError):
                os.write(self._tell, b"!")

    def _watch_deadline(self) -> None:
        """For every signal: wait until it has gone on, or the deadline has passed."""
        while True:
            ready, _, _ = select.select([self._arrivals, self._stopped], [], [])
            if self._stopped in ready:
                return
            os.read(self._arrivals, 4096)
            _log.warning("signal %d: it goes on once this step is durable", self._number)
            # woken by the next arrival or the end: in both cases this signal has gone on
            ready, _, _ = select.select([self._arrivals, self._stopped], [], [], self._deadline_s)
            if not ready and self._take():
                self._expire()

    @property
    def held(self) -> bool:
        """Whether a signal is being held back."""
        return self._held

    def _take(self) -> bool:
        """Whether there is a held signal that is the caller's to send on."""
        with self._guard:
            held, self._held = self._held, False
        return held

    def _expire(self) -> None:
        _log.error("the step did not end within %.1f s of the signal", self._deadline_s)
        self._due = True
        if self._before in (signal.SIG_DFL, None):
            # a main thread that waits in C (for another rank, for a device) runs no handler
            ctypes.pythonapi.PyOS_setsig(self._number, None)
        os.kill(self._pid, self._number)

    def step_ended(self) -> None:
        """Call when a step is durable: a signal that came in between goes on now."""
        if not self._take():
            return
        if threading.current_thread() is threading.main_thread():
            self._pass_on(inspect.currentframe())
        else:  # handlers run in the main thread
            self._due = True
            os.kill(self._pid, self._number)

    def _pass_on(self, frame: FrameType | None) -> None:
        """Let the one who had the signal before have it now."""
        if callable(self._before):
            self._before(self._number, frame)
        elif self._before in (signal.SIG_DFL, None):
            signal.signal(self._number, signal.SIG_DFL)
            os.kill(os.getpid(), self._number)
            if not self._closed:  # its default is not to end the process
                signal.signal(self._number, self._arrived)

    def close(self) -> None:
        """Give the signal back to who had it before, unless somebody else has taken it since.
        One that is still held goes on."""
        if self._closed:
            return
        self._closed = True
        if os.getpid() == self._pid:  # a forked child shares the pipes, and has no watch
            os.write(self._stop, b"!")
            self._watch.join()
        self._close_pipes()
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(self._number) == self._arrived:
            before = signal.SIG_DFL if self._before is None else self._before
            signal.signal(self._number, before)
        self.step_ended()

    def _close_pipes(self) -> None:
        for fd in (self._arrivals, self._tell, self._stopped, self._stop):
            os.close(fd)
