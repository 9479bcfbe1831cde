"""Selection against a stable sort, options, and what one rank would send."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis.extra import numpy as hnp

from deltas.compression import ALL, top
from everystep.deltas import exchange, selection
from everystep.deltas.compressors import (
    Quantize8,
    RandomK,
    SignScale,
    Threshold,
    TopK,
    kept_of,
)
from everystep.deltas.residuals import Residuals
from everystep.errors import Unsupported, UsageError

Array = np.ndarray[Any, Any]
FLOATS = {np.float16: torch.float16, np.float32: torch.float32, np.float64: torch.float64}
CHUNK = 64
NEEDS_CARD = pytest.mark.skipif(not torch.accelerator.is_available(), reason="no NVIDIA card")


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks and samples so small that every way through the selection is taken."""
    monkeypatch.setattr(selection, "_CHUNK", CHUNK)
    monkeypatch.setattr(selection, "_MAX_SAMPLE", 32)


@st.composite
def arrays(draw: st.DrawFn) -> Array:
    """Any bits; or few different values, so that there are ties."""
    dtype = draw(st.sampled_from(list(FLOATS)))
    n = draw(st.integers(0, 900))
    if draw(st.booleans()):
        width = np.dtype(dtype).itemsize
        return draw(hnp.arrays(f"u{width}", n)).view(dtype)
    few = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, np.inf, -np.inf, np.nan, 1e-7])
    return draw(hnp.arrays(dtype, n, elements=few, fill=few))


@settings(max_examples=300)
@given(values=arrays(), data=st.data())
def test_largest_is_what_a_stable_sort_gives(values: Array, data: st.DataObject) -> None:
    k = data.draw(st.integers(0, values.size))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "_CHUNK", CHUNK)
        patch.setattr(selection, "_MAX_SAMPLE", 32)
        found = selection.largest(torch.from_numpy(values), k)
    assert found.dtype is torch.int64
    assert found.tolist() == top(values, k).tolist()


@settings(max_examples=100)
@given(values=arrays(), data=st.data())
def test_the_way_of_accelerators_gives_the_same(values: Array, data: st.DataObject) -> None:
    if values.size == 0:
        return
    k = data.draw(st.integers(1, values.size))
    keys = selection.keys_of(torch.from_numpy(values))
    assert selection._among_on_device(keys, k).tolist() == top(values, k).tolist()


N = 3_000


def adversarial() -> dict[str, Array]:
    random = np.random.default_rng(0)
    ones = np.ones(N, np.float32)
    ramp = np.arange(N, dtype=np.float32)
    huge = np.zeros(N, np.float32)
    huge[1234] = 1e30
    sparse = np.zeros(N, np.float32)
    sparse[random.choice(N, 5, replace=False)] = 1
    return {
        "equal": ones,
        "zero": 0 * ones,
        "two values": np.where(random.random(N) < 0.5, 1, 2).astype(np.float32),
        "ascending": ramp,
        "descending": ramp[::-1].copy(),
        "one huge": huge,
        "fewer than k": sparse,
        "the largest last": np.concatenate([0 * ones[:-50], ones[:50]]),
        "NaN": np.full(N, np.nan, np.float32),
        "all bits": np.full(N, 0xFFFFFFFF, np.uint32).view(np.float32),
        "signs": np.where(random.random(N) < 0.5, -1, 1).astype(np.float32) * ramp,
    }


@pytest.mark.parametrize("name", list(adversarial()))
@pytest.mark.parametrize("k", [1, 10, 30, 400, 749])
def test_adversarial_values(name: str, k: int, small_chunks: None) -> None:
    values = adversarial()[name]
    assert selection.largest(torch.from_numpy(values), k).tolist() == top(values, k).tolist()


