"""What may go: never the newest complete step, never what is pinned, never another's."""

from __future__ import annotations

import errno
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from byte_runs import NoSync, begin, files_of, new_run, small_state, tensor, write_part, write_step
from everystep.errors import StoreError, StoreFailed, UsageError
from everystep.store.format import PartName
from everystep.store.retention import Retention, Upkeep, metric_of, plan_retention
from everystep.store.run import Run, StepEntry
from everystep.types import StepRef


def main(step: int) -> StepRef:
    return StepRef("main", step)


def made_up(step: int, session: int = 1, ranks: str = "a") -> StepEntry:
    """An entry with a rank for each letter, which is its replica's hash; `-`: it is missing."""
    parts = tuple(
        PartName(session, rank, len(ranks), letter * 16)
        for rank, letter in enumerate(ranks)
        if letter != "-"
    )
    return StepEntry(ref=main(step), session=session, world_size=len(ranks), parts=parts, nbytes=0)


def gone(
    entries: list[StepEntry],
    policy: Retention,
    metrics: dict[int, float] | None = None,
    pinned: tuple[int, ...] = (),
) -> list[int]:
    by_ref = {main(step): value for step, value in (metrics or {}).items()}
    plan = plan_retention(entries, policy, by_ref, {main(step) for step in pinned}, {})
    return sorted(entry.ref.step for entry in plan)


def pairs(*numbers: int) -> list[StepEntry]:
    return [made_up(number, ranks="aa") for number in numbers]


def steps(*numbers: int) -> list[StepEntry]:
    return [made_up(number) for number in numbers]


# ---------------------------------------------------------------- the plan


def test_each_rule_keeps_what_it_says() -> None:
    ten = steps(*range(1, 11))
    assert gone(ten, Retention()) == list(range(1, 8))
    assert gone(ten, Retention(keep_last=1)) == list(range(1, 10))
    assert gone(ten, Retention(keep_last=20)) == []
    assert gone(ten, Retention(keep_last=None)) == []
    assert gone(ten, Retention(keep_last=None, keep_every=4)) == [1, 2, 3, 5, 6, 7, 9]
    assert gone(ten, Retention(keep_last=2, keep_every=5)) == [1, 2, 3, 4, 6, 7, 8]
    losses = {step: float(10 - step) for step in range(1, 11)} | {3: -5.0, 4: 99.0}
    best = Retention(keep_last=1, keep_best="loss")
    assert gone(ten, best, losses) == [1, 2, *range(4, 10)]
    worst = Retention(keep_last=1, keep_best="loss", best="max", best_count=2)
    assert gone(ten, worst, losses) == [2, 3, *range(5, 10)]


def test_with_several_ranks_the_newest_two_stay() -> None:
    """Another rank's newest record may be seen before it is durable."""
    assert gone(pairs(1, 2, 3), Retention(keep_last=1)) == [1]
    assert gone(steps(1, 2, 3), Retention(keep_last=1)) == [1, 2]


def test_pinned_steps_stay() -> None:
    """G03: what the run was resumed from."""
    assert gone(steps(1, 2, 3, 4), Retention(keep_last=1), pinned=(2,)) == [1, 3]


def test_the_newest_and_the_best_both_stay() -> None:
    """G05: a limit of one, and the best is not the newest."""
    policy = Retention(keep_last=1, keep_best="loss")
    assert gone(steps(1, 2, 3), policy, {1: 0.1, 2: 0.5, 3: 0.9}) == [2]
    assert gone(steps(1, 2, 3), policy, {}) == [1, 2], "no value at all: the newest"


def test_nan_is_never_the_best() -> None:
    """G11: a first value of NaN must not win for ever."""
    policy = Retention(keep_last=1, keep_best="loss")
    assert gone(steps(1, 2, 3), policy, {1: math.nan, 2: 0.5, 3: 0.9}) == [1]
    for best in ("min", "max"):
        every = Retention(keep_last=1, keep_best="loss", best=best)
        assert gone(steps(1, 2), every, {1: math.nan, 2: math.nan}) == [1]


