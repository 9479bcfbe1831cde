"""Functions that compiled training calls, and torch's compiler does not look into."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch._C._dynamo.eval_frame import set_eval_frame

F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(function: F) -> F:
    """Have a function, and all that it calls, run as it is, wherever it is called.

    As `torch.compiler.disable`, for which the whole compiler is imported. The attribute alone, by
    which a trace ends before the call, is not enough: what is called inside would be compiled by
    itself, and a view that is made into other memory at each call was made into another one.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        before = set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            set_eval_frame(before)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return cast(F, call)
