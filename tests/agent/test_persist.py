"""Images of a replica as the agent's writer makes them durable: in part, and whole all the same."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from agent.scenes import DEADLINE_S, assert_stored, begin_of, run_at, stored_steps
from byte_runs import TREE, NoSync, Tensor, files_of, read_back, tensor
from everystep.agent import protocol as p
from everystep.agent.image import Image, SlotLayout
from everystep.agent.slots import Slots
from everystep.agent.writer import Writer
from everystep.cli.main import run as run_cli
from everystep.planning.partition import pieces_of
from everystep.store import increments
from everystep.store.full import lay_out_files
from everystep.store.increments import MOST_FILE_BYTES, MOST_IMAGES
from everystep.store.local import LocalBackend
from everystep.store.pruning import carry_out, plan_prune
from everystep.store.references import needed_steps, references_of
from everystep.store.retention import Retention
from everystep.store.run import Run
from everystep.store.verify import verify_step
from everystep.types import StepRef
from faults import Faults
from waiting import until

UNIT = 4096
KEPT = 3


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(increments, "UNIT_BYTES", UNIT)


@pytest.fixture
def run(run_dir: Path) -> Run:
    return run_at(run_dir)


def first_state(seed: int = 0) -> list[Tensor]:
    """Tensors of many units, of odd lengths, of less than one, and of none."""
    return [
        tensor("/models/model/embedding", "float32", 61, 257, seed=seed),
        tensor("/models/model/weight", "uint8", 5 * UNIT + 3, seed=seed),
        tensor("/models/model/bias", "bfloat16", 300, seed=seed),
        tensor("/models/model/none", "float32", 0, 4),
        tensor("/optimizers/optimizer/state/moment", "float64", 61, 64, seed=seed),
        tensor("/optimizers/optimizer/state/count", "int64", seed=seed),
    ]


def changed(tensors: Sequence[Tensor], share: float, rng: random.Random) -> list[Tensor]:
    found = []
    for one in tensors:
        data = bytearray(one.data)
        for start in range(0, len(data), UNIT):
            if rng.random() < share:
                data[start] = (data[start] + 1) % 256
        found.append(one._replace(data=bytes(data)))
    return found


def states(share: float, count: int, seed: int = 0) -> list[list[Tensor]]:
    """The state at every step, from 1 on; `states(...)[0]` is that of step 1."""
    rng = random.Random(seed)
    found = [first_state(seed)]
    while len(found) < count:
        found.append(changed(found[-1], share, rng))
    return found


def image_bytes(tensors: Sequence[Tensor]) -> int:
    """What the files of a full checkpoint hold."""
    specs = {t.key: t.spec for t in tensors}
    return sum(f.nbytes for f in lay_out_files(specs, pieces_of(list(specs.values()), 0, 1)))


class Persisting:
    """An agent's writer, and a replica that seals its slot again and again."""

    def __init__(self, run: Run, backend: LocalBackend | None = None, **changes: Any) -> None:
        self.guard = threading.Condition()
        self.told: list[Any] = []
        self.begin = begin_of(run, replica=True, **changes)
        backend = backend or LocalBackend(Path(run.backend.abilities.location), NoSync())
        self.writer = Writer(backend, self.begin, self.guard, self.told.append)
        self.slots: Slots[Image] = Slots(1, "block")
        self.writer.slots = self.slots
        self.image: Image | None = None

    def seal(self, step: int, tensors: Sequence[Tensor], rest: Sequence[Tensor] = ()) -> None:
        specs = [t.spec for t in tensors]
        pieces = pieces_of(specs, 0, 1)
        layout = SlotLayout(1, specs, pieces, sum(len(t.data) for t in rest))
        slot = memoryview(bytearray(layout.slot_bytes))
        layout.write_headers(slot)
        for one, offset in zip(tensors, layout.offsets, strict=True):
            slot[offset : offset + len(one.data)] = one.data
        joined = b"".join(t.data for t in rest)
        slot[layout.rest_offset : layout.rest_offset + len(joined)] = joined
        seal = p.Seal(
            slot=0, layout=1, step=step, created="2026-01-01T00:00:00Z", hashes={}, whole={},
            rest=[t.spec for t in rest], still=False, tree=msgspec.json.encode(TREE), metrics={},
        )  # fmt: skip
        with self.guard:
            self.image = Image(self.begin, layout, seal, None, slot)
            self.writer.seal(0, self.image, self.slots)
            self.guard.notify_all()

    def outcome(self, step: int) -> p.Stored | p.NotStored:
        def found() -> list[Any]:
            return [
                m for m in self.told if isinstance(m, p.Stored | p.NotStored) and m.step == step
            ]

        until(found, DEADLINE_S, f"step {step} to be stored or refused")
        return found()[-1]  # type: ignore[no-any-return]

    def persist(self, step: int, tensors: Sequence[Tensor], rest: Sequence[Tensor] = ()) -> int:
        """Returns how many bytes were written."""
        self.seal(step, tensors, rest)
        told = self.outcome(step)
        assert isinstance(told, p.Stored), told
        return told.written_bytes

    def close(self) -> None:
        with self.guard:
            self.slots.draining = True
        self.writer.close()


