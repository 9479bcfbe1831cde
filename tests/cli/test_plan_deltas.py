"""`everystep plan deltas`, and the heat map that it draws."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from everystep.cli import plan_deltas as module
from everystep.cli.figures import spoken_time
from everystep.cli.heat import draw_heat
from everystep.planning.failures import Mtbf, estimate_mtbf
from everystep.planning.intervals import Choice, Costs, Limits, Waste, choose, predict
from everystep.store.local import LocalBackend
from everystep.store.measured import Measure, MeasuredBy, write_measures
from everystep.store.restarts import restarts_of
from everystep.store.run import Run
from small_runs import Job, Said

Cli = Callable[..., Said]

GIVEN = {
    "--state": "1.5GB", "--step": "0.5", "--write": "1GB/s", "--replay": "50ms", "--delta": "6MB",
    "--mtbf": "3h", "--full-stall": "20ms", "--batch-stall": "2ms", "--load": "2s",
    "--restart": "20s", "--sync": "4ms", "--record-stall": "1ms",
}  # fmt: skip

COSTS = Costs(
    step_s=0.5, state_bytes=1_500_000_000, delta_bytes=6_000_000, write_bytes_per_s=1e9,
    replay_s=0.05, mtbf_s=10_800.0, load_s=2.0, restart_s=20.0, sync_s=0.004,
    batch_stall_s=0.002, record_stall_s=0.001, full_stall_s=0.02,
)  # fmt: skip


def words(*without: str, **more: str) -> list[str]:
    """The options of the example, some of them changed or left out."""
    changed = {f"--{name.replace('_', '-')}": value for name, value in more.items()}
    options = {k: v for k, v in {**GIVEN, **changed}.items() if k not in without}
    return [word for pair in options.items() for word in pair]


def plain(said: Said) -> str:
    assert (said.status, said.err) == (0, "")
    assert "\x1b" not in said.out
    lines = (line for line in said.out.splitlines() if "/" not in line or "/s" in line)
    assert max(map(len, lines)) <= 110
    return said.out


def test_the_record_is_the_models_choice(cli: Cli) -> None:
    found = cli("plan", "deltas", *words(), "--json").json
    assert msgspec.convert(found["costs"], Costs) == COSTS
    assert msgspec.convert(found["limits"], Limits) == Limits()
    best = choose(COSTS)
    assert msgspec.convert(found["choice"], Choice) == best
    assert msgspec.convert(found["waste"], Waste) == predict(COSTS, best.full_every, best.batch)
    assert (found["run"], found["mtbf"], found["restarts"]) == (None, None, None)
    assert (found["assumed"], found["fixed"]) == ([], [])
    grid = found["grid"]
    assert best.full_every in grid["full_every"] and best.batch in grid["batch"]
    shares = {
        (f, b): share
        for b, row in zip(grid["batch"], grid["wasted_share"], strict=True)
        for f, share in zip(grid["full_every"], row, strict=True)
    }
    assert shares[best.full_every, best.batch] == found["waste"]["share"]
    assert shares[1, 1] is None, "more than storage can take"
    assert all(share is None for (f, b), share in shares.items() if b > f)


def test_what_is_said(cli: Cli) -> None:
    out = plain(cli("plan", "deltas", *words()))
    best = choose(COSTS)
    said = f"a full every {best.full_every} steps ({spoken_time(best.full_every * 0.5)}), "
    assert out.startswith(f"{said}{best.batch} deltas per write")
    share = predict(COSTS, best.full_every, best.batch).share
    assert f"\nwasted: {share:.3%} of all time (visible " in out
    assert "fulls: each costs 20 ms, each step since 50 ms of replay; closed form: 131.5 steps" in (
        out
    )
    assert "writes: each costs 2 ms, half a batch is lost with the host; closed form: 13.7" in out
    assert "one every 3 h; 100% of them take the host" in out
    assert "LowDiff's own model" in out
    assert "assumed" not in out
    drawn = out[out.index("wasted time by") :].splitlines()
    assert sum("O" in line for line in drawn[1:-1]) == 1
    assert drawn[-1].endswith("x not possible, O chosen")


def test_what_is_not_given_is_assumed_and_told(cli: Cli) -> None:
    optional = tuple(GIVEN)[5:]
    out = plain(cli("plan", "deltas", *words(*optional)))
    assert out.count("assumed: ") == 7
    assert "assumed: one failure a day (--mtbf)" in out
    assert "one every 24 h, 90 % between 8.01 h and 468 h; 100% of them" in out
    assert "fulls: more often would be more than 90% of storage's time" in out
    assert "writes: they hide, so only a slow store asks for batches" in out
    found = cli("plan", "deltas", *words(*optional), "--json").json
    assert found["costs"]["load_s"] == 1.5
    assert msgspec.convert(found["mtbf"], Mtbf) == estimate_mtbf(0, 0.0)
    assert set(found["assumed"]) == set(module._ASSUMED)


def test_why_at_a_limit(cli: Cli) -> None:
    out = plain(cli("plan", "deltas", *words(storage_budget="3.5GB", memory_budget="40MB")))
    assert "fulls: less often, two of them and their deltas would not fit (--storage-budget)" in out
    assert "writes: two larger batches would not fit (--memory-budget)" in out
    out = plain(cli("plan", "deltas", *words(replay="0"), "--host-share", "0"))
    assert "fulls: as seldom as may be; a replay takes almost nothing" in out
    assert "writes: no failure takes the host, so large batches cost nothing" in out
    assert "LowDiff's own" not in out
    out = plain(cli("plan", "deltas", *words(replay="0.6")))
    assert "deltas save no time" in out
    out = plain(cli("plan", "deltas", *words(), "--full-every", "500", "--batch", "4"))
    assert out.startswith("a full every 500 steps (4.17 min), 4 deltas per write (2 s)")
    assert "fulls: as given\nwrites: as given\n" in out


def test_fulls_that_the_agent_makes(cli: Cli) -> None:
    given = words(full_stall="0", batch="4")
    out = plain(cli("plan", "deltas", *given, "--fold", "0.1"))
    assert "fulls: as often as the agent that makes them can fold and write (--fold)" in out
    found = cli("plan", "deltas", *given, "--fold", "0.1", "--json").json
    assert found["costs"]["fold_s"] == 0.1
    assert found["waste"]["share"] == predict(
        replace(COSTS, full_stall_s=0.0, fold_s=0.1),
        found["choice"]["full_every"], found["choice"]["batch"],
    ).share  # fmt: skip
    assert cli("plan", "deltas", *words(), "--fold", "0.1").status == 2, "a stall of a full"


def test_a_share_of_the_disk(cli: Cli) -> None:
    costs = words(full_stall="0")
    more = cli("plan", "deltas", *costs, "--json").json["choice"]["full_every"]
    less = cli("plan", "deltas", *costs, "--disk-share", "0.1", "--json").json
    assert less["choice"]["full_every"] > 2 * more
    assert less["waste"]["disk_share"] <= 0.1
    said = cli("plan", "deltas", *costs, "--disk-share", "2")
    assert (said.status, "disk_share=2.0" in said.err) == (2, True)


def test_what_is_impossible_or_missing(cli: Cli) -> None:
    said = cli("plan", "deltas", *words(delta="1GB"))
    assert (said.status, said.out) == (2, "")
    assert "no choice respects the limits: storage is too slow" in said.err
    said = cli("plan", "deltas", "--state", "1GB", "--step", "1")
    assert (said.status, said.out) == (2, "")
    assert "not known: --write, --replay, --delta\n" in said.err
    assert cli("plan", "deltas", *words(mtbf="often")).status == 2
    assert cli("plan", "deltas", *words(), "--host-share", "1.5").status == 2


def test_it_explains_itself(cli: Cli) -> None:
    status, out, err = cli("plan", "deltas", "--help")
    assert (status, err) == (0, "")
    assert "Usage: everystep plan deltas" in out
    assert "Example: everystep plan deltas" in out
    example = module.EXAMPLE.partition("everystep ")[2]
    assert cli(*example.split()).status == 0


# ---------------------------------------------------------------- from a run


def measure(step: int, **more: object) -> Measure:
    figures: dict[str, object] = {
        "timeline": "main", "step": step, "begun_s": 0.0, "took_s": 1.3, "stall_s": 0.0,
        "snapshot_s": 0.0, "staging_s": 0.0, "bookkeeping_s": 0.0, "forward_s": 0.2,
        "backward_s": 0.25, "update_s": 0.05, "state_bytes": 1_500_000_000, "copied_bytes": 0,
        "written_bytes": 0, "write_bytes_per_s": 1e9,
    }  # fmt: skip
    return Measure(**{**figures, **more})  # type: ignore[arg-type]


def measured(run: Path, measures: list[Measure]) -> None:
    write_measures(LocalBackend(run), MeasuredBy(1, 0, 1), measures)


def test_figures_of_a_run(cli: Cli, healthy: Path) -> None:
    measured(healthy, [measure(1), measure(2, snapshot_s=0.01, staging_s=0.02, every=4)])
    said = cli("plan", "deltas", "--from-run", healthy, "--replay", "0.05", "--delta", "6MB")
    out = plain(said)
    assert out.startswith(f"from the medians of 2 steps that {healthy} measured\n")
    assert "(0 restarts seen)" in out
    found = cli(
        "plan", "deltas", "--from-run", healthy, "--replay", "0.05", "--delta", "6MB", "--json",
    ).json  # fmt: skip
    costs = found["costs"]
    assert (costs["step_s"], costs["state_bytes"]) == (0.5, 1_500_000_000)
    assert costs["full_stall_s"] == pytest.approx((0 + 4 * 0.03) / 2)
    assert (found["measured_steps"], found["restarts"]) == (2, 0)
    assert "mtbf_s" not in found["assumed"]
    said = cli("plan", "deltas", "--from-run", healthy)
    assert "not known: --replay, --delta\n" in said.err


def test_a_run_that_measured_nothing(cli: Cli, fresh: Path) -> None:
    said = cli("plan", "deltas", "--from-run", fresh)
    assert (said.status, "the run has no measurements" in said.err) == (1, True)


def test_restarts_that_go_on_count_and_those_that_go_back_do_not(fresh: Path, forked: Path) -> None:
    assert restarts_of(Run.open(fresh), 0) == (0, 0.0)
    restarts, observed_s = restarts_of(Run.open(forked), 0)
    assert restarts == 1, "the second session went on, the third went back"
    assert 0 <= observed_s < 600
    Job().run(forked, 7)
    assert restarts_of(Run.open(forked), 0)[0] == 2


# ---------------------------------------------------------------- the heat map


def test_heat() -> None:
    values = [[1.0, 1.04, 1.2], [1.9, 3.9, 4.1], [None, None, 1.0]]
    lines = [line.text for line in draw_heat([1, 10, 2000], [1, 2, 30], values, (10, 1))]
    assert lines == [
        "30 |x x ··",
        " 2 |▒▒▓▓██",
        " 1 |··O ░░",
        "   ++-+---",
        "    1 10",
        "times the least: · to 1.05, ░ to 1.25, ▒ to 2, ▓ to 4, █ more; x not possible, O chosen",
    ]


# ---------------------------------------------------------------- the document


def test_every_key_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
    section = text.partition("| `plan deltas` | |\n")[2].partition("\n\n")[0]
    kinds = (
        module.DeltasPlan, module.Grid, module.PaperChoice, Costs, Limits, Waste, Mtbf,
    )  # fmt: skip
    records = [thing for thing in vars(module).values() if inspect.isclass(thing)]
    assert set(kinds) <= set(records)
    keys = {name for record in kinds for name in record.__struct_fields__}
    assert keys - set(re.findall(r"`(\w+)`", section)) == set()
