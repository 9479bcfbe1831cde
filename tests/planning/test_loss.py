"""How often a mirrored step lacks something: the closed form against packets that are lost."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everystep.errors import UsageError
from everystep.planning.loss import Host, Mirror, Traffic, predict, simulate, size

KINDS = ("one", "both", "neighbours", "two-ports")

mirrors = st.builds(
    lambda ranks, links, added: Mirror(ranks, tuple(link % ranks for link in links), added),
    st.integers(2, 9),
    st.lists(st.integers(0, 8), min_size=1, max_size=5),
    st.booleans(),
)
probabilities = st.floats(0, 1)

ONE, LITTLE = Mirror(2, (0,)), Traffic(gradient_bytes=1)


@pytest.mark.parametrize(
    ("kind", "ranks", "copies"),
    [
        ("one", 2, [1, 0]),
        ("one", 5, [1, 0, 1, 1, 1]),
        ("both", 2, [1, 1]),
        ("both", 5, [1, 1, 2, 2, 2]),
        ("neighbours", 2, [2, 2]),
        ("neighbours", 3, [3, 2, 3]),
        ("neighbours", 5, [3, 2, 3, 4, 4]),
        ("two-ports", 4, [3, 3, 3, 3]),
        ("two-ports", 6, [3, 3, 3, 3, 4, 4]),
    ],
)
def test_copies_of_each_chunk(kind: str, ranks: int, copies: list[int]) -> None:
    assert Mirror.of(ranks, kind).copies == copies  # type: ignore[arg-type]


def test_one_link_never_shows_a_chunk() -> None:
    traffic = Traffic(gradient_bytes=10**6)
    never = predict(Mirror.of(4, "one"), traffic, 0.0)
    assert (never.remedy_probability, never.missing_share) == (1.0, 0.25)
    whole = predict(Mirror.of(4, "one", added_step=True), traffic, 0.0)
    assert (whole.remedy_probability, whole.missing_share) == (0.0, 0.0)
    assert whole.steps_between == math.inf


@given(mirrors, st.integers(1, 10**9), probabilities, probabilities)
def test_more_loss_is_never_better(mirror: Mirror, nbytes: int, one: float, other: float) -> None:
    low, high = sorted((one, other))
    traffic = Traffic(gradient_bytes=nbytes)
    better, worse = predict(mirror, traffic, low), predict(mirror, traffic, high)
    assert 0 <= better.remedy_probability <= worse.remedy_probability <= 1
    assert 0 <= better.missing_share <= worse.missing_share <= 1
    assert predict(mirror, traffic, 1.0).remedy_probability == 1.0


@given(mirrors, st.integers(1, 10**9), probabilities, st.integers(0, 8))
def test_another_link_is_never_worse(mirror: Mirror, nbytes: int, p: float, link: int) -> None:
    traffic = Traffic(gradient_bytes=nbytes)
    more = Mirror(mirror.ranks, (*mirror.links, link % mirror.ranks), mirror.added_step)
    less = predict(mirror, traffic, p).remedy_probability
    assert predict(more, traffic, p).remedy_probability <= less


@pytest.mark.parametrize("loss", [1e-3, 0.02, 0.3])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("added", [False, True])
def test_closed_form_and_simulation_agree(kind: str, ranks: int, loss: float, added: bool) -> None:
    if kind == "two-ports" and ranks < 4:
        with pytest.raises(UsageError, match="at least 4 ranks"):
            Mirror.of(ranks, kind)  # type: ignore[arg-type]
        return
    mirror = Mirror.of(ranks, kind, added_step=added)  # type: ignore[arg-type]
    traffic = Traffic(gradient_bytes=ranks * 5 * 1024, payload_bytes=1024, protocol="simple")
    steps = 600
    found = simulate(mirror, traffic, loss, steps, np.random.default_rng(ranks))
    expected = predict(mirror, traffic, loss)
    chance = expected.remedy_probability
    assert abs(found.remedy_probability - chance) <= 5 * math.sqrt(chance / steps) + 1e-9
    packets = steps * ranks * traffic.packets(ranks)
    spread = math.sqrt(expected.missing_share / packets)
    assert abs(found.missing_share - expected.missing_share) <= 5 * spread + 1e-9


def test_paper_form_is_the_first_order() -> None:
    """m streams of different ports, one direction each: N [(m/k) p^(m-1) + ((k-m)/k) p^m]."""
    k, p = 8, 1e-6
    traffic = Traffic(gradient_bytes=8 * 10 * 4096, payload_bytes=4096, protocol="simple")
    for m in (2, 3):
        mirror = Mirror(k, tuple(range(m)))
        packets = k * traffic.packets(k)
        paper = packets * (m / k * p ** (m - 1) + (k - m) / k * p**m)
        assert predict(mirror, traffic, p).remedy_probability == pytest.approx(paper, rel=1e-3)


@given(st.integers(2, 64), st.integers(1, 10**10), st.integers(1, 9000))
def test_packets_hold_the_chunk(ranks: int, nbytes: int, payload: int) -> None:
    traffic = Traffic(gradient_bytes=nbytes, payload_bytes=payload, protocol="ll")
    packets = traffic.packets(ranks)
    wire = 2 * nbytes / ranks
    assert packets == 1 or (packets - 1) * payload < wire <= packets * payload * (1 + 1e-12)


@settings(max_examples=50)
@given(mirrors, st.integers(1, 10**10), st.floats(0.05, 10), st.integers(1, 10**11))
def test_a_shadow_keeps_up(mirror: Mirror, nbytes: int, step_s: float, state: int) -> None:
    traffic, host = Traffic(gradient_bytes=nbytes), Host()
    try:
        found = size(mirror, traffic, state_bytes=state, step_s=step_s, link_bytes_per_s=12.5e9)
    except UsageError as error:
        assert "too short" in str(error)
        assert traffic.link_bytes(mirror.ranks) * 1.5 > 12.5e9 * step_s
        return
    work_s = found.wire_bytes / host.decode_bytes_per_s / found.decode_cores
    assert work_s <= step_s * (1 + 1e-9)
    assert state / host.fold_bytes_per_s / found.fold_cores <= step_s * (1 + 1e-9)
    assert found.memory_bytes >= state + 2 * nbytes
    assert found.hosts * host.memory_bytes >= found.memory_bytes
    assert found.hosts * host.cores >= found.decode_cores + found.fold_cores


@pytest.mark.parametrize(
    ("words", "make"),
    [
        ("makes no sense", lambda: Mirror(1, (0,))),
        ("makes no sense", lambda: Mirror(4, (4,))),
        ("no link is mirrored", lambda: Mirror(4, ())),
        ("makes no sense", lambda: Traffic(gradient_bytes=0)),
        ("above zero", lambda: Host(cores=0)),
        ("not between 0 and 1", lambda: predict(ONE, LITTLE, -0.1)),
        ("not between 0 and 1", lambda: predict(ONE, LITTLE, math.nan)),
        (
            "no sense",
            lambda: size(ONE, LITTLE, state_bytes=1, step_s=0, link_bytes_per_s=1),
        ),
    ],
)
def test_what_makes_no_sense(words: str, make: object) -> None:
    with pytest.raises(UsageError, match=words):
        make()  # type: ignore[operator]
