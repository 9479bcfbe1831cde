"""A step read from what is stored of it: a full checkpoint, with the deltas after it folded in."""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from msgspec.structs import replace
from torch.optim import Optimizer

from everystep.deltas.delta import Delta, Layout
from everystep.deltas.packing import unpack, unpack_layout
from everystep.errors import Damaged, EverystepError
from everystep.recovery.fold import fold
from everystep.recovery.part import Lend, Proved, read_part
from everystep.recovery.proof import Step
from everystep.state.form import check_form
from everystep.store.chains import Chain, Excluded, Link, Place
from everystep.store.format import RankRecord, StoredTensor
from everystep.store.run import Run
from everystep.store.segments import read
from everystep.types import Json, TensorSpec, spoken

AHEAD_BYTES = 256 << 20
"""Of records that are read before they are folded."""

_READERS = 4

_NONSENSE = (KeyError, IndexError, TypeError, AttributeError, ValueError, ArithmeticError)
"""What values that no writer writes may end in."""

_log = logging.getLogger("everystep")

Progress = Callable[[int], None]


class How(NamedTuple):
    """How a rank's part of a step is read."""

    fits: Callable[[RankRecord], None] | None = None
    """Called with the full checkpoint's record before a tensor is made or read from the store;
    raises if it is of no use."""
    progress: Progress | None = None
    """Called with the number of bytes just read, from any thread."""
    folded: Progress | None = None
    """Called with the number of steps just folded and proved."""
    wanted: Callable[[TensorSpec], bool] = lambda spec: True
    """Which tensors are of use; more may be read."""
    lend: Lend | None = None
    """See `read_part`."""
    standing: Callable[[RankRecord], Mapping[str, torch.Tensor]] = lambda record: {}
    """See `read_part`."""
    classes: Mapping[str, type[Optimizer]] = {}
    """Optimizers that are not torch's, by full name."""


def read_chain(run: Run, chain: Chain, rank: int, how: How = How()) -> Proved:  # noqa: B008
    """Read one rank's state of a step, and prove it.

    Raises:
        Damaged, Missing, ReplicasDiffer: something is not what was written, or does not fold to
            what it was in training; `blamed` tells what.
        CannotRestore: an optimizer cannot be built here.
        StoreFailed: it cannot be read.
    """
    if not chain.links:
        return read_part(
            run, chain.full, rank, how.fits, how.progress, how.wanted, how.lend, how.standing
        )
    full = read_part(run, chain.full, rank, how.fits, how.progress)
    metrics: dict[str, Json] = {}
    steps = _steps(run, chain.links, rank, metrics, how.progress)
    try:
        folded = fold(
            full.record.tree,
            full.specs,
            full.tensors,
            steps,
            classes=how.classes,
            progress=how.folded,
        )
    except _NONSENSE as error:
        raise Damaged(f"a delta up to {chain.ref} makes no sense: {error!r}") from error
    check_form(folded.tree, folded.specs.keys())
    for key in left_out(chain, rank):
        _log.warning(
            "step %s: %s is kept in full checkpoints only, and begins empty; training may go "
            "another way than before", chain.ref, spoken(key.rstrip("/")),
        )  # fmt: skip
    last = chain.links[-1]
    record = replace(
        full.record,
        timeline=last.ref.timeline,
        step=last.ref.step,
        session=last.session,
        tree=folded.tree,
        metrics=metrics,
        tensors=[StoredTensor(spec=spec, xxh3_128="") for spec in folded.specs.values()],
        pieces=[],
        files=[],
    )
    return Proved(record, folded.tensors)


