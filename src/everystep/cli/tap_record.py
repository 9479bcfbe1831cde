"""The record that `everystep tap decode` prints."""

from __future__ import annotations

from msgspec import Struct

from everystep.types import Json


class Capture(Struct, frozen=True, kw_only=True):
    """The record that `everystep tap decode` prints."""

    capture: str
    """Name of the file."""
    frames: int
    roce_frames: int
    """Frames to the RoCE port."""
    packet_kinds: dict[str, int]
    path_mtu: int
    """Largest payload of a packet that others followed, in bytes; 0 if there was none."""
    world_size: int
    ranks: list[dict[str, Json]]
    """`rank` and `macs`, as far as the receivers' records tell."""
    directions: list[str]
    """Between which ranks data was seen."""
    dtype: str
    connections: list[dict[str, Json]]
    messages: list[dict[str, Json]]
    collectives: list[dict[str, Json]]
    reduced: list[dict[str, Json]]
    doubts: list[int]
    """All-reduces from which on loss made the numbers of one direction uncertain."""
    mismatches: list[dict[str, Json]]
    """Copies of one range that differ: `index`, `at` (byte), `frames`."""
    sockets: dict[str, int]
    """What was counted of NCCL's sockets: see `everystep.tap.sockets`."""
    contradicted: int
    """Messages that are not what their place asks for; not used."""