def test_of_equals_the_newer_is_better() -> None:
    policy = Retention(keep_last=1, keep_best="loss")
    assert gone(steps(1, 2, 3), policy, {1: 0.5, 2: 0.5, 3: 0.9}) == [1]


def test_what_may_be_on_its_way_stays() -> None:
    """A11: pending is different from failed."""
    entries = [*pairs(1, 2, 3), made_up(4, ranks="a-"), made_up(5, ranks="-a")]
    assert gone(entries, Retention(keep_last=1)) == [1]
    assert gone([made_up(3, ranks="a-")], Retention(keep_last=1)) == []


def test_what_never_became_complete_goes_when_a_newer_step_is() -> None:
    entries = [made_up(1, ranks="a-"), made_up(2, ranks="ab"), *steps(3)]
    assert gone(entries, Retention(keep_last=5)) == [1, 2]


def test_an_older_writing_of_a_step_goes_and_a_newer_one_stays() -> None:
    old, new, newer = made_up(5, session=1), made_up(5, session=2), made_up(5, 3, "a-")
    assert plan_retention([old, new, newer], Retention(), {}, (), {}) == [old]
    assert plan_retention([newer, new, old], Retention(), {}, (), {}) == [old]


def test_a_low_number_in_a_reused_directory() -> None:
    """G06: order is by step within a timeline, and another timeline is not looked at."""
    fork = StepRef("main@9", 10)
    entry = StepEntry(ref=fork, session=2, world_size=1, parts=(PartName(2, 0, 1, ""),), nbytes=0)
    assert plan_retention([entry], Retention(keep_last=1), {}, {main(9)}, {}) == []


@pytest.mark.parametrize(
    "wrong",
    [
        *[{"keep_last": 0}, {"keep_last": -1}, {"keep_last": True}, {"keep_last": 1.5}],
        *[{"keep_every": 0}, {"best_count": 0}, {"best": "low"}],
    ],
)
def test_wrong_rules_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Retention(**wrong)


POLICIES = st.builds(
    Retention,
    keep_last=st.none() | st.integers(1, 4),
    keep_every=st.none() | st.integers(1, 4),
    keep_best=st.none() | st.just("loss"),
    best=st.sampled_from(["min", "max"]),
    best_count=st.integers(1, 3),
)
ENTRIES = st.lists(
    st.builds(
        made_up,
        st.integers(1, 9),
        st.integers(1, 3),
        st.sampled_from(["aa", "aa", "aa", "ab", "a-", "-a"]),
    ),
    max_size=12,
    unique_by=lambda entry: (entry.ref, entry.session),
)
METRICS = st.dictionaries(st.integers(1, 9).map(main), st.floats())


@given(ENTRIES, POLICIES, METRICS, st.sets(st.integers(1, 9).map(main)))
def test_whatever_the_listing_the_best_of_it_stays(
    entries: list[StepEntry],
    policy: Retention,
    metrics: dict[StepRef, float],
    pinned: set[StepRef],
) -> None:
    plan = plan_retention(entries, policy, metrics, pinned, {})
    complete = [entry for entry in entries if entry.complete]
    left = [entry for entry in entries if entry not in plan]
    assert len(left) + len(plan) == len(entries)
    if not complete:
        assert plan == []
        return
    newest = max(complete, key=lambda entry: (entry.ref, entry.session))
    assert newest in left
    still = {entry.ref for entry in left if entry.complete}
    assert pinned & {entry.ref for entry in complete} <= still
    assert all(entry.ref <= newest.ref for entry in plan), "what comes after it is on its way"
    if policy.keep_last is not None:
        numbers = sorted({entry.ref for entry in complete})
        assert set(numbers[-policy.keep_last :]) <= still
    again = plan_retention(left, policy, metrics, pinned, {})
    assert again == [], "once is enough"


