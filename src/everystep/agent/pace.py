"""How fast an agent sends: no faster than the user allows, over all connections together."""

from __future__ import annotations

import threading
import time

_MOST_AHEAD_S = 0.05
"""Of sending that an idle time makes up for."""


class Pace:
    """Lets bytes through at a rate; for any number of threads.

    Args:
        bytes_per_s: the rate; None: at once.
    """

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._guard = threading.Lock()
        self._free_s = 0.0

    def take(self, nbytes: int) -> None:
        """Wait until so many bytes more may be sent."""
        if self._bytes_per_s is None:
            return
        with self._guard:
            now_s = time.monotonic()
            start_s = max(self._free_s, now_s - _MOST_AHEAD_S)
            self._free_s = start_s + nbytes / self._bytes_per_s
        if start_s > now_s:
            time.sleep(start_s - now_s)
