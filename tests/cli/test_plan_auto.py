"""`everystep plan auto`: the record, what is said, and what a run has measured."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from everystep.cli import plan_auto as module
from everystep.planning.choosing import NAMES, Prediction, Verdict, choose
from everystep.planning.facts import HOST_SHARE, Facts
from everystep.planning.failures import Mtbf, estimate_mtbf
from everystep.store.local import LocalBackend
from everystep.store.measured import Measure, MeasuredBy, write_measures
from small_runs import Said

Cli = Callable[..., Said]

GIVEN = {
    "--state": "8GB", "--step": "8", "--d2h": "25GB/s", "--write": "200MB/s", "--update": "400ms",
    "--gradients": "3GB", "--delta": "30MB", "--d2d": "1TB/s", "--sync": "5ms", "--fold": "0.4",
    "--record-stall": "1ms", "--load": "20s", "--restart": "30s", "--mtbf": "3h",
    "--host-share": "0.25", "--memory": "100GB",
}  # fmt: skip

FACTS = Facts(
    state_bytes=8_000_000_000, gradient_bytes=3_000_000_000, window_s=7.6, update_s=0.4,
    offload_bytes_per_s=25e9, snapshot_bytes_per_s=1e12, write_bytes_per_s=2e8, mtbf_s=10_800.0,
    host_share=0.25, delta_bytes=30_000_000, sync_s=0.005, fold_s=0.4, record_stall_s=0.001,
    load_s=20.0, restart_s=30.0, host_memory_bytes=100_000_000_000,
)  # fmt: skip


def words(*without: str, **more: str) -> list[str]:
    """The options of the example, some of them changed or left out."""
    changed = {f"--{name.replace('_', '-')}": value for name, value in more.items()}
    options = {k: v for k, v in {**GIVEN, **changed}.items() if k not in without}
    return [word for pair in options.items() for word in pair]


def test_the_record_is_the_models_choice(cli: Cli) -> None:
    found = cli("plan", "auto", *words(), "--json").json
    assert msgspec.convert(found["facts"], Facts) == FACTS
    verdict = choose(FACTS)
    assert verdict.strategy == "deltas"
    assert msgspec.convert(found["verdict"], Verdict) == verdict
    assert (found["run"], found["mtbf"], found["assumed"]) == (None, None, [])


def test_what_is_said(cli: Cli) -> None:
    status, out, err = cli("plan", "auto", *words())
    assert (status, err) == (0, "")
    lines = out.splitlines()
    verdict = choose(FACTS)
    assert lines[0] == verdict.reason
    assert [line.split()[0] for line in lines[2:5]] == list(verdict.predicted)
    for line, found in zip(lines[2:5], verdict.predicted.values(), strict=True):
        assert f"{found.wasted_share:.3%}" in line
    assert "one failure every 3 h; 25% of them take the host" in out
    assert "assumed" not in out and "possible" not in out


def test_what_is_not_possible_is_told_and_is_null(cli: Cli) -> None:
    why = ("--unrepeatable", "a closure runs the model again")
    said = cli("plan", "auto", *words(), *why)
    assert said.out.count("a closure runs the model again") == 4
    assert "replica is not possible: a closure runs the model again" in said.out
    found = cli("plan", "auto", *words(), *why, "--json").json["verdict"]
    assert found["strategy"] == "full"
    assert found["predicted"]["deltas"]["wasted_share"] is None


def test_the_strategy_in_use_counts(cli: Cli) -> None:
    near = words(delta="3GB", write="20GB/s", fold="0.01")
    left = cli("plan", "auto", *near, "--json").json["verdict"]
    shares = {name: found["wasted_share"] for name, found in left["predicted"].items()}
    second = sorted(shares, key=lambda name: shares[name] or 1)[1]
    assert shares[second] < shares[left["strategy"]] / 0.9, "else this shows nothing"
    kept = cli("plan", "auto", *near, "--now", second, "--json").json["verdict"]
    assert kept["strategy"] == second
    said = cli("plan", "auto", *words(), "--now", "other")
    assert (said.status, "is no strategy" in said.err) == (2, True)


def test_what_is_not_given_is_assumed_and_told(cli: Cli) -> None:
    optional = [name for name in GIVEN if name not in ("--state", "--step", "--d2h", "--write")]
    found = cli("plan", "auto", *words(*optional), "--json").json
    assert set(found["assumed"]) == set(module._ASSUMED)
    assert msgspec.convert(found["mtbf"], Mtbf) == estimate_mtbf(0, 0.0)
    facts = msgspec.convert(found["facts"], Facts)
    assert (facts.host_share, facts.gradient_bytes) == (HOST_SHARE, 2_666_666_667)
    assert facts.step_s == 8.0
    assert cli("plan", "auto", *words(*optional)).out.count("assumed: ") == len(module._ASSUMED)


def test_what_is_missing_or_impossible(cli: Cli) -> None:
    said = cli("plan", "auto", "--state", "1GB", "--step", "1")
    assert (said.status, said.out) == (2, "")
    assert "not known: --d2h, --write\n" in said.err
    said = cli("plan", "auto", *words(memory="1GB"))
    assert (said.status, said.out) == (2, "")
    assert "no strategy is possible: two states need 16 GB of host memory" in said.err


def test_it_explains_itself(cli: Cli) -> None:
    status, out, err = cli("plan", "auto", "--help")
    assert (status, err) == (0, "")
    assert "Usage: everystep plan auto" in out
    example = module.EXAMPLE.partition("everystep ")[2]
    assert cli(*example.split()).status == 0


def test_figures_of_a_run(cli: Cli, healthy: Path) -> None:
    measured = [
        Measure(
            timeline="main", step=step, begun_s=0.0, took_s=1.3, stall_s=0.0, snapshot_s=0.0,
            staging_s=0.0, bookkeeping_s=0.0, forward_s=0.2, backward_s=0.25, update_s=0.05,
            state_bytes=10**9, copied_bytes=0, written_bytes=0, write_bytes_per_s=1e9,
            offload_bytes_per_s=2e9, snapshot_bytes_per_s=8e9,
        )
        for step in (1, 2)
    ]  # fmt: skip
    write_measures(LocalBackend(healthy), MeasuredBy(1, 0, 1), measured)
    found = cli("plan", "auto", "--from-run", healthy, "--write", "3GB/s", "--json").json
    facts = msgspec.convert(found["facts"], Facts)
    assert (facts.state_bytes, facts.step_s, facts.update_s) == (10**9, 0.5, 0.05)
    assert (facts.offload_bytes_per_s, facts.snapshot_bytes_per_s) == (2e9, 8e9)
    assert facts.write_bytes_per_s == 3e9
    assert (found["run"], found["measured_steps"]) == (str(healthy), 2)
    assert "mtbf_s" not in found["assumed"] and facts.mtbf_s == found["mtbf"]["mean_s"]
    out = cli("plan", "auto", "--from-run", healthy).out
    assert out.startswith(f"from the medians of 2 steps that {healthy} measured\n")


@pytest.mark.parametrize("kind", [module.AutoPlan, Facts, Verdict, Prediction])
def test_every_key_is_documented(kind: type[msgspec.Struct]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
    section = text.partition("| `plan auto` | |\n")[2].partition("\n\n")[0]
    documented = set(re.findall(r"`(\w+)`", section))
    assert set(kind.__struct_fields__) - documented == set()
    assert set(NAMES) <= documented
