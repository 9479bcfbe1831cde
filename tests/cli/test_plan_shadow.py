"""`everystep plan shadow`: the record, and what is said."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from everystep.cli.plan_shadow import KINDS, read_count
from everystep.planning.loss import Loss, Mirror, Sizing, Traffic, predict, size
from small_runs import Said

Cli = Callable[..., Said]

WORDS = ["--parameters", "124M", "--ranks", "4", "--step", "500ms"]


def test_the_record_is_the_models(cli: Cli) -> None:
    found = cli("plan", "shadow", *WORDS, "--loss", "1e-6", "--mtu", "1024", "--json").json
    mirror = Mirror.of(4, "both")
    traffic = Traffic(gradient_bytes=496_000_000, payload_bytes=1024, protocol="ll")
    assert msgspec.convert(found["loss"], Loss) == predict(mirror, traffic, 1e-6)
    expected = size(mirror, traffic, state_bytes=1_488_000_000, step_s=0.5, link_bytes_per_s=12.5e9)
    assert msgspec.convert(found["sizing"], Sizing) == expected
    assert found["copies"] == [1, 1, 2, 2]
    names = [name for kind in KINDS for name in (kind, f"{kind} + added step")]
    assert list(found["others"]) == names
    assert found["others"]["both"] == found["loss"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--loss", "1e-7"], "must be asked for"),
        (["--loss", "0"], "the mirror alone shows every step whole"),
        (["--links", "one"], "no step is whole from the mirror alone"),
        (["--links", "one"], "1 of 4 chunks of a step are seen never"),
        (["--links", "one", "--added-step"], "4 of 4 chunks of a step are seen once"),
    ],
)
def test_what_is_said(cli: Cli, words: list[str], said: str) -> None:
    status, out, err = cli("plan", "shadow", *WORDS, *words)
    assert (status, err) == (0, "")
    assert said in out


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--ranks", "2", "--links", "two-ports"], "at least 4 ranks"),
        (["--parameters", "many"], "is not a count"),
        (["--step", "1ms"], "too short"),
        (["--step", "0"], "no sense"),
        (["--memory", "0GB"], "above zero"),
    ],
)
def test_wrong_use(cli: Cli, words: list[str], problem: str) -> None:
    status, _, err = cli("plan", "shadow", *WORDS, *words)
    assert status == 2
    assert problem in err


def test_counts() -> None:
    assert [read_count("--n", text) for text in ("7", "1.5k", "124M", "7B", "1T")] == [
        7, 1500, 124_000_000, 7_000_000_000, 10**12,
    ]  # fmt: skip
