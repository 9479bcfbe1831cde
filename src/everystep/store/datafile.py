"""What a data file says of itself, checked against what the record of its step says of it."""

from __future__ import annotations

from everystep.errors import Damaged
from everystep.store import format as fmt
from everystep.store import tensorfile
from everystep.store.backend import Backend
from everystep.store.tensorfile import Slot


def open_data_file(backend: Backend, name: str, file: fmt.DataFile) -> list[Slot]:
    """Check a data file's length and header, and return what it holds.

    Raises:
        Damaged: length, header hash or header are not as recorded.
        Missing: the file is gone.
    """
    actual = backend.size(name)
    if actual != file.nbytes:
        raise Damaged(
            "length", path=name, at=min(actual, file.nbytes), expected=file.nbytes, found=actual
        )
    first = bytearray(min(8, actual))
    backend.read(name, memoryview(first), 0)
    length = tensorfile.header_length(bytes(first), actual, name)
    if length != file.header_bytes:
        raise Damaged("header length", path=name, at=0, expected=file.header_bytes, found=length)
    header = bytearray(length)
    backend.read(name, memoryview(header), 0)
    found = fmt.digest(header)
    if found != file.header_xxh3_128:
        expected = file.header_xxh3_128
        raise Damaged("header hash differs", path=name, at=0, expected=expected, found=found)
    return tensorfile.decode_header(bytes(header), actual, name)
