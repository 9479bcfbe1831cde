"""`everystep export`: other programs read it, and training goes on from it bit for bit."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import everystep
from everystep.state import raw
from everystep.store import durable
from small_runs import WHOLE, Job, Said, flip
from trips import BLOCKING

Cli = Callable[..., Said]

FORMS = ["x.safetensors", "x.pt", "x"]
"""One target of each form."""


def export(cli: Cli, *words: object) -> Any:
    said = cli("export", *words, "--json")
    assert (said.status, said.err) == (0, ""), said
    return said.json


def read_pt(path: Path) -> Any:
    return torch.load(path, weights_only=True)  # noqa: TID251 - what its users do


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        (a[key].dtype, a[key].shape, raw.bits_of(a, key))
        == (b[key].dtype, b[key].shape, raw.bits_of(b, key))
        for key in a
    )


def reference(upto: int) -> Job:
    job = Job()
    for step in range(1, upto + 1):
        job.train(step)
    return job


def begun() -> Job:
    """A job with other weights, which an export is loaded into."""
    job = Job()
    with torch.no_grad():
        for parameter in job.model.parameters():
            parameter.fill_(9.0)
    job.optimizer.param_groups[0]["lr"] = 5.0
    return job


# ---------------------------------------------------------------- safetensors


def test_safetensors_hold_the_model(cli: Cli, healthy: Path, tmp_path: Path) -> None:
    target = tmp_path / "x.safetensors"
    told = export(cli, healthy, "--step", "2", "--to", target)
    assert told == {
        "path": str(healthy), "step": "main:2", "rank": 0, "target": str(target),
        "format": "safetensors", "size_bytes": target.stat().st_size, "tensors": 4,
    }  # fmt: skip
    loaded = safetensors.torch.load_file(target)
    assert same_bits(loaded, reference(2).model.state_dict())
    job = begun()
    safetensors.torch.load_model(job.model, target)
    assert same_bits(job.model.state_dict(), loaded)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.small = nn.Parameter(torch.randn(3).to(torch.bfloat16))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.embed(ids)) + self.small.sum()
        return logits


def tied_run(path: Path, model: nn.Module, steps: int = 2) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with everystep.Checkpointer(path, model=model, optimizer=optimizer, strategy=BLOCKING) as ck:
        for step in range(steps):
            tied_step(model, optimizer, step)
            ck.step()
    return optimizer


def tied_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    model(torch.tensor([step % 5, 3])).square().sum().backward()
    optimizer.step()


def test_tied_tensors_stand_once_as_save_model_has_them(cli: Cli, tmp_path: Path) -> None:
    model = Tied()
    tied_run(tmp_path / "run", model)
    assert export(cli, tmp_path / "run", "--to", tmp_path / "x.safetensors")["tensors"] == 2
    safetensors.torch.save_model(model, str(tmp_path / "torch.safetensors"))
    ours, theirs = (
        safetensors.safe_open(tmp_path / name, framework="pt")
        for name in ("x.safetensors", "torch.safetensors")
    )
    with ours, theirs:
        assert set(ours.keys()) == {"embed.weight", "small"}
        assert ours.metadata() == {"format": "pt", "head.weight": "embed.weight"}
    other = Tied()
    safetensors.torch.load_model(other, tmp_path / "x.safetensors")
    assert same_bits(other.state_dict(), model.state_dict())
    assert other.head.weight is other.embed.weight


def test_sharded_tensors_are_whole_and_own_ones_are_the_ranks(
    cli: Cli, two: Path, tmp_path: Path
) -> None:
    for rank in (0, 1):
        target = tmp_path / f"{rank}.safetensors"
        assert export(cli, two, "--step", "1", "--rank", rank, "--to", target)["rank"] == rank
        assert same_bits(
            safetensors.torch.load_file(target),
            {
                "rows": WHOLE,
                "own": torch.tensor([10 * rank + 1]),
                "same": torch.tensor([1.0, -0.0, 2.0, 3.0]),
            },
        )
    assert cli("export", two, "--rank", "2", "--to", tmp_path / "2.safetensors").status == 1
    assert not (tmp_path / "2.safetensors").exists()


def test_several_models_and_optimizers(cli: Cli, tmp_path: Path) -> None:
    models = {"g": nn.Linear(2, 2), "d": nn.Linear(2, 1)}
    optimizers = {n: torch.optim.AdamW(m.parameters(), lr=0.1) for n, m in models.items()}
    with everystep.Checkpointer(
        tmp_path / "run", model=models, optimizer=optimizers, strategy=BLOCKING
    ) as ck:
        for name, model in models.items():
            model(torch.ones(1, 2)).sum().backward()
            optimizers[name].step()
        ck.step(loss=1.5)
    export(cli, tmp_path / "run", "--to", tmp_path / "x.safetensors")
    flat = {f"{n}.{fqn}": t for n, m in models.items() for fqn, t in m.state_dict().items()}
    assert same_bits(safetensors.torch.load_file(tmp_path / "x.safetensors"), flat)
    export(cli, tmp_path / "run", "--to", tmp_path / "x.pt")
    loaded = read_pt(tmp_path / "x.pt")
    for name, model in models.items():
        assert same_bits(loaded["model"][name], model.state_dict())
        assert loaded["optimizer_parameters"][name] == ["weight", "bias"]
        fresh = torch.optim.AdamW(nn.Linear(*reversed(model.weight.shape)).parameters())
        fresh.load_state_dict(loaded["optimizer"][name])
        assert fresh.param_groups[0]["lr"] == 0.1
    assert (loaded["step"], loaded["metrics"]) == (1, {"loss": 1.5})


def test_what_safetensors_cannot_say_is_refused(cli: Cli, tmp_path: Path) -> None:
    model = nn.Module()
    model.wave = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    with everystep.Checkpointer(tmp_path / "run", model=model, strategy=BLOCKING) as ck:
        ck.step()
    said = cli("export", tmp_path / "run", "--to", tmp_path / "x.safetensors")
    assert said.status == 2
    assert "complex64" in said.err and ".pt" in said.err
    assert not (tmp_path / "x.safetensors").exists()
    export(cli, tmp_path / "run", "--to", tmp_path / "x.pt")
    loaded = read_pt(tmp_path / "x.pt")
    assert same_bits(loaded["model"], {"wave": model.wave.detach()})
    assert "optimizer" not in loaded


# ---------------------------------------------------------------- .pt


def test_training_goes_on_from_a_pt_file(cli: Cli, healthy: Path, tmp_path: Path) -> None:
    told = export(cli, healthy, "--step", "2", "--to", tmp_path / "x.pt")
    assert (told["format"], told["tensors"], told["step"]) == ("pt", 4, "main:2")
    loaded = read_pt(tmp_path / "x.pt")
    assert list(loaded) == ["model", "optimizer", "optimizer_parameters", "step", "metrics"]
    assert (loaded["step"], loaded["metrics"]["at"]) == (2, 2)
    assert loaded["optimizer_parameters"] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    job = begun()
    job.model.load_state_dict(loaded["model"])
    job.optimizer.load_state_dict(loaded["optimizer"])
    assert job.bits() == reference(2).bits()
    for step in range(3, 7):
        job.train(step)
    assert job.bits() == reference(6).bits()


def test_the_optimizer_is_as_torch_gives_it(cli: Cli, healthy: Path, tmp_path: Path) -> None:
    export(cli, healthy, "--to", tmp_path / "x.pt")
    ours = read_pt(tmp_path / "x.pt")["optimizer"]
    theirs = reference(3).optimizer.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for index, slot in theirs["state"].items():
        assert same_bits(ours["state"][index], slot)


def test_tied_tensors_have_all_their_names_in_a_pt_file(cli: Cli, tmp_path: Path) -> None:
    model = Tied()
    tied_run(tmp_path / "run", model)
    export(cli, tmp_path / "run", "--to", tmp_path / "x.pt")
    loaded = read_pt(tmp_path / "x.pt")["model"]
    assert same_bits(loaded, model.state_dict())
    assert loaded["embed.weight"].data_ptr() == loaded["head.weight"].data_ptr()


class Counting(nn.Linear):
    calls = 3

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def test_extra_state_of_modules_is_in_a_pt_file(cli: Cli, tmp_path: Path) -> None:
    model = nn.Sequential(Counting(2, 2))
    model[0].calls = 41
    with everystep.Checkpointer(tmp_path / "run", model=model, strategy=BLOCKING) as ck:
        ck.step()
    export(cli, tmp_path / "run", "--to", tmp_path / "x.pt")
    other = nn.Sequential(Counting(2, 2))
    other.load_state_dict(read_pt(tmp_path / "x.pt")["model"])
    assert other[0].calls == 41


# ---------------------------------------------------------------- torch.distributed.checkpoint


def load_dcp(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    weights, slots = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": slots}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_training_goes_on_from_a_dcp_directory(cli: Cli, healthy: Path, tmp_path: Path) -> None:
    told = export(cli, healthy, "--step", "2", "--to", tmp_path / "x")
    assert told["format"] == "dcp"
    assert told["size_bytes"] == sum(f.stat().st_size for f in (tmp_path / "x").iterdir())
    job = begun()
    load_dcp(tmp_path / "x", job.model, job.optimizer)
    assert job.bits() == reference(2).bits()
    for step in range(3, 7):
        job.train(step)
    assert job.bits() == reference(6).bits()
    more: dict[str, Any] = {"step": 0, "metrics": {"at": 0}}
    dcp.load(more, checkpoint_id=tmp_path / "x", no_dist=True)
    assert more == {"step": 2, "metrics": {"at": 2}}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_tied_tensors_in_a_dcp_directory(cli: Cli, tmp_path: Path) -> None:
    model = Tied()
    optimizer = tied_run(tmp_path / "run", model)
    export(cli, tmp_path / "run", "--to", tmp_path / "x")
    other = Tied()
    again = torch.optim.AdamW(other.parameters(), lr=5.0)
    load_dcp(tmp_path / "x", other, again)
    for step in range(3):
        tied_step(model, optimizer, step)
        tied_step(other, again, step)
    assert same_bits(other.state_dict(), model.state_dict())


# ---------------------------------------------------------------- the target


@pytest.mark.parametrize("name", FORMS)
def test_a_target_that_is_there_is_kept_or_replaced_whole(
    cli: Cli, healthy: Path, tmp_path: Path, name: str
) -> None:
    target = tmp_path / name
    for make in (lambda: target.write_text("mine"), target.mkdir):
        make()
        said = cli("export", healthy, "--to", target)
        assert (said.status, said.out) == (2, "")
        assert "is there already" in said.err and "--force" in said.err
        assert target.is_dir() or target.read_text() == "mine"
        export(cli, healthy, "--to", target, "--force")
        assert target.is_dir() == (name == "x")
        assert {path.name for path in tmp_path.iterdir()} == {"healthy", name}
        export(cli, healthy, "--to", target, "--force")
        if target.is_dir():
            assert (target / ".metadata").exists()
            dcp_files = sorted(target.iterdir())
            for file in dcp_files:
                file.unlink()
            target.rmdir()
        else:
            target.unlink()


@pytest.mark.parametrize("name", FORMS)
def test_a_failed_rename_leaves_what_was_there(
    cli: Cli, healthy: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / name
    export(cli, healthy, "--step", "1", "--to", target)
    before = content(target)
    renames = 0
    original = durable.SystemCalls.rename

    def fails_at_the_last(self: durable.SystemCalls, source: Path, to: Path) -> None:
        nonlocal renames
        if to == target and "-old" not in source.name:
            renames += 1
            raise OSError(5, "sample")
        original(self, source, to)

    monkeypatch.setattr(durable.SystemCalls, "rename", fails_at_the_last)
    said = cli("export", healthy, "--step", "2", "--to", target, "--force")
    assert renames == 1
    assert (said.status, said.out) == (1, "")
    assert str(target) in said.err and "input/output error" in said.err
    assert content(target) == before
    assert {path.name for path in tmp_path.iterdir()} == {"healthy", name}


def content(path: Path) -> dict[str, bytes]:
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    return {file.name: file.read_bytes() for file in files}


def test_everything_is_synced_before_it_has_its_name(
    cli: Cli, healthy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    calls = durable.SystemCalls

    def sync(self: durable.SystemCalls, fd: int) -> None:
        events.append("file " + Path(os.readlink(f"/proc/self/fd/{fd}")).name)

    def sync_directory(self: durable.SystemCalls, path: Path) -> None:
        events.append(f"directory {path.name}")

    def rename(self: durable.SystemCalls, source: Path, target: Path) -> None:
        events.append(f"rename {target.name}")
        os.rename(source, target)  # noqa: TID251 - stands in for the one that is watched

    monkeypatch.setattr(calls, "sync", sync)
    monkeypatch.setattr(calls, "sync_directory", sync_directory)
    monkeypatch.setattr(calls, "rename", rename)
    export(cli, healthy, "--to", tmp_path / "x")
    names = {file.name for file in (tmp_path / "x").iterdir()}
    middle = len(names)
    assert {event.removeprefix("file ") for event in events[:middle]} == names
    assert events[middle].startswith("directory .x.")
    assert events[middle + 1 :] == ["rename x", f"directory {tmp_path.name}"]


@contextlib.contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """What a write beyond it meets is the same as on a full disk, with another number."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("name", FORMS)
def test_a_full_disk_is_a_clear_error(cli: Cli, healthy: Path, tmp_path: Path, name: str) -> None:
    with files_of_at_most(600):
        said = cli("export", healthy, "--to", tmp_path / name)
    assert (said.status, said.out) == (1, "")
    headline, hint = said.err.splitlines()
    assert headline == f"everystep: {tmp_path / name}: file too large"
    assert hint.startswith("  try: free some space")
    assert {path.name for path in tmp_path.iterdir()} == {"healthy"}


