"""`everystep report`: a page that needs nothing else, and a trace that says what was measured."""

from __future__ import annotations

import random
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

from byte_runs import begin, new_run
from everystep.cli import report, report_page
from everystep.cli.report_figures import (
    Figures,
    Message,
    Spread,
    durable_lag_steps,
    duration,
    figures,
    messages,
)
from everystep.cli.report_page import Page, encode_page
from everystep.cli.report_trace import LANES, encode_trace
from everystep.store.measured import (
    KEPT_STEPS,
    Measure,
    MeasuredBy,
    Span,
    read_measures,
    write_measures,
)
from everystep.types import StepRef
from small_runs import Said

Cli = Callable[..., Said]

HOSTILE = "disk </script><script>document.title='owned'</script><!-- <img src=x onerror=alert(1)>"
"""What an error may say: it quotes paths, and anybody may name a file."""

DOCUMENT = Path(__file__).parents[2] / "docs" / "cli.md"


# ---------------------------------------------------------------- made-up runs


def exact(seconds: float) -> float:
    return round(seconds * 2**20) / 2**20


def made_up(
    by: MeasuredBy, first: int, count: int, timeline: str = "main", clock_s: float = 5_000.0
) -> list[Measure]:
    """Steps as an agent could have measured them: copies go on into the next step, one write at a
    time; the disk is slow in the middle, so that steps are given up and lags grow. All times are
    multiples of 2**-20 s, so that sums are exact."""
    chance = random.Random(f"{by} {first}")

    def between(least_s: float, most_s: float) -> float:
        return exact(chance.uniform(least_s, most_s))

    measures = []
    disk_free_s = now_s = clock_s + between(0, 0.002)
    for step in range(first, first + count):
        slow = 0.45 < (step - first) / count < 0.6
        forward, backward, update = (exact(chance.gauss(m, m / 30)) for m in (0.08, 0.16, 0.03))
        snapshot = between(0.0004, 0.0012)
        staging = between(0.01, 0.05) if slow and step % 3 == 0 else 0.0
        bookkeeping = between(0.00008, 0.0002)
        stall = snapshot + staging + bookkeeping
        took = forward + backward + update + stall
        staged = between(0.19, 0.22)
        writing = between(1.2, 2.0) if slow else between(0.15, 0.24)
        begins = max(disk_free_s, now_s + took + staged)
        durable = begins - now_s - took + writing if begins - now_s - took < 3 else None
        if durable is not None:
            disk_free_s = begins + writing
        copied, update_at, piece = 1_300_000_000, forward + backward, exact(staged / 6)
        measures.append(
            Measure(
                timeline=timeline, step=step, begun_s=now_s, took_s=took,
                stall_s=stall, snapshot_s=snapshot, staging_s=staging, bookkeeping_s=bookkeeping,
                forward_s=forward, backward_s=backward, update_s=update,
                state_bytes=copied, copied_bytes=copied,
                written_bytes=copied if durable is not None else 0,
                offload_bytes_per_s=copied / staged, snapshot_bytes_per_s=8e11,
                write_bytes_per_s=copied / writing if durable is not None else None,
                staged_s=staged, durable_s=durable,
                error=HOSTILE if durable is None and step % 7 == 0 else None,
                deviation="write: 0.7 GB/s, planned 6.1 GB/s" if slow and step % 5 == 0 else None,
                spans=[
                    Span("forward", 0.0, forward),
                    Span("backward", forward, update_at),
                    Span("stall", update_at, update_at + staging + snapshot),
                    Span("snapshot", update_at + staging, update_at + staging + snapshot),
                    Span("update", update_at + stall, took),
                    *(Span("offload", took + piece * k, took + piece * k + piece * 7 / 8)
                      for k in range(6)),
                    *(Span("hash", took + piece * k + piece * 7 / 8, took + piece * (k + 1.25))
                      for k in range(6)),
                    *([Span("write", took + durable - writing, took + durable)]
                      if durable is not None else []),
                ],
            )
        )  # fmt: skip
        now_s += took
    return measures