@contextlib.contextmanager
def persisting(
    run: Run, backend: LocalBackend | None = None, **changes: Any
) -> Iterator[Persisting]:
    made = Persisting(run, backend, **changes)
    try:
        yield made
    finally:
        made.close()


def damages(run: Run) -> list[str]:
    """What verification finds, references to steps that are gone included."""
    return [f"{f.path} {f.what}" for e in run.listing().steps for f in verify_step(run, e)]


def disk_bytes(run: Run) -> int:
    """Of all data files, those that are being removed included."""
    files = run.backend.list("steps")
    return sum(file.nbytes for file in files if file.name.endswith(".safetensors"))


# ---------------------------------------------------------------- what is written


@pytest.mark.parametrize("share", [0.02, 0.4])
def test_hundreds_of_images_on_little_disk(run: Run, run_dir: Path, share: float) -> None:
    """Each is had bit for bit when it is the newest; few bytes are written, and no step stays for
    longer than it is needed."""
    rng = random.Random(3)
    tensors = first_state()
    full = image_bytes(tensors)
    written, on_disk = [], []
    with persisting(run, retention=Retention(keep_last=KEPT)) as replica:
        for step in range(1, 201):
            written.append(replica.persist(step, tensors))
            if step % 7 == 0:
                assert_stored(run, step, tensors)
            on_disk.append(disk_bytes(run))
            tensors = changed(tensors, share, rng)
    steps = stored_steps(run)
    assert len(steps) <= 2 * MOST_IMAGES + KEPT
    assert steps[-1] == 200
    assert damages(run) == []
    assert max(written) <= 1.05 * full
    mean = sum(written) / len(written) / full
    assert mean <= max(2 * share / (1 + share), share + 1 / MOST_IMAGES) + 0.08
    # the images before a whole one are there until so many have come after it, and while one more
    # is written; headers are large for units as small as these
    assert max(on_disk) <= (2 * MOST_FILE_BYTES + 1) * full * 1.05


def test_a_part_of_one_large_tensor(run: Run) -> None:
    with persisting(run) as replica:
        tensors = [tensor("/models/model/embedding", "float32", 20 * UNIT)]
        whole = replica.persist(1, tensors)
        data = bytearray(tensors[0].data)
        data[17 * UNIT] ^= 1
        data[60 * UNIT + 5] ^= 1
        tensors = [tensors[0]._replace(data=bytes(data))]
        part = replica.persist(2, tensors)
        assert 2 * UNIT < part < 2 * UNIT + 1000 < whole / 20
        assert replica.persist(3, tensors) == 0
    for step in (2, 3):
        assert_stored(run, step, tensors)
    entries = run.listing().steps
    assert references_of(run, entries) == {
        StepRef("main", 2): {StepRef("main", 1)},
        StepRef("main", 3): {StepRef("main", 1), StepRef("main", 2)},
    }
    assert damages(run) == []


def test_tensors_whose_form_changes(run: Run) -> None:
    """What is in no fixed place is cut and referred to like all else."""
    held = states(0.0, 1)[0]
    with persisting(run) as replica:
        for step, length in enumerate((10, 3 * UNIT, 3 * UNIT, 10, 3 * UNIT), 1):
            rest = [tensor("/extras/e", "uint8", length), tensor("/extras/f", "int8", step)]
            written = replica.persist(step, held, rest)
            assert_stored(run, step, [*held, *rest])
            if step == 3:
                assert written < UNIT
    assert damages(run) == []


