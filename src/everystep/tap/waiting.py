"""The channels of a ring, the messages that wait on them, and what all-reduce they could be."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from everystep.tap.collectives import Expectations, Plan, plan_of
from everystep.tap.connections import Connection
from everystep.tap.inference import inferred
from everystep.tap.schedule import Protocol, Schedule, ceil
from everystep.tap.writes import Write

MAX_LOOKED_AT = 4096
"""Messages of a channel."""


class Channels:
    """All ring connections of one sender."""

    def __init__(self, expected: Expectations) -> None:
        self.expected = expected
        self.channels: list[Connection] = []
        self.rank_index: int | None = None
        """Ring index of the sender, if it is known."""
        self.number: int | None = None
        """Of the next all-reduce; None before the first."""
        self.is_final = False
        self.is_settled = False
        self.is_aligned: bool | None = None
        """Whether the next all-reduce is known to begin at the base of each channel, or after what
        is left out there whole; None before anything was looked at."""

    def add_channel(self, connection: Connection) -> None:
        """Another connection of this sender; queue pairs are numbered in the order of channels."""
        self.channels.append(connection)
        self.sort()
        self.is_settled = False

    def sort(self) -> None:
        """Put the channels into their order, as far as queue pairs are known."""
        if all(c.data_qp is not None for c in self.channels):
            self.channels.sort(key=lambda c: c.data_qp or 0)
        elif all(c.cts_qp is not None for c in self.channels):
            self.channels.sort(key=lambda c: c.cts_qp or 0)

    @property
    def waiting(self) -> int:
        """Messages that wait."""
        return sum(len(c.pending) for c in self.channels)

    def is_from_start(self) -> bool:
        """Whether the first messages of all channels were seen, as far as any were."""
        return all(c.from_start for c in self.channels if c.base is not None)

    def is_open(self) -> bool:
        """Whether it is not known if the ring has an added step."""
        return len(self.expected.shapes) > 1

    def protocol(self) -> Protocol:
        """Of the messages that wait."""
        for connection in self.channels:
            for position in sorted(connection.pending)[:MAX_LOOKED_AT]:
                protocol = connection.pending[position].protocol
                if protocol is not None:
                    return protocol
        known = {one for connection in self.channels for one in connection.protocols.values()}
        return known.pop() if len(known) == 1 else "LL"

    def loop_messages(self) -> int:
        """Messages of a rank on a channel in one loop over a buffer."""
        return self.expected.shape.ring_steps * (2 if self.protocol() == "Simple" else 1)

    def messages_of(self, count: int) -> int:
        """Messages of a rank on a channel, at most, for a buffer of so many elements."""
        shape = self.expected.shape
        most = self.expected.chunk_bytes[self.protocol()] // shape.element_bytes
        return ceil(count, shape.ranks * most) * self.loop_messages()

    def fitting(self, schedule: Schedule) -> list[tuple[int, list[Plan]]]:
        """The plans of a schedule's channels, where all messages that are there agree with them,
        and the ring index of the sender: of more than one where it is not known which.
        """
        used = len(schedule.channels)
        if used > len(self.channels) or self._goes_beside(used):
            return []
        fitting = []
        for ring_index in self.ring_indices():
            plans = [plan_of(schedule, b, ring_index) for b in range(len(schedule.channels))]
            agreeing = 0
            for connection, plan in zip(self.channels, plans, strict=False):
                if connection.base is None:
                    continue
                found = connection.fits(plan, connection.base, connection.base_psn)
                if found is None or not found[1]:
                    break
                agreeing += found[0]
            else:
                if agreeing and not self._went_on(plans):
                    fitting.append((ring_index, plans))
        return fitting

    def _went_on(self, plans: list[Plan]) -> bool:
        """Whether a channel has sent what comes after these before another has begun: then they are
        not of one all-reduce, for no rank ends one before all its channels have begun. Where sizes
        are told this is not needed, and packets that came late would mislead it."""
        if len(plans) < 2 or self.expected.count(self.number or 0) is not None:
            return False
        begun, after = [0], []
        for connection, plan in zip(self.channels, plans, strict=False):
            base, pending = connection.base or 0, connection.pending
            stop = base + len(plan.lengths)
            own = (write.frame for place, write in pending.items() if base <= place < stop)
            begun.append(min(own, default=0))
            if stop in pending:
                after.append(pending[stop].frame)
        return min(after, default=max(begun)) < max(begun)

    def ring_indices(self) -> list[int]:
        """Those that the sender may have."""
        if self.rank_index is not None:
            return [self.rank_index]
        return list(range(self.expected.shape.ranks))

    def _agreeing(
        self, plans: list[Plan], bases: list[tuple[int | None, int | None]]
    ) -> int | None:
        agreeing = 0
        for connection, plan, (base, psn) in zip(self.channels, plans, bases, strict=False):
            if base is None:
                continue
            found = connection.fits(plan, base, psn)
            if found is None:
                return None
            agreeing += found[0]
        return agreeing

    def telling_frames(self, plans: list[Plan]) -> list[tuple[int, bool]]:
        """Frames of the messages that tell which all-reduce this is: see `number_at`. Of packets
        that came late, the frame of what follows them on their connection, since that was sent
        after them; and whether it is so."""
        last = self.expected.shape.ranks - 1
        found = []
        for connection, plan in zip(self.channels, plans, strict=False):
            base, frame = connection.base or 0, sys.maxsize
            for position in sorted(connection.pending, reverse=True):
                its = connection.pending[position].frame
                frame = min(frame, its)
                sent = plan.sends[position - base] if position < base + len(plan.sends) else None
                if sent is not None and sent.ring_step == last:
                    found.append((frame, frame < its))
        return found

    def _bases_after(
        self, plans: list[Plan], bases: list[tuple[int | None, int | None]]
    ) -> list[tuple[int | None, int | None]] | None:
        """Where the channels stand after messages that were lost; None where it is not known."""
        if len(plans) > len(bases):
            return None  # it used a channel that nothing has been seen of
        found: list[tuple[int | None, int | None]] = [*bases]
        for b, plan in enumerate(plans):
            base, psn = bases[b]
            offsets = self.channels[b].spans(plan.lengths)
            if base is None or psn is None or offsets is None:
                return None
            found[b] = (
                base + len(plan.lengths),
                (psn + offsets[-1]) % self.channels[b].numbers.count,
            )
        return found

    def is_shown(self, schedule: Schedule) -> bool:
        """Whether every message of an all-reduce is there, or what it took is known by the sequence
        number of a later one; and data of it is there."""
        has_data = False
        for b, connection in enumerate(self.channels[: len(schedule.channels)]):
            lengths = plan_of(schedule, b, self.rank_index or 0).lengths
            base, psn = connection.base or 0, connection.base_psn
            there = [base + place in connection.pending for place in range(len(lengths))]
            has_data |= any(n for n, is_there in zip(lengths, there, strict=True) if is_there)
            if all(there):
                continue
            offsets = connection.spans(lengths)
            after = connection.pending.get(base + len(lengths))
            if psn is None or offsets is None:
                return False
            stop = (psn + offsets[-1]) % connection.numbers.count
            if not there[-1] and (after is None or after.psn != stop):
                return False
        return has_data

    def is_whole_so_far(self) -> bool:
        """Whether nothing is missing before the last message that waits."""
        return all(len(self.run(c)) == len(c.pending) for c in self.channels if c.base is not None)

    def readings(self, ahead: int = 0) -> Iterator[Schedule]:
        """All-reduces that the messages that wait could be, on most channels first.

        `ahead`: from so many positions behind the base on.
        """
        for used in range(len(self.channels), 0, -1):
            if self._goes_beside(used):
                return
            found = self._possible(used, ahead, self.number or 0)
            yield from found
            if found:
                return

    def may_read(self, ahead: int, number: int) -> bool:
        """Whether all-reduce `number` may begin so many positions behind the base."""
        return bool(self._possible(len(self.channels), ahead, number))

    def _possible(self, used: int, ahead: int, number: int) -> list[Schedule]:
        """What the messages of the first `used` channels could be."""
        protocol, expected, loop = self.protocol(), self.expected, self.loop_messages()
        ways = [False, True] if expected.contiguous is None else [expected.contiguous]
        lengths = [self._padded(c, ahead, loop) for c in self.channels[:used]]
        return [
            schedule
            for shape in expected.shapes
            for ring_index in self.ring_indices()
            for contiguous in ways
            for schedule in inferred(
                shape,
                protocol,
                ring_index,
                lengths,
                expected.chunk_bytes[protocol],
                contiguous=contiguous,
                count=expected.count(number),
                is_fine=expected.is_fine,
            )
        ]

    def may_be_part(self, connection: Connection, write: Write) -> bool:
        """Whether a message that fits nowhere may be of an all-reduce that is expected."""
        channel = self.channels.index(connection)
        for options in self.expected.coming(self.number or 0, self.protocol(), len(self.channels)):
            if not options:
                return True  # how this one is cut is not known yet
            for schedule in options:
                if channel < len(schedule.channels):
                    plan = plan_of(schedule, channel, self.rank_index or 0)
                    if write.length in plan.lengths and (
                        write.length or self._has_gap(connection, len(plan.lengths))
                    ):
                        return True
        return False

    @staticmethod
    def _has_gap(connection: Connection, size: int) -> bool:
        """Whether one of the next so many messages is missing."""
        base = connection.base or 0
        last = max(connection.pending, default=base)
        return bool(connection.floating or connection.headless) or any(
            position not in connection.pending for position in range(base, min(base + size, last))
        )

    def _goes_beside(self, used: int) -> bool:
        """Whether a channel beyond the first `used` sends at the same time as they do: then they
        are not all that take part."""
        own = [w.last_frame for c in self.channels[:used] for w in self._first_loop(c)]
        beside = [frame for c in self.channels[used:] for frame in c.frames_at_base()]
        return bool(own and beside) and min(beside) < max(own)

    def _first_loop(self, connection: Connection) -> list[Write]:
        base = connection.base or 0
        waiting = (connection.pending.get(base + i) for i in range(self.expected.shape.ring_steps))
        return [write for write in waiting if write is not None]

    def run(self, connection: Connection, ahead: int = 0, holes: int = 0) -> list[int | None]:
        """The lengths of the messages that wait, as far as they follow each other.

        `holes`: so many missing ones in a row do not end it.
        """
        found: list[int | None] = []
        if connection.base is None:
            return found
        at = connection.base + ahead
        last = max(connection.pending, default=-1)
        known = 0
        while at <= last and len(found) - known <= holes:
            write = connection.pending.get(at)
            found.append(None if write is None else write.length)
            known = known if write is None else len(found)
            at += 1
        return found[:known]

    def may_go_on(self, schedule: Schedule) -> bool:
        """Whether it may have another loop, which is not all there: its last one is full."""
        largest = self.expected.chunk_bytes[schedule.protocol] // schedule.shape.element_bytes
        full = all(
            stop - start == largest for loops in schedule.channels for start, stop in loops[-1]
        )
        told = self.expected.count(self.number or 0) is not None
        loop = range(self.loop_messages())
        after = [
            (c.base or 0) + len(plan_of(schedule, b, self.rank_index or 0).lengths) + place
            in c.pending
            for b, c in enumerate(self.channels[: len(schedule.channels)])
            for place in loop
        ]
        return full and not told and not all(after)

    def may_hide(self, connection: Connection) -> bool:
        """Whether an all-reduce may be, in part or whole, where messages of a channel are lost."""
        channel = self.channels.index(connection)
        missing, packets = connection.gap()
        number = self.number or 0
        known = self.expected.schedules(number, self.protocol(), len(self.channels))
        for schedule in known:
            if channel >= len(schedule.channels):
                continue
            plan = plan_of(schedule, channel, self.rank_index or 0)
            found = connection.fits(plan, connection.base or 0, connection.base_psn)
            if found is not None and found[0]:
                return True
            offsets = connection.spans(plan.lengths)
            if missing >= len(plan.lengths) and (
                packets is None or offsets is None or packets >= offsets[-1]
            ):
                return True
        return not known

    def _padded(self, connection: Connection, ahead: int, loop: int) -> list[int | None]:
        """What waits, with holes of less than a loop; a loop that is not whole is filled up."""
        found = self.run(connection, ahead, loop - 1)
        return found + [None] * (-len(found) % loop if self.is_final else 0)
