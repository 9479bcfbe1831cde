"""How fast the tap reads all-reduces off a mirrored port, on one core.

    python -m benchmarks.tap [--quick] [--json] [--dir DIR] [--runs N] [--only NAME,…]

The parts, each of which can be run alone:

- `roce`: NCCL over RoCEv2, from synthetic captures of 400 MB in memory (`--quick`: 200 MB).
- `gloo`: gloo over TCP, likewise.
- `live`: two hosts (network namespaces; root) all-reduce over gloo as fast as they can, and a third
  one follows the mirror of a port.

What it does not show: a network card that receives at these rates.
"""

from __future__ import annotations

from benchmarks.command import Asked, Parts
from benchmarks.tap_decode import measure_gloo, measure_roce
from benchmarks.tap_live import measure_live

PARTS: Parts = {"roce": measure_roce, "gloo": measure_gloo, "live": measure_live}
"""By name, in the order in which they are run."""


if __name__ == "__main__":
    Asked.parse(__doc__ or "", PARTS).run()
