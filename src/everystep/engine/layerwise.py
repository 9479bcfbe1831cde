"""Copies of gradients that do not stay as they are, begun while backward computes the others."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import torch
from torch import nn

from everystep.deltas.delta import Parameter
from everystep.engine.device import copy_memory
from everystep.engine.gradients import Source
from everystep.engine.reduced import reduced_of
from everystep.engine.taken import Taken
from everystep.state import raw
from everystep.state.uncompiled import uncompiled

LEAST_BYTES = 256 << 10
"""Of a gradient that is copied during backward; smaller ones are copied many in one call."""

CHUNK_BYTES = 8 << 20
"""Copied at a time. What is not begun when the optimizer's step comes is copied then, by all
cores."""

_SEEN_FIRST = 3
"""Updates whose gradients did not stay, before any is copied early."""

_COMPARED = 3
"""So many updates' early copies are compared whole."""

_PATIENCE = 3
"""After so many updates in a row of whose early copies less than half could be used, no more are
made."""

_LOOKED_AT = 64
"""Elements of a gradient, afterwards."""

WRITTEN = "gradients change between backward and the optimizer's step, as by clipping or unscaling"
UNSEEN = "gradients are written behind torch's back, through .data or by a collective of your own"
NONE_CAME = "backward did not hand over as often as before"

Buffers = dict[int, torch.Tensor]
"""By the number of the parameter: one-dimensional, as long as the gradient. Only the part that this
rank records is ever written; the operating system gives no memory for the rest."""


class Copies:
    """Copies of one optimizer's gradients, in memory that is used again and again.

    Args:
        early: copies during backward what does not stay as it is; None: nobody does.
    """

    def __init__(self, early: Early | None) -> None:
        self.early = early
        self._pieces: Sequence[Parameter] = ()
        self._shelf: list[Buffers] = []
        """At most one: a record is mostly handed over before the next backward."""
        self._buffers: Buffers = {}
        self._guard = threading.Lock()
        """Of the two: buckets arrive in a thread of their own, and so do records that are done."""
        self._told = False
        if early is not None:
            early.target = self._target

    def _target(self, number: int, gradient: torch.Tensor) -> torch.Tensor | None:
        """Where this rank's piece of a gradient is to be copied; None: it has none."""
        if number >= len(self._pieces):
            return None
        piece = self._pieces[number]
        if piece.start == piece.stop:
            return None
        with self._guard:
            if not self._buffers and self._shelf:
                self._buffers = self._shelf.pop()
            buffer = self._buffers.get(number)
            if buffer is None or buffer.dtype != gradient.dtype or len(buffer) != piece.elements:
                buffer = torch.empty(piece.elements, dtype=gradient.dtype)
                self._buffers[number] = buffer
        return buffer[piece.start : piece.stop]

    def take(self, taken: Taken, pieces: Sequence[Parameter]) -> None:
        """See to it that what an optimizer is about to consume can be read when training goes on.

        Args:
            pieces: what this rank records of each gradient.
        """
        kept: set[int] = set()
        if self.early is not None:
            self.early.settle()
            kept = self.early.confirmed(taken, pieces) if pieces is self._pieces else kept
            self.early.next(lasting=taken.lasting)
        self._pieces = pieces
        if not taken.lasting:
            self._copy(taken, kept)

    def _copy(self, taken: Taken, kept: set[int]) -> None:
        copied: list[torch.Tensor | None] = []
        sources, targets = [], []
        for number, gradient in enumerate(taken.gradients):
            if gradient is None:
                copied.append(None)
            elif not is_plain(gradient):
                copied.append(gradient.detach().clone())
            elif (target := self._target(number, gradient)) is None:
                copied.append(torch.empty(gradient.shape, dtype=gradient.dtype))  # not read
            else:
                copied.append(self._buffers[number])
                if number not in kept:
                    sources.append(piece_of(gradient, self._pieces[number]))
                    targets.append(target)
        if targets:
            torch._foreach_copy_(targets, sources)
        buffers, self._buffers = self._buffers, {}
        taken.kept, taken.gradients = copied, []
        taken.returned = lambda: self._put_back(buffers)

    def _put_back(self, buffers: Buffers) -> None:
        with self._guard:
            if not self._shelf and not self._buffers:  # else others have taken their place
                self._shelf.append(buffers)

    def told(self) -> str | None:
        """Why nothing is copied early any more, in words, once."""
        if self.early is None or self._told:
            return None
        self._told = self.early.given_up is not None
        return self.early.given_up

    def close(self) -> None:
        """Take hooks away, and let go of everything."""
        if self.early is not None:
            self.early.close()
        self._shelf, self._buffers, self._pieces = [], {}, ()