def _steps(
    run: Run,
    links: Sequence[Link],
    rank: int,
    metrics: dict[str, Json],
    progress: Progress | None,
) -> Iterator[Step]:
    """The deltas of each step, read and checked some steps ahead.

    Args:
        metrics: filled with those of the newest step.
    """
    layouts: dict[str, Layout] = {}
    ahead: collections.deque[tuple[Link, list[tuple[Layout, Future[Delta]]], int]] = (
        collections.deque()
    )
    waiting = collections.deque(links)
    ahead_bytes = 0
    with ThreadPoolExecutor(_READERS, "everystep-read") as pool:
        try:
            while waiting or ahead:
                while waiting and (not ahead or ahead_bytes < AHEAD_BYTES):
                    link = waiting.popleft()
                    places = _needed(link, rank, layouts)
                    jobs = [
                        (layout, pool.submit(_read, run, place, layout, progress))
                        for layout, place in places
                    ]
                    nbytes = sum(place.found.nbytes for _, place in places)
                    ahead_bytes += nbytes
                    ahead.append((link, jobs, nbytes))
                link, jobs, nbytes = ahead.popleft()
                ahead_bytes -= nbytes
                parts = [(layout, job.result()) for layout, job in jobs]
                step = Step(link.ref.step, parts, rank)
                metrics.clear()
                metrics |= step.own[1].metrics
                yield step
        finally:
            pool.shutdown(cancel_futures=True)


def _needed(link: Link, rank: int, layouts: dict[str, Layout]) -> list[tuple[Layout, Place]]:
    """The rank's own delta, and those of others where it holds parts only.

    Raises:
        Damaged: other ranks trained there, or a layout is not one.
    """
    found = []
    for place in link.places:
        if place.name not in layouts:
            try:
                layouts[place.name] = unpack_layout(place.scanned.layout)
            except Damaged as error:
                raise Damaged(error.headline(), path=place.name, at=0) from error
        found.append((layouts[place.name], place))
    own = [one for one in found if one[0].rank == rank]
    if len(own) != 1:
        raise Damaged("another number of ranks trained there", step=link.ref.step, rank=rank)
    return own if _is_whole(own[0][0]) else found


def _is_whole(layout: Layout) -> bool:
    """Whether a rank's deltas hold all that it needs."""
    parameters = [one for its in layout.optimizers.values() for one in its]
    return all(one.stop - one.start == one.elements for one in parameters)


def _read(run: Run, place: Place, layout: Layout, progress: Progress | None) -> Delta:
    payload = read(run.backend, place.name, place.found)
    try:
        delta = unpack(payload, layout)
    except Damaged as error:
        at = place.found.payload_offset
        raise Damaged(
            f"the delta makes no sense: {error.headline()}", path=place.name, at=at
        ) from error
    if progress is not None:
        progress(place.found.nbytes)
    return delta


def blamed(chain: Chain, error: EverystepError, excluded: Excluded) -> Excluded:
    """What to leave aside when another way to a step is looked for.

    Args:
        error: why the state could not be read and proved.
        excluded: what is left aside already.
    """
    places = [(place, link) for link in chain.links for place in link.places]
    path = None if error.path is None else str(error.path)
    guilty = [
        place
        for place, _ in places
        if path is not None and path.endswith(place.name) and _lies_in(place, error.at)
    ]
    if path is None and isinstance(error.step, int):
        # a slice is proved at every so many steps: whatever went wrong did so since its last turn
        read = {p.name: p.scanned.layout for p, link in places if link.ref.step <= error.step}
        slices = max((unpack_layout(layout).slices for layout in read.values()), default=1)
        guilty = [p for p, link in places if error.step - slices < link.ref.step <= error.step]
    if not guilty and path is None and error.step is None:
        guilty = [place for place, _ in places]
    if guilty:
        deltas = {(place.name, place.found.offset) for place in guilty}
        return excluded._replace(deltas={*excluded.deltas, *deltas})
    full = (chain.full.ref, chain.full.session)
    return excluded._replace(fulls={*excluded.fulls, full})


def _lies_in(place: Place, at: int | None) -> bool:
    found = place.found
    return at is None or at == 0 or found.offset <= at < found.payload_offset + found.nbytes


def left_out(chain: Chain, rank: int) -> list[str]:
    """Beginnings of keys that the deltas of a chain do not hold."""
    found: dict[str, None] = {}
    for layout in {p.name: p.scanned.layout for link in chain.links for p in link.places}.values():
        its = unpack_layout(layout)
        if its.rank == rank:
            found |= dict.fromkeys(its.left_out)
    return list(found)


def by_name(kinds: Iterable[type[Optimizer]]) -> dict[str, type[Optimizer]]:
    """Classes by their full names, as full checkpoints name them."""
    return {f"{kind.__module__}.{kind.__qualname__}": kind for kind in kinds}
