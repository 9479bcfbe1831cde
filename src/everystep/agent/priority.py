"""How what runs beside training gives way to it, where both want a processor."""

from __future__ import annotations

import os
import threading

_NICER = 5
_MOST = 19


def give_way() -> None:
    """Let this thread, and those that it starts, have a third of the share of others, where there
    are more of them than processors: ranks wait for each other at every step, and what delays one
    delays all. What is not copied when the optimizer comes, the training thread copies itself."""
    thread = threading.get_native_id()
    nice = os.getpriority(os.PRIO_PROCESS, thread)  # of a thread, in spite of its name
    os.setpriority(os.PRIO_PROCESS, thread, min(_MOST, nice + _NICER))