@pytest.mark.parametrize("name", FORMS)
def test_a_damaged_step_is_not_exported(cli: Cli, healthy: Path, tmp_path: Path, name: str) -> None:
    flip(healthy, "steps/main/*3/*.model.safetensors", -1)
    said = cli("export", healthy, "--to", tmp_path / name)
    assert (said.status, said.out) == (1, "")
    assert "hash of bytes" in said.err
    assert {path.name for path in tmp_path.iterdir()} == {"healthy"}
    assert cli("export", healthy, "--step", "2", "--to", tmp_path / name).status == 0


def test_targets_that_cannot_be(cli: Cli, healthy: Path, tmp_path: Path) -> None:
    for target, problem in (
        (tmp_path / "nowhere" / "x.pt", "is no directory"),
        (healthy / "x.pt", "lies in the run"),
        (tmp_path / "x.bin", "'.bin' does not say"),
    ):
        said = cli("export", healthy, "--to", target)
        assert (said.status, said.out) == (2, "") and problem in said.err
    told = export(cli, healthy, "--to", tmp_path / "x.bin", "--format", "pt")
    assert told["format"] == "pt"
    assert read_pt(tmp_path / "x.bin")["step"] == 3


def test_plain_text_and_names_with_spaces(cli: Cli, healthy: Path, tmp_path: Path) -> None:
    target = tmp_path / "my model.safetensors"
    said = cli("export", healthy, "--to", target)
    length = target.stat().st_size
    assert said == (
        0,
        f"step main:3 is in {target} (safetensors: 4 model tensors, {length} B)\n",
        "",
    )
