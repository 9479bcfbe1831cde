"""SIGTERM, which schedulers send before they take a machine: let the step end, then the signal."""

from __future__ import annotations

import logging
import os
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
        UsageError: a deadline that is not positive.
    """

    deadline_s: float = 30.0
    """Seconds from the signal after which it goes on even if the step has not ended. Set it below
    the scheduler's own grace time."""
    signal_number: int = int(signal.SIGTERM)
    """Which signal."""

    def __post_init__(self) -> None:
        if not self.deadline_s > 0:
            raise UsageError(f"SaveOnSignal(deadline_s={self.deadline_s!r}): not a positive time")


class SignalHold:
    """Holds a signal back from its arrival to the end of the step, or to the deadline.

    The handler only notes that the signal came: a checkpoint taken inside it could catch the
    model in the middle of an update. Install from the main thread.
    """

    def __init__(self, options: SaveOnSignal) -> None:
        self._number = options.signal_number
        self._deadline_s = options.deadline_s
        self._timer: threading.Timer | None = None
        self._expired = False
        try:
            self._before = signal.signal(self._number, self._arrived)
        except ValueError as error:
            raise UsageError(
                f"on_signal: {error}", hint="make the Checkpointer in the main thread"
            ) from error

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        if self._expired:
            self._let_go()
        elif self._timer is None:
            _log.warning("signal %d: it goes on once this step is durable", number)
            self._timer = threading.Timer(self._deadline_s, self._expire)
            self._timer.daemon = True
            self._timer.start()

    def _expire(self) -> None:
        self._expired = True
        _log.error("the step did not end within %.1f s of the signal", self._deadline_s)
        os.kill(os.getpid(), self._number)  # handlers run in the main thread

    def step_ended(self) -> None:
        """Call when a step is durable: a signal that came in between goes on now."""
        if self._timer is not None:
            self._let_go()

    def _let_go(self) -> None:
        self.close()
        os.kill(os.getpid(), self._number)

    def close(self) -> None:
        """Give the signal back to who had it before, unless somebody else has taken it since."""
        if self._timer is not None:
            self._timer.cancel()
            if self._timer is not threading.current_thread():
                self._timer.join()
        if signal.getsignal(self._number) == self._arrived:
            before = signal.SIG_DFL if self._before is None else self._before
            signal.signal(self._number, before)
