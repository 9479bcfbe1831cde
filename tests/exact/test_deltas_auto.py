"""`Deltas()` as users have it: all chosen by the cost model, to the end, and after falling back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everystep
from everystep import logged
from states import assert_same_state, state_of
from waiting import until

ALL = everystep.Retention(keep_last=None)


def _objects(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(5, 3)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, ck: Any, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 5)).square().sum().backward()
        optimizer.step()
        ck.step()


def test_a_run_whose_last_step_is_full_ends_well(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The full becomes durable while the session is closed already."""
    monkeypatch.setattr(logged, "_FIRST_FULL_EVERY", 4)
    model, optimizer = _objects(1)
    strategy = everystep.Deltas(mtbf_s=60.0, check=False)
    with everystep.Checkpointer(
        run_dir, model=model, optimizer=optimizer, strategy=strategy, retention=ALL
    ) as ck:
        ck.restore()
        _train(model, optimizer, ck, 12)
        ck._session._engine.owe()  # type: ignore[union-attr]
        _train(model, optimizer, ck, 1)
    assert all(stats.durable for stats in ck.stats)
    other, its = _objects(2)
    with everystep.Checkpointer(run_dir, model=other, optimizer=its, strategy=strategy) as ck:
        assert ck.restore() == 13
    assert_same_state(
        state_of({"m": model}, {"o": optimizer}, {}), state_of({"m": other}, {"o": its}, {})
    )


def test_after_falling_back_every_step_is_stored_in_full(run_dir: Path) -> None:
    model, optimizer = _objects(1)
    strategy = everystep.Deltas(mtbf_s=60.0, check=False)
    with everystep.Checkpointer(
        run_dir, model=model, optimizer=optimizer, strategy=strategy, retention=ALL
    ) as ck:
        ck.restore()
        _train(model, optimizer, ck, 10)
        session: Any = ck._session
        session._fall_back("a test wants it")
        for _ in range(6):
            _train(model, optimizer, ck, 1)
            until(lambda: ck.stats[-1].durable, 60, "the step to be durable")
        assert session._engine._every == 1 and session._recorder is None
    assert ck.steps()[-6:] == [11, 12, 13, 14, 15, 16]
