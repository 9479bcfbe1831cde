"""One direction of one channel between two ranks: its messages, and who takes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

from everystep.tap.collectives import Collective, Plan
from everystep.tap.located import SPLIT_BYTES, Located
from everystep.tap.positions import SIZE_BYTES, SLOTS, Window, offsets_of
from everystep.tap.schedule import Protocol
from everystep.tap.writes import Write

_MAX_HEADLESS = 64
_KEPT_OF_A_GAP = 64

Walk = Callable[["Connection", Write, int, int], "int | None"]
"""See located."""

Placed = tuple[Write, Window, int]
"""A message, and its place in the collective that has taken it."""


class Connection(Located):
    """A connection's messages by position: given to a collective, or waiting for one."""

    def __init__(self, sender: int, receiver: int, source_port: int) -> None:
        super().__init__()
        self.sender = sender
        """Index into the table of addresses."""
        self.receiver = receiver
        self.source_port = source_port
        self.data_qp: int | None = None
        self.cts_qp: int | None = None
        self.protocols: dict[int, Protocol] = {}
        """By remote key: each protocol has its own buffer."""
        self.keys: set[int] = set()
        """All that were seen, the first few: those of empty messages, too."""
        self.messages = 0
        self.headless: list[Write] = []

    # ------------------------------------------------------------ messages that wait

    def give(self, write: Write, walk: Walk) -> list[Placed]:
        """One more message: gives those whose collective has gone on without them."""
        if self.locate(write, partial(walk, self)) is None:
            return []
        wholes = [write] if self.cut is None else self.cut.put(write, write.position or 0)
        return [found for whole in wholes for found in self._keep(whole)]

    def retry(self, walk: Walk) -> list[Placed]:
        """Look again for the positions of messages that had none; gives as `give`."""
        waiting, self.floating = self.floating, []
        return [found for write in waiting for found in self.give(write, walk)]

    def end(self) -> list[Placed]:
        """Nothing more will come: what is not whole is used as it is; gives as `give`."""
        rest = [] if self.cut is None else self.cut.rest()
        return [found for write in rest for found in self._keep(write)]

    def _keep(self, write: Write) -> list[Placed]:
        position = write.position or 0
        window = self.window_of(position)
        if window is not None:
            return [(write, window, position - window.first)]
        if position >= (self.base or 0):
            self.pending[position] = write
        return []

    def gap(self) -> tuple[int, int | None]:
        """Messages that are missing at the base, and at most how many packets they took."""
        base = self.base or 0
        after = min((p for p in self.pending if p > base), default=base)
        known = self.base_psn if self.base_psn is not None else self.least_psn
        if after == base or known is None:
            return after - base, None
        return after - base, self.numbers.after(self.pending[after].psn, known)

    def frames_at_base(self) -> list[int]:
        """Frames that show that the message at the base was, or will be, sent."""
        base = self.base or 0
        found = [w.frame for position, w in self.pending.items() if position - base < SLOTS]
        found += [write.frame for write in (*self.headless, *self.floating)]
        found += [] if self.cut is None else self.cut.frames()
        return found + self.rooms.frames_from(base)

    def owns(self, rkey: int) -> bool:
        """Whether a remote key is of one of its buffers."""
        return rkey in self.keys or self.rooms.owns(rkey)

    def add_headless(self, write: Write) -> None:
        """Keep a message whose beginning was lost until its place is known."""
        self.headless = [*self.headless[1 - _MAX_HEADLESS :], write]

    # ------------------------------------------------------------ collectives

    def window_of(self, position: int) -> Window | None:
        """The collective that a position was given to, if it is still remembered."""
        return self.windows.of(position)

    def spans(self, lengths: Sequence[int]) -> list[int] | None:
        """Sequence numbers from the first message to each, and to the end; None if unsure."""
        if self.is_tcp:
            return list(accumulate(lengths, lambda at, n: at + n + SIZE_BYTES, initial=0))
        if not self.mtu or self.is_spread:
            return None
        if self.is_split is None and max(lengths, default=0) > SPLIT_BYTES:
            return None
        return offsets_of(lengths, self.mtu, SPLIT_BYTES if self.is_split else None)

    def fits(self, plan: Plan, base: int, psn: int | None) -> tuple[int, bool] | None:
        """How many messages with data agree with a plan from `base` on; None where one does not.

        The second value tells whether the first message is there, or its packet is known and
        agrees: whether the plan can stand nowhere else.
        """
        agreeing = 0
        offsets = self.spans(plan.lengths)
        is_sure = base in self.pending or psn is not None
        for position, write in self.pending.items():
            place = position - base
            if not 0 <= place < len(plan.lengths):
                continue
            length = plan.lengths[place]
            if write.length != length or write.protocol not in (None, plan.protocol):
                return None
            if offsets is not None:
                start = (write.psn - offsets[place]) % self.numbers.count
                if psn is not None and start != psn:
                    return None
                least = start if self.least_psn is None else self.least_psn
                if psn is None and self.numbers.after(start, least) < 0:
                    return None
            agreeing += length > 0 or psn is not None
        return agreeing, is_sure

    def take(self, plan: Plan, collective: Collective) -> list[Write]:
        """Give the positions from the base on to a collective; returns its waiting messages."""
        base = self.base or 0
        window = Window(base, plan, collective)
        self.windows.append(window)
        waiting = [self.pending[p] for p in sorted(self.pending) if base <= p < window.stop]
        for write in waiting:
            del self.pending[write.position or 0]
        window.offsets = offsets = self.spans(plan.lengths)
        window.psn = self.base_psn
        if offsets is not None and window.psn is None and waiting:
            first = waiting[0]
            place = (first.position or 0) - base
            window.psn = (first.psn - offsets[place]) % self.numbers.count
        self.base = window.stop
        self.base_psn = self.least_psn = None
        last = waiting[-1] if waiting else None
        if self.is_spread:
            window.psn = None  # each queue pair counts its own
        elif last is not None and last.position == window.stop - 1 and last.span:
            self.base_psn = (last.psn + last.span) % self.numbers.count
        elif window.psn is not None and offsets is not None:
            self.base_psn = (window.psn + offsets[-1]) % self.numbers.count
        return waiting

    def skip(self) -> Write | None:
        """Leave out one position: of another collective, or lost."""
        base = self.base or 0
        write = self.pending.pop(base, None)
        self.base = base + 1
        if write is None:
            # a long gap at once, but for what may be the beginning of the next collective
            self.base = max(self.base, min(self.pending, default=0) - _KEPT_OF_A_GAP)
        if write is not None and write.span and not self.is_spread:
            self.base_psn = (write.psn + write.span) % self.numbers.count
            self.least_psn = None
        else:
            known = self.base_psn if self.base_psn is not None else self.least_psn
            skipped = self.base - base
            self.least_psn = None if known is None else (known + skipped) % self.numbers.count
            self.base_psn = None
        return write

    def found_places(self) -> list[Placed]:
        """Messages without a beginning whose place has become known, with it."""
        found = []
        kept = []
        for write in self.headless:
            known = self.windows.place_of(write.psn, self.numbers)
            if known is None:
                kept.append(write)
                continue
            window, place, behind = known
            write.offset = behind * (self.mtu or 1)
            found.append((write, window, place))
        self.headless = kept[-_MAX_HEADLESS:]
        return found
