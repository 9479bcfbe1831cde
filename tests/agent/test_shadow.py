"""A shadow, in this process: what it takes, what it refuses, and what it gives back."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import everystep
from agent.replica_scenes import agents_in_threads
from agent.shadow_scenes import Scene
from crash.trainer import Job
from everystep.agent import wire as w
from everystep.agent.certificates import server_context
from everystep.errors import StoreFailed, Unsupported, UsageError
from everystep.shadowed import Shadowed
from everystep.store.addresses import Address
from everystep.strategies import parse_place


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    yield made
    made.shadow.close()


def test_a_run_goes_on_from_its_shadow(scene: Scene, run_dir: Path) -> None:
    _, _, end = scene.train(run_dir, 6, scene.strategy())
    done, before, _ = scene.train(run_dir, 3, scene.strategy())
    assert (done, before) == (6, end)


def test_an_empty_directory_becomes_the_shadows_run(
    scene: Scene, run_dir: Path, tmp_path: Path
) -> None:
    _, _, end = scene.train(run_dir, 6, scene.strategy())
    done, before, _ = scene.train(tmp_path / "other", 1, scene.strategy())
    assert (done, before) == (6, end)


def test_another_run_is_refused(scene: Scene, run_dir: Path, tmp_path: Path) -> None:
    scene.train(run_dir, 2, scene.strategy())
    other = tmp_path / "other"
    with everystep.Checkpointer(other, model=Job(0, 1).model, strategy=everystep.Full()) as ck:
        ck.restore()
    with pytest.raises(StoreFailed, match="another run"):
        scene.train(other, 1, scene.strategy())


def test_what_it_has_written_outlives_it(scene: Scene, run_dir: Path) -> None:
    _, _, end = scene.train(run_dir, 6, scene.strategy())
    scene.shadow.close()
    scene.shadow = scene.started()
    done, before, _ = scene.train(run_dir, 1, scene.strategy())
    assert (done, before) == (6, end)


def test_without_a_tap_it_takes_no_record_that_needs_one(scene: Scene, run_dir: Path) -> None:
    job = Job(0, 1)
    strategy = scene.strategy(tap="wire")
    with agents_in_threads(), job.checkpointer(str(run_dir), strategy=strategy) as ck:
        ck.restore()
        job.step(1)
        ck.step()
        assert ck.strategy == everystep.Full(every=1)  # one rank sends no gradients
        job.step(1)
        ck.step()
    assert ck.steps()[-1] == 2


def test_what_cannot_be_recorded_is_stored_in_full_from_the_first_step_on(
    scene: Scene, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise Unsupported("a kind of tensor that nobody has heard of")

    monkeypatch.setattr(Shadowed, "recorder", refuse)
    job = Job(0, 1)
    with agents_in_threads(), job.checkpointer(str(run_dir), strategy=scene.strategy()) as ck:
        ck.restore()
        assert ck.strategy == everystep.Full(every=1)
        job.step(1)
        ck.step()
    assert ck.steps() == [1]


@pytest.mark.parametrize("right", [True, False])
def test_nobody_in_between_is_spoken_to(right: bool) -> None:
    """The proofs hold for one certificate only."""
    import socket

    context, certificate = server_context()
    _, other = server_context()
    binding = bytes.fromhex(certificate if right else other)
    token, refused = os.urandom(64), []

    def serve() -> None:
        connection = listener.accept()[0]
        try:
            w.welcomed(connection, context, token, binding).close()
        except w.Gone as error:
            refused.append(error)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        port = listener.getsockname()[1]
        address = Address(rank=0, host="127.0.0.1", port=port, certificate=w.UNKNOWN, holds=[])
        if right:
            w.connected(address, token).close()
        else:
            with pytest.raises(w.Gone):
                w.connected(address, token)
        thread.join()
    assert bool(refused) is not right


@pytest.mark.parametrize("address", ["", "host", "host:1", "1.2.3.4", "1.2.3.4:0", "1.2.3.4:65536"])
def test_an_address_is_an_ip_address_and_a_port(address: str) -> None:
    with pytest.raises(UsageError):
        parse_place("it", address)


def test_addresses_of_both_kinds() -> None:
    assert parse_place("it", "1.2.3.4:5") == ("1.2.3.4", 5)
    assert parse_place("it", "[::1]:5") == ("::1", 5)