def test_a_sample_that_misleads_costs_only_time(
    monkeypatch: pytest.MonkeyPatch, small_chunks: None
) -> None:
    values = np.random.default_rng(1).standard_normal(N).astype(np.float32)
    floors: list[int] = []
    passed = selection._pass

    def noted(bits: torch.Tensor, mask: int, collector: Any) -> None:
        floors.append(collector.floor)
        passed(bits, mask, collector)

    monkeypatch.setattr(selection, "_pass", noted)
    for floor, passes in ((0, 1), (0x7F000000, 2)):
        floors.clear()
        monkeypatch.setattr(selection, "_sampled_floor", lambda *_, floor=floor: floor)
        assert selection.largest(torch.from_numpy(values), 30).tolist() == top(values, 30).tolist()
        assert floors == [floor, 0][:passes]


def test_candidates_are_bounded(small_chunks: None) -> None:
    collector = selection._Collector(k=5, floor=0)
    for start in range(0, 10_000, CHUNK):
        at = np.arange(start, start + CHUNK)
        collector.add(at.astype(np.int32), at)  # each larger than all before
        assert collector._count <= 2 * 5 + 2 * CHUNK
    found = collector.finish()
    assert found is not None
    assert found.tolist() == list(range(at[-1] - 4, at[-1] + 1))


@settings(max_examples=100)
@given(values=arrays(), least=st.sampled_from([1e-7, 1.0, 1.5, 60_000.0]))
def test_reaching_is_what_compares_so(values: Array, least: float) -> None:
    threshold = torch.tensor(least, dtype=FLOATS[values.dtype.type])
    found = selection.reaching(torch.from_numpy(values), threshold)
    with np.errstate(invalid="ignore"):
        expected = np.flatnonzero(~(np.abs(values) < threshold.numpy()))
    assert found.tolist() == expected.tolist()


