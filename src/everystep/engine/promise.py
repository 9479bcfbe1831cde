"""Futures that are fulfilled by whichever thread comes to it, with no executor of their own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Value = TypeVar("Value")


def fulfil(future: Future[Value], compute: Callable[[], Value]) -> None:
    """Give a future the value, or the error, that a call ends in."""
    try:
        future.set_result(compute())
    except BaseException as error:  # noqa: BLE001 - whoever asks for the result gets it
        future.set_exception(error)