def write_run(path: Path, steps: int = 120) -> dict[MeasuredBy, list[Measure]]:
    """A run of two ranks whose second session went back, and what was measured in it."""
    run = new_run(path, world_size=2)
    begin(run, 2, "main@90", world_size=2, parent=StepRef("main", 90), restored=StepRef("main", 90))
    measured = {}
    for rank in (0, 1):
        for session, first, timeline in ((1, 1, "main"), (2, 91, "main@90")):
            by = MeasuredBy(session, rank, 2)
            measured[by] = made_up(by, first, steps, timeline, clock_s=5_000.0 * session)
            write_measures(run.backend, by, measured[by])
    return measured


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def embedded(page: Path) -> Any:
    """The data in a page, and the proof that nothing else in it comes from the run: around the
    data it is the template."""
    template = Path(report_page.__file__).with_name("report.html").read_text(encoding="utf-8")
    before, _, after = template.partition("@DATA@")
    text = page.read_text(encoding="utf-8")
    assert text.startswith(before) and text.endswith(after)
    data = text[len(before) : len(text) - len(after)]
    assert "<" not in data
    return msgspec.json.decode(data)


def rows_of(chart: Any, fields: list[str]) -> list[dict[str, Any]]:
    return [dict(zip(fields, row, strict=True)) for row in chart["rows"]]


# ---------------------------------------------------------------- the command


def test_the_page_is_written_here_and_the_record_says_where(
    cli: Cli, tmp_path: Path, place: Path
) -> None:
    measured = write_run(tmp_path / "gpt")
    said = cli("report", tmp_path / "gpt", "--json")
    assert (said.status, said.err) == (0, "")
    found = said.json
    assert found["path"] == str(tmp_path / "gpt")
    assert (found["output"], found["trace"]) == ("gpt-report.html", None)
    assert (found["sessions"], found["ranks"]) == ([1, 2], [0, 1])
    assert found["figures"]["steps"] == sum(map(len, measured.values()))
    assert [path.name for path in place.iterdir()] == ["gpt-report.html"]
    assert HOSTILE in [message["text"] for message in found["errors"]]


def test_people_read_the_same_figures_on_the_terminal_and_in_the_page(
    cli: Cli, tmp_path: Path, place: Path
) -> None:
    write_run(tmp_path / "gpt")
    said = cli("report", tmp_path / "gpt")
    assert said.status == 0
    for label, text in embedded(place / "gpt-report.html")["headline"]:
        assert re.search(rf"^{re.escape(label)} +{re.escape(text)}$", said.out, re.MULTILINE)
    assert "open gpt-report.html in a browser" in said.out


def test_nothing_that_is_there_is_replaced_without_force(
    cli: Cli, tmp_path: Path, place: Path
) -> None:
    write_run(tmp_path / "gpt", 4)
    for option in ("--output", "--trace"):
        (place / "kept").write_text("mine")
        status, out, err = cli("report", tmp_path / "gpt", option, "kept")
        assert (status, out) == (2, "")
        assert "kept: is there already" in err and "--force" in err
        assert (place / "kept").read_text() == "mine"
        assert [path.name for path in place.iterdir()] == ["kept"]
        assert cli("report", tmp_path / "gpt", option, "kept", "--force").status == 0
        assert (place / "kept").read_text() != "mine"
        for path in place.iterdir():
            path.unlink()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--output", "nowhere/page.html"], "is no directory"),
        (["--output", "{run}/page.html"], "lies in the run"),
        (["--output", "x", "--trace", "./x"], "both the page and the trace"),
    ],
)
def test_targets_that_cannot_be(
    cli: Cli, tmp_path: Path, place: Path, words: list[str], problem: str
) -> None:
    write_run(tmp_path / "gpt", 4)
    words = [word.format(run=tmp_path / "gpt") for word in words]
    status, out, err = cli("report", tmp_path / "gpt", *words)
    assert (status, out) == (2, "") and problem in err
    assert list(place.iterdir()) == []


