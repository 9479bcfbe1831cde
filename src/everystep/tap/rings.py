"""The ring messages of one rank to the next, over all channels, read as collectives.

Every channel takes its messages strictly in order, so a collective is found at the first position
that none has taken yet: on all its channels at once, by the lengths of its messages and by packet
sequence numbers. What fits nothing is left out, one message at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from msgspec import Struct
from msgspec.structs import replace

from everystep.tap import bringup
from everystep.tap.added import has_added_step
from everystep.tap.alone import stands_alone
from everystep.tap.collectives import Collective, Expectations, Plan, plan_of
from everystep.tap.connections import Connection
from everystep.tap.positions import Window
from everystep.tap.schedule import Schedule
from everystep.tap.waiting import Channels
from everystep.tap.writes import Write

_UNKNOWN = "an all-reduce whose number is unknown"

_AHEAD = 64
"""All-reduces."""

_MAX_LOST = 512
"""All-reduces in a row that may be lost whole without losing count."""

_PATIENCE = 32
"""Messages after which one that did not come is lost: roce gives it up earlier."""

_MAX_WAITING = 8192
"""Messages that wait to be understood."""

_MAX_WALK = 4096
"""Messages in a row whose lengths are foreseen."""

_LOOKS = 64
"""At what waits, for each message that comes; then it is left out: time is bounded by size."""

Place = Callable[[Connection, Write, Window, int], None]
"""Called for a message whose collective is known, with its place in the window."""


class Doubt(Struct, frozen=True):
    """Counting begins anew: messages were lost, and how many all-reduces were among them is not
    known.

    Those from `collective` on follow each other, but not those before it.
    """

    collective: int
    sender: int
    """Index into the table of addresses."""


class Ring(Channels):
    """All ring connections of one sender."""

    def __init__(
        self,
        expected: Expectations,
        place: Place,
        on_doubt: Callable[[Doubt], None],
        record: bool,
    ) -> None:
        super().__init__(expected)
        self.on_doubt = on_doubt
        self.collectives: list[Collective] = []
        """In order, where a record is kept."""
        self.doubts: list[Doubt] = []
        self._place = place
        self._record = record
        self._grammar = bringup.Grammar()
        self._counts: dict[str, int] = {}
        self.adrift = False
        """Whether messages were lost among which may have been all-reduces: how many is unknown."""
        self._told: int | None = None
        """The number of the next all-reduce, if another link has told that of the last one."""
        self._may_grow = False
        self._looks = 256 * _LOOKS
        self._waited = 0

    @property
    def left_out(self) -> int:
        """Messages that fitted nothing."""
        return self._counts.get("other", 0)

    def walk(self, connection: Connection, write: Write, position: int, packets: int) -> int | None:
        """The position that begins `packets` after the one at `position`, by what is expected."""
        channel, number = self.channels.index(connection), self.number
        window = connection.window_of(position)
        lengths: list[int] = []
        if window is not None:
            lengths += window.plan.lengths[position - window.first :]
            number = window.collective.number + 1
            if window.collective.kind != "allreduce" or self.adrift:
                number = None  # what follows it is not known
        elif position != connection.base:
            return None
        ahead = connection.numbers.least(lengths)
        while number is not None and ahead <= packets and len(lengths) <= _MAX_WALK:
            if self.expected.count(number) is None:
                break
            schedule = next(iter(self.expected.schedules(number, "Simple", channel + 1)), None)
            if schedule is None or channel >= len(schedule.channels):
                break
            more = plan_of(schedule, channel, self.rank_index or 0).lengths
            lengths += more
            ahead += connection.numbers.least(more)
            number += 1
        offsets = connection.spans(lengths)
        if offsets is None or packets not in offsets:
            return None
        place = offsets.index(packets)
        is_foreseen = lengths[place : place + 1] in ([], [write.length])
        return position + place if is_foreseen else None

    # ------------------------------------------------------------ reading

    def read(self, *, final: bool) -> bool:
        """Find the collectives of what is waiting; whether any was found.

        `final`: nothing more will come.
        """
        found = False
        self._looks += _LOOKS * max(0, self.waiting - self._waited)
        while any(c.pending for c in self.channels) and self._step(final):
            found = True
        # what was sent without its beginning may fall into windows that were taken before
        for connection in self.channels:
            waiting = len(connection.pending)
            for write, window, place in connection.retry(self.walk):
                self._place(connection, write, window, place)
            found |= len(connection.pending) > waiting
            if connection.headless:
                self._place_headless(connection)
        self._waited = self.waiting
        return found

    def _may_look(self) -> bool:
        """Whether all that waits may be looked at once more."""
        cost = self.waiting + 32 * len(self.channels)
        if self._looks < cost:
            return False
        self._looks -= cost
        return True

    def give_up(self, *, final: bool) -> bool:
        """Leave out one message that fits nothing, if it is time to; whether one was."""
        waiting = self.waiting
        if not waiting or not (final or self._is_late(waiting)):
            return False
        return self._leave_out()

    def _step(self, final: bool) -> bool:
        first = self.channels[0]
        if first.base is None:
            if not final:
                return False
            first = next(c for c in self.channels if c.pending)
        self._may_grow = False
        self.is_final = final
        if self.is_aligned is None or (self.number is None and not self.is_settled):
            self.is_aligned = self.is_aligned is not False and self.is_from_start()
        if self._bring_up(first):
            return True
        if not self.is_settled and not final and not self._has_begun(first):
            return False
        return self._expected() or self._lost() or self._inferred(final) or self._looked_ahead()

    def _has_begun(self, first: Connection) -> bool:
        """Whether channel 0 is so far on that every channel must have shown itself."""
        most, count = self.loop_messages(), self.expected.count(self.number or 0)
        if count is not None and self._rules_open():
            most += self.messages_of(count)
        return len(first.pending) > most + self.expected.shape.ranks

    def _is_late(self, waiting: int) -> bool:
        """Whether what waits would have been understood by now."""
        if waiting > _MAX_WAITING:
            return True
        first = self.channels[0]
        if self._may_grow or first.base is None:
            return False
        loop = range(first.base, first.base + self.loop_messages())
        if any(position not in first.pending for position in loop):  # it may only be late
            return max(first.pending, default=0) > first.base + _PATIENCE
        is_told = self.is_settled and self.expected.count(self.number or 0) is not None
        is_plain = is_told and not first.is_spread and not self._rules_open()
        return is_plain or self._has_begun(first)

    def _rules_open(self) -> bool:
        """Whether a told size is not enough: how NCCL cuts it must be seen whole first."""
        return self.expected.contiguous is True and not self.expected.schedules(
            self.number or 0, self.protocol(), len(self.channels)
        )

    def _bring_up(self, first: Connection) -> bool:
        found = self._grammar.next(first, self.channels, self.expected.shape)
        if found is None:
            return False
        collective = Collective(found.kind, self._count(found.kind), None, found.what, self._book())
        self._take(collective, found.plans)
        return True

    def _expected(self) -> bool:
        number = self.number or 0
        options = self.expected.schedules(number, self.protocol(), len(self.channels))
        if self.expected.count(number) is None and self.expected.schedule(number) is None:
            options = [schedule for schedule in options if self.is_shown(schedule)]
        return self._take_best(options)

    def _take_best(self, options: Iterable[Schedule]) -> bool:
        """Take what fits, if nothing else does."""
        found = [(one, *fitting) for one in dict.fromkeys(options) for fitting in self.fitting(one)]
        fits = bool(found)
        if self.is_open():
            ways = {item[0].shape.added_step: (*item[:2], item[2][0]) for item in reversed(found)}
            if True in ways:
                plain = ways[False][2] if False in ways else None
                choice = has_added_step(self, self.expected.rings, plain, ways[True])
                found = [item for item in found if item[0].shape.added_step is choice]
        if len(found) != 1:
            self._may_grow |= fits and not self.is_final  # more may tell
            return False
        ((schedule, rank_index, plans),) = found
        if not self.is_aligned and not (self._may_look() and stands_alone(self)):
            self._may_grow = not self.is_final
            return False
        self.rank_index = rank_index
        if not self.is_aligned and self.expected.count(self.number or 0) is None:
            # it may be the end of a longer one; what follows begins anew
            self.is_settled = self.is_aligned = True
            self.adrift |= self.number is not None
            self._take(self._unknown(), plans)
            return True
        self._take_all_reduce(schedule, plans)
        return True

    def _lost(self) -> bool:
        """Whether whole all-reduces were lost: then what waits stands just that far behind."""
        number = self.number
        if self.adrift or number is None or self.expected.count(number) is None:
            # before the first, what was lost may be the parameters: as long as their gradients
            return False
        bases = [(c.base, c.base_psn) for c in self.channels]
        if any(base in c.pending for c, (base, _) in zip(self.channels, bases, strict=True)):
            return False
        lost: list[tuple[Schedule, list[Plan]]] = []
        for ahead in range(_MAX_LOST):
            options = self.expected.schedules(number + ahead, self.protocol(), len(self.channels))
            if len(options) != 1 or self.rank_index is None:
                return False
            schedule = options[0]
            plans = [plan_of(schedule, b, self.rank_index) for b in range(len(schedule.channels))]
            agreeing = self._agreeing(plans, bases)
            if agreeing:
                for one, its_plans in lost:
                    self._take_all_reduce(one, its_plans)
                return bool(lost)
            after = self._bases_after(plans, bases)
            if agreeing is None or after is None:
                return False
            bases = after
            lost.append((schedule, plans))
        return False

    def _inferred(self, final: bool) -> bool:
        if not self._may_look():
            self._may_grow = not final  # and be made out when more has come
            return False
        found = list(self.readings())
        if any(self.may_go_on(schedule) for schedule in found):
            self._may_grow = not final
            return False
        return self._take_best(found)

    def _looked_ahead(self) -> bool:
        """Where messages are missing: a later all-reduce of as many elements shows how this one is
        cut."""
        number = self.number or 0
        count = self.expected.count(number)
        if count is None or not self.is_aligned or self.is_whole_so_far():
            return False
        if self.expected.schedules(number, self.protocol(), len(self.channels)):
            return False
        ahead, shapes = 0, self.expected.shapes
        for later in range(number, number + _AHEAD):
            size = self.expected.count(later)
            if later > number and size == count:
                if not self._may_look():
                    return False
                found = self.readings(ahead)  # here, what does not fit there may
                if self._take_best(replace(s, shape=one) for s in found for one in shapes):
                    return True
            ahead += self.messages_of(size or 0)
        return False

    def _leave_out(self) -> bool:
        """Give up one message of a channel that cannot go on."""
        stuck = [c for c in self.channels if c.pending]
        if not stuck:
            return False
        # the channel that is furthest behind in the capture
        connection = min(stuck, key=lambda c: min(w.frame for w in c.pending.values()))
        self._note_left_out(connection)
        write = connection.skip()
        if write is not None:
            collective = Collective("other", self._count("other"), writes=self._book())
            write.collective = collective
            collective.saw(write)
            if self._record:
                self.collectives.append(collective)
        return True

    def _note_left_out(self, connection: Connection) -> None:
        """What is no longer known where the message at the base of a channel is left out."""
        write = connection.pending.get(connection.base or 0)
        is_told = self.expected.count(self.number or 0) is not None
        if is_told and write is not None and not self.may_be_part(connection, write):
            return  # all of something else was seen
        self.is_aligned = False
        if self.number is None:  # the end of what had begun before the capture counts for nothing
            is_hidden = write is not None or not is_told or self.may_hide(connection)
            self.adrift |= is_hidden and self.is_from_start()
        else:
            self.adrift = True

    # ------------------------------------------------------------ taking

    def _take_all_reduce(self, schedule: Schedule, plans: list[Plan]) -> None:
        number = self._numbered(schedule, plans)
        self.is_settled = self.is_aligned = True
        if number is None:
            self._take(self._unknown(), plans)
            return
        self.number = number + 1
        self.expected.found(number, schedule)
        collective = Collective("allreduce", number, schedule, None, self._book())
        self._take(collective, plans)
        if collective.last_frame:
            self.expected.seen(collective)

    def _unknown(self) -> Collective:
        return Collective("other", self._count("other"), None, _UNKNOWN, self._book())

    def _numbered(self, schedule: Schedule, plans: list[Plan]) -> int | None:
        """The number of an all-reduce; None if it cannot be told while other links can tell it."""
        is_first = self.is_from_start() and self.expected.is_absolute
        if self.number is None and is_first and not self.adrift:
            self.number = 0
        telling = self.telling_frames(plans)
        self.adrift |= (self.expected.schedule(self.number or 0) or schedule) != schedule
        if not self.adrift and self.number is not None:
            self.adrift = not self.expected.may_tell(self.number, [frame for frame, _ in telling])
            return None if self.adrift else self.number
        others = {self.expected.number_at(frame) for frame, is_late in telling if not is_late}
        number = others.pop() if len(others) == 1 else None
        if number is not None and self.expected.schedule(number) == schedule:
            was_told, self._told = self._told, number + 1
            # where sizes are not told, one alone may be a packet that was mirrored late
            if number == was_told or self.expected.count(number) is not None:
                self.adrift = False
                return number
            return None
        self._told = None
        if self.expected.others(self) and self.expected.newest() >= 0:
            return None
        number = self.expected.begin_anew()
        if self.adrift:
            self.doubts.append(Doubt(number, self.channels[0].sender))
            self.on_doubt(self.doubts[-1])
        self.adrift = False
        return number

    def _take(self, collective: Collective, plans: list[Plan]) -> None:
        if self._record:
            self.collectives.append(collective)
        for connection, plan in zip(self.channels, plans, strict=False):
            for write in connection.take(plan, collective):
                window = connection.windows[-1]
                self._place(connection, write, window, (write.position or 0) - window.first)
            self._place_headless(connection)

    def _place_headless(self, connection: Connection) -> None:
        for write, window, place in connection.found_places():
            self._place(connection, write, window, place)

    def _count(self, kind: str) -> int:
        number = self._counts.get(kind, 0)
        self._counts[kind] = number + 1
        return number

    def _book(self) -> list[Write] | None:
        return [] if self._record else None
