"""Logs made of plain bytes, without torch and without training: what tests of the store write."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from byte_runs import noise
from everystep.store.backend import Backend
from everystep.store.log import Log, NewRecord

RUN = "00112233445566778899aabbccddeeff"

LAYOUT = b'{"a": 1}'


def payload(step: int, rank: int = 0, seed: object = 0, nbytes: int | None = None) -> bytes:
    """What a test's delta holds; of no length that is a multiple of 8."""
    return noise(37 + 8 * (step % 5) if nbytes is None else nbytes, f"{step} {rank} {seed}")


def record(step: int, rank: int = 0, seed: object = 0, nbytes: int | None = None) -> NewRecord:
    """A delta in two parts."""
    data = payload(step, rank, seed, nbytes)
    return NewRecord(step, len(data), [data[:5], memoryview(data)[5:]])


def new_log(
    backend: Backend,
    run: str = RUN,
    timeline: str = "main",
    session: int = 1,
    rank: int = 0,
    world_size: int = 1,
) -> Log:
    return Log(
        backend, run=run, timeline=timeline, session=session, rank=rank, world_size=world_size
    )


def write_log(
    backend: Backend,
    steps: Iterable[int],
    *,
    base: int = 0,
    run: str = RUN,
    timeline: str = "main",
    session: int = 1,
    ranks: Sequence[int] = (0,),
    world_size: int = 1,
    seal: bool = False,
) -> None:
    """A segment of each of these ranks with a delta of each of these steps."""
    steps = list(steps)
    for rank in ranks:
        log = new_log(backend, run, timeline, session, rank, world_size)
        log.begin(base, LAYOUT)
        log.append([record(step, rank, session) for step in steps])
        if seal:
            log.seal()
