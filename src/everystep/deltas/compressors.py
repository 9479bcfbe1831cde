"""How gradients are compressed before ranks exchange them: frozen records of options.

All of them work parameter by parameter, not bucket by bucket: DistributedDataParallel lays its
buckets out anew after the first backward of every process, so that what depends on buckets would
depend on when the process was started, and a restored run would go on differently.

With error feedback each rank keeps what it did not send (the residual) and adds it to the next
gradient: with g the gradient of this rank, e its residual and C the compressor,
p = g + e;  sent = C(p);  e' = p - sent (Stich et al., "Sparsified SGD with Memory", 2018;
Karimireddy et al., "Error Feedback Fixes SignSGD", 2019). The residual has the size and dtype of
the gradient. It is training state: hand the hook to the checkpointer as an extra.
"""

from __future__ import annotations

from fractions import Fraction

from msgspec import Struct

from everystep.errors import UsageError


class TopK(Struct, frozen=True, kw_only=True):
    """The largest magnitudes of each parameter's gradient (Aji and Heafield, "Sparse Communication
    for Distributed Gradient Descent", 2017; Lin et al., "Deep Gradient Compression", 2018).

    Of n elements exactly k = ceil(density × n) are sent, density taken as the decimal number that
    it prints as. Of equal magnitudes those with the lowest index win; NaN counts as larger than
    infinity, so that it is sent and seen.

    Raises:
        UsageError: a value that makes no sense.
    """

    density: float = 0.01
    """The share of elements that is sent, above 0 and at most 1."""
    error_feedback: bool = True
    """Whether what is not sent is added to the next gradient."""

    def __post_init__(self) -> None:
        _check_density(self, self.density)
        _check_flag(self, "error_feedback", self.error_feedback)


class RandomK(Struct, frozen=True, kw_only=True):
    """Elements drawn at random, the same on all ranks, so that no indices are exchanged (Stich et
    al., "Sparsified SGD with Memory", 2018).

    Of n elements, k = ceil(density × n) are drawn uniformly without replacement, anew for each
    parameter and step, from the seed, the step and the parameter's number. They are not scaled by
    n/k. What is not drawn is not seen: an overflow may stay hidden from a gradient scaler.

    Raises:
        UsageError: a value that makes no sense.
    """

    density: float = 0.01
    """The share of elements that is sent, above 0 and at most 1."""
    error_feedback: bool = True
    """Whether what is not sent is added to the next gradient."""
    seed: int = 0
    """The same on all ranks; 0 to 2^63 - 1."""

    def __post_init__(self) -> None:
        _check_density(self, self.density)
        _check_flag(self, "error_feedback", self.error_feedback)
        if type(self.seed) is not int or not 0 <= self.seed < 1 << 63:
            raise UsageError(f"RandomK(seed={self.seed!r}): not a whole number from 0 to 2^63 - 1")


class Threshold(Struct, frozen=True, kw_only=True):
    """Elements whose magnitude reaches a fixed threshold, and NaNs (Strom, "Scalable Distributed
    DNN Training Using Commodity GPU Cloud Computing", 2015; values are sent whole here).

    Ranks send different numbers of elements; none, if none reaches the threshold.

    Raises:
        UsageError: a value that makes no sense.
    """

    threshold: float
    """In the unit of the gradient (scaled by a gradient scaler, if there is one), above 0. It is
    rounded to the gradient's dtype."""
    error_feedback: bool = True
    """Whether what is not sent is added to the next gradient."""

    def __post_init__(self) -> None:
        value = self.threshold
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise UsageError(f"Threshold(threshold={value!r}): not a number above 0")
        _check_flag(self, "error_feedback", self.error_feedback)


class Quantize8(Struct, frozen=True, kw_only=True):
    """Eight bits for each element (Dettmers, "8-Bit Approximations for Parallelism in Deep
    Learning", 2016; blocks as in Dettmers et al., "8-bit Optimizers via Block-wise Quantization",
    2022, with linear steps).

    Of each block of a parameter's elements x: s = max |x| / 127 in float32;
    q = round(x / s), half to even, an int8 from -127 to 127; what is received is q × s. A block
    that holds NaN or infinity is received without any finite number.

    Raises:
        UsageError: a value that makes no sense.
    """

    block: int = 2048
    """How many elements share a scale, from 8 to 2^31 - 1."""
    error_feedback: bool = True
    """Whether the error of rounding is added to the next gradient."""

    def __post_init__(self) -> None:
        if type(self.block) is not int or not 8 <= self.block < 1 << 31:
            raise UsageError(f"Quantize8(block={self.block!r}): not a whole number from 8")
        _check_flag(self, "error_feedback", self.error_feedback)


class SignScale(Struct, frozen=True, kw_only=True):
    """One bit for each element, and one scale for each parameter (Karimireddy et al., "Error
    Feedback Fixes SignSGD", 2019; after Seide et al., "1-Bit Stochastic Gradient Descent", 2014).

    Of a parameter's n elements x: s = ||x||_1 / n in float32; what is received is s where x has no
    sign bit, else -s. If x holds NaN or infinity, so does s, and all elements are received as it.

    Raises:
        UsageError: a value that makes no sense.
    """

    error_feedback: bool = True
    """Whether the error is added to the next gradient; without it, training may diverge."""

    def __post_init__(self) -> None:
        _check_flag(self, "error_feedback", self.error_feedback)


Compressor = TopK | RandomK | Threshold | Quantize8 | SignScale


def kept_of(n: int, density: float) -> int:
    """How many of n elements are sent: ceil(density × n), density as the decimal it prints as.

    Args:
        density: share of elements, above 0 and at most 1.
    """
    share = Fraction(repr(density))
    return -(-n * share.numerator // share.denominator)


def _check_density(record: Struct, value: object) -> None:
    if type(value) not in (int, float) or not 0 < value <= 1:  # type: ignore[operator]  # a number, as just seen
        name = type(record).__name__
        raise UsageError(f"{name}(density={value!r}): not above 0 and at most 1")


def _check_flag(record: Struct, field: str, value: object) -> None:
    if type(value) is not bool:
        raise UsageError(f"{type(record).__name__}({field}={value!r}): neither True nor False")
