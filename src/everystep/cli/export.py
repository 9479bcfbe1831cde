"""`everystep export`: one stored step in a form that other programs read."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Literal, NamedTuple, cast

import typer
from msgspec import Struct

from everystep.cli.output import Block, Line, Output, Progress, counted, size
from everystep.cli.target import (
    AsJson,
    RunPath,
    StepText,
    chain_bytes,
    path_text,
    restorable,
)
from everystep.errors import EverystepError, StoreFull, Unsupported, UsageError
from everystep.store import durable, tensorfile
from everystep.store.chains import Chain
from everystep.store.local import translated
from everystep.store.run import Run
from everystep.types import Buffer, split_key

if TYPE_CHECKING:
    from everystep.recovery.load import LoadedState
    from everystep.recovery.stream import OpenStep
    from everystep.types import TensorSpec

Format = Literal["safetensors", "pt", "dcp"]

_SUFFIXES: dict[str, Format] = {".safetensors": "safetensors", ".pt": "pt", ".pth": "pt", "": "dcp"}

SAFE_DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"),
)
"""What every release of the safetensors library can say."""


class Exported(Struct, frozen=True, kw_only=True):
    """The record that the command prints."""

    path: str
    step: str
    rank: int
    target: str
    format: Format
    size_bytes: int
    tensors: int
    """Parameters and buffers of models, tied ones once."""


class Order(NamedTuple):
    """What to write."""

    run: Run
    chain: Chain
    rank: int
    progress: Progress


def export(
    run: RunPath,
    to: Annotated[
        Path,
        typer.Option(
            "--to",
            metavar="TARGET",
            help="x.safetensors: the models. x.pt: models and optimizers for torch.load. "
            "A name without a suffix: a directory for torch.distributed.checkpoint.",
        ),
    ],
    step: StepText = None,
    form: Annotated[
        Format | None, typer.Option("--format", help="Instead of what the suffix says.")
    ] = None,
    rank: Annotated[int, typer.Option(help="Whose buffers and own tensors.", min=0)] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace a target that is there.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write one step in a form that other programs read.

    Any step that can be had: where it is stored as deltas, they are folded, and every step on the
    way is proved. Tensors that are sharded over the ranks are written whole. The target appears
    complete or not at all.
    """
    form = form or _SUFFIXES.get(to.suffix)
    if form is None:
        hint = "end it in .safetensors or .pt, give a directory without a suffix, or say --format"
        raise UsageError(f"{to.suffix!r} does not say which form to write", hint=hint)
    _refuse_target(to, run, force)
    opened = Run.open(run)
    chain = restorable(opened, step)
    output = Output(as_json)
    with output.progress("reading", chain_bytes(chain)) as progress:
        count = write(Order(opened, chain, rank, progress), form, to)
    report = Exported(
        path=path_text(run),
        step=str(chain.ref),
        rank=rank,
        target=path_text(to),
        format=form,
        size_bytes=_length(to),
        tensors=count,
    )
    output.show(report, blocks(report))


def write(order: Order, form: Format, to: Path) -> int:
    """Write a step to a target, which appears complete or not at all; returns how many tensors of
    models it holds.

    Raises:
        Damaged, Missing, ReplicasDiffer: the step is not what was written.
        StoreFull, StoreFailed: the target's file system refused.
        Unsupported: the form has no word for what the step holds.
    """
    return {"safetensors": _write_safetensors, "pt": _write_pt, "dcp": _write_dcp}[form](order, to)


def _refuse_target(to: Path, run: Path, force: bool) -> None:
    if os.path.lexists(to) and not force:
        raise UsageError("is there already", path=to, hint="--force, or another name")
    if not to.absolute().parent.is_dir():
        raise UsageError("is no directory", path=to.absolute().parent, hint="make it first")
    if to.resolve().is_relative_to(run.resolve()):
        raise UsageError("lies in the run, which is not for other files", path=to)


@contextlib.contextmanager
def _appearing(to: Path) -> Iterator[Path]:
    """A name beside the target to write to; it becomes the target at the end, or goes.

    Raises:
        StoreFull, StoreFailed: the file system refused.
    """
    path = to.absolute()
    tag = f"{os.getpid():x}-{secrets.token_hex(4)}"
    temporary = path.with_name(f".{path.name}.{tag}{durable.TEMPORARY_SUFFIX}")
    try:
        with translated(to):
            yield temporary
            durable.publish(temporary, path, durable.SystemCalls())
    except StoreFull as error:
        hint = "free some space, or choose a target on another disk; nothing is left of this one"
        raise StoreFull(error.message, path=to, hint=hint) from error
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)


