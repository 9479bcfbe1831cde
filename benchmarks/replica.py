"""A second copy of the run, done again by the agent: what it costs training, and what it gives.

    python -m benchmarks.replica [--quick] [--json] [--dir DIR] [--runs N] [--only NAME,…]

The parts, each of which can be run alone:

- `emulated`: 124 M fp32 parameters with dense gradients and AdamW, fused and not. A step takes 1 s,
  or twice its update where that is more: a wait in which the host is idle, as beside an
  accelerator, and then a real update.
- `killed`: the trainer is killed (SIGKILL), and a restart reads the state from the agent's memory.
- `persist`: what is written where two fifths of a state change in an interval, or all of it.
- `auto`: the wasted time of its choice beside the best fixed strategy's, simulated, on nine
  workloads; and what it chooses in two real runs.
- `peers`: two and four hosts (network namespaces; root), each with a copy of another's state, of
  which one is lost.
"""

from __future__ import annotations

from benchmarks.command import Asked, Parts
from benchmarks.replica_auto import measure_auto
from benchmarks.replica_emulated import measure_emulated
from benchmarks.replica_killed import measure_killed
from benchmarks.replica_peers import measure_peers
from benchmarks.replica_persist import measure_persist

PARTS: Parts = {
    "emulated": measure_emulated,
    "killed": measure_killed,
    "persist": measure_persist,
    "auto": measure_auto,
    "peers": measure_peers,
}
"""By name, in the order in which they are run."""


if __name__ == "__main__":
    Asked.parse(__doc__ or "", PARTS).run()
