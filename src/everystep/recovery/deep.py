"""Proof of a whole run: every step is folded from the full checkpoint before it, and compared with
what was recorded of it in training.

Of a step that is stored as deltas that is its fingerprint; of one that has a full checkpoint as
well, all of that: what the deltas before it give must be equal, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from everystep.errors import CannotRestore, Damaged, EverystepError, Missing, ReplicasDiffer
from everystep.recovery.compare import Differences, compare
from everystep.recovery.folded import FoldedStep
from everystep.recovery.reach import How, blamed, read_chain
from everystep.recovery.stream import StoredStep
from everystep.recovery.stretches import Stretch, stretches
from everystep.store.chains import Chain, Chains, Excluded, plan_chains
from everystep.store.run import Listing, Run
from everystep.store.segments import Scanned
from everystep.types import StepRef, spoken

_DAMAGE = (Damaged, Missing, ReplicasDiffer)

Proof = Literal["proved", "differs", "lost", "unfinished"]
"""`differs`: it does not come out as it was in training; `lost`: it cannot be had; `unfinished`:
it is at the end of the log, and some rank has not stored its delta (yet)."""


class Judged(NamedTuple):
    """What is known of a step now."""

    proof: Proof
    why: str | None = None
    """None: proved."""


def steps_to_fold(listing: Listing, segments: Sequence[Scanned]) -> int:
    """How often `prove_run` will tell that a step is done, if nothing is damaged."""
    total = 0
    done: set[object] = set()
    for timeline in listing.timelines:
        for stretch in stretches(plan_chains(listing, segments, timeline)):
            if _key(stretch.chain) not in done:
                done |= _keys(stretch.chain)
                total += len(stretch.chain.links) * stretch.chain.full.world_size
    return total


def prove_run(
    run: Run,
    listing: Listing,
    segments: Sequence[Scanned],
    how: How = How(),  # noqa: B008
) -> dict[StepRef, Judged]:
    """Prove every step of all timelines.

    Memory: the states of all ranks, what they hold alike once.

    Args:
        run: the run.
        listing: of it.
        segments: its log.
        how: `folded` is told of each step, once for each rank.

    Raises:
        StoreError: the store did not answer.
    """
    proving = _Proving(run, listing, segments, how)
    for timeline in sorted(listing.timelines):
        proving.timeline(timeline)
    return dict(sorted(proving.found.items()))


class _Proving:
    def __init__(self, run: Run, listing: Listing, segments: Sequence[Scanned], how: How) -> None:
        self._run, self._listing, self._segments, self._how = run, listing, segments, how
        self._excluded = Excluded()
        self._done: set[object] = set()
        self.found: dict[StepRef, Judged] = {}

    def timeline(self, name: str) -> None:
        """Prove the steps on the line of a timeline that have not been looked at yet."""
        chains = plan_chains(self._listing, self._segments, name)
        recorded = list(chains.refs)
        while not all(self._prove(stretch) for stretch in stretches(chains)):
            chains = plan_chains(self._listing, self._segments, name, self._excluded)
        self._note_gaps(chains)
        for ref in recorded:
            self.found.setdefault(ref, Judged("lost", "what it needs is damaged"))

    def _note_gaps(self, chains: Chains) -> None:
        first = chains.refs[0].step if chains.refs else None
        last = chains.refs[-1].step if chains.refs else 0
        for gap in chains.gaps:
            if first is not None and gap.last < first:
                continue  # the full checkpoint before these deltas is gone, as retention has it
            unfinished = gap.ref.step > last and not gap.unfit
            for step in range(gap.ref.step, gap.last + 1):
                ref = StepRef(gap.ref.timeline, step)
                proof: Proof = "unfinished" if unfinished else "lost"
                self.found.setdefault(ref, Judged(proof, gap.what))

    def _prove(self, stretch: Stretch) -> bool:
        """Fold a stretch. False: something is damaged; it is left aside from now on."""
        chain, proves = stretch
        if _key(chain) in self._done:
            return True
        try:
            folded = self._fold(chain, keep=proves is not None)
        except _DAMAGE as error:
            self._blame(chain, error)
            return False
        except CannotRestore as error:  # the full checkpoint has been read by then
            self._note_proved(chain.full.ref)
            for link in chain.links:
                self.found[link.ref] = Judged("lost", error.headline())
            self._done |= _keys(chain)
            return True
        for ref in (chain.full.ref, *(link.ref for link in chain.links)):
            self._note_proved(ref)
        self._done |= _keys(chain)
        if proves is not None and folded is not None:
            try:
                difference = _first(compare(folded, StoredStep(self._run, proves)))
            except _DAMAGE:
                return True  # it is looked at again where the next stretch begins with it
            if difference is not None:
                what = f"the full checkpoint is not what the deltas before it give: {difference}"
                self.found[proves.ref] = Judged("differs", what)
        return True

    def _note_proved(self, ref: StepRef) -> None:
        if ref not in self.found or self.found[ref].proof != "differs":
            self.found[ref] = Judged("proved")

    def _fold(self, chain: Chain, keep: bool) -> FoldedStep | None:
        if keep:
            return FoldedStep(self._run, chain, how=self._how)
        for rank in range(chain.full.world_size):
            read_chain(self._run, chain, rank, self._how)
        return None

    def _blame(self, chain: Chain, error: EverystepError) -> None:
        before, self._excluded = self._excluded, blamed(chain, error, self._excluded)
        deltas = set(self._excluded.deltas) - set(before.deltas)
        refs = [
            link.ref
            for link in chain.links
            if any((place.name, place.found.offset) in deltas for place in link.places)
        ]
        differs = error.path is None and error.step is not None
        why = error.message if differs else error.headline()
        for ref in refs[:1]:
            self.found[ref] = Judged("differs" if differs else "lost", why)
        if not refs:  # the full checkpoint; with a delta of its own it may still be had
            self._done.discard(_key(chain))


def _key(chain: Chain) -> object:
    return _key_at(chain, len(chain.links))


def _keys(chain: Chain) -> set[object]:
    """Of the chain, and of all that it begins with."""
    return {_key_at(chain, length) for length in range(len(chain.links) + 1)}


def _key_at(chain: Chain, length: int) -> object:
    full = chain.full.ref, chain.full.session
    if not length:
        return full
    place = chain.links[length - 1].places[0]
    return *full, place.name, place.found.offset


def _first(found: Differences) -> str | None:
    """The first of the differences, by name; None: there is none."""
    keys = [one.key for one in found.tensors] + [one.key for one in found.forms]
    names = [spoken(key) for key in (*keys, *found.only_a, *found.only_b)]
    names += [value.place for value in found.values]
    if not names:
        return None
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]
