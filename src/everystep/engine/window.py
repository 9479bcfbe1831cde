"""The window of a step: from the end of `step()` to the first update, in forward and backward."""

from __future__ import annotations

import sys
import threading
import time

import torch

from everystep.engine.meter import Cost, Lane

_BACKWARD = torch.autograd.backward.__code__
_DEEPEST = 64
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
        frame = sys._current_frames().get(self._training_thread)
        for _ in range(_DEEPEST):
            if frame is None:
                break
            if frame.f_code is _BACKWARD:
                self._forward_until_s = time.monotonic()
                return _IDLE_S
            frame = frame.f_back
        pause_s = max(_LEAST_LOOK_S, self._length_s / 50)
        self._look_at_s = now_s + pause_s
        return pause_s
