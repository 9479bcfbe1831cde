"""A whole restore from an agent's memory, into slots that are there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import AdamW

import everystep
from agent.test_memory import RUN, answering
from everystep.agent import protocol as p
from everystep.agent.arena import PAGE_BYTES, Arena, whole_pages
from everystep.agent.memory import Overlay
from everystep.errors import CannotRestore
from everystep.recovery.restore import restore
from everystep.state.objects import Objects
from everystep.state.ranks import Ranks
from everystep.store import format as fmt
from everystep.store.local import LocalBackend
from everystep.store.run import Run
from trips import BLOCKING


def trained() -> tuple[nn.Module, AdamW]:
    """A model with slots of 256 KiB, after one step."""
    model = nn.Linear(256, 256)
    optimizer = AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return model, optimizer


def in_memory(root: Path) -> tuple[list[p.InMemory], Arena]:
    """The files of all steps below a directory, in memory instead."""
    paths = [path for path in sorted(root.glob("steps/**/*")) if path.is_file()]
    sizes = [whole_pages(path.stat().st_size) for path in paths]
    arena, at, files = Arena.made(1, max(PAGE_BYTES, sum(sizes))), 0, []
    for path, size in zip(paths, sizes, strict=True):
        data = path.read_bytes()
        arena.view(at, len(data))[:] = data
        files.append(p.InMemory(str(path.relative_to(root)), len(data), at))
        path.unlink()
        at += size
    return files, arena


def stored(root: Path) -> tuple[nn.Module, AdamW]:
    """What was stored below a directory as its only step."""
    model, optimizer = trained()
    with everystep.Checkpointer(root, model=model, optimizer=optimizer, strategy=BLOCKING) as ck:
        ck.restore()
        ck.step()
    return model, optimizer


def laid_over(root: Path, files: list[p.InMemory], arena: Arena) -> Overlay:
    """What an agent that holds these files gives a restart; the arena is closed."""
    answer = p.Files(files, (arena.slots, arena.slot_bytes))
    thread = answering(lambda channel: channel.send(answer, arena.fd))
    found = Overlay(LocalBackend(root), RUN, [0])
    thread.join()
    arena.close()
    return found


def bits(model: nn.Module, optimizer: AdamW) -> list[torch.Tensor]:
    """Copies of all parameters and slots."""
    slots = [value for slot in optimizer.state.values() for value in slot.values()]
    return [t.detach().clone().view(torch.int32) for t in [*model.parameters(), *slots]]


@pytest.mark.parametrize("place", [".model.", ".state."])
def test_a_flipped_bit_in_memory_is_found_before_anything_is_written(
    tmp_path: Path, place: str
) -> None:
    stored(tmp_path)
    files, arena = in_memory(tmp_path)
    (damaged,) = [file for file in files if place in file.name]
    arena.view(damaged.offset + damaged.nbytes - 1, 1)[0] ^= 1
    found = laid_over(tmp_path, files, arena)
    again, other = trained()
    before = bits(again, other)
    record = fmt.RunRecord(run=Run.open(tmp_path).id, created="")
    objects = Objects.of(again, other, {})
    with pytest.raises(CannotRestore, match="hash of bytes"):
        restore(Run(found, record), None, objects, Ranks(0, 1), lend=found.lend)
    found.close()
    assert all(map(torch.equal, bits(again, other), before))


def test_slots_are_written_where_they_are(tmp_path: Path) -> None:
    model, optimizer = stored(tmp_path)
    files, arena = in_memory(tmp_path)
    found = laid_over(tmp_path, files, arena)
    again, other = trained()
    slots = {id(value) for slot in other.state.values() for value in slot.values()}
    record = fmt.RunRecord(run=Run.open(tmp_path).id, created="")
    objects = Objects.of(again, other, {})
    restored = restore(Run(found, record), None, objects, Ranks(0, 1), lend=found.lend)
    found.close()
    assert restored.chain is not None and restored.chain.ref.step == 1
    for mine, theirs in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine.view(torch.int32), theirs.view(torch.int32))
        for name, value in optimizer.state[theirs].items():
            assert torch.equal(other.state[mine][name].view(torch.int32), value.view(torch.int32))
    weight = other.state[next(again.parameters())]
    assert {id(weight["exp_avg"]), id(weight["exp_avg_sq"])} <= slots
