"""Notices the end of another process, even while children of it keep its sockets open."""

from __future__ import annotations

import os
import select
import selectors


class Watched:
    """At most one process, among what a selector waits for; its key there has no data.

    Args:
        selector: becomes ready when the process ends.
    """

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._fd: int | None = None

    def watch(self, pid: int) -> None:
        """Watch this one from now on. Where no descriptor is left, its socket must tell.

        Raises:
            ProcessLookupError: it has ended.
        """
        self.forget()
        try:
            self._fd = os.pidfd_open(pid)
        except ProcessLookupError:
            raise
        except OSError:
            return
        self._selector.register(self._fd, selectors.EVENT_READ, None)

    def forget(self) -> None:
        """Watch none."""
        if self._fd is not None:
            self._selector.unregister(self._fd)
            os.close(self._fd)
            self._fd = None

    @property
    def has_ended(self) -> bool:
        """Whether the process has, now: what the selector said before may be of another one."""
        if self._fd is None:
            return False
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(0))
