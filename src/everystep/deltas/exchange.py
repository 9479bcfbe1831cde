"""One bucket of gradients on its way: what this rank sends, and the sum of what all ranks sent.

A bucket is a one-dimensional tensor in which the gradients of several parameters follow one
another. What is received is divided by the number of ranks and added in the order of ranks, so
that all ranks compute the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist

from everystep.deltas import selection
from everystep.deltas.compressors import (
    Compressor,
    Quantize8,
    RandomK,
    SignScale,
    Threshold,
    TopK,
    kept_of,
)


class Segment(NamedTuple):
    """Where one parameter's gradient lies in a bucket."""

    number: int
    """Of the parameter."""
    start: int
    stop: int


class Merged(NamedTuple):
    """Where a bucket was written: everything else in it is +0."""

    positions: torch.Tensor
    """Ascending, each once; int32 where the bucket has less than 2^31 elements, else int64."""
    values: torch.Tensor
    """As they stand in the bucket."""


class Exchange(Protocol):
    """A bucket under way."""

    def finish(self) -> Merged | None:
        """Wait for all ranks and overwrite the bucket with the mean of what they sent.

        Returns: what is known of the result; None if it is dense.
        """
        ...


class Gathering:
    """The same kind of tensor from every rank, under way."""

    def __init__(self, part: torch.Tensor, group: Any) -> None:
        """Begin; all ranks of the group do, with one-dimensional tensors of one size and dtype.

        Args:
            group: a process group; None: there is one rank only.
        """
        self._dtype = part.dtype
        self._work: Any = None
        # every backend can send bytes; a single element may have any stride, which bytes may not
        self._sent = part.contiguous().as_strided(part.shape, (1,)).view(torch.uint8)
        self._received = self._sent[None]
        if group is not None and group.size() > 1:
            shape = (group.size(), self._sent.numel())
            self._received = torch.empty(shape, dtype=torch.uint8, device=part.device)
            if self._sent.numel():
                rows = list(self._received.unbind(0))
                self._work = dist.all_gather(rows, self._sent, group=group, async_op=True)

    def wait(self) -> list[torch.Tensor]:
        """What each rank sent, by rank."""
        if self._work is not None:
            self._work.wait()
        if not self._sent.numel():  # torch does not see an empty row as another dtype
            return [row.to(self._dtype) for row in self._received.unbind(0)]
        return [row.view(self._dtype) for row in self._received.unbind(0)]


def start(
    options: Compressor,
    bucket: torch.Tensor,
    residual: torch.Tensor | None,
    segments: Sequence[Segment],
    step: int,
    group: Any,
) -> Exchange:
    """Compress a bucket and begin to send it. Every rank does this for the same buckets in the
    same order.

    Args:
        bucket: the gradients of this rank, one-dimensional and contiguous; overwritten later.
        residual: of the same form; updated. None: without error feedback.
        step: how many times the gradients have been compressed before.
        group: a process group; None: there is one rank only.
    """
    full = bucket if residual is None else residual.add_(bucket)
    if isinstance(options, Quantize8 | SignScale):
        return _Dense(options, bucket, full, residual, segments, group)
    return _Sparse(options, bucket, full, residual, segments, step, group)


class _Sparse:
    def __init__(
        self,
        options: TopK | RandomK | Threshold,
        bucket: torch.Tensor,
        full: torch.Tensor,
        residual: torch.Tensor | None,
        segments: Sequence[Segment],
        step: int,
        group: Any,
    ) -> None:
        self._bucket = bucket
        ranks = 1 if group is None else group.size()
        positions = _chosen(options, full, segments, step)
        values = full.index_select(0, positions)
        if residual is not None:
            residual.index_fill_(0, positions, 0)
            # what a random choice leaves behind is not seen in what it takes
            _drop_nonfinite(residual, residual.sum() if isinstance(options, RandomK) else values)
        values.div_(ranks)
        narrow = torch.int32 if bucket.numel() < 1 << 31 else torch.int64
        self._positions = positions.to(narrow)
        self._shared = isinstance(options, RandomK) or ranks == 1
        self._counts = [positions.numel()] * ranks
        if isinstance(options, Threshold) and ranks > 1:
            own = torch.tensor([positions.numel()], device=bucket.device)
            self._counts = [int(count.item()) for count in Gathering(own, group).wait()]
        most = max(self._counts)
        self._values = Gathering(_padded(values, most), group)
        alone = None if self._shared else group
        self._where = Gathering(_padded(self._positions, most), alone)

    def finish(self) -> Merged:
        """See `Exchange.finish`."""
        values = self._values.wait()
        where = [self._positions] * len(values) if self._shared else self._where.wait()
        where = [part[:count] for part, count in zip(where, self._counts, strict=True)]
        self._bucket.zero_()
        for positions, its in zip(where, values, strict=True):
            self._bucket.index_add_(0, positions, its[: positions.numel()])
        union = self._positions if self._shared else _union(where)
        return Merged(union, self._bucket.index_select(0, union))


