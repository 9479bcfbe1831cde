"""What the forked trainers of tests/crash/test_compaction.py do: train while agents make the full
checkpoints."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from crash.logged_scenes import sizes
from crash.nursery import agents_from_nursery, at_any_call
from crash.staged_scenes import _held, note
from crash.trainer import Board, Job
from everystep import Checkpointer, Deltas, Retention, load
from everystep.agent.handover import Lost
from waiting import until

KEPT_FULLS = 2


def strategy(full_every: int, **options: Any) -> Deltas:
    """The agent makes them."""
    return Deltas(full_every=full_every, compact=True, **{"batch": 1, "linger_s": 20} | options)


def digest(models: Mapping[str, Any], slots: Mapping[str, Any]) -> str:
    """Of every bit of parameters, buffers and slots, each by name."""
    found = hashlib.sha256()
    named = {f"{owner} {name}": t for owner, slot in slots.items() for name, t in slot.items()}
    for name, tensor in sorted({**models, **named}.items()):
        found.update(name.encode())
        found.update(torch.as_tensor(tensor).detach().reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def digest_of(job: Job) -> str:
    """Of what a training has."""
    names = {parameter: name for name, parameter in job.model.named_parameters()}
    slots = {names[parameter]: slot for parameter, slot in job.optimizer.state.items()}
    return digest(job.model.state_dict(), slots)


def agents_die(run: str, kills: int, calls: int, seed: int, full_every: int = 3) -> None:
    """Train until so many agents have died in the middle of a compaction. After each death, what
    the store has is what training had at that step; print the step, and at the end how many bytes
    there were at most, and the digest of the last step."""
    logging.basicConfig(level=logging.ERROR, format="%(levelname)s %(message)s")
    deaths = Path(run).parent / "deaths"
    deaths.touch()
    states: dict[int, str] = {}
    most = killed = step = 0

    def have_died() -> int:
        return len(deaths.read_text().split())

    with agents_from_nursery(at_any_call(seed, calls, deaths, kills)):
        job = Job()
        ck = job.checkpointer(
            run, strategy=strategy(full_every), retention=Retention(keep_last=KEPT_FULLS)
        )
        with ck:
            assert ck.restore() == 0
            heard = Heard(ck)
            while killed < kills or step % full_every:
                step += 1
                job.step(1)
                states[step] = digest_of(job)
                ck.step()
                if step % full_every == 0:
                    until(lambda: has_full(ck, step) or have_died() > killed, 60, "a full")  # noqa: B023
                if have_died() > killed:
                    killed += 1
                    until(lambda: heard.losses >= killed, 60, "the trainer to hear of it")  # noqa: B023
                    found = load(run)
                    assert (
                        digest(found.models["model"], found.optimizer()["state"])
                        == (states[found.step])
                    )
                    assert step - found.step <= full_every, "what was in the log is there"
                    print("killed", step, found.step, flush=True)
                most = max(most, sum(sizes(Path(run), "*.safetensors")))
    print("end", step, most, job.digest(), flush=True)


class Heard:
    """Counts the deaths of agents that the trainer's session has been told of: its next step comes
    whole, for another agent to begin from."""

    def __init__(self, ck: Checkpointer) -> None:
        agent: Any = ck._agent
        self.losses, self._session = 0, agent._heard
        agent.listen(self._hear)

    def _hear(self, message: Any) -> None:
        self._session(message)
        self.losses += isinstance(message, Lost)


def has_full(ck: Checkpointer, step: int) -> bool:
    """Whether the trainer has heard that there is one of a step, or of a later one."""
    session: Any = ck._session
    return max(session._chain._fulls, default=0) >= step


def train(
    run: str,
    total: int,
    board: str,
    full_every: int = 5,
    batch: int = 1,
    catch_up_every: int = 0,
) -> None:
    """As `logged_scenes.train`; `go` on the board is the agent's process.

    Args:
        catch_up_every: after so many steps, wait for the newest full that is due.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    progress = Board(board)
    with agents_from_nursery():
        job = Job()
        options = {"strategy": strategy(full_every, batch=batch)}
        with job.checkpointer(run, **options) as ck:
            done = ck.restore()
            print("restored", done, job.digest(), flush=True)
            progress["restored"] = done
            for step in range(done + 1, total + 1):
                progress.await_leave(step - done)
                job.step(1)
                print("at", step, job.digest(), flush=True)
                ck.step(loss=step / 3)
                progress["returned"] = step
                note(progress, ck)
                if ck._agent is not None:
                    progress["go"] = ck._agent.pid
                if catch_up_every and step % catch_up_every == 0:
                    until(lambda: has_full(ck, step // full_every * full_every), 60, "a full")  # noqa: B023
        note(progress, ck)
        rows = [[s.step, s.staged, s.durable, s.error, s.stall_s] for s in ck.stats]
        print("stats", json.dumps(rows))
        print("end", total, job.digest(), flush=True)


def many_steps(run: str, steps: int) -> None:
    """Print what this process, its agent and the run hold, now and then: step, resident bytes,
    descriptors and threads of the trainer, the same of the agent, bytes of fulls, of the log, and
    segments, and by how many steps the newest full is behind."""
    with agents_from_nursery():
        job = Job()
        options = {"strategy": strategy(50, batch=8), "retention": Retention(keep_last=3)}
        with job.checkpointer(run, **options) as ck:
            ck.restore()
            for step in range(1, steps + 1):
                job.step(1)
                ck.step(loss=random.random())
                if step == 1 or step % (steps // 20) == 0:
                    if step > 1:
                        until(lambda: has_full(ck, step - 100), 60, "a full that is not old")  # noqa: B023
                    assert ck._agent is not None
                    logs = sizes(Path(run, "logs"), "*.log")
                    held = [*_held(os.getpid()), *_held(ck._agent.pid)]
                    held += [sum(sizes(Path(run), "*.safetensors")), sum(logs), len(logs)]
                    print(json.dumps([step, *held]), flush=True)
        assert all(s.durable for s in ck.stats), [s for s in ck.stats if not s.durable]
    print(json.dumps(len(os.listdir("/proc/self/fd"))), flush=True)