def _write_safetensors(order: Order, to: Path) -> int:
    """Models by FQN, tied tensors once, as safetensors.torch.save_model does; of a full checkpoint
    one tensor in memory at a time."""
    from everystep.recovery.folded import open_step
    from everystep.recovery.reach import How

    stored = open_step(order.run, order.chain, order.rank, How(progress=order.progress))
    tree = stored.record(order.rank).tree
    keys = _model_keys(stored, order.rank, alone=len(tree["models"]) == 1)
    metadata = {"format": "pt"}
    for name, facts in tree["models"].items():
        before = "" if len(tree["models"]) == 1 else f"{name}."
        metadata |= {before + alias: before + fqn for alias, fqn in facts["aliases"].items()}
    slots = tensorfile.lay_out([(name, *_form(spec)) for name, spec in keys.items()])
    header = tensorfile.encode_header(slots, metadata)

    def parts() -> Iterator[Buffer]:
        from everystep.state import raw

        yield header
        for slot in slots:
            tensor = stored.whole(keys[slot.name].key, order.rank)
            yield from raw.host_chunks(tensor, 0, tensor.numel())

    nbytes = len(header) + (slots[-1].stop if slots else 0)
    with _appearing(to) as temporary, open(temporary, "xb") as file:
        for part in parts():
            file.write(part)
        file.truncate(nbytes)
    return len(keys)


def _model_keys(stored: OpenStep, rank: int, alone: bool) -> dict[str, TensorSpec]:
    """Names in the file with the tensors that they stand for.

    Raises:
        Unsupported: safetensors has no word for a dtype.
    """
    found: dict[str, TensorSpec] = {}
    for key, tensor in stored.tensors[rank].items():
        parts = split_key(key)
        if parts[0] != "models" or len(parts) != 3:
            continue
        if tensor.spec.dtype not in SAFE_DTYPES or parts[2] == "__metadata__":
            raise Unsupported(
                f"{parts[1]}.{parts[2]}: safetensors has no {tensor.spec.dtype} of this name",
                hint="export to a .pt file",
            )
        name = parts[2] if alone else f"{parts[1]}.{parts[2]}"
        if name in found:
            raise Unsupported(f"two tensors would be called {name}", hint="export to a .pt file")
        found[name] = tensor.spec
    return found


def _form(spec: TensorSpec) -> tuple[str, tuple[int, ...]]:
    return spec.dtype, spec.shape if spec.shard is None else tuple(spec.shard.global_shape)


def _load(order: Order) -> LoadedState:
    from everystep.recovery.load import load_chain
    from everystep.recovery.reach import How

    return load_chain(order.run, order.chain, order.rank, How(progress=order.progress))


def _write_pt(order: Order, to: Path) -> int:
    import torch

    from everystep.recovery.forms import indexed_form

    state = _load(order)
    form = indexed_form(state)
    with _appearing(to) as temporary, open(temporary, "xb") as file:
        watched = _Watched(file.write)
        try:
            torch.save(form, cast(IO[bytes], watched))
        except RuntimeError:  # torch's writer reports a failed write so, without its reason
            watched.raise_if_failed()
            raise
    return _count_models(list(state.tensors))


class _Watched:
    """What torch.save needs of a file, and the reason of a write that failed."""

    def __init__(self, write: Callable[[bytes], int]) -> None:
        self._write = write
        self._error: OSError | None = None

    def write(self, data: bytes) -> int:
        """Write all of it."""
        try:
            return self._write(data)
        except OSError as error:
            self._error = error
            raise

    def flush(self) -> None:
        """The owner of the file closes it."""

    def raise_if_failed(self) -> None:
        """Raise the first failure of a write."""
        if self._error is not None:
            raise self._error


def _write_dcp(order: Order, to: Path) -> int:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    from everystep.recovery.forms import named_form

    state = _load(order)
    form = named_form(state)
    with _appearing(to) as temporary:
        writer = FileSystemWriter(temporary, sync_files=False)  # publish() does
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # "assuming … a single process": so it is
                save(form, storage_writer=writer, no_dist=True)
        except CheckpointException as failure:  # not an Exception, and it hides the reason
            for cause, _ in failure.failures.values():
                if isinstance(cause, OSError):
                    raise cause from None
            raise EverystepError(f"torch.distributed.checkpoint: {failure}", path=to) from failure
    return _count_models(list(state.tensors))


def _count_models(keys: list[str]) -> int:
    return sum(key.startswith("/models/") and key.count("/") == 3 for key in keys)


def _length(target: Path) -> int:
    files = [target] if target.is_file() else [f for f in target.rglob("*") if f.is_file()]
    return sum(file.stat().st_size for file in files)


def blocks(report: Exported) -> Iterator[Block]:
    """The record for people."""
    what = f"{counted(report.tensors, 'model tensor')}, {size(report.size_bytes)}"
    yield Line(f"step {report.step} is in {report.target} ({report.format}: {what})", "bold green")