def test_a_run_without_measurements(cli: Cli, tmp_path: Path, place: Path) -> None:
    fresh = tmp_path / "gpt"
    new_run(fresh)
    for name in ("", "measured/s000001-r00000of00001.jsonl"):
        if name:  # a file is there, and no line of it is ours
            (fresh / "measured").mkdir()
            (fresh / name).write_text("{}\n")
        status, out, err = cli("report", fresh, "--trace", "t.json")
        assert (status, out) == (1, "")
        headline, hint = err.splitlines()
        assert headline.endswith(f"{fresh}: nothing was measured in this run")
        assert hint.startswith("  try: ") and "Full()" in hint
        assert list(place.iterdir()) == []


def test_a_directory_that_is_no_run(cli: Cli, tmp_path: Path, place: Path) -> None:
    status, out, err = cli("report", tmp_path, "--output", tmp_path / "here" / "x", "--force")
    assert (status, out) == (2, "") and "lies in the run" in err
    (tmp_path / "other").mkdir()
    for path, problem in (("other", "has no run.json"), ("none", "there is no such directory")):
        status, out, err = cli("report", tmp_path / path)
        assert (status, out) == (1, "") and problem in err
    assert list(place.iterdir()) == []


def test_the_command_explains_itself(cli: Cli) -> None:
    said = cli("report", "--help")
    assert said.status == 0 and "Example: everystep report" in said.out


def test_every_key_is_documented() -> None:
    section = DOCUMENT.read_text(encoding="utf-8").partition("| `report` | |\n")[2]
    documented = set(re.findall(r"`(\w+)`", section.partition("\n\n")[0]))
    records = (report.Reported, Figures, Spread, Message)
    keys = {name for record in records for name in record.__struct_fields__}
    assert keys - documented == set()


# ---------------------------------------------------------------- the figures


def step(number: int, **changes: Any) -> Measure:
    """A step of one second, with no copy and no span."""
    plain = Measure(
        timeline="main", step=number, begun_s=10.0 + number, took_s=1.0,
        stall_s=0.0, snapshot_s=0.0, staging_s=0.0, bookkeeping_s=0.0,
        forward_s=0.25, backward_s=0.5, update_s=0.25,
        state_bytes=100, copied_bytes=100, written_bytes=0,
    )  # fmt: skip
    return msgspec.structs.replace(plain, **changes)


BY = MeasuredBy(1, 0, 1)


def test_figures_of_known_steps() -> None:
    stalls = [n / 100 for n in range(1, 21)]
    measures = [step(n, stall_s=stall) for n, stall in enumerate(stalls, 1)]
    measures[3] = step(
        4, stall_s=0.04, staged_s=0.5, durable_s=2.0, written_bytes=80, write_bytes_per_s=7.0
    )
    measures[4] = step(5, stall_s=0.05, staged_s=0.75, error="e", deviation="d")
    found = figures({BY: measures})
    assert (found.steps, found.staged, found.durable) == (20, 2, 1)
    assert found.stall_share == found.stall_s == Spread(median=0.1, p95=0.19, largest=0.2)
    assert found.step_s == Spread(median=1.0, p95=1.0, largest=1.0)
    assert found.staged_lag_s == Spread(median=0.5, p95=0.75, largest=0.75)
    assert found.durable_lag_s == Spread(median=2.0, p95=2.0, largest=2.0)
    assert found.written_bytes == Spread(median=80, p95=80, largest=80)
    assert (found.write_bytes_per_s, found.offload_bytes_per_s) == (7.0, None)
    assert (found.errors, found.deviations, found.state_bytes) == (1, 1, 100)


def test_how_many_steps_durable_is_behind() -> None:
    # step 3 is durable as step 5 ends, and step 4 only after step 6 has ended
    measures = [step(n) for n in range(2, 8)]
    measures[1] = step(3, durable_s=2.0)
    measures[2] = step(4, durable_s=2.5)
    assert durable_lag_steps(measures) == [1, 2, 3, 2, 3, 3]
    # where the beginning of the session is lost, nothing is known before the first durable step
    many = [step(n) for n in range(1, KEPT_STEPS + 1)]
    many[1] = step(2, durable_s=1.0)
    assert durable_lag_steps(many)[:4] == [None, None, 1, 2]
    assert durable_lag_steps([]) == []