def _chosen(
    options: TopK | RandomK | Threshold,
    full: torch.Tensor,
    segments: Sequence[Segment],
    step: int,
) -> torch.Tensor:
    """Positions in the bucket, int64 and ascending."""
    if isinstance(options, Threshold):
        return selection.reaching(full, full.new_tensor(options.threshold))
    selection.check_dtype(full.dtype)
    found = []
    for number, begin, end in segments:
        k = kept_of(end - begin, options.density)
        if isinstance(options, TopK):
            its = selection.largest(full[begin:end], k)
        else:
            its = drawn(end - begin, k, (options.seed, step, number)).to(full.device)
        found.append(its.add_(begin))
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device=full.device)


def drawn(n: int, k: int, seed: tuple[int, int, int]) -> torch.Tensor:
    """A uniformly drawn set of k of n indices, the same for the same seed; int64, ascending."""
    generator = np.random.default_rng(seed)
    return torch.from_numpy(np.sort(generator.choice(n, k, replace=False, shuffle=False)))


def _padded(values: torch.Tensor, size: int) -> torch.Tensor:
    if values.numel() == size:
        return values
    padded = values.new_zeros(size)
    padded[: values.numel()] = values
    return padded


def _union(lists: list[torch.Tensor]) -> torch.Tensor:
    """What is in any of several ascending lists, ascending."""
    union: torch.Tensor
    if lists[0].device.type != "cpu":
        union = torch.unique(torch.cat(lists))
        return union
    # the stable sort merges runs that are in order already
    merged = np.sort(np.concatenate([part.numpy() for part in lists]), kind="stable")
    first = np.ones(merged.size, dtype=bool)
    np.not_equal(merged[1:], merged[:-1], out=first[1:])
    return torch.from_numpy(merged[first])


def _drop_nonfinite(residual: torch.Tensor, evidence: torch.Tensor) -> None:
    """A gradient that overflowed must not come back with every later one."""
    if not bool(torch.isfinite(evidence).all()):
        residual.masked_fill_(~torch.isfinite(residual), 0)


class _Dense:
    def __init__(
        self,
        options: Quantize8 | SignScale,
        bucket: torch.Tensor,
        full: torch.Tensor,
        residual: torch.Tensor | None,
        segments: Sequence[Segment],
        group: Any,
    ) -> None:
        self._options, self._bucket, self._segments = options, bucket, segments
        selection.check_dtype(full.dtype)
        coded = [_encode(options, full[begin:end]) for _, begin, end in segments]
        self._sizes = [(codes.numel(), scales.numel()) for codes, scales in coded]
        codes = torch.cat([codes for codes, _ in coded])
        scales = torch.cat([scales for _, scales in coded])
        if residual is not None:
            residual.sub_(self._decode(codes, scales))
            _drop_nonfinite(residual, scales)
        self._codes, self._scales = Gathering(codes, group), Gathering(scales, group)

    def finish(self) -> None:
        """See `Exchange.finish`."""
        codes, scales = self._codes.wait(), self._scales.wait()
        total: torch.Tensor | None = None
        for its_codes, its_scales in zip(codes, scales, strict=True):
            part = self._decode(its_codes, its_scales).div_(len(codes))
            total = part if total is None else total.add_(part)
        if total is not None:
            self._bucket.copy_(total)

    def _decode(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """float32, of the bucket's length."""
        out = torch.empty(self._bucket.numel(), dtype=torch.float32, device=codes.device)
        each = zip(
            self._segments,
            torch.split(codes, [size for size, _ in self._sizes]),
            torch.split(scales, [size for _, size in self._sizes]),
            strict=True,
        )
        for (_, begin, end), its_codes, its_scales in each:
            out[begin:end] = _decoded(self._options, its_codes, its_scales, end - begin)
        return out


def _encode(
    options: Quantize8 | SignScale, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (uint8) and scales (float32) of one parameter's gradient."""
    n = values.numel()
    if n == 0:
        empty = values.new_empty(0)
        return empty.to(torch.uint8), empty.to(torch.float32)
    if isinstance(options, SignScale):
        scale = values.to(torch.float32).abs().mean().reshape(1)
        planes = _padded(torch.signbit(values).view(torch.uint8), -(-n // 8) * 8).view(8, -1)
        packed = planes[0].clone()
        for bit in range(1, 8):
            packed |= planes[bit] << bit
        return packed, scale
    block = min(options.block, n)
    blocks = _padded(values.to(torch.float32), -(-n // block) * block).view(-1, block)
    scales = blocks.abs().amax(1) / 127
    steps = blocks / torch.where(scales == 0, 1, scales)[:, None]
    # a subnormal scale is too coarse to divide by exactly
    codes = steps.round_().nan_to_num_(0).clamp_(-127, 127).to(torch.int8)
    return codes.view(torch.uint8).reshape(-1), scales


def _decoded(
    options: Quantize8 | SignScale, codes: torch.Tensor, scales: torch.Tensor, n: int
) -> torch.Tensor:
    if n == 0:
        return scales
    if isinstance(options, SignScale):
        signs = torch.stack([1 - 2 * ((codes >> bit) & 1).to(torch.float32) for bit in range(8)])
        return signs.mul_(scales).view(-1)[:n]
    block = min(options.block, n)
    steps = codes.view(torch.int8).to(torch.float32).view(-1, block)
    return steps.mul_(scales[:, None]).view(-1)[:n]
