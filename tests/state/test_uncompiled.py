from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everystep
from agent.replica_scenes import agents_in_threads
from everystep import Checkpointer, Deltas, Full, Replica
from everystep.state.uncompiled import uncompiled


class Backend:
    """Compiles nothing, and notes the source of what it was asked to."""

    def __init__(self) -> None:
        self.sources: list[str] = []

    def __call__(self, module: torch.fx.GraphModule, inputs: Any) -> Any:
        traces = [node.meta.get("stack_trace") or "" for node in module.graph.nodes]
        self.sources.append("\n".join(traces))
        return module.forward


def views(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[4:12].view(torch.int32)


def test_nothing_that_it_calls_is_compiled() -> None:
    backend, memory = Backend(), torch.arange(64, dtype=torch.uint8)

    @uncompiled
    def act(number: int) -> torch.Tensor:
        return views(memory) + number

    @torch.compile(backend=backend)
    def training(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        act(1)
        return y.cos()

    for _ in range(3):
        training(torch.ones(3))
    assert backend.sources, "what is around it is compiled"
    assert not any("views" in source for source in backend.sources)


def test_it_is_what_it_was() -> None:
    @uncompiled
    def act(number: int = 3) -> int:
        """Acts."""
        if number < 0:
            raise ValueError(number)
        return number

    assert (act(), act(4), act.__doc__, act.__name__) == (3, 4, "Acts.", "act")
    with pytest.raises(ValueError, match="-1"):
        act(-1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [Full(), Full(blocking=True), Deltas(), Replica(), Replica(layerwise=True), "auto"],
    ids=["full", "blocking", "deltas", "replica", "layerwise", "auto"],
)
def test_a_whole_step_that_is_compiled(strategy: Any, run_dir: Path) -> None:
    """Nothing of this library is compiled with it."""
    backend = Backend()
    model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01))
    with (
        agents_in_threads(),
        Checkpointer(run_dir, model=model, optimizer=optimizer, strategy=strategy) as ck,
    ):
        ck.restore()

        @torch.compile(backend=backend)
        def training(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            ck.step()

        for _ in range(5):
            training(torch.randn(4, 7))
    assert any("adam.py" in source for source in backend.sources), "the update was compiled"
    own = str(Path(everystep.__file__).parent)
    assert not any(own in source for source in backend.sources)