def test_a_message_is_listed_once_with_where_it_came() -> None:
    other = MeasuredBy(1, 1, 2)
    measured = {
        BY: [step(1), step(2, error="full"), step(3, error="full\nx"), step(4, error="full")],
        other: [step(5, error="full"), step(6, error="z" * 10_000)],
    }
    found = messages(measured, lambda m: m.error)
    assert found[:2] == [
        Message(text="full", count=3, first="main:2", last="main:5", rank=0),
        Message(text="full\\nx", count=1, first="main:3", last="main:3", rank=0),
    ]
    assert len(found) == 3 and len(found[2].text) == 400
    many = {BY: [step(n, error=f"error {n}") for n in range(1, 1_000)]}
    assert len(messages(many, lambda m: m.error)) == 50


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 µs"), (3.21e-6, "3.21 µs"), (0.0123, "12.3 ms"), (0.9996, "1 s"), (1234.4, "1,234 s")],
)
def test_times_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# ---------------------------------------------------------------- the page


def test_every_measured_figure_is_in_the_page(cli: Cli, tmp_path: Path, place: Path) -> None:
    measured = write_run(tmp_path / "gpt")
    assert cli("report", tmp_path / "gpt").status == 0
    data = embedded(place / "gpt-report.html")
    assert [chart["rank"] for chart in data["charts"]] == [0, 1]
    assert data["notes"] == [] and len(data["by_rank"]) == 2
    assert data["sessions"]["2"].startswith("2 ranks, from main:90, begun ")
    for chart in data["charts"]:
        rows = rows_of(chart, data["fields"])
        expected = [m for by, ms in measured.items() if by.rank == chart["rank"] for m in ms]
        assert [row["step"] for row in rows] == [f"{m.timeline}:{m.step}" for m in expected]
        for row, m in zip(rows, expected, strict=True):
            shown = [row["took"], row["stall"], row["snapshot"], row["staging"], row["bookkeeping"]]
            held = [m.took_s, m.stall_s, m.snapshot_s, m.staging_s, m.bookkeeping_s]
            assert shown == [round(value, 7) for value in held]
            assert row["durable"] == (None if m.durable_s is None else round(m.durable_s, 7))
            assert (row["error"], row["deviation"]) == (m.error, m.deviation)
            assert row["spans"] == [
                [data["lanes"].index(span.lane), round(span.start_s, 7), round(span.stop_s, 7)]
                for span in m.spans
            ]


def test_the_newest_steps_and_spans_are_kept_and_it_says_so(
    cli: Cli, tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "gpt", 50)
    monkeypatch.setattr(report_page, "MAX_ROWS", 60)
    monkeypatch.setattr(report_page, "MAX_SPANS", 200)
    assert cli("report", tmp_path / "gpt").status == 0
    data = embedded(place / "gpt-report.html")
    assert data["notes"] == ["The charts show the newest steps; 140 older ones left out."]
    for chart in data["charts"]:
        rows = rows_of(chart, data["fields"])
        assert [row["step"] for row in rows] == [f"main@90:{n}" for n in range(111, 141)]
        kept = [row["spans"] is not None for row in rows]
        assert kept == sorted(kept) and any(kept) and not all(kept)
        assert sum(len(row["spans"] or []) for row in rows) <= 100


def test_ranks_beyond_the_limit_are_left_out_and_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_page, "MAX_RANKS", 2)
    page = Page(title="x", headline=[], sessions={}, errors=[], deviations=[])
    measured = {MeasuredBy(1, rank, 3): [step(1)] for rank in range(3)}
    (tmp_path / "x.html").write_bytes(encode_page(page, measured))
    data = embedded(tmp_path / "x.html")
    assert [chart["rank"] for chart in data["charts"]] == [0, 1]
    assert data["notes"] == ["The charts show the lowest 2 of 3 ranks."]
    assert [row[0] for row in data["by_rank"]] == ["0", "1", "2"]


