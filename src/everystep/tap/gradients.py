"""Reduced gradients of each step, by parameter, or what is lacking of them.

The trainer tells, step by step, which buckets its backward reduced; the tap gives reduced buffers
by number. A step's buckets are found by their sizes, their order and their place:

- Where the trainer tells the number of its last collective too (`through`; gloo's numbers are on
  the wire), a step's buckets lie between that of the step before and its own.
- Where it does not, they lie behind those of the step before.

Several runs of all-reduces may fit: a metric may be as large as a bucket. So what is given is a
candidate, which the caller checks by what else it knows of the gradient, and calls `wrong`. A
buffer of which a byte is missing is in no candidate.

What DDP reduces is what it leaves in `p.grad`: each rank divides before (gloo), so that the sum is
the mean. With a communication hook it is something else, and no candidate will pass.

The caller's loop, for each step in order:

    gradients.expect(step, buckets, through=number)
    while (found := gradients.take(step)) is None:
        gradients.feed(frames)            # or flush(), where none come
    if not isinstance(found, Lacking) and not agrees(found):
        gradients.wrong(step)             # and take it again

and after `Lacking`, when a full state of a later step is there, `gradients.forget(that_step)`.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from msgspec import Struct

from everystep.errors import UsageError
from everystep.tap.buckets import DTYPES, Bucket, ByParameter, Ranges, missing, parameters
from everystep.tap.kept import Kept
from everystep.tap.matching import Run, runs
from everystep.tap.pieces import Frames, Reduced
from everystep.tap.reduced import Reader

__all__ = ["MOST_CANDIDATES", "Bucket", "Gradients", "Lacking"]

MOST_CANDIDATES = 8
"""Of one step: after so many wrong ones it is lacking."""

_BEHIND = 8  # all-reduces seen beyond a step: what is not there by then does not come
_FARTHEST = 1024  # numbers: no step is looked for further back
_MOST_RUNS = 256  # that are looked at
_SAME_STEPS = 3  # with the same buckets: they are taken to stay, and to be all that is reduced
_MOST_STEPS = 4096  # whose records wait


class Lacking(Struct, frozen=True):
    """The gradients of this step cannot be had: a full state must be asked for."""

    step: int
    what: str
    """In words."""
    ranges: dict[str, Ranges]
    """Elements [start, stop) that are missing, by parameter."""
    is_wrong: bool = False
    """Everything was there, at the likeliest place, but was called wrong."""


class _Step:
    """What the trainer told of a step, and what was found."""

    def __init__(self, number: int, newest: int) -> None:
        self.number, self.newest = number, newest  # `newest`: number seen when it was told
        self.backwards: list[tuple[Bucket, ...]] = []
        self.through: int | None = None
        self.rejected: set[Run] = set()
        self.run: Run | None = None  # what was given
        self.lacking: Lacking | None = None

    def needed(self) -> list[tuple[Bucket, ...]]:
        """The backwards of which a later one does not reduce every parameter again."""
        needed: list[tuple[Bucket, ...]] = []
        later: set[str] = set()
        for buckets in reversed(self.backwards):
            names = {name for bucket in buckets for name in bucket.names}
            if names - later:
                needed.insert(0, buckets)
                later |= names
        return needed

    def buckets(self) -> list[Bucket]:
        """Of a run."""
        return [bucket for buckets in self.needed() for bucket in buckets]

    def sizes(self) -> set[int]:
        """Of all that it reduces, in bytes."""
        return {bucket.nbytes for buckets in self.backwards for bucket in buckets}


class Gradients:
    """Reduced gradients of each step, by parameter, or what is lacking. Not for several threads."""

    def __init__(self, reader: Reader, *, budget_bytes: int = 8 << 30) -> None:
        """Nothing seen yet.

        Args:
            reader: used by nobody else. One of gloo is told the sizes of the buckets when they are
                certain; until then it should be told none. It needs `hosts` where every buffer
                divides evenly among the ranks, as those of many models do.
            budget_bytes: of buffers that are kept for steps to come, and for the last step taken;
                beyond, the oldest are dropped and counted.

        Raises:
            UsageError: a negative budget.
        """
        if budget_bytes < 0:
            raise UsageError("a budget is not negative")
        self._reader, self._kept = reader, Kept(budget_bytes)
        self._steps: OrderedDict[int, _Step] = OrderedDict()
        self._told_last: _Step | None = None
        self._last: Run | None = None  # of the last step that was right
        self._distance: int | None = None  # from its last bucket to its `through`,
        self._stride: int | None = None  # or from the one before it
        self._sizes: set[int] = set()
        self._same_steps = 0

    # ---------------------------------------------------------------- what comes

    def feed(self, frames: Frames) -> None:
        """Any captured frames, in the order of the capture."""
        self._keep(self._reader.feed(frames))

    def flush(self) -> None:
        """To be called when no frames have come for a while (0.1 s): what was acknowledged and is
        not there was lost by the mirror."""
        self._keep(self._reader.flush())

    def end(self) -> None:
        """No frames will come any more."""
        self._keep(self._reader.end())

    def tell(self, buckets: Sequence[Bucket]) -> None:
        """From now on every backward reduces these buckets, and nothing else is looked for. Not to
        be called before DDP has rebuilt its buckets, which it does in the forward after its first
        backward (with static_graph, the second; with find_unused_parameters, never).

        It is concluded from three steps alike otherwise; until then a capture that began in the
        middle of the run, or that loses packets, gives less than it could.
        """
        self._sizes = {bucket.nbytes for bucket in buckets}
        self._same_steps, self._told_last = _SAME_STEPS, None
        self._reader.tell(self._sizes)

    @property
    def are_buckets_certain(self) -> bool:
        """Whether they are told, or have come to stay."""
        return self._same_steps >= _SAME_STEPS

    def expect(self, step: int, buckets: Sequence[Bucket], *, through: int | None = None) -> None:
        """The trainer's record of `step`; where several of its backwards reduced (accumulation
        without no_sync, several models), once for each of them, in order.

        Args:
            step: greater than those that were taken.
            buckets: in the order of launch: `engine.bucket_layout.layout`.
            through: number of the last collective that the process group had begun when the
                optimizer stepped: `engine.bucket_layout.last_collective`. None: not known (NCCL).

        Raises:
            UsageError: no buckets, or a dtype that is not known.
        """
        if not buckets or any(bucket.dtype not in DTYPES for bucket in buckets):
            raise UsageError(f"at least one bucket, of {', '.join(DTYPES)}")
        found = self._steps.get(step)
        if found is None:
            if self._told_last is not None:  # which may have been forgotten
                self._learn_sizes(self._told_last)
            found = self._steps[step] = self._told_last = _Step(step, self._kept.newest)
        found.backwards.append(tuple(buckets))
        found.run = found.lacking = None
        while len(self._steps) > _MOST_STEPS:
            self._steps.popitem(last=False)
        if through is not None:
            found.through = through
            self._keep(self._reader.settle(through))

    # ---------------------------------------------------------------- what is had

    def take(self, step: int, *, is_over: bool = False) -> ByParameter | Lacking | None:
        """The likeliest candidate that has not been called wrong; None: not all there yet.

        The steps before it are let go; what was taken of them counts as right.

        Args:
            step: that was told by `expect`.
            is_over: the caller waits no longer for what has not come.

        Returns: by parameter, flat and read-only, in the dtype of its bucket (`buckets.DTYPES`). A
            parameter that was not used is zero here, whatever DDP makes of its `grad`.

        Raises:
            UsageError: the step was not told.
        """
        found = self._begin(step)
        if found.lacking is not None:
            return found.lacking
        is_over = is_over or self._is_over(found)
        if is_over and found.through is not None:
            self._keep(self._reader.buffers.give_up(found.through))
        if found.run is None or not self._is_whole(found, found.run):
            found.run = next(self._complete(found, is_over=is_over), None)
        if found.run is not None:
            return self._arrays(found, found.run)
        if is_over or len(found.rejected) >= MOST_CANDIDATES:
            found.lacking = self._lacking(found)
        return found.lacking

    def candidates(self, step: int) -> list[ByParameter]:
        """All that is there of a step by now: at most 8, the likeliest first, without copies.

        A caller that takes another than the first calls `wrong` once for each before it.

        Raises:
            UsageError: the step was not told.
        """
        found = self._begin(step)
        return [self._arrays(found, run) for run in self._complete(found, is_over=True)]

    def wrong(self, step: int) -> None:
        """The first candidate, or what was taken last, is not this step's gradient.

        Raises:
            UsageError: the step was not told.
        """
        found = self._begin(step)
        run = found.run or next(self._complete(found, is_over=True), None)
        if run is not None:
            found.rejected.add(run)
        found.run = None

    def forget(self, until_step: int) -> None:
        """A full state of this step is there: drop it and all before, and align anew."""
        for number in [number for number in self._steps if number <= until_step]:
            self._end(self._steps.pop(number))
        self._distance = self._stride = self._last = None
        if self._reader.buffers.is_doubted:
            self._reader.buffers.give_up()  # what came before has other numbers
            self._reader.buffers.is_doubted = False

    def counts(self) -> dict[str, int]:
        """Buffers that are `waiting` for a step, `waiting_bytes`, and those `dropped` for want of
        room."""
        return self._kept.counts()

    # ---------------------------------------------------------------- steps

    def _keep(self, given: list[Reduced]) -> None:
        self._kept.put(given)
        self._kept.withdraw(self._reader.buffers.withdrawn())

    def _begin(self, step: int) -> _Step:
        """The step, with those before it let go."""
        found = self._steps.get(step)
        if found is None:
            raise UsageError(f"nothing was told of step {step}")
        for number in [number for number in self._steps if number < step]:
            before = self._steps.pop(number)
            if before.run is not None:
                self._learn_place(before, before.run)
            self._end(before)
        return found

    def _end(self, step: _Step) -> None:
        self._kept.release(step.run[-1] if step.run else -1)
        self._kept.release(-1 if step.through is None else step.through)

    def _learn_place(self, step: _Step, run: Run) -> None:
        """It was right: the next one's buckets are likely to lie at the same place."""
        if step.through is not None:
            self._distance = step.through - run[-1]
        elif self._last is not None:
            self._stride = run[-1] - self._last[-1]
        self._last = run

    def _learn_sizes(self, step: _Step) -> None:
        """Whether the buckets have come to stay."""
        sizes = step.sizes()
        self._same_steps = self._same_steps + 1 if sizes == self._sizes else 1
        if sizes != self._sizes:
            self._sizes = sizes
            self._reader.tell(None)
        elif self._same_steps == _SAME_STEPS:
            self._reader.tell(sizes)

    def _is_over(self, step: _Step) -> bool:
        """Whether what has not come will not."""
        if self._reader.buffers.is_doubted:
            return True
        return step.through is not None and self._kept.beyond(step.through) >= _BEHIND

    # ---------------------------------------------------------------- candidates

    def _size(self, number: int) -> int | None:
        buffer = self._kept.get(number)
        if buffer is not None and buffer.nbytes is not None:
            return buffer.nbytes
        return self._reader.buffers.sizes.get(number)

    def _place(self, step: _Step) -> int | None:
        """Number of the last bucket, if it lies where the step before lets it be expected."""
        if step.through is not None:
            return None if self._distance is None else step.through - self._distance
        if self._last is None or self._stride is None:
            return None
        return self._last[-1] + self._stride

    def _runs(self, step: _Step) -> list[Run]:
        """All-reduces that may be it, whether or not their bytes are there; the likeliest first."""
        high = step.through
        if high is None:
            high = max(self._kept.newest, *self._reader.buffers.sizes, -1)
        low = max(self._kept.floor, high - _FARTHEST)
        parts = [[bucket.nbytes for bucket in buckets] for buckets in step.needed()]
        found = [*itertools.islice(self._joined(parts, low, high), _MOST_RUNS)]
        if step.through is None:
            found.sort(key=lambda run: self._lateness(step, run))
        place = self._place(step)
        return [*sorted(found, key=lambda run: run[-1] != place)]

    def _joined(self, parts: list[list[int]], low: int, high: int) -> Iterator[Run]:
        """Runs of the sizes in `parts`, one behind the other; the last first."""
        if not parts:
            yield ()
            return
        for run in runs(parts[-1], low, high, self._size):
            for before in self._joined(parts[:-1], low, run[0] - 1):
                yield before + run

    def _lateness(self, step: _Step, run: Run) -> tuple[bool, int]:
        """Where no number is told: as they come, behind the step before. At first: what was there
        when the trainer told of the step, the newest first, and then what came later."""
        if self._last is not None or run[-1] > step.newest:
            return True, run[-1]
        return False, -run[-1]

    def _complete(self, step: _Step, *, is_over: bool) -> Iterator[Run]:
        """Those of which every byte is there, if it is time to look at them."""
        found = [run for run in self._runs(step) if run not in step.rejected]
        complete = [run for run in found if self._is_whole(step, run)]
        if not is_over:
            skipped = len(step.backwards) - len(step.needed())
            is_awaited = found and found[0] not in complete and found[0][-1] == self._place(step)
            if is_awaited or len(complete) + len(step.rejected) <= skipped:
                return
        yield from complete[: MOST_CANDIDATES - len(step.rejected)]

    def _is_whole(self, step: _Step, run: Run) -> bool:
        for number, bucket in zip(run, step.buckets(), strict=True):
            buffer = self._kept.get(number)
            if buffer is None or not buffer.is_whole(bucket.nbytes):
                return False
        return True

    def _arrays(self, step: _Step, run: Run) -> ByParameter:
        found: ByParameter = {}
        for number, bucket in zip(run, step.buckets(), strict=True):
            buffer = self._kept.get(number)
            if buffer is not None and buffer.data is not None:
                found |= parameters(bucket, buffer.data)
        return found

    def _lacking(self, step: _Step) -> Lacking:
        """Why there is no candidate, and what is missing of the likeliest."""
        if self._reader.buffers.is_doubted:
            return Lacking(step.number, "so much was lost that all-reduces cannot be counted", {})
        unread = self._reader.why_nothing()
        if unread is not None:
            return Lacking(step.number, unread, self._all(step))
        found = self._runs(step)
        if step.rejected and (not found or found[0] in step.rejected):
            what = f"none of {len(step.rejected)} candidates is it"
            return Lacking(step.number, what, {}, is_wrong=True)
        ranges: dict[str, Ranges] = {}
        is_dropped = False
        for number, bucket in zip(found[0] if found else (), step.buckets(), strict=bool(found)):
            buffer = self._kept.get(number)
            lost = [(0, bucket.nbytes)]
            if buffer is not None and buffer.nbytes == bucket.nbytes:
                is_dropped |= buffer.data is None
                lost = lost if buffer.data is None else buffer.missing
            ranges |= missing(bucket, lost)
        if not found:
            return Lacking(step.number, "its all-reduces were not seen", self._all(step))
        what = "let go for want of room" if is_dropped else "not seen"
        return Lacking(step.number, f"{len(ranges)} of its parameters were {what}", ranges)

    def _all(self, step: _Step) -> dict[str, Ranges]:
        ranges: dict[str, Ranges] = {}
        for bucket in step.buckets():
            ranges |= missing(bucket, [(0, bucket.nbytes)])
        return ranges