@given(ENTRIES, POLICIES, METRICS, st.integers(1, 9))
def test_what_one_rank_lets_go_no_later_rank_wants(
    entries: list[StepEntry], policy: Retention, metrics: dict[StepRef, float], cut: int
) -> None:
    """Ranks plan at different moments and must not end with halves: what may go may go for ever."""
    early = [entry for entry in entries if entry.ref.step <= cut]
    first = plan_retention(early, policy, metrics, (), {})
    later = plan_retention(entries, policy, metrics, (), {})
    assert all(entry in later for entry in first)


# ---------------------------------------------------------------- metrics


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({"loss": 0.5}, 0.5),
        ({"loss": 3}, 3.0),
        ({"other": 1}, math.nan),
        ({"loss": "low"}, math.nan),
        ({"loss": {"$float": "7ff8000000000000"}}, math.nan),
        ({"loss": {"$float": "fff0000000000000"}}, math.nan),
        ({"loss": None}, math.nan),
        ({"loss": [1]}, math.nan),
    ],
)
def test_a_metric_as_it_was_recorded(
    tmp_path: Path, metrics: dict[str, Any], expected: float
) -> None:
    run = new_run(tmp_path)
    write_part(run, main(1), [], metrics=metrics)
    assert repr(metric_of(run, run.entries(main(1))[0], "loss")) == repr(expected)


