"""The window of a step: from the end of `step()` to the first update, in forward and backward."""

from __future__ import annotations

import sys
import threading
import time

import torch

from everystep.engine.meter import Cost, Lane

_BACKWARD = {
    called.__code__
    for called in (
        torch.autograd.backward,
        getattr(torch.autograd.graph, "_engine_run_backward", torch.autograd.backward),
    )
}
"""What a thread stands in while autograd's engine runs. `torch.autograd.grad` does, too."""

_LEAST_LOOK_S = 0.005
_IDLE_S = 1.0


class Window:
    """Opened and closed by the training thread, looked at by another."""

    def __init__(self) -> None:
        self._is_open = False
        self._length_s = self._look_at_s = 0.0
        self._training_thread = threading.get_ident()
        self._forward_until_s: float | None = None

    def open(self) -> None:
        """A step begins in this thread."""
        self._training_thread = threading.get_ident()
        self._is_open, self._forward_until_s, self._look_at_s = True, None, 0.0

    def close(self, now_s: float, cost: Cost) -> None:
        """An update begins: note forward and backward in the step's costs, if it is the first."""
        if not self._is_open:
            return
        self._is_open = False
        self._length_s = now_s - cost.begun_s
        middle_s = self._forward_until_s or cost.begun_s
        cost.forward_s, cost.backward_s = middle_s - cost.begun_s, now_s - middle_s
        cost.lanes.append(Lane("forward", cost.begun_s, middle_s))
        cost.lanes.append(Lane("backward", middle_s, now_s))

    def look(self) -> float:
        """See what the training thread is doing, to tell forward from backward without a hook in
        either; returns when to look again, in seconds from now."""
        if not self._is_open or self._forward_until_s is not None:
            return _IDLE_S
        now_s = time.monotonic()
        if now_s < self._look_at_s:  # whoever copies asks between any two tasks
            return self._look_at_s - now_s
        # no further than the top: other threads' frames may end while one walks to their callers,
        # and CPython 3.11 has died of that
        frame = sys._current_frames().get(self._training_thread)
        if frame is not None and frame.f_code in _BACKWARD:
            self._forward_until_s = time.monotonic()
            return _IDLE_S
        pause_s = max(_LEAST_LOOK_S, self._length_s / 50)
        self._look_at_s = now_s + pause_s
        return pause_s