def copies_for(sources: Iterable[Source], models: Sequence[nn.Module] | None) -> dict[str, Copies]:
    """Copies of the gradients of each optimizer, by its name.

    Args:
        models: where DDP modules are looked for; None: nothing is copied during backward.
    """
    return {
        source.name: Copies(None if models is None else Early(source.parameters, models))
        for source in sources
    }


def close_all(copies: dict[str, Copies]) -> None:
    """Take hooks away, and forget them all."""
    while copies:
        copies.popitem()[1].close()


def why_not_early(copies: Iterable[Copies]) -> str | None:
    """Why one of them copies nothing early any more, in words; of each this is told once."""
    found = [one.told() for one in copies]
    return next((why for why in found if why is not None), None)


class _Chunk(NamedTuple):
    """Part of a copy."""

    start: int
    """From this element of this rank's piece …"""
    stop: int
    """… to this one, exclusive."""
    done: Future[None]
    """Cancelled where the optimizer's step came first."""


class _Copy(NamedTuple):
    """A copy of a gradient that was begun during backward."""

    version: int
    """Of the gradient then."""
    address: int
    chunks: list[_Chunk]


class Early:
    """Begins copies during backward, and tells afterwards which are what the optimizer consumes.

    A gradient is copied by a thread beside, at the moment at which nothing more is added to it:
    when it has been added to as often as between the last two updates (with accumulation, several
    times); or, under DDP, when the all-reduce of its bucket has ended.

    Args:
        parameters: of an optimizer.
        models: where DDP modules are looked for.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], models: Sequence[nn.Module]) -> None:
        self.given_up: str | None = None
        """Why no gradients are copied early any more."""
        self.used_bytes = 0
        """Of early copies that were what the optimizer consumed."""
        self.target: Callable[[int, torch.Tensor], torch.Tensor | None] = lambda number, its: None
        self._parameters = list(parameters)
        large = [n for n, p in enumerate(parameters) if p.nbytes >= LEAST_BYTES]
        self._numbers = {id(parameters[n]): n for n in large}
        self._added = dict.fromkeys(large, 0)
        self._expected = dict(self._added)
        self._on, self._seen, self._useless, self._compared = False, 0, 0, 0
        self._copies: dict[int, _Copy] = {}
        self._running: list[Future[None]] = []
        self._touched: dict[int, int] = {}
        self._arrived: dict[int, list[_Chunk]] = {}
        self._thread = ThreadPoolExecutor(1, "everystep-early")
        self._reduced, self.given_up = reduced_of(models)
        self._handles = self._hooks()

    def _hooks(self) -> list[Any]:
        if self.given_up is not None:
            return []
        for one in self._reduced:
            one.listeners.append(self)
        theirs = {id(p) for one in self._reduced for p in one.parameters}
        handles = []
        for number in self._numbers.values():
            parameter = self._parameters[number]
            if type(parameter) in (torch.Tensor, nn.Parameter) and parameter.requires_grad:
                hook = self._toucher(number) if id(parameter) in theirs else self._adder(number)
                handles.append(parameter.register_post_accumulate_grad_hook(uncompiled(hook)))  # type: ignore[no-untyped-call]
        return handles

    # ------------------------------------------------------------ during backward

    def _adder(self, number: int) -> Callable[[torch.Tensor], None]:
        def added(parameter: torch.Tensor) -> None:
            self._added[number] += 1
            gradient = parameter.grad
            last = self._added[number] == self._expected[number]
            if self._on and last and gradient is not None and is_plain(gradient):
                chunks = self._begin(number, gradient.detach().view(-1))
                self._copies[number] = _Copy(gradient._version, gradient.data_ptr(), chunks)

        return added

    def _toucher(self, number: int) -> Callable[[torch.Tensor], None]:
        def touched(_: torch.Tensor) -> None:
            self._touched[number] = int(torch._C._current_graph_task_id())

        return touched

    def _begin(self, number: int, flat: torch.Tensor) -> list[_Chunk]:
        target = self.target(number, flat)
        if target is None:
            return []
        first, step = target.storage_offset(), CHUNK_BYTES // target.element_size()
        chunks = []
        for start in range(0, len(target), step):
            stop = min(start + step, len(target))
            source = flat[first + start : first + stop]
            done = self._thread.submit(_copy, source, target[start:stop])
            chunks.append(_Chunk(start, stop, done))
            self._running.append(done)
        return chunks

    def arrived(self, parameter: torch.Tensor, gradient: torch.Tensor, task: int) -> None:
        """See `Listener.arrived`."""
        number = self._numbers.get(id(parameter))
        if not self._on or number is None or self._touched.get(number) != task:
            return  # of one that this rank has not used, DDP may leave p.grad as it is
        with contextlib.suppress(RuntimeError):  # it has just been closed
            self._arrived[number] = self._begin(number, gradient)

    def finished(self, task: int) -> None:
        """See `Listener.finished`."""
        arrived, self._arrived = self._arrived, {}
        for number, chunks in arrived.items():
            gradient = self._parameters[number].grad
            if gradient is not None:
                self._copies[number] = _Copy(gradient._version, gradient.data_ptr(), chunks)

    # ------------------------------------------------------------ at the update

    def settle(self) -> None:
        """Return when nothing is being copied: what has not been begun is not."""
        running, self._running = self._running, []
        wait([done for done in running if not done.cancel()])

    def confirmed(self, taken: Taken, pieces: Sequence[Parameter]) -> set[int]:
        """The numbers of the parameters whose early copies are what the optimizer consumes.

        A gradient in another place, or of another version, has changed. What is written behind
        torch's back leaves no trace but the values: the first copies are compared whole, and later
        ones in a few places.
        """
        pairs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        sources, targets = [], []
        copied = used = 0
        for number, copy in self._copies.items():
            gradient = taken.gradients[number]
            target = None if gradient is None else self.target(number, gradient)
            if target is None or gradient is None:
                continue
            copied += target.nbytes
            here = (gradient._version, gradient.data_ptr())
            if not is_plain(gradient) or here != (copy.version, copy.address):
                continue
            used += target.nbytes
            source = piece_of(gradient, pieces[number])
            pairs[number] = source, target
            for start, stop, done in copy.chunks:
                if done.cancelled():
                    sources.append(source[start:stop])
                    targets.append(target[start:stop])
        if targets:
            torch._foreach_copy_(targets, sources)
        if not all(self._same(*pair) for pair in pairs.values()):
            self._give_up(UNSEEN)
            return set()
        if self._on and not taken.lasting:
            self._judge(copied, used)
        self.used_bytes += used - sum(target.nbytes for target in targets)
        return set(pairs)

    def _same(self, gradient: torch.Tensor, copy: torch.Tensor) -> bool:
        apart = 1 if self._compared < _COMPARED else max(1, len(copy) // _LOOKED_AT)
        one, other = raw.plain_bits(gradient[::apart]), raw.plain_bits(copy[::apart])
        return torch.equal(one, other)

    def _judge(self, copied: int, used: int) -> None:
        self._compared += used > 0
        useless = 2 * used <= copied
        self._useless = self._useless + 1 if useless else 0
        if self._useless == _PATIENCE:
            self._give_up(WRITTEN if copied else NONE_CAME)

    def next(self, *, lasting: bool) -> None:
        """Another backward begins.

        Args:
            lasting: the gradients of the last one stay as they are: no copies are needed.
        """
        self._copies = {}
        self._seen = 0 if lasting else self._seen + 1
        self._on = self._seen >= _SEEN_FIRST and self.given_up is None
        self._expected, self._added = self._added, dict.fromkeys(self._added, 0)

    def _give_up(self, why: str) -> None:
        self.given_up = why
        self._remove()

    def _remove(self) -> None:
        self._on = False
        for one in self._reduced:
            if self in one.listeners:
                one.listeners.remove(self)
        while self._handles:
            self._handles.pop().remove()

    def close(self) -> None:
        """Take the hooks away."""
        self._remove()
        self._thread.shutdown()
        self._copies, self._arrived, self._reduced, self._parameters = {}, {}, [], []
        self.target = lambda number, its: None  # nothing goes in a circle


def is_plain(gradient: torch.Tensor) -> bool:
    """Whether its bytes lie in order, as they are."""
    return (
        type(gradient) is torch.Tensor
        and gradient.layout is torch.strided
        and gradient.is_contiguous()
        and not (gradient.is_conj() or gradient.is_neg())
    )


def piece_of(gradient: torch.Tensor, piece: Parameter) -> torch.Tensor:
    """A rank's piece, one-dimensional."""
    return gradient.detach().view(-1)[piece.start : piece.stop]


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """Past the cache, without the interpreter's lock."""
    copy_memory(target.data_ptr(), source.data_ptr(), source.nbytes)