def test_a_metric_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Damage is not a good value; a store that does not answer says nothing, and is asked again."""
    run = new_run(tmp_path)
    write_part(run, main(1), [], metrics={"loss": 0.5})
    (entry,) = run.entries(main(1))
    (path,) = tmp_path.glob("steps/*/*/*.json")

    def refuse(*args: object) -> None:
        raise StoreFailed("no answer")

    with monkeypatch.context() as patched:
        patched.setattr(run.backend, "read", refuse)
        with pytest.raises(StoreFailed):
            metric_of(run, entry, "loss")
    path.write_bytes(path.read_bytes()[:-4])
    assert math.isnan(metric_of(run, entry, "loss"))
    path.unlink()
    assert math.isnan(metric_of(run, entry, "loss"))


# ---------------------------------------------------------------- ranks that act on it


@contextmanager
def upkeep_of(
    run: Run, policy: Retention, rank: int = 0, known: Any = (), pinned: Any = ()
) -> Iterator[Upkeep]:
    upkeep = Upkeep(run, policy, rank, known, pinned)
    try:
        yield upkeep
    finally:
        upkeep.close()


def after(upkeep: Upkeep, step: int, session: int = 1) -> list[StepEntry]:
    waiting = upkeep.after_step(main(step), session)
    upkeep.finish_removal()
    return waiting


def left(run: Run) -> list[int]:
    return [entry.ref.step for entry in run.listing().steps]


def test_one_rank_keeps_the_newest_three(tmp_path: Path) -> None:
    run = new_run(tmp_path, calls=NoSync())
    with upkeep_of(run, Retention()) as upkeep:
        for step in range(1, 7):
            write_part(run, main(step), small_state())
            assert after(upkeep, step) == []
            assert left(run) == list(range(max(1, step - 2), step + 1))
    assert len(list((tmp_path / "steps" / "main").iterdir())) == 3, "empty directories go too"


def test_steps_of_earlier_sessions_go_as_well(tmp_path: Path) -> None:
    run = new_run(tmp_path, calls=NoSync())
    for step in (1, 2, 3):
        write_step(run, main(step))
    begin(run, 2, restored=main(3))
    known = run.listing().steps
    with upkeep_of(run, Retention(keep_last=1), known=known, pinned=[main(3)]) as upkeep:
        for step in (4, 5):
            write_step(run, main(step), session=2)
            after(upkeep, step, session=2)
    assert left(run) == [3, 5]


def test_nothing_goes_while_steps_fail(tmp_path: Path) -> None:
    """G01: the old checkpoint stays until the new one is there."""
    run = new_run(tmp_path, 2, NoSync())
    write_step(run, main(1), 2)
    known = run.listing().steps
    with upkeep_of(run, Retention(keep_last=1), known=known) as upkeep:
        for step in range(2, 6):  # rank 1 never stores anything
            write_part(run, main(step), small_state(), world_size=2)
            waiting = after(upkeep, step)
            assert [entry.missing_ranks for entry in waiting] == [[1]] * (step - 1)
    assert left(run)[0] == 1


def test_the_best_step_is_that_of_rank_0_on_every_rank(tmp_path: Path) -> None:
    run = new_run(tmp_path, 2, NoSync())
    policy = Retention(keep_last=1, keep_best="loss")
    losses = [(0.3, 9.0), (0.1, 8.0), (0.2, 0.0), (0.4, 7.0), (0.5, 7.0)]
    with upkeep_of(run, policy, 0) as first, upkeep_of(run, policy, 1) as second:
        for step, of_ranks in enumerate(losses, 1):
            for rank, loss in enumerate(of_ranks):
                state = [tensor("/models/model/w", "uint8", 2)]
                metrics = {"loss": loss}
                write_part(run, main(step), state, rank=rank, world_size=2, metrics=metrics)
            after(first, step)
            after(second, step)
    assert left(run) == [2, 4, 5]
    assert all(entry.complete for entry in run.listing().steps)


def test_a_rank_removes_only_its_own_part_of_its_own_timeline(tmp_path: Path) -> None:
    """G03, G07."""
    run = new_run(tmp_path, 2, NoSync())
    for step in (1, 2, 3):
        write_step(run, main(step), 2)
    other = StepRef("main@1", 2)
    begin(run, 2, "main@1", world_size=2, parent=main(1))
    for rank in (0, 1):
        write_part(run, other, small_state(rank), rank=rank, world_size=2, session=2)
    before = files_of(tmp_path)
    known = [entry for entry in run.listing().steps if entry.ref.timeline == "main"]
    with upkeep_of(run, Retention(keep_last=1), 0, known=known) as upkeep:
        write_step(run, main(4), 2)
        after(upkeep, 4)
    removed = before.keys() - files_of(tmp_path).keys()
    assert removed == {
        name
        for name in before
        if name.startswith(("steps/main/000000000001", "steps/main/000000000002"))
        and "-r00000of" in name
    }


def test_a_step_that_cannot_be_removed_does_not_keep_the_others(tmp_path: Path) -> None:
    refused: list[str] = []

    class Stuck(NoSync):
        def unlink(self, path: Path) -> None:
            if "000000000001" in str(path):
                refused.append(path.name)
                raise OSError(errno.EPERM, "immutable")
            super().unlink(path)

    run = new_run(tmp_path, calls=Stuck())
    with upkeep_of(run, Retention(keep_last=1)) as upkeep:
        for step in (1, 2):
            write_part(run, main(step), small_state())
            upkeep.after_step(main(step), 1)
        with pytest.raises(StoreError, match="not permitted"):
            upkeep.finish_removal()
        for step in (3, 4):
            write_part(run, main(step), small_state())
            upkeep.after_step(main(step), 1)
            with pytest.raises(StoreError, match="not permitted"):
                upkeep.finish_removal()
    assert left(run) == [1, 4]
    assert len(refused) == 3, "it is tried again each time"


def test_a_racing_writer_in_a_directory_that_is_removed(tmp_path: Path) -> None:
    """G09."""
    raced: list[Path] = []

    class Racing(NoSync):
        def remove_directory(self, path: Path) -> None:
            if path.name.isdigit():
                raced.append(path / "racer")
                raced[-1].write_bytes(b"")
            super().remove_directory(path)

    run = new_run(tmp_path, calls=Racing())
    with upkeep_of(run, Retention(keep_last=1)) as upkeep:
        for step in (1, 2, 3):
            write_part(run, main(step), small_state())
            after(upkeep, step)
    assert left(run) == [3]
    assert len(set(raced)) == 2 and all(path.exists() for path in raced)


def test_replicas_that_differ_are_reported_until_something_newer_is_whole(tmp_path: Path) -> None:
    run = new_run(tmp_path, 2, NoSync())
    with upkeep_of(run, Retention(keep_last=1)) as upkeep:
        for rank in (0, 1):
            write_part(run, main(1), small_state(seed=rank), rank=rank, world_size=2)
        assert [entry.diverged for entry in after(upkeep, 1)] == [True]
        write_step(run, main(2), 2)
        assert [entry.ref for entry in after(upkeep, 2)] == [main(1)]
        assert after(upkeep, 2) == []
    assert [e.ref.step for e in run.listing().steps if e.complete] == [2]
    assert run.entries(main(1))[0].missing_ranks == [0]


class Ranks:
    """Several ranks of one run, each with its own pace; what they store is a record's name."""

    def __init__(self, run: Run, root: Path, count: int, policy: Retention) -> None:
        self.run, self.root, self.count = run, root, count
        self.upkeep = [Upkeep(run, policy, rank, (), ()) for rank in range(count)]
        self.done = [0] * count
        self.newest = 0

    def step(self, rank: int, *, stored: bool) -> None:
        self.done[rank] += 1
        step = self.done[rank]
        if stored:
            directory = self.root / f"steps/main/{step:012d}"
            directory.mkdir(parents=True, exist_ok=True)
            (directory / PartName(1, rank, self.count, "").marker).touch()
            after(self.upkeep[rank], step)

    def check(self) -> None:
        complete = {ref.step for ref in self.run.listing().complete()}
        newest = max(complete, default=0)
        assert newest >= self.newest, f"step {self.newest} was complete; now {complete} are"
        self.newest = newest


