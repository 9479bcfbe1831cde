"""A training process without torch: it stages steps with an agent, says so, and waits for its end.

Arguments: the run directory, its identity, how long the agent lingers (s), how many steps, and
whether to fork a child that keeps all descriptors (`fork`) or to be ended well (`close`).
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from agent.scenes import Trainer
from everystep.agent.client import Agent
from everystep.store.local import LocalBackend
from everystep.store.run import Run


def main() -> None:
    path, linger_s, steps, how = (
        Path(sys.argv[1]),
        float(sys.argv[2]),
        int(sys.argv[3]),
        sys.argv[4],
    )
    run = Run.open(path)
    run.backend = LocalBackend(path)
    agent = Agent(path, run.id, 0)
    trainer = Trainer(agent, run, linger_s=linger_s)
    for step in range(1, steps + 1):
        trainer.stage(step)
    child = 0
    if how == "fork":
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            agent.close()  # is the parent's, and must not be ended by a child
            os.write(write, b"!")
            signal.pause()
        os.read(read, 1)
    print(f"staged {agent.pid} {child}", flush=True)
    if how == "close":
        agent.close()
    else:
        signal.pause()


if __name__ == "__main__":
    main()
