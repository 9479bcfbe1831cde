"""SaveOnSignal: the step ends and is durable, and then the signal goes on; at the deadline at the
latest."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from crash.trainer import Board, Job
from everystep import SaveOnSignal, load
from everystep.errors import RunBusy, UsageError
from waiting import until
from zygote import Child, Zygote

HELD = "it goes on once this step is durable"


class Trainer:
    """A forked training in its long step."""

    def __init__(self, zygote: Zygote, where: Path) -> None:
        self._zygote, self._where = zygote, where
        self.run = where / "run"
        self.board = Board(where / "board")
        self._lives = 0

    def begin(self, place: int | None = Board.TRAINING, **options: object) -> Child:
        """Start it; returns when it is at `place`."""
        self.board.clear()
        self._lives += 1
        log = self._where / f"log{self._lives}"
        board = str(self._where / "board")
        child = self._zygote.start(
            "crash.trainer.hold_signals", log, run=str(self.run), board=board, **options
        )
        if place is not None:
            until(lambda: self.board["place"] == place or child.status(), 60, "the long step")
            assert child.status() is None, child.said()
        return child

    def go(self) -> None:
        """Let the long step end."""
        self.board["go"] = 1


def is_held(child: Child) -> None:
    until(lambda: HELD in child.said(), 60, f"the signal to be held: {child.said()}")
    assert child.status() is None


@pytest.fixture
def trainer(zygote: Zygote, quick_path: Path) -> Iterator[Trainer]:
    made = Trainer(zygote, quick_path)
    yield made
    made.board.close()


def test_off_by_default(trainer: Trainer) -> None:
    child = trainer.begin(deadline_s=None)
    assert child.kill(signal.SIGTERM)
    assert child.wait() == -signal.SIGTERM
    assert load(trainer.run).step == 2


@pytest.mark.parametrize("signals", [1, 4])
def test_the_step_ends_and_then_the_process(trainer: Trainer, signals: int) -> None:
    """P01: nothing is done inside the handler; and impatience changes nothing."""
    child = trainer.begin()
    for _ in range(signals):
        assert child.kill(signal.SIGTERM)
        is_held(child)
    trainer.go()
    assert child.wait() == -signal.SIGTERM
    assert load(trainer.run).step == 3
    assert child.said().count(HELD) == 1
    again = trainer.begin(how="none", place=Board.ENDING)
    assert "restored 3" in again.said()
    trainer.go()
    assert again.wait() == 0


@pytest.mark.parametrize("how", ["", "spin", "c"])
def test_a_step_that_never_ends_meets_the_deadline(trainer: Trainer, how: str) -> None:
    """P02; also where the main thread then waits in C (for a rank that is gone), where it would run
    no handler."""
    child = trainer.begin(how=how, deadline_s=0.5)
    sent = time.monotonic()
    assert child.kill(signal.SIGTERM)
    if how == "c":
        is_held(child)
        trainer.go()
    assert child.wait(60) == -signal.SIGTERM
    assert time.monotonic() - sent >= 0.5
    assert "did not end within 0.5 s" in child.said()
    assert load(trainer.run).step == 2


@pytest.mark.parametrize("call", range(1, 20, 3))
def test_in_the_middle_of_the_save(trainer: Trainer, call: int) -> None:
    child = trainer.begin(place=None, how="none", send_at=call)
    assert child.wait() == -signal.SIGTERM, child.said()
    assert load(trainer.run).step == 3


def test_the_users_handler_has_it_at_the_end_of_the_step(trainer: Trainer) -> None:
    """P03: an earlier handler is chained, and the next signal is held back again."""
    child = trainer.begin(before="note")
    assert child.kill(signal.SIGTERM)
    is_held(child)
    trainer.go()
    assert child.wait() == 0
    assert f"handled {int(signal.SIGTERM)} 3" in child.said()
    assert child.said().rstrip().endswith("end")


def test_signals_in_several_steps(trainer: Trainer) -> None:
    child = trainer.begin(before="note", total=200, long_step=3)
    assert child.kill(signal.SIGTERM)
    is_held(child)
    trainer.go()
    until(lambda: child.said().count("handled") == 1, 60, "the first to go on")
    for number in (2, 3):
        assert child.kill(signal.SIGTERM)
        until(lambda: child.said().count("handled") == number, 60, "the next to go on")  # noqa: B023
    assert child.kill()
    child.wait()
    handled = [int(line.split()[2]) for line in child.said().splitlines() if "handled" in line]
    assert handled == sorted(set(handled))
    assert handled[0] == 3


def test_the_users_handler_at_the_deadline(trainer: Trainer) -> None:
    child = trainer.begin(before="exit", deadline_s=0.3)
    assert child.kill(signal.SIGTERM)
    assert child.wait(60) == 7
    assert f"handled {int(signal.SIGTERM)} 2" in child.said()


def test_a_signal_that_was_ignored_stays_ignored(trainer: Trainer) -> None:
    child = trainer.begin(before="ignore")
    assert child.kill(signal.SIGTERM)
    is_held(child)
    trainer.go()
    assert child.wait() == 0


def test_a_signal_after_the_last_step_goes_on_at_close(trainer: Trainer) -> None:
    child = trainer.begin(how="none", place=Board.ENDING)
    assert child.kill(signal.SIGTERM)
    is_held(child)
    trainer.go()
    assert child.wait() == -signal.SIGTERM
    assert "end" not in child.said().split()
    assert load(trainer.run).step == 5


def test_processes_and_threads_of_the_trainer(zygote: Zygote, quick_path: Path) -> None:
    """A forked worker is not held; step() in another thread lets the signal go on all the same."""
    child = zygote.start(
        "crash.trainer.hold_signals_with_a_child",
        quick_path / "log",
        run=str(quick_path / "run"),
        board="",
    )
    assert child.wait() == -signal.SIGTERM, child.said()
    assert f"child {-int(signal.SIGTERM)}" in child.said()
    assert load(quick_path / "run").step == 2


def test_pre_emptions_do_not_fill_the_disk(trainer: Trainer) -> None:
    """P03: retention covers the steps that were saved on a signal."""
    for life in range(5):
        child = trainer.begin(place=None, how="none", send_at=5)
        assert child.wait() == -signal.SIGTERM, child.said()
        assert load(trainer.run).step == 3 * (life + 1)
        steps = [path for path in (trainer.run / "steps/main").iterdir() if any(path.iterdir())]
        assert len(steps) <= 4


def test_the_handler_is_given_back(run_dir: Path) -> None:
    def mine(*_: object) -> None: ...

    before = signal.signal(signal.SIGUSR1, mine)
    hold = SaveOnSignal(signal_number=signal.SIGUSR1)
    try:
        with Job().checkpointer(str(run_dir), on_signal=hold):
            assert signal.getsignal(signal.SIGUSR1) is not mine
        assert signal.getsignal(signal.SIGUSR1) is mine

        def later(*_: object) -> None: ...

        with Job().checkpointer(str(run_dir), on_signal=hold):
            signal.signal(signal.SIGUSR1, later)
        assert signal.getsignal(signal.SIGUSR1) is later
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(
    "options",
    [
        {"deadline_s": 0}, {"deadline_s": -1.0}, {"deadline_s": float("nan")},
        {"signal_number": signal.SIGKILL}, {"signal_number": 1000},
    ],
)  # fmt: skip
def test_options_that_make_no_sense(options: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        SaveOnSignal(**options)  # type: ignore[arg-type]


def test_only_the_main_thread_can_install_it(run_dir: Path) -> None:
    raised: list[BaseException] = []

    def make() -> None:
        try:
            Job().checkpointer(str(run_dir), on_signal=SaveOnSignal())
        except UsageError as error:
            raised.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert "main thread" in str(raised[0])
    try:
        Job().checkpointer(str(run_dir)).close()  # the run is not left locked
    except RunBusy:
        pytest.fail("still locked")
