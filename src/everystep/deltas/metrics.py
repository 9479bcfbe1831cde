"""The metrics of a delta, read from the beginning of its bytes, without torch and without the rest.

What is read so has not been proved: the hash of a record covers all of it.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from everystep.errors import Damaged
from everystep.types import Buffer, Json

METADATA_KEY = "everystep.delta"
"""Where a delta's JSON stands in the metadata of its safetensors blob."""

LENGTH_BYTES = 8
"""A blob begins with the length of its header, little-endian."""


class _Facts(Struct):
    metrics: dict[str, Json]


class _Header(Struct):
    metadata: dict[str, str] = msgspec.field(name="__metadata__")


def header_bytes(beginning: Buffer) -> int:
    """How much of a delta must be read for its metrics.

    Args:
        beginning: at least its first `LENGTH_BYTES` bytes.
    """
    return LENGTH_BYTES + int.from_bytes(beginning[:LENGTH_BYTES], "little")


def metrics_of(beginning: Buffer) -> dict[str, Json]:
    """The metrics of a delta, encoded as in the record of a full checkpoint.

    Args:
        beginning: at least its first `header_bytes` bytes.

    Raises:
        Damaged: it is not the beginning of a delta.
    """
    text = beginning[LENGTH_BYTES : header_bytes(beginning)]
    try:
        header = msgspec.json.decode(text, type=_Header)
        return msgspec.json.decode(header.metadata.get(METADATA_KEY, ""), type=_Facts).metrics
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise Damaged(f"header: {error}", at=LENGTH_BYTES) from error