@settings(max_examples=40)
@given(
    count=st.integers(1, 4),
    policy=st.builds(
        Retention, keep_last=st.integers(1, 2), keep_every=st.none() | st.integers(2, 3)
    ),
    moves=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=30),
)
def test_however_ranks_lag_a_complete_step_remains(
    tmp_path_factory: pytest.TempPathFactory,
    count: int,
    policy: Retention,
    moves: list[tuple[int, int]],
) -> None:
    """Ranks race, lag, and fail to store; the newest step that was complete stays so until a
    newer one is, at every moment."""
    root = tmp_path_factory.mktemp("run")
    ranks = Ranks(new_run(root, count, NoSync()), root, count, policy)
    try:
        for rank, luck in moves:
            ranks.step(rank % count, stored=luck > 0)
            ranks.check()
        for rank in range(count):  # all catch up: what is left is what the rules say
            while ranks.done[rank] < max(ranks.done) or ranks.done[rank] < 2:
                ranks.step(rank, stored=True)
                ranks.check()
        last = max(ranks.done) + 1
        for rank in [*range(count)] * 3:
            ranks.step(rank, stored=True)
            ranks.check()
        for rank in range(count):  # the first to store the last step saw it before it was whole
            after(ranks.upkeep[rank], last + 2)
    finally:
        for upkeep in ranks.upkeep:
            upkeep.close()
    entries = ranks.run.listing().steps
    every = policy.keep_every
    expected = {last + 2, *([last + 1] if policy.keep_last == 2 or count > 1 else [])}
    assert expected <= {e.ref.step for e in entries}
    assert {e.ref.step for e in entries if every is None or e.ref.step % every} <= expected


def test_removal_is_in_the_background_and_ends_with_close(tmp_path: Path) -> None:
    run = new_run(tmp_path, calls=NoSync())
    upkeep = Upkeep(run, Retention(keep_last=1), 0, (), ())
    for step in (1, 2):
        write_part(run, main(step), small_state())
        upkeep.after_step(main(step), 1)
    upkeep.close()
    assert left(run) == [2]


def test_a_backend_of_its_own_sees_the_same(tmp_path: Path) -> None:
    """Other hosts look at the directory with a backend of theirs."""
    new_run(tmp_path, 2, NoSync())
    runs = [Run.open(tmp_path) for _ in (0, 1)]
    with (
        upkeep_of(runs[0], Retention(keep_last=1), 0) as first,
        upkeep_of(runs[1], Retention(keep_last=1), 1) as second,
    ):
        for step in (1, 2, 3):
            for rank, upkeep in enumerate((first, second)):
                write_part(runs[rank], main(step), small_state(rank), rank=rank, world_size=2)
                after(upkeep, step)
        after(first, 3)
    assert left(runs[0]) == [2, 3]