def test_where_all_changes_files_are_as_without_a_replica(run: Run, run_dir: Path) -> None:
    with persisting(run) as replica:
        for step in (1, 2, 3):
            tensors = first_state(step)
            replica.persist(step, tensors)
            assert_stored(run, step, tensors)
            assert replica.image is not None
            assert replica.image.refers_to == []
    names = {name.split(".", 1)[1] for name in files_of(run_dir / "steps/main/000000000003")}
    assert names == {"json", "model.safetensors", "state.safetensors"}


def test_memory_holds_all_of_an_image_that_the_store_holds_in_parts(run: Run) -> None:
    first, second = states(0.3, 2)
    with persisting(run) as replica:
        replica.persist(1, first)
        replica.persist(2, second)
        assert replica.image is not None
        assert replica.image.refers_to == [StepRef("main", 1)]
        files = replica.image.files(0)
    slot = replica.image._slot
    data = {
        f.name: slot[f.offset : f.offset + f.nbytes] if f.data is None else f.data for f in files
    }
    directory = "steps/main/000000000002/"
    assert all(name.startswith(directory) for name in data)
    marker = next(name for name in data if name.endswith(".json"))
    (entry,) = run.entries(StepRef("main", 2))
    assert entry.parts[0].marker == marker.removeprefix(directory)
    record = msgspec.json.decode(bytes(data[marker]))["content"]
    assert {f"{directory}{file['name']}" for file in record["files"]} == data.keys() - {marker}
    assert all(file["step"] is None for file in record["files"])
    stored = run.record(entry, 0)
    assert [t["xxh3_128"] for t in record["tensors"]] == [t.xxh3_128 for t in stored.tensors]
    assert {file.name for file in stored.files}.isdisjoint(
        file["name"] for file in record["files"]
    ), "what others refer to on the store must not be hidden by what is in memory"


# ---------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize("how", ["gone", "cut"])
def test_files_that_somebody_has_touched_are_not_referred_to(
    run: Run, run_dir: Path, how: str
) -> None:
    held = states(0.1, 3)
    with persisting(run) as replica:
        whole = replica.persist(1, held[0])
        (file,) = (run_dir / "steps/main/000000000001").glob("*.safetensors")
        file.unlink() if how == "gone" else os.truncate(file, 100)
        assert replica.persist(2, held[1]) == whole
        assert replica.persist(3, held[2]) < whole / 2
    assert_stored(run, 2, held[1])
    assert_stored(run, 3, held[2])


def test_another_agent_or_session_begins_with_a_whole_image(run: Run) -> None:
    held = states(0.1, 4)
    with persisting(run) as replica:
        whole = replica.persist(1, held[0])
        replica.persist(2, held[1])
    with persisting(run) as replica:
        replica.seal(2, held[1])  # which the one before had stored and not told
        told = replica.outcome(2)
        assert isinstance(told, p.Stored) and told.written_bytes == 0
        assert replica.persist(3, held[2]) == whole
    with persisting(run, session=2) as replica:
        assert replica.persist(4, held[3]) == whole
    assert damages(run) == []


def test_prune_keeps_what_is_referred_to_and_no_more(run: Run, run_dir: Path) -> None:
    count = MOST_IMAGES + 5
    held = states(0.02, count)
    with persisting(run) as replica:
        for step in range(1, count + 1):
            replica.persist(step, held[step - 1])
    listing = run.listing()
    references = references_of(run, listing.steps)
    whole = [step for step in stored_steps(run) if StepRef("main", step) not in references]
    assert whole == [1, MOST_IMAGES + 1]
    files = {entry.name: entry.nbytes for entry in run.backend.list("")}
    plan = plan_prune(listing, files, Retention(keep_last=1), {}, references)
    carry_out(run, plan, lambda: None)
    newest = StepRef("main", count)
    needed = needed_steps([newest], references)
    assert stored_steps(run) == sorted(ref.step for ref in {newest, *needed})
    assert stored_steps(run)[0] == MOST_IMAGES + 1
    for step in stored_steps(run):
        assert_stored(run, step, held[step - 1])
    assert damages(run) == []
    assert disk_bytes(run) <= 1.5 * image_bytes(held[0])


