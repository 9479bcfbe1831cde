"""A shadow and trainers of this process."""

from __future__ import annotations

import select
import time
from pathlib import Path
from typing import Any

import everystep
from agent.replica_scenes import agents_in_threads
from crash.trainer import Job
from everystep.agent.shadow import Shadow
from everystep.agent.shadow_copy import Keeping
from everystep.store import addresses as at
from waiting import until

DEADLINE_S = 60.0
EVERY = 4
"""Steps between two full checkpoints of the shadow."""


class Scene:
    """A shadow without a tap, and trainers of this process."""

    def __init__(self, folder: Path, *, deltas: bool = False, keep_last: int = 2) -> None:
        self.folder, self.token, self._deltas = folder, folder / "token", deltas
        self._keep_last = keep_last
        at.make_secret(self.token)
        self.said: list[str] = []
        self.digests: list[str] = []
        """Of the state after each step of the newest training."""
        self.shadow = self.started()

    def started(self, name: str = "shadow") -> Shadow:
        keeping = Keeping(
            path=self.folder / name,
            persist_every=EVERY,
            keep_last=self._keep_last,
            deltas=self._deltas,
        )
        token = at.read_secret(self.token)
        return Shadow(keeping, "127.0.0.1", 0, token, None, lambda _, text: self.said.append(text))

    def strategy(self, **options: object) -> everystep.Shadow:
        given = {"tap": "software", "token_file": str(self.token)} | options
        return everystep.Shadow(address=f"127.0.0.1:{self.shadow.port}", **given)  # type: ignore[arg-type]

    def train(
        self,
        run: Path,
        steps: int,
        strategy: everystep.Shadow,
        step: int | None = None,
        *,
        waits: bool = True,
    ) -> tuple[int, str, str]:
        """Train so many steps more; returns those done before, and the digests then and now.

        Args:
            step: to go on from; None: the newest.
            waits: for each step to be in the shadow; else train further until one is.
        """
        job = Job(0, 1)
        with agents_in_threads(), job.checkpointer(str(run), strategy=strategy) as ck:
            done = ck.restore(step)
            before = job.digest()
            self.digests = [before]
            session: Any = ck._session
            # the first step's state goes to whom the agent has reached by then
            until(lambda: session._wanted is not None, DEADLINE_S, "the shadow to be reached")
            ends_s = time.monotonic() + DEADLINE_S
            while len(self.digests) <= steps or (session.in_shadow != ck._done and not waits):
                assert time.monotonic() < ends_s, self.said
                job.step(1)
                self.digests.append(job.digest())
                ck.step()
                if waits:
                    self.until_in_shadow(ck)
                else:
                    select.select([], [], [], 0.2)
        return done, before, job.digest()

    def until_in_shadow(self, ck: everystep.Checkpointer) -> None:
        session = ck._session
        until(
            lambda: getattr(session, "in_shadow", 0) == ck._done,
            DEADLINE_S,
            "the step to be in the shadow",
        )
