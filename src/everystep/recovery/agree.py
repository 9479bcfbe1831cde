"""Ranks act as one: an answer or an error of one rank becomes that of all."""

from __future__ import annotations

from collections.abc import Callable

from everystep import errors
from everystep.errors import EverystepError, RanksDisagree
from everystep.state.ranks import Ranks
from everystep.types import Json


def on_first_rank(ranks: Ranks, act: Callable[[], Json]) -> Json:
    """Let rank 0 act, and give its answer to every rank. Collective.

    Raises:
        EverystepError: what rank 0 raised; on every rank.
    """
    answer: Json = None
    error: EverystepError | None = None
    if ranks.rank == 0:
        try:
            answer = act()
        except EverystepError as failure:
            error = failure
    told = ranks.from_first([answer, as_json(error)])
    if error is not None:
        raise error
    if told[1] is not None:
        raise from_json(0, told[1])
    return told[0]


def raise_together(ranks: Ranks, error: EverystepError | None) -> None:
    """Raise if any rank has an error: its own, or the first other one. Collective.

    Raises:
        EverystepError: there is one.
    """
    told = ranks.gather(as_json(error))
    if error is not None:
        raise error
    for rank, other in enumerate(told):
        if other is not None:
            raise from_json(rank, other)


def as_json(error: EverystepError | None) -> Json:
    """An error for the other ranks; None for none."""
    return None if error is None else [type(error).__name__, error.headline(), error.hint]


def from_json(rank: int, told: Json) -> EverystepError:
    """Another rank's error, in its own words and of its kind."""
    kind = getattr(errors, told[0], RanksDisagree)
    error: EverystepError = kind(f"on rank {rank}: {told[1]}", hint=told[2])
    return error