def test_bfloat16_is_selected_by_its_bits(small_chunks: None) -> None:
    values = torch.randn(N, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert selection.largest(values, 31).tolist() == top(values.float().numpy(), 31).tolist()


@NEEDS_CARD
@pytest.mark.cuda
@pytest.mark.parametrize("name", list(adversarial()))
def test_a_card_selects_the_same(name: str) -> None:
    values = adversarial()[name]
    on_card = torch.from_numpy(values).to("cuda")
    for k in (1, 30, 749):
        assert selection.largest(on_card, k).cpu().tolist() == top(values, k).tolist()


@NEEDS_CARD
@pytest.mark.cuda
@pytest.mark.parametrize("options", ALL, ids=str)
def test_a_card_sends_the_same(options: Any) -> None:
    values = torch.from_numpy(np.random.default_rng(3).standard_normal(N).astype(np.float32))
    buckets = [values.clone(), values.to("cuda")]
    known = [sent_alone(options, bucket) for bucket in buckets]
    if not isinstance(options, SignScale):  # a mean is summed in another order there
        assert torch.equal(buckets[0], buckets[1].cpu())
    if known[0] is not None and known[1] is not None:
        assert torch.equal(known[0].positions, known[1].positions.cpu())


def sent_alone(options: Any, bucket: torch.Tensor) -> exchange.Merged | None:
    segments = [exchange.Segment(0, 0, bucket.numel())]
    residual = torch.zeros_like(bucket) if options.error_feedback else None
    return exchange.start(options, bucket, residual, segments, 0, None).finish()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("options", ALL, ids=str)
def test_what_is_sent_and_the_residual_make_the_gradient(options: Any, dtype: torch.dtype) -> None:
    gradient = torch.randn(500, generator=torch.Generator().manual_seed(4)).to(dtype)
    bucket, residual = gradient.clone(), torch.zeros_like(gradient)
    segments = [exchange.Segment(0, 0, 300), exchange.Segment(1, 300, 500)]
    kept = residual if options.error_feedback else None
    merged = exchange.start(options, bucket, kept, segments, 0, None).finish()
    if merged is not None:
        assert torch.equal(merged.values, gradient[merged.positions])
        assert torch.count_nonzero(bucket) == merged.positions.numel()
        rest = gradient.index_fill(0, merged.positions.long(), 0)
        assert torch.equal(residual, rest if kept is not None else torch.zeros_like(rest))
    elif kept is not None:
        assert torch.count_nonzero(residual) > 0
        # the residual was taken before what is sent was rounded to the dtype
        error = (gradient - bucket - residual).abs().max()
        assert error <= torch.finfo(dtype).eps * gradient.abs().max()


def numbers() -> st.SearchStrategy[float]:
    """Far enough from the largest that 127 rounded steps are no infinity."""
    finite = st.floats(-(2.0**127), 2.0**127, width=32)
    return finite | st.sampled_from([np.nan, np.inf, -np.inf])


@given(
    values=hnp.arrays(np.float32, st.integers(1, 100), elements=numbers()),
    block=st.integers(8, 40),
)
@settings(max_examples=200)
def test_eight_bits_are_off_by_half_a_step_or_are_not_finite(values: Array, block: int) -> None:
    bucket = torch.from_numpy(values.copy())
    sent_alone(Quantize8(block=block, error_feedback=False), bucket)
    for start in range(0, values.size, block):
        own, received = values[start : start + block], bucket.numpy()[start : start + block]
        if not np.isfinite(own).all():
            assert not np.isfinite(received).any()
        else:
            step = float(np.abs(own).max()) / 127
            wrong = np.abs(own.astype(np.float64) - received)
            assert wrong.max() <= step * 0.5001 + 127 * 2.0**-149


@given(density=st.decimals("0.001", "1", places=3), n=st.integers(0, 10**9))
def test_how_many_are_kept(density: Any, n: int) -> None:
    exact = -(-n * int(density * 1000) // 1000)
    assert kept_of(n, float(density)) == exact


@pytest.mark.parametrize(("n", "k"), [(1, 1), (100, 1), (100, 100), (200_000, 2_000)])
def test_drawn_sets(n: int, k: int) -> None:
    first, again, next_ = (exchange.drawn(n, k, (0, step, 5)) for step in (0, 0, 1))
    assert first.tolist() == again.tolist()
    assert len(set(first.tolist())) == k
    assert sorted(first.tolist()) == first.tolist()
    assert int(first.min()) >= 0 and int(first.max()) < n
    assert (first.tolist() == next_.tolist()) == (k == n)


def test_residuals_move_with_the_buckets() -> None:
    residuals = Residuals()
    bucket = torch.empty(10)
    views = [bucket[:6].view(2, 3), bucket[6:]]
    segments = [exchange.Segment(0, 0, 6), exchange.Segment(1, 6, 10)]
    flat = residuals.of(bucket, segments, views)
    flat.copy_(torch.arange(10.0))
    assert residuals.of(bucket, segments, views) is flat
    turned = [exchange.Segment(1, 0, 4), exchange.Segment(0, 4, 10)]
    # this time with the memory of the second in another order
    moved = residuals.of(bucket, turned, [bucket[:4], bucket[4:].view(3, 2).t()])
    assert moved.tolist() == [6, 7, 8, 9, 0, 3, 1, 4, 2, 5]
    assert dict(residuals.items())[0].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert len(residuals._flat) == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: TopK(density=0),
        lambda: TopK(density=1.5),
        lambda: TopK(density=float("nan")),
        lambda: TopK(density=True),
        lambda: TopK(error_feedback=1),  # type: ignore[arg-type]
        lambda: RandomK(density=-1),
        lambda: RandomK(seed=-1),
        lambda: RandomK(seed=1.0),  # type: ignore[arg-type]
        lambda: Threshold(threshold=0),
        lambda: Threshold(threshold=float("inf")),
        lambda: Threshold(threshold="1"),  # type: ignore[arg-type]
        lambda: Quantize8(block=7),
        lambda: Quantize8(error_feedback=None),  # type: ignore[arg-type]
        lambda: SignScale(error_feedback=None),  # type: ignore[arg-type]
    ],
)
def test_options_that_make_no_sense(make: Any) -> None:
    with pytest.raises(UsageError):
        make()


def test_no_magnitudes_of_other_numbers() -> None:
    for dtype in (torch.complex64, torch.int32):
        with pytest.raises(Unsupported, match="cannot be compressed"):
            selection.largest(torch.zeros(3, dtype=dtype), 1)