def test_commands_read_what_lies_in_parts(
    run: Run, run_dir: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    held = states(0.2, 3)
    with persisting(run) as replica:
        for step in (1, 2, 3):
            replica.persist(step, held[step - 1])
    out = tmp_path / "out.safetensors"
    for status, *words in (
        (0, "verify", run_dir),
        (0, "ls", run_dir),
        (0, "show", run_dir, "--tensors"),
        (1, "diff", run_dir, "2", "3"),
        (0, "diff", run_dir, "3", "3"),
        (0, "export", run_dir, "--to", out),
        (0, "prune", run_dir, "--keep-last", "1", "--yes"),
    ):
        assert run_cli([*map(str, words), "--json"]) == status, capsys.readouterr()
    exported = load_file(out)
    assert {k: v.reshape(-1).view(torch.uint8).numpy().tobytes() for k, v in exported.items()} == {
        t.key.rpartition("/")[2]: t.data for t in held[2] if t.key.startswith("/models/")
    }
    assert stored_steps(run) == [1, 2, 3]
    assert damages(run) == []


# ---------------------------------------------------------------- the agent dies, or is refused

CRASHED_STEPS = 3


def _persist_until_killed(path: Path, run: Run, nth: int, heard: int) -> None:
    """In a child: be killed before a system call, having told every step that is durable."""
    faults = Faults()
    replica = Persisting(
        run, LocalBackend(path, faults), retention=Retention(keep_last=1), identity=[]
    )
    faults.kill_at(nth)
    for step, tensors in enumerate(states(0.3, CRASHED_STEPS), 1):
        replica.persist(step, tensors)
        os.write(heard, bytes([step]))
    replica.close()
    os._exit(0)


def _killed(path: Path, run: Run, nth: int) -> int | None:
    """The newest step that was told; None: nobody was killed."""
    hears, heard = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _persist_until_killed(path, run, nth, heard)
        finally:
            os._exit(1)
    os.close(heard)
    with open(hears, "rb") as told:
        steps = told.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return max(steps, default=0)
    assert os.WEXITSTATUS(status) == 0
    return None


def test_killed_before_every_system_call(tmp_path: Path) -> None:
    """What is on the store is whole images, the newest that was told among them or a later one; and
    another agent goes on."""
    held = states(0.3, CRASHED_STEPS + 1)
    nth = 0
    referred = 0
    while True:
        nth += 1
        path = tmp_path / str(nth)
        run = run_at(path)
        told = _killed(path, run, nth)
        if told is None:
            break
        for step in stored_steps(run):
            assert read_back(run, StepRef("main", step), 0) == {
                t.key: t.data for t in held[step - 1]
            }
        newest = max(stored_steps(run), default=0)
        assert told <= newest <= told + 1
        assert [d for d in damages(run) if "no record names" not in d] == []
        referred += len(references_of(run, run.listing().steps)) > 0
        with persisting(run, retention=Retention(keep_last=1)) as replica:
            replica.persist(CRASHED_STEPS + 1, held[-1])
        assert_stored(run, CRASHED_STEPS + 1, held[-1])
        run.clean_up()
        assert damages(run) == []
    assert nth > 40
    assert referred > nth / 4


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_refused_at_every_system_call(tmp_path: Path, number: int) -> None:
    """An image that could not be written is tried again; the one before is there meanwhile."""
    held = states(0.3, 3)
    refused = 0
    for nth in range(1, 40):
        path = tmp_path / str(nth)
        run, faults = run_at(path), Faults()
        with persisting(run, LocalBackend(path, faults)) as replica:
            replica.persist(1, held[0])
            faults.at("any", nth, number)
            replica.seal(2, held[1])
            first = replica.outcome(2)
            if isinstance(first, p.NotStored):
                refused += 1
                assert_stored(run, 1, held[0])
                with replica.guard:
                    replica.writer._retry_at_s = 0.0
                    replica.guard.notify_all()
                until(lambda r=replica: isinstance(r.outcome(2), p.Stored), DEADLINE_S, "a retry")
            faults.watch()
            assert replica.persist(3, held[2]) < 0.6 * image_bytes(held[2])
        for step in (1, 2, 3):
            assert_stored(run, step, held[step - 1])
        assert damages(run) == []
        if not faults.fired:
            break
    assert refused >= 5
    assert not faults.fired, "calls that were never refused"
