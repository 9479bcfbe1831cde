"""What error feedback keeps: a residual for each parameter, laid out as the buckets are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from everystep.deltas.exchange import Segment


class Residuals:
    """Residuals by the number of their parameter; zero until they are first written.

    They lie one after another in one tensor for each bucket, as the gradients do. When buckets
    are laid out anew, they move.
    """

    def __init__(self) -> None:
        self._each: dict[int, torch.Tensor] = {}
        self._flat: dict[tuple[int, ...], torch.Tensor] = {}

    def items(self) -> Iterable[tuple[int, torch.Tensor]]:
        """Numbers and residuals, in the shapes of the gradients."""
        return self._each.items()

    def replace(self, each: dict[int, torch.Tensor]) -> None:
        """Forget all residuals and take these."""
        self._each, self._flat = dict(each), {}

    def of(
        self, bucket: torch.Tensor, segments: Sequence[Segment], views: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """The residual of a bucket, to be read and written in place.

        Args:
            bucket: one-dimensional, of the gradients' dtype and device.
            views: the gradient of each segment as a strided view of the bucket.
        """
        key = tuple(segment.number for segment in segments)
        flat = self._flat.get(key)
        if flat is not None and flat.numel() == bucket.numel():
            return flat
        flat = torch.zeros_like(bucket)
        for segment, view in zip(segments, views, strict=True):
            its = flat.as_strided(view.shape, view.stride(), segment.start)
            old = self._each.get(segment.number)
            if old is not None:
                its.copy_(old)
            self._each[segment.number] = its
        numbers = set(key)
        self._flat = {k: its for k, its in self._flat.items() if numbers.isdisjoint(k)}
        self._flat[key] = flat
        return flat