class References(HTMLParser):
    """Collects what a page would fetch, and its policy."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.policy = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.found += [f"{tag} {name}" for name in named if name in ("src", "href", "srcset")]
        if named.get("http-equiv") == "Content-Security-Policy":
            self.policy = named["content"] or ""


def test_the_page_fetches_nothing_and_may_not(cli: Cli, tmp_path: Path, place: Path) -> None:
    write_run(tmp_path / "gpt", 4)
    assert cli("report", tmp_path / "gpt").status == 0
    text = (place / "gpt-report.html").read_text(encoding="utf-8")
    references = References()
    references.feed(text)
    assert references.found == []
    assert references.policy.startswith("default-src 'none';")
    template = Path(report_page.__file__).with_name("report.html").read_text(encoding="utf-8")
    assert set(re.findall(r"https?://\S+", template)) == {'http://www.w3.org/2000/svg";'}
    assert not re.search(
        r"fetch\(|XMLHttp|WebSocket|innerHTML|insertAdjacent|url\(|@import", template
    )


# ---------------------------------------------------------------- in a browser

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def loaded(page: Path, profile: Path) -> str:
    """The document after its script has run."""
    done = subprocess.run(
        [
            *(str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"),
            *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
            *("--disable-sync", "--disable-dev-shm-usage", "--virtual-time-budget=10000"),
            *(f"--user-data-dir={profile}", "--window-size=1280,2000", "--dump-dom", page.as_uri()),
        ],
        capture_output=True, text=True, encoding="utf-8", timeout=90, check=True,
    )  # fmt: skip
    return done.stdout


browser = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")


@browser
def test_a_browser_draws_the_charts(cli: Cli, tmp_path: Path, place: Path) -> None:
    write_run(tmp_path / "gpt", 40)
    assert cli("report", tmp_path / "gpt").status == 0
    dom = loaded(place / "gpt-report.html", tmp_path / "profile")
    body = re.search(r"<body[^>]*>", dom)
    assert body is not None and body[0] == '<body data-ready="1">'
    charts, lanes = dom.partition('id="charts"')[2].partition('id="lanes"')[::2]
    assert charts.count('role="img"') == 4
    assert len(re.findall(r'<path class="(grey|blue|orange)" d="M58 [^"]{400,}"', charts)) == 3
    assert len(re.findall(r'<path class="line [a-z ]+" d="M58 [^"]{400,}"', charts)) == 4
    assert lanes.count('class="span ') + lanes.count(" on →</text>") == 18
    assert all(f">{lane}</text>" in lanes for lane in LANES)
    assert "session 2 · main@90</text>" in charts
    table = dom.rpartition('id="table"')[2]
    assert table.count("<tr>") == 51 and "<td>main@90:130</td>" in table


_HANDS = """
const plot = document.querySelector("#charts svg[role=img]");
const left = plot.getBoundingClientRect().left, says = document.querySelectorAll("#charts output");
const told = [], tell = id => told.push(at(id).textContent);
plot.dispatchEvent(new PointerEvent("pointermove", {clientX: left + 59}));
told.push(...[...says].map(output => output.textContent));
plot.dispatchEvent(new MouseEvent("click", {clientX: left + 59}));
tell("lane-title");
for (const id of ["after", "stalled"]) { at(id).click(); tell("lane-title"); }
at("rank").value = 1;
at("rank").dispatchEvent(new Event("change"));
at("which").value = 79;
at("which").dispatchEvent(new Event("input"));
tell("lane-title");
document.querySelector(".span").dispatchEvent(new PointerEvent("pointerenter"));
tell("lane-says");
for (const id of ["clip", "whole", "theme"]) at(id).click();
new Image().src = "https://example.invalid/";
told.push(performance.getEntriesByType("resource").length);
document.body.dataset.told = JSON.stringify(told);
"""


@browser
def test_a_browser_shows_what_is_pointed_at(cli: Cli, tmp_path: Path, place: Path) -> None:
    measured = write_run(tmp_path / "gpt", 40)
    assert cli("report", tmp_path / "gpt").status == 0
    page = place / "gpt-report.html"
    before, begins, after = page.read_text(encoding="utf-8").rpartition("\nbegin();\n")
    page.write_text(before + begins + _HANDS + after, encoding="utf-8")
    body = re.search(r"<body[^>]*>", loaded(page, tmp_path / "profile"))
    assert body is not None and "data-error" not in body[0]
    told = re.search('data-told="([^"]*)"', body[0])
    assert told is not None
    *charts, first, second, stalled, other, bar, fetched = msgspec.json.decode(unescape(told[1]))
    one = measured[MeasuredBy(1, 0, 2)]
    assert [text.partition(": ")[0] for text in charts] == ["main:1"] * 4
    assert charts[0].startswith(f"main:1: {one[0].stall_s * 1000:#.4g} ms (")
    assert charts[3] == "main:1: 1 step behind"
    assert (first, second) == ("One step: main:1, session 1", "One step: main:2, session 1")
    most = max(one + measured[MeasuredBy(2, 0, 2)], key=lambda m: m.stall_s)
    assert stalled.startswith(f"One step: {most.timeline}:{most.step}, ")
    assert other == "One step: main@90:130, session 2"
    forward_s = measured[MeasuredBy(2, 1, 2)][-1].forward_s
    length = f"{forward_s * 1000:#.4g} ms"
    assert bar == f"forward: 0 s to {length}, {length}"
    assert fetched == 0


@browser
def test_a_browser_takes_nothing_from_the_run_for_markup(
    cli: Cli, tmp_path: Path, place: Path
) -> None:
    run = new_run(tmp_path / "gpt")
    wild = step(
        10**30, timeline=HOSTILE * 40, took_s=1e308, begun_s=-1e308, durable_s=-5.0, stall_s=1e300,
        copied_bytes=-(10**40), error=HOSTILE, deviation=f"\u202e\x00{HOSTILE}",
        spans=[Span(HOSTILE, -1e308, 1e308), Span("__proto__", 0.0, 1.0), Span("write", 5.0, 1.0)],
    )  # fmt: skip
    lines = [msgspec.json.encode(m) for m in (wild, step(1), wild, step(2, took_s=0.0))]
    (tmp_path / "gpt" / "measured").mkdir()
    (tmp_path / "gpt" / BY.name).write_bytes(b"\n".join(lines))
    assert len(read_measures(run.backend)[BY]) == 4
    assert cli("report", tmp_path / "gpt", "--trace", "t.json").status == 0
    dom = loaded(place / "gpt-report.html", tmp_path / "profile")
    assert '<body data-ready="1">' in dom
    assert "<img" not in dom and "<title>owned" not in dom
    assert "&lt;img src=x onerror=alert(1)&gt;" in dom
    assert min(e.get("ts", 0) for e in events(place / "t.json")) == 0


# ---------------------------------------------------------------- the trace


def events(path: Path) -> list[dict[str, Any]]:
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])["traceEvents"]


def nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def test_the_trace_has_every_span_once_at_its_time(cli: Cli, tmp_path: Path, place: Path) -> None:
    measured = write_run(tmp_path / "gpt")
    said = cli("report", tmp_path / "gpt", "--trace", "trace.json", "--json")
    assert said.status == 0 and said.json["trace"] == "trace.json"
    found = [event for event in events(place / "trace.json") if event["ph"] == "X"]
    expected: Counter[Any] = Counter()
    zero_s = 0.0
    for session in (1, 2):
        both = {by: ms for by, ms in measured.items() if by.session == session}
        zero_s = min(ms[0].begun_s for ms in both.values()) - zero_s
        ends_s = 0.0
        for by, m in ((by, m) for by, ms in both.items() for m in ms):
            name = f"{m.timeline}:{m.step}"
            for lane, start_s, stop_s in [Span("step", 0.0, m.took_s), *m.spans]:
                start, stop = (nanoseconds(m.begun_s + t - zero_s) for t in (start_s, stop_s))
                shown = name if lane == "step" else f"{lane} {name}"
                expected[by.rank, session, lane, shown, start, stop - start] += 1
                ends_s = max(ends_s, m.begun_s + stop_s - zero_s)
        zero_s = ends_s + 1.0  # where the next session begins
    seen = Counter(
        (e["pid"], e["args"]["session"], e["cat"], e["name"],
         round(e["ts"] * 1000), round(e["dur"] * 1000))
        for e in found if e["cat"] != "session"
    )  # fmt: skip
    assert seen == expected
    assert Counter((e["pid"], e["name"]) for e in found if e["cat"] == "session") == {
        (rank, f"session {session}"): 1 for rank in (0, 1) for session in (1, 2)
    }


def test_the_trace_is_formed_as_viewers_want_it(cli: Cli, tmp_path: Path, place: Path) -> None:
    write_run(tmp_path / "gpt")
    assert cli("report", tmp_path / "gpt", "--trace", "trace.json").status == 0
    found = events(place / "trace.json")
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in found if e["name"] == "thread_name"}
    processes = {e["pid"]: e["args"]["name"] for e in found if e["name"] == "process_name"}
    assert processes == {0: "rank 0", 1: "rank 1"}
    assert [n for (p, _), n in sorted(names.items()) if p == 0] == ["session", "step", *LANES]
    last: dict[int, float] = {}
    ends: dict[tuple[int, int], float] = {}
    for event in found:
        if event["ph"] == "M":
            continue
        assert event.keys() == {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args"}
        assert event["ts"] >= last.get(event["pid"], 0) and event["dur"] >= 0
        last[event["pid"]] = event["ts"]
        thread = event["pid"], event["tid"]
        assert names[thread] == event["cat"]
        assert round(event["ts"] * 1000) >= ends.get(thread, 0), "two at a time in one thread"
        ends[thread] = round(event["ts"] * 1000) + round(event["dur"] * 1000)


def decoded(measured: dict[MeasuredBy, list[Measure]]) -> list[dict[str, Any]]:
    return msgspec.json.decode(b"".join(encode_trace(measured)))["traceEvents"]


def test_what_overlaps_in_a_lane_goes_to_another_thread() -> None:
    spans = [Span("write", 0.0, 2.0), Span("write", 1.0, 3.0), Span("write", 2.0, 2.5)]
    found = decoded({BY: [step(1, spans=spans)]})
    threads = {e["tid"]: e["args"]["name"] for e in found if e["name"] == "thread_name"}
    placed = [(e["ts"], threads[e["tid"]]) for e in found if e.get("cat") == "write"]
    assert placed == [(0.0, "write"), (1e6, "write 2"), (2e6, "write")]


def test_what_only_rounding_makes_overlap_stays_in_one_thread() -> None:
    spans = [Span("write", 0.0, 1.000000005), Span("write", 1.0, 2.0)]
    found = [e for e in decoded({BY: [step(1, spans=spans)]}) if e.get("cat") == "write"]
    assert [(e["ts"], e["dur"]) for e in found] == [(0.0, 1e6), (1e6, 1e6)]
    assert len({e["tid"] for e in found}) == 1


@pytest.mark.parametrize(
    ("ahead_s", "shown_s"), [(0.5, 0.5), (-0.5, -0.5), (100_000.0, 0.0), (-100_000.0, 0.0)]
)
def test_clocks_of_other_hosts_are_aligned_and_of_one_host_are_kept(
    ahead_s: float, shown_s: float
) -> None:
    first = [step(n) for n in range(1, 4)]
    second = [step(n, begun_s=10.0 + n + ahead_s) for n in range(2, 5)]
    found = decoded({MeasuredBy(1, 0, 2): first, MeasuredBy(1, 1, 2): second})
    at = {(e["pid"], e["name"]): e["ts"] for e in found if e.get("cat") == "step"}
    assert at[0, "main:1"] == 0.0 and at[0, "main:2"] == 1e6
    assert at[1, "main:2"] == 1e6 + 1e6 * shown_s


def test_sessions_follow_each_other() -> None:
    later = [step(n, begun_s=n) for n in (3, 4)]  # after a reboot the clock begins again
    found = decoded({BY: [step(1), step(2)], MeasuredBy(2, 0, 1): later})
    at = {e["name"]: e["ts"] for e in found if e.get("cat") == "step"}
    assert at == {"main:1": 0.0, "main:2": 1e6, "main:3": 3e6, "main:4": 4e6}
