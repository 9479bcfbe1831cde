"""Compressed gradients in training: under DistributedDataParallel, or in one process.

When: at the end of a backward pass, before the user can clip or unscale, as DDP does. With
gradient accumulation, wrap every backward but the last in `no_sync()`: the sum is then compressed
once. A gradient scaler's scale is part of the gradient, and so of the residual.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from everystep.deltas import selection
from everystep.deltas.compressors import Compressor
from everystep.deltas.exchange import Exchange, Merged, Segment, start
from everystep.deltas.known import Known, known_of
from everystep.deltas.residuals import Residuals
from everystep.errors import LayoutMismatch, Unsupported, UsageError
from everystep.state.names import names_of
from everystep.state.uncompiled import uncompiled

_hooks: weakref.WeakSet[CompressionHook] = weakref.WeakSet()


def compress(model: nn.Module, compressor: Compressor) -> CompressionHook:
    """Compress a model's gradients from the next backward pass on.

    With DDP this is its communication hook (`register_comm_hook`): `p.grad` becomes the mean of
    what the ranks sent, the same bits on every rank. Without DDP `p.grad` becomes what a single
    rank would send.

    Without error feedback nothing of a gradient but what was sent is ever applied. A parameter
    that no rank used in a pass keeps its gradient, and what its residual sent is lost. Without
    DDP, a parameter that is frozen now is not compressed when it is trained later.

    Args:
        model: wrapped by DDP, or not; `torch.compile` around either is looked through.
        compressor: `TopK`, `RandomK`, `Threshold`, `Quantize8` or `SignScale`; the same on all
            ranks.

    Returns:
        The hook: hand it to the checkpointer, `extras={"compressor": hook}`, for the residual of
        error feedback and the count of steps.

    Raises:
        UsageError: not a compressor; no trainable parameter; or a DDP module somewhere inside.
        Unsupported: sharded parameters, or a dtype that has no magnitude.
    """
    if not isinstance(compressor, Compressor):
        raise UsageError(f"compress(): {compressor!r} is not a compressor")
    bare: nn.Module = model
    while isinstance(getattr(bare, "_orig_mod", None), nn.Module):
        bare = bare._orig_mod  # type: ignore[assignment]  # a Module, as just seen
    ddp = bare if isinstance(bare, DistributedDataParallel) else None
    inside = [name for name, m in bare.named_modules() if isinstance(m, DistributedDataParallel)]
    if ddp is None and inside:
        raise UsageError(
            f"compress(): {inside[0]} inside the model is a DistributedDataParallel",
            hint="hand over that module",
        )
    hook = CompressionHook(_parameters(bare), compressor, ddp)
    _hooks.add(hook)
    return hook


def known_now() -> dict[nn.Parameter, Known]:
    """What all hooks of this process know of their last backward pass, and forget it: see
    `CompressionHook.known`."""
    found: dict[nn.Parameter, Known] = {}
    for hook in list(_hooks):
        found |= hook.known()
    return found


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """All of them, each once: their numbers must not depend on what is frozen now."""
    found: dict[str, nn.Parameter] = {}
    seen: set[int] = set()
    for name, parameter in names_of(model, 1).parameters.items():
        if id(parameter) in seen:
            continue
        seen.add(id(parameter))
        found[name] = parameter  # type: ignore[assignment]  # `names` says Tensor
        if not parameter.requires_grad:
            continue
        if isinstance(parameter, DTensor):
            raise Unsupported(
                f"{name} is sharded", hint="compress gradients of a model that is not, or of DDP"
            )
        selection.check_dtype(parameter.dtype)
    if not any(parameter.requires_grad for parameter in found.values()):
        raise UsageError("compress(): no parameter of the model requires a gradient")
    return found


class CompressionHook:
    """Compression at work on one model; made by `compress`."""

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        compressor: Compressor,
        ddp: DistributedDataParallel | None,
    ) -> None:
        """Begin.

        Args:
            parameters: all of the model, by FQN.
            ddp: the module that exchanges their gradients; None: nobody does.
        """
        self._options = compressor
        self._names = list(parameters)
        self._parameters = list(parameters.values())
        self._number = {id(p): number for number, p in enumerate(self._parameters)}
        self._residuals = Residuals()
        self._ddp = ddp
        self._steps = 0
        self._paused = False
        self._queued_in = -1
        self._touched: dict[int, int] = {}
        """Parameters that a pass has added to, and the number of the latest one."""
        self._flights: list[tuple[Exchange, Future[torch.Tensor], torch.Tensor]] = []
        self._layouts: list[tuple[list[Segment], list[torch.Tensor]]] = []
        self._merged: list[tuple[Merged, list[Segment], list[torch.Tensor]]] = []
        self._known: dict[nn.Parameter, Known] = {}
        # DDP insists that all parameters are used unless it is told otherwise
        self._some_unused = ddp is not None and (ddp.find_unused_parameters or ddp.static_graph)
        if ddp is None or self._some_unused:
            for number, parameter in enumerate(self._parameters):
                if parameter.requires_grad:
                    touched = uncompiled(self._toucher(number))
                    parameter.register_post_accumulate_grad_hook(touched)  # type: ignore[no-untyped-call]  # torch has no types here
        if ddp is not None:
            # torch reads annotations as objects, and here they are strings
            ddp.register_comm_hook(self, uncompiled(lambda state, bucket: state.on_bucket(bucket)))

    @property
    def kept_in_fulls(self) -> tuple[str, ...]:
        """Entries of the state that deltas leave out: they are as large as the model and change
        everywhere. A restore between two full checkpoints begins without them."""
        return ("residuals",) if self._options.error_feedback else ()

    def known(self) -> dict[nn.Parameter, Known]:
        """What the last backward pass left in `p.grad`, by parameter, and forget it.

        Whatever is not known for sure is left out: all of a dense compressor's gradients, and
        with unused parameters those that this rank did not use. The tensors are the caller's:
        no later step writes to them. What is not taken is dropped at the next backward pass.
        """
        known, self._known = self._known, {}
        return known

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, a backward pass only adds to `p.grad`; with DDP, its own `no_sync`. The next one
        outside compresses the sum."""
        if self._ddp is not None:
            return self._ddp.no_sync()
        return self._pause()

    def state_dict(self) -> dict[str, Any]:
        """The residuals of this rank by FQN (live tensors, of the shape and dtype of the
        gradients), and how many times gradients have been compressed."""
        residuals = {self._names[n]: its for n, its in sorted(self._residuals.items())}
        return {"compressor": repr(self._options), "steps": self._steps, "residuals": residuals}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over copies of what `state_dict` gave.

        Raises:
            LayoutMismatch: it is of another compressor, or of another model.
        """
        if state["compressor"] != repr(self._options):
            raise LayoutMismatch(
                "the state is of another compressor",
                expected=repr(self._options),
                found=state["compressor"],
            )
        numbers = {name: number for number, name in enumerate(self._names)}
        found = {}
        for name, residual in state["residuals"].items():
            number = numbers.get(name)
            if number is None:
                raise LayoutMismatch(f"a residual of {name}, which is no parameter here")
            here = self._parameters[number]
            if (residual.shape, residual.dtype) != (here.shape, here.dtype):
                raise LayoutMismatch(
                    f"the residual of {name} has another form",
                    expected=f"{here.dtype} {tuple(here.shape)}",
                    found=f"{residual.dtype} {tuple(residual.shape)}",
                )
            found[number] = residual.detach().to(here.device, copy=True)
        self._residuals.replace(found)
        self._steps = int(state["steps"])

    # ------------------------------------------------------------ under DDP

    def on_bucket(self, bucket: Any) -> Future[torch.Tensor]:
        """The communication hook. The exchange of a bucket runs beside the backward pass; all are
        finished when the last one is ready.

        Args:
            bucket: a `torch.distributed.GradBucket`.

        Raises:
            Unsupported: a sparse gradient.
        """
        if bucket.index() == 0:  # also after a backward pass that failed half-way
            self._begin()
        buffer = bucket.buffer()
        if buffer.layout is not torch.strided:
            raise Unsupported("sparse gradients cannot be compressed", hint="sparse=False")
        views, segments, at = [], [], 0
        for parameter in bucket.parameters():
            end = at + parameter.numel()
            segments.append(Segment(self._number[id(parameter)], at, end))
            views.append(_view(buffer, at, parameter))
            at = end
        devices = [buffer.device] if buffer.device.type != "cpu" else None
        done: Future[torch.Tensor] = Future(devices=devices)
        self._flights.append((self._start(buffer, segments, views), done, buffer))
        self._layouts.append((segments, [_like(view) for view in views]))
        if bucket.is_last():
            self._land()
        return done

    def _land(self) -> None:
        for (exchange, done, buffer), layout in zip(self._flights, self._layouts, strict=True):
            merged = exchange.finish()
            if merged is not None:
                self._merged.append((merged, *layout))
            done.set_result(buffer)
        self._flights, self._layouts = [], []
        self._steps += 1
        # DDP queues its own callback, which writes p.grad, after this one and before the next
        task = _pass_number()
        _queue(lambda: _queue(lambda: self._note(task)))

    def _note(self, task: int) -> None:
        """Remember what is in `p.grad`, now that DDP has written it."""
        for merged, segments, likes in self._merged:
            grads = [
                self._parameters[number].grad if self._written(number, task) else None
                for number, _, _ in segments
            ]
            for segment, its in zip(
                segments, known_of(merged, segments, grads, likes), strict=True
            ):
                if its is not None:
                    self._known[self._parameters[segment.number]] = its
        self._merged = []

    def _written(self, number: int, task: int) -> bool:
        # DDP leaves the gradient of a parameter that no rank used as it is
        return not self._some_unused or self._touched.get(number) == task

    # ------------------------------------------------------------ without DDP

    def _toucher(self, number: int) -> Any:
        def touched(parameter: torch.Tensor) -> None:
            task = _pass_number()
            self._touched[number] = task
            # a pass that failed before its end left its number here
            if self._ddp is None and self._queued_in != task and not self._paused:
                self._queued_in = task
                _queue(self._compress)

        return touched

    def _compress(self) -> None:
        """Replace all gradients that this pass, and paused ones before it, added to."""
        touched = sorted(self._touched)
        self._touched.clear()
        self._queued_in = -1
        if not touched:  # passes within passes (reentrant checkpointing)
            return
        self._begin()
        for number in touched:
            grad = self._parameters[number].grad
            if grad is None:
                continue
            if grad.layout is not torch.strided:
                raise Unsupported(
                    f"the gradient of {self._names[number]} is sparse and cannot be compressed"
                )
            flat = grad.detach().reshape(-1)
            segments = [Segment(number, 0, flat.numel())]
            merged = self._start(flat, segments, [flat.view(grad.shape)]).finish()
            if not grad.is_contiguous():
                grad.copy_(flat.view(grad.shape))
            if merged is not None:
                its = known_of(merged, segments, [grad], [flat.view(grad.shape)])[0]
                if its is not None:
                    self._known[self._parameters[number]] = its
        self._steps += 1

    @contextlib.contextmanager
    def _pause(self) -> Any:
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    # ------------------------------------------------------------ both

    def _begin(self) -> None:
        self._flights, self._layouts, self._merged, self._known = [], [], [], {}

    def _start(
        self, bucket: torch.Tensor, segments: list[Segment], views: Sequence[torch.Tensor]
    ) -> Exchange:
        residual = None
        if self._options.error_feedback:
            residual = self._residuals.of(bucket, segments, views)
        group = None if self._ddp is None else self._ddp.process_group
        return start(self._options, bucket, residual, segments, self._steps, group)


def _view(buffer: torch.Tensor, at: int, parameter: torch.Tensor) -> torch.Tensor:
    """A parameter's gradient in a bucket. `GradBucket.gradients()` is row-major, but the elements
    lie as those of the parameter do, if these have no gaps (`Reducer::initialize_bucket_views`)."""
    expected = 1
    for size, stride in sorted(
        zip(parameter.shape, parameter.stride(), strict=True), key=lambda its: its[1]
    ):
        if size != 1 and stride != expected:
            return buffer[at : at + parameter.numel()].view(parameter.shape)
        expected *= size
    return buffer.as_strided(parameter.shape, parameter.stride(), buffer.storage_offset() + at)


def _like(view: torch.Tensor) -> torch.Tensor:
    """Shape and strides without memory."""
    return torch.empty_strided(view.shape, view.stride(), device="meta")


def _queue(callback: Any) -> None:
    """Call back at the end of the backward pass that is running."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def _pass_number() -> int:
    """Of the backward pass that is running."""
    return int(torch._C._current_graph_task_id())
