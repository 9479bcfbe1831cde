"""Frames of a capture file that is still being written, or of a pipe."""

from __future__ import annotations

import os
import select
import stat
import time
from collections.abc import Iterator

import numpy as np

from everystep.errors import CaptureFailed, NotACapture
from everystep.tap.capture import File, not_read
from everystep.tap.live import Drops
from everystep.tap.pieces import Frames

_HEADER_BYTES = 24  # of pcap; the first block of pcapng is longer
_READ_BYTES = 4 << 20
_MOST_BYTES = 32 << 20  # of one block: that of a frame is at most half of it
_LOOK_S = 0.01  # a file does not tell when it grows


class Followed:
    """Frames of a pcap or pcapng file from its beginning, in batches, and what is added to it; a
    context manager.

    The file may be empty at first. Of a pipe, the end is the end of the capture.
    """

    quiet_s = 1.0
    """Programs that capture write several times a second, whatever the end of what they have."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open it; this waits for the writer of a named pipe.

        Raises:
            NotACapture: it cannot be read.
            Unsupported: the compiled loops are not installed.
        """
        self.path = os.fspath(path)
        self._file: File | None = None
        self._batches: Iterator[Frames] = iter(())
        self._begun = b""  # of the header
        self._at = self._frames = 0
        try:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise not_read(self.path, error) from error
        mode = os.fstat(self._fd).st_mode
        self._is_pipe = not stat.S_ISREG(mode)
        if stat.S_ISDIR(mode):
            self.close()
            raise not_read(self.path, IsADirectoryError("a directory"))

    def __enter__(self) -> Followed:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop; a second time: no effect. Batches handed out stay valid."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    @property
    def is_behind(self) -> bool:
        """Whether much of what is in the file has not been read."""
        return not self._is_pipe and os.fstat(self._fd).st_size - self._at >= _READ_BYTES

    def drops(self) -> Drops:
        """How many frames there were; what the writer had to drop is not known."""
        return Drops(self._frames, 0, 0)

    def next(self, timeout_s: float) -> Frames | None:
        """The next batch; None if none comes within `timeout_s` seconds.

        Raises:
            NotACapture: it is no capture, or contradicts itself.
            CaptureFailed: the pipe has ended, or the file is not what it was.
        """
        ends_s = time.monotonic() + timeout_s
        while True:
            frames = next(self._batches, None)
            if frames is not None:
                self._frames += len(frames.table)
                return frames
            data = self._read(ends_s)
            if data is None:
                return None
            self._take(data)

    def _take(self, data: bytes) -> None:
        """Have the batches of what has been read."""
        file = self._file
        if file is None:
            self._begun += data
            if len(self._begun) < _HEADER_BYTES:
                return
            file = self._file = File(np.frombuffer(self._begun, np.uint8), self.path)
        else:
            rest = file.rest
            if len(rest) > _MOST_BYTES:
                raise NotACapture("a block of an impossible length", path=self.path, at=self._at)
            file.go_on(np.frombuffer(rest.tobytes() + data, np.uint8))
        self._batches = iter(file)

    def _read(self, ends_s: float) -> bytes | None:
        """What comes next; None: nothing, for too long."""
        while True:
            left_s = max(0.0, ends_s - time.monotonic())
            if self._is_pipe and not select.select([self._fd], [], [], left_s)[0]:
                return None
            try:
                data = os.read(self._fd, _READ_BYTES)
            except OSError as error:
                raise CaptureFailed(f"{self.path} cannot be read: {error}") from error
            if data:
                self._at += len(data)
                return data
            if self._is_pipe:
                raise CaptureFailed(f"{self.path} has ended: its writer is gone")
            self._require_same()
            if not left_s:
                return None
            select.select([], [], [], min(left_s, _LOOK_S))

    def _require_same(self) -> None:
        """Whether what is read is what is written.

        Raises:
            CaptureFailed: the file is shorter now, or another has its name.
        """
        own = os.fstat(self._fd)
        hint = "let one file be written, without rotation"
        if own.st_size < self._at:
            raise CaptureFailed(f"{self.path} has become shorter", hint=hint)
        try:
            found = os.stat(self.path)
        except OSError:  # it has no name any more: whoever writes it may go on
            return
        if (found.st_dev, found.st_ino) != (own.st_dev, own.st_ino):
            raise CaptureFailed(f"{self.path} is another file now", hint=hint)
