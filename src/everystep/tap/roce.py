"""RoCEv2: the messages of reliable connections, put together by packet sequence number.

One tracker follows every queue pair that it sees. A packet goes to its place in its message
whenever it comes: reordering, duplicates and retransmissions do no harm, and what is missing is
known by range. A message goes out when it is complete; one with gaps when it is given up: 1,024
packets or 16 messages of its stream later, when room runs out, or by `flush`.

A queue pair that begins anew with other numbers (a restarted run) is a new stream.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import numpy as np

from everystep.errors import UsageError
from everystep.tap.bpf import ROCE_PORT
from everystep.tap.capture import need_extension
from everystep.tap.pieces import ACK, FORMS, MESSAGE, STREAM, Bytes, Messages, Packets, Table

try:
    from everystep.tap import _roce
except ImportError:  # no compiler where this was installed
    _roce = None  # type: ignore[assignment]

COUNTS = (
    "not RoCE",
    "other transport",
    "wrong ICRC",
    "ICRC cannot be checked",
    "malformed",
    "atomic",
    "duplicate",
    "payload not captured",
    "no room",
    "contradiction",
    "wrong flags",
    "restarted streams",
    "messages given up",
    "forgotten streams",
    "requests",
    "READ responses",
    "acknowledgements",
)
"""What is counted of the packets to the RoCE port. All but the last three tell what was not taken,
or not as it came. The ICRC of a packet that was not captured whole cannot be checked."""

MAX_MESSAGE_BYTES = 4 << 20
ARENA_BYTES = 64 << 20

_EVER = (1 << 63) - 1


class Tracker:
    """Messages out of packets, batch by batch; for one thread."""

    def __init__(
        self,
        *,
        check_icrc: bool = True,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        arena_bytes: int = ARENA_BYTES,
    ) -> None:
        """Follow no stream yet.

        Args:
            check_icrc: whether packets are dropped whose invariant CRC is wrong or cannot be
                checked: the best filter against what only looks like RoCE, and against damage on
                the way. False, for captures that hold headers alone.
            max_message_bytes: of a longer one, no byte is kept.
            arena_bytes: memory for payload; a power of two, at least four of the longest messages.

        Raises:
            Unsupported: the compiled loops are not installed.
            UsageError: sizes that do not fit each other.
        """
        need_extension(_roce)
        self._arena = np.empty(arena_bytes, np.uint8)
        self._view = self._arena.view()
        self._view.flags.writeable = False
        try:
            self._state = _roce.new_tracker(
                self._arena, max_message_bytes, secrets.randbits(64), check_icrc
            )
        except ValueError as error:
            raise UsageError(
                f"an arena of {arena_bytes:,} bytes for messages of {max_message_bytes:,}",
                hint="a power of two, at least four times the longest message",
            ) from error

    def feed(self, packets: Packets) -> Iterator[Messages]:
        """Take these packets; gives at least one batch, more where the arena is too small for one.

        What was handed out before is no longer valid.
        """
        frames, at = packets.frames, 0
        while True:
            at, collected = _roce.feed(
                self._state, frames.data, frames.table, frames.first, packets.table, at, ROCE_PORT
            )
            yield self._messages(collected)
            if at >= len(packets.table):
                return

    def flush(self, before_ns: int = _EVER) -> Messages:
        """Give up every open message of which no packet came since `before_ns` (capture time)."""
        return self._messages(_roce.flush(self._state, before_ns))

    def _messages(self, collected: tuple[bytes, bytes, bytes, bytes, bytes]) -> Messages:
        messages, ranges, acks, opened, closed = collected
        return Messages(
            table=np.frombuffer(messages, MESSAGE),
            data=self._view,
            ranges=np.frombuffer(ranges, np.int64).reshape(-1, 2),
            acks=np.frombuffer(acks, ACK),
            opened=np.frombuffer(opened, STREAM),
            closed=np.frombuffer(closed, np.uint32),
        )

    def place(self, stream: int, rkey: int, form: int) -> bool:
        """From now on, put payload of messages with this key into this form.

        A stream remembers 8 keys; all others are RAW.

        Returns:
            whether the stream is known.

        Raises:
            UsageError: there is no such form.
        """
        if form not in FORMS:
            raise UsageError(f"no form {form}")
        return _roce.place(self._state, stream, rkey, form)

    def counts(self) -> dict[str, int]:
        """How many packets (messages, streams) of each kind there were: see COUNTS."""
        return dict(zip(COUNTS, _roce.counts(self._state), strict=True))


def unpack(form: int, raw: Bytes, to: Bytes, at: int = 0) -> tuple[int, bool]:
    """Do to raw bytes of the wire what `place` would have done.

    Args:
        form: RAW, LL or LL128.
        raw: a present range of a raw message.
        to: where the payload of the whole message goes; LL: 8 bytes per line of 16, LL128: 1,920
            per slice of 2,048, both rounded up.
        at: where the range begins on the wire.

    Returns:
        the flag of the first line, and whether all lines are whole and have it; if not, what was
        written is of no use.

    Raises:
        UsageError: no such form, or `to` is too short.
        Unsupported: the compiled loops are not installed.
    """
    need_extension(_roce)
    try:
        flag, is_right = _roce.unpack(to, raw, at, form)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return flag, is_right


def foreseen(rows: Table, lengths: Table, *, psn: int, flag: int, form: int, keys: Table) -> int:
    """How many of the first rows (MESSAGE) of one stream are whole writes, each right behind the
    one before, and as foreseen.

    Args:
        rows: contiguous.
        lengths: int64, bytes on the wire of each; 0 for one that has neither form nor flag.
        psn: of the first packet of the first.
        flag: of the first, where the form has flags: one more for each after it.
        form: of the payload.
        keys: uint32, the remote keys that it may be written with.

    Raises:
        Unsupported: the compiled loops are not installed.
    """
    need_extension(_roce)
    return _roce.foreseen(rows, lengths, psn, flag, form, keys)
