"""Make a tiny run of format version 2: `python tests/golden/make.py DIRECTORY` (see its test).

What is committed as `format-1` and `format-2` was made by this script as it was while that version
was the newest, and is never made anew: it is what every later release must read. A later version of
the format gets a directory of its own.
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import Any

import msgspec

from byte_runs import Tensor, pieces_of, stored_earlier
from everystep.store import format as fmt
from everystep.store.backend import NewFile
from everystep.store.format import RunRecord, SessionRecord, TimelineRecord
from everystep.store.full import Part, Source, lay_out_files, streamed, write_part
from everystep.store.local import LocalBackend
from everystep.store.run import Run
from everystep.types import MAIN, Shard, StepRef

RUN = "00112233445566778899aabbccddeeff"
CREATED = "2026-01-01T00:00:00Z"
FORK = "main@1"
EARLIER = {"model": StepRef(MAIN, 1), "state": StepRef(FORK, 2)}
"""What step 3 refers to: the model is as step 1 has it, and slots are as in step 2."""


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def tensors(rank: int, step: int) -> list[Tensor]:
    """What a rank holds after a step; `rows` is sharded, and described so by `sources`."""
    n = 1 if step == 3 else step
    return [
        Tensor("/models/model/fc.weight", "float32", (2, 3), floats(1, -0.0, 3, 4, 5, n), True),
        Tensor("/models/model/fc.bias", "bfloat16", (2,), b"\x80\x3f\x00\xc0", True),
        Tensor("/models/model/rows", "float32", (1, 2), floats(rank, n)),
        Tensor("/models/model/phase", "complex64", (), floats(0, 1)),
        Tensor("/models/model/empty", "int64", (0, 3), b""),
        Tensor("/optimizers/optimizer/state/model/fc.weight/exp_avg", "float32", (2, 3),
               floats(*[0.5] * 6), True),
        Tensor("/extras/schedule/nan", "uint8", (4,), b"\x01\x00\xc0\x7f"),
        Tensor("/rng/torch", "uint8", (3,), bytes([rank, step, 255])),
    ]  # fmt: skip


def tree(rank: int, step: int) -> dict[str, Any]:
    """The JSON part of a state."""
    weight = ["model", "fc.weight"]
    exp_avg = {"$tensor": "/optimizers/optimizer/state/model/fc.weight/exp_avg"}
    return {
        "models": {
            "model": {"aliases": {"tied": "fc.weight"}, "frozen": ["fc.bias"], "extra_state": {}}
        },
        "optimizers": {
            "optimizer": {
                "class": "torch.optim.adam.Adam",
                "groups": [
                    {
                        "parameters": [weight],
                        "options": {"lr": 0.001, "betas": {"$tuple": [0.9, 0.999]}},
                    }
                ],
                "slots": [[weight, {"step": step, "exp_avg": exp_avg}]],
                "others": {},
                "more": {},
            }
        },
        "extras": {
            "schedule": {
                "last": {"$int": "0x20000000000001"},
                "worst": {"$float": "fff0000000000000"},
                "nan": {"$array": ["/extras/schedule/nan", "<f4", [1]]},
                "seen": {"$dict": [[1, "one"], [{"$tuple": [2, 3]}, {"$set": [4]}]]},
                "rank": rank,
            }
        },
        "loaders": {},
        "rng": {"torch": {"$tensor": "/rng/torch"}},
    }


def sources(rank: int, step: int) -> list[Source]:
    shard = Shard(
        global_shape=(2, 2),
        offsets=(rank, 0),
        mesh_shape=(2,),
        mesh_dim_names=("dp",),
        placements=("S(0)",),
    )
    made = [tensor.source() for tensor in tensors(rank, step)]
    return [
        Source(msgspec.structs.replace(s.spec, shard=shard), s.chunks)
        if s.spec.key.endswith("rows")
        else s
        for s in made
    ]


def main(root: Path) -> None:
    """Two ranks: step 1 in session 1, then a fork with steps 2 and 3 in session 2; step 3 refers to
    files of the other two."""
    root.mkdir(parents=True)
    backend = LocalBackend(root)

    def put(name: str, record: msgspec.Struct) -> None:
        data = fmt.encode_record(record)
        backend.put([NewFile(name, len(data), [data])])

    put(fmt.RUN_FILE, RunRecord(run=RUN, created=CREATED))
    first = StepRef(MAIN, 1)
    for session, timeline, parent in ((1, MAIN, None), (2, FORK, first)):
        put(fmt.timeline_file(timeline), TimelineRecord(name=timeline, parent=parent))
        record = SessionRecord(
            run=RUN,
            session=session,
            timeline=timeline,
            world_size=2,
            restored=parent,
            created=CREATED,
            host="golden",
            pid=1,
            versions={"everystep": "0.1.0"},
        )
        put(fmt.session_file(session), record)
    for session, ref in ((1, first), (2, StepRef(FORK, 2)), (2, StepRef(FORK, 3))):
        for rank in (0, 1):
            part = Part(
                ref=ref,
                run=RUN,
                session=session,
                rank=rank,
                world_size=2,
                tree=tree(rank, ref.step),
                metrics={"loss": 1 / ref.step, "note": "ä"},
                created=CREATED,
                versions={"everystep": "0.1.0"},
            )
            held = tensors(rank, ref.step)
            made = {source.spec.key: source for source in sources(rank, ref.step)}
            specs = {key: source.spec for key, source in made.items()}
            contents = [
                stored_earlier(Run.open(root), layout, EARLIER[layout.section], rank)
                if ref.step == 3 and layout.section in EARLIER
                else streamed(layout, made)
                for layout in lay_out_files(specs, pieces_of(held, rank, 2))
            ]
            hashes = {tensor.key: fmt.digest(tensor.data) for tensor in held}
            write_part(backend, part, list(specs.values()), contents, hashes)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
