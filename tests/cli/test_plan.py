"""`everystep plan full`, and the lanes that it draws."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from everystep.cli import plan as module
from everystep.cli.lanes import draw_lanes
from everystep.planning.hiding import Figures, Verdict, verdict
from everystep.store.local import LocalBackend
from everystep.store.measured import Measure, MeasuredBy, write_measures
from everystep.store.run import Run
from small_runs import Said, two_ranks

Cli = Callable[..., Said]

GIVEN = {
    "--state": "26GB", "--forward": "0.4", "--backward": "800ms", "--update": "0.05s",
    "--d2h": "25GB/s", "--d2d": "1.2TB/s", "--storage": "2GB/s", "--activations": "10GB",
}  # fmt: skip

FIGURES = Figures(
    state_bytes=26 * 10**9, forward_s=0.4, backward_s=0.8, update_s=0.05,
    offload_bytes_per_s=25e9, snapshot_bytes_per_s=1.2e12, write_bytes_per_s=2e9,
    activation_bytes=10**10,
)  # fmt: skip


def words(**more: str) -> list[str]:
    """The options of the example, some of them changed."""
    options = {**GIVEN, **{f"--{name}": value for name, value in more.items()}}
    return [word for pair in options.items() for word in pair]


def plain(said: Said) -> str:
    assert (said.status, said.err) == (0, "")
    assert "\x1b" not in said.out
    lines = (line for line in said.out.splitlines() if "/" not in line)  # a path may be long
    assert max(map(len, lines)) <= 110
    return said.out


def test_the_record_is_the_models_verdict(cli: Cli) -> None:
    said = cli("plan", "full", *words(), "--json")
    found = said.json
    assert list(found) == ["run", "measured_steps", "figures", "assumed", "verdict", "timeline"]
    assert msgspec.convert(found["figures"], Figures) == FIGURES
    assert msgspec.convert(found["verdict"], Verdict) == verdict(FIGURES)
    assert (found["run"], found["measured_steps"], found["assumed"]) == (None, 0, [])
    timeline = found["timeline"]
    assert len(timeline["step_ends_s"]) == 2
    assert timeline["step_ends_s"][-1] == timeline["stop_s"]
    assert {lane for lane, _, _ in timeline["spans"]} == {
        "forward", "backward", "update", "offload", "write",
    }  # fmt: skip


def test_what_hides_whole(cli: Cli) -> None:
    out = plain(cli("plan", "full", *words()))
    assert out.splitlines()[:8] == [
        "a checkpoint of 26.0 GB every step of 1.25 s",
        "hidden whole: it leaves in 1.04 s of the 1.2 s of forward and backward, 160 ms to spare",
        "each step loses nothing",
        "extra device memory: none",
        "host memory for staging: 78.0 GB, three states",
        "staged 1.04 s after its step ends",
        "durable: every 10.4 steps on the mean, 11 at most; with the host at most 23 steps are "
        "lost",
        "for every checkpoint to be durable: 20.8 GB/s to storage (now 2.0 GB/s)",
    ]
    assert "stall" not in out and "assumed" not in out


def test_what_is_snapshotted_says_what_would_hide_it(cli: Cli) -> None:
    out = plain(cli("plan", "full", *words(state="31GB")))
    assert "each step loses 0.833 ms (0.07%): 0.833 ms to snapshot 1.0 GB" in out
    assert "to hide whole: 1.24 s of forward and backward (now 1.2 s), or 25.8 GB/s" in out
    assert "extra device memory: none at the peak, 1.0 GB fit where activations were" in out
    assert re.search(r"^stall +▏", out, re.M), "too short for a character, and still seen"


def test_what_the_link_cannot_carry_at_every_step(cli: Cli) -> None:
    out = plain(cli("plan", "full", *words(state="80GB")))
    assert (
        "a checkpoint has the link to the host for as long as 3 steps compute; one is taken every 4"
    ) in out
    assert "extra device memory: 39.0 GB at the peak\n" in out
    said = cli("plan", "full", *words(state="80GB"), "--every", "2")
    assert (said.status, said.out) == (2, "")
    assert "at every 2 steps" in said.err and "try: at every 3 steps it can" in said.err
    assert cli("plan", "full", *words(state="80GB"), "--every", 3, "--json").json["verdict"][
        "every"
    ] == 3  # fmt: skip


def test_checkpoints_too_far_apart_are_not_simulated(cli: Cli) -> None:
    said = cli("plan", "full", *words(d2h="1kB/s"))
    assert (said.status, "two steps in the steady state" in said.out) == (0, False)
    found = cli("plan", "full", *words(d2h="1kB/s"), "--json").json
    assert (found["timeline"], found["verdict"]["every"]) == (None, 2**25)


def test_block_waits_for_storage(cli: Cli) -> None:
    out = plain(cli("plan", "full", *words(), "--policy", "block"))
    assert "waiting for storage" in out
    assert "host memory for staging: 52.0 GB, two states" in out
    assert "durable: every step" in out
    assert "to wait for nothing: 20.8 GB/s to storage (now 2.0 GB/s)" in out


def test_without_a_device(cli: Cli) -> None:
    out = plain(cli("plan", "full", *words(state="80GB"), "--cpu"))
    assert out.startswith("a checkpoint of 80.0 GB every 4 steps of 1.25 s")
    assert "extra device memory: none, training runs in host memory" in out


def test_what_is_not_given_is_assumed_and_told(cli: Cli) -> None:
    options = {k: v for k, v in GIVEN.items() if k not in ("--d2d", "--activations")}
    said = cli("plan", "full", *(word for pair in options.items() for word in pair), "--json")
    assert said.json["assumed"] == ["snapshot_bytes_per_s", "activation_bytes"]
    assert said.json["figures"]["snapshot_bytes_per_s"] == 25e9
    options["--state"] = "31GB"
    out = plain(cli("plan", "full", *(word for pair in options.items() for word in pair)))
    assert "assumed: the device copies no faster than the link (--d2d)" in out
    assert "extra device memory: at most 1.0 GB\n" in out
    options["--d2d"] = "1.2TB/s"
    out = plain(cli("plan", "full", *(word for pair in options.items() for word in pair)))
    assert re.search(
        r"^extra device memory: [\d.]+ MB at the peak, less what backward frees", out, re.M
    )


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("123", 123), ("7B", 7), ("1.5kB", 1500), ("2KB", 2000), ("2KiB", 2048),
        ("3 MB", 3 * 10**6),
        ("1MiB", 2**20), ("1e3MB", 10**9), ("2GiB", 2**31), ("1TB", 10**12), ("1TiB", 2**40),
    ],
)  # fmt: skip
def test_sizes(cli: Cli, text: str, nbytes: int) -> None:
    said = cli("plan", "full", *words(state=text), "--cpu", "--json")
    assert said.json["figures"]["state_bytes"] == nbytes
    if not text.isdigit():
        said = cli("plan", "full", *words(d2h=f"{text}/s"), "--cpu", "--json")
        assert said.json["figures"]["offload_bytes_per_s"] == nbytes


@pytest.mark.parametrize(
    ("text", "seconds"), [("1", 1), ("1.5s", 1.5), ("250ms", 0.25), ("2e-1", 0.2), ("1min", 60)]
)
def test_times(cli: Cli, text: str, seconds: float) -> None:
    said = cli("plan", "full", *words(forward=text), "--json")
    assert said.json["figures"]["forward_s"] == seconds


@pytest.mark.parametrize(
    ("option", "text", "hint"),
    [
        *(("state", text, "26GB or 24GiB") for text in ("26Gb", "x", "", "1GB/s", "GB", "nan")),
        *(("d2h", text, "25GB/s") for text in ("25", "25GB", "25/s", "25s", "inf")),
        *(("forward", text, "0.4 or 400ms") for text in ("1GB", "4 days", "1/s")),
        ("state", "1e999GB", None),
        ("state", "0", None),
        ("storage", "0GB/s", None),
    ],
)
def test_bad_values_are_wrong_use(cli: Cli, option: str, text: str, hint: str | None) -> None:
    status, out, err = cli("plan", "full", *words(**{option: text}))
    assert (status, out) == (2, "")
    assert err.startswith("everystep: ")
    assert hint is None or err.endswith(f"  try: --{option} {hint}\n")


def test_negative_values_are_wrong_use(cli: Cli) -> None:
    assert cli("plan", "full", *words(), "--state=-1GB").status == 2


def test_what_is_missing_is_named(cli: Cli) -> None:
    status, out, err = cli("plan", "full", "--state", "1GB", "--d2h", "1GB/s")
    assert (status, out) == (2, "")
    assert "not known: --forward, --backward, --update, --storage" in err
    assert "--from-run" in err


def test_the_group_and_its_command_explain_themselves(cli: Cli) -> None:
    said = cli("plan")
    assert (said.status, "full" in said.out) == (2, True)
    for name in (["plan"], ["plan", "full"]):
        status, out, err = cli(*name, "--help")
        assert (status, err) == (0, "")
        assert f"Usage: everystep {' '.join(name)}" in out
        assert "Example: everystep plan full" in out
    assert cli("plan", "fly").status == 2


# ---------------------------------------------------------------- from a run


def measure(step: int, **more: object) -> Measure:
    figures: dict[str, object] = {
        "timeline": "main", "step": step, "begun_s": 0.0, "took_s": 1.3, "stall_s": 0.0,
        "snapshot_s": 0.0, "staging_s": 0.0, "bookkeeping_s": 0.0, "forward_s": 0.4,
        "backward_s": 0.8, "update_s": 0.05, "state_bytes": 31 * 10**9, "copied_bytes": 0,
        "written_bytes": 0, "offload_bytes_per_s": 25e9, "write_bytes_per_s": 2e9,
    }  # fmt: skip
    return Measure(**{**figures, **more})  # type: ignore[arg-type]


@pytest.fixture
def bare(run_dir: Path) -> Path:
    """A run in which no step was stored yet."""
    run_dir.mkdir()
    Run.open_or_create(LocalBackend(run_dir))
    return run_dir


@pytest.fixture
def stored(run_dir: Path) -> Path:
    """Two steps of two ranks, in host memory."""
    run_dir.mkdir()
    two_ranks(run_dir)
    return run_dir


def measured(run: Path, session: int, rank: int, measures: list[Measure]) -> None:
    write_measures(Run.open(run).backend, MeasuredBy(session, rank, 2), measures)


def test_medians_of_the_newest_session_that_measured(cli: Cli, bare: Path) -> None:
    measured(bare, 1, 0, [measure(1, forward_s=9.0)])
    cold = measure(2, forward_s=7.0, offload_bytes_per_s=None)
    later = [measure(n, forward_s=f, snapshot_bytes_per_s=1e12) for n, f in ((3, 0.3), (4, 0.5))]
    measured(bare, 2, 0, [cold, *later])
    measured(bare, 3, 0, [])
    measured(bare, 2, 1, [measure(2, forward_s=2.0)])
    found = cli("plan", "full", "--from-run", bare, "--json").json
    assert (found["run"], found["measured_steps"]) == (str(bare), 3)
    figures = found["figures"]
    assert (figures["forward_s"], figures["backward_s"]) == (0.5, 0.8)
    assert (figures["offload_bytes_per_s"], figures["snapshot_bytes_per_s"]) == (25e9, 1e12)
    assert found["assumed"] == ["activation_bytes"]
    other = cli("plan", "full", "--from-run", bare, "--rank", 1, "--json").json
    assert other["figures"]["forward_s"] == 2.0
    out = plain(cli("plan", "full", "--from-run", bare))
    assert out.startswith(f"from the medians of 3 steps that {bare} measured\n")


def test_options_count_more_than_measurements(cli: Cli, bare: Path) -> None:
    measured(bare, 1, 0, [measure(1)])
    found = cli("plan", "full", "--from-run", bare, "--state", "1GB", "--json").json
    assert found["figures"]["state_bytes"] == 10**9
    assert found["figures"]["write_bytes_per_s"] == 2e9


def test_a_run_in_host_memory_is_seen(cli: Cli, stored: Path) -> None:
    measured(stored, 1, 0, [measure(1)])
    for more, on_device in (((), False), (("--device",), True)):
        found = cli("plan", "full", "--from-run", stored, *more, "--json").json
        assert found["figures"]["on_device"] is on_device


def test_a_run_that_measured_nothing_or_too_little(cli: Cli, stored: Path) -> None:
    status, out, err = cli("plan", "full", "--from-run", stored)
    assert (status, out) == (1, "")
    assert err == (
        "everystep: rank 0: the run has no measurements\n"
        "  try: they come with strategy=Full(); without, give the figures as options\n"
    )
    measured(stored, 1, 0, [measure(1, write_bytes_per_s=None)])
    assert (
        "rank 1: the run has no meas" in cli("plan", "full", "--from-run", stored, "--rank", 1).err
    )
    status, out, err = cli("plan", "full", "--from-run", stored)
    assert (status, out) == (2, "")
    assert err.startswith("everystep: not known: --storage\n")


def test_what_is_no_run(cli: Cli, tmp_path: Path) -> None:
    status, out, err = cli("plan", "full", "--from-run", tmp_path / "none")
    assert (status, out) == (1, "")
    assert "there is no such directory" in err


# ---------------------------------------------------------------- lanes


def test_lanes_are_rows_in_their_order() -> None:
    spans = [
        ("write", 0.0, 8.0), ("forward", 0.0, 2.0), ("forward", 4.0, 6.0), ("zeta", 3.0, 3.01),
        ("update", 7.4, 8.9), ("stall", 20.0, 30.0), ("hash", 1.0, 1.0),
    ]  # fmt: skip
    lines = [line.text for line in draw_lanes(spans, 0.0, 10.0, marks_s=[4.0, 10.0], width=19)]
    assert lines == [
        "forward  ██  ██",
        "update          ██",
        "write    ████████",
        "zeta        ▏",
        "         ····|····|",
        "         0     10 s",
    ]


def test_lanes_are_cut_at_both_ends_and_fit_the_width() -> None:
    lines = [line.text for line in draw_lanes([("forward", -5.0, 50.0)], 0.0, 1.0)]
    assert lines[0] == "forward  " + "█" * 69
    assert {len(line) for line in lines} == {78}


# ---------------------------------------------------------------- the document


def test_every_key_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
    section = text.partition("| `plan full` | |\n")[2].partition("\n\n")[0]
    records = [
        thing
        for thing in vars(module).values()
        if inspect.isclass(thing) and thing in (module.FullPlan, module.Timeline, Figures, Verdict)
    ]
    keys = {name for record in records for name in record.__struct_fields__}
    assert len(records) == 4
    assert keys - set(re.findall(r"`(\w+)`", section)) == set()
