"""Which slot of staging memory may be filled next, and which is written next: bookkeeping only."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

Content = TypeVar("Content")


class State(enum.Enum):
    """What a slot is in the middle of."""

    FREE = "free"
    TAKEN = "taken"
    """Granted to the trainer, which fills it."""
    SEALED = "sealed"
    """Holds a whole step."""
    WRITING = "writing"
    """Sealed, and being written."""
    LENT = "lent"
    """The replica folds in it; it holds no whole step."""


@dataclass
class Slot(Generic[Content]):
    """One slot."""

    index: int
    state: State = State.FREE
    content: Content | None = None
    order: int = 0
    """Rises with every seal."""
    saved: bool = False
    failures: int = 0
    wanted: bool = False
    """It must become durable, whatever comes after it."""


class Slots(Generic[Content]):
    """The slots of one arena.

    With `block` every sealed step is written, in order. With `skip` the newest is written whenever
    the store is free, and an older one gives up its slot to a new step, unless it is wanted. In
    both, the newest sealed step is never given up, and one that the store has refused does not
    hold up training.
    """

    def __init__(self, count: int, policy: Literal["block", "skip"]) -> None:
        self.all: list[Slot[Content]] = [Slot(index) for index in range(count)]
        self.policy = policy
        self.draining = False
        """No new step will come before everything is written."""
        self._sealed = 0

    def newest(self) -> Slot[Content] | None:
        """The slot with the newest whole step."""
        held = [slot for slot in self.all if slot.content is not None]
        return max(held, key=lambda slot: slot.order, default=None)

    def unsaved(self) -> list[Slot[Content]]:
        """Slots with a step that is not durable, newest first."""
        held = [slot for slot in self.all if slot.content is not None and not slot.saved]
        return sorted(held, key=lambda slot: -slot.order)

    def grant(self) -> tuple[int, Content | None] | None:
        """A slot for the trainer, and the step that has been given up for it, if it was not
        durable; None while none is to be had or the last one is still being filled."""
        if self.draining or any(slot.state is State.TAKEN for slot in self.all):
            return None
        free = [slot for slot in self.all if self._may_go(slot)]
        best = min(free, key=lambda slot: (not self._costs_nothing(slot), slot.order), default=None)
        if best is None:
            return None
        lost = None if self._costs_nothing(best) else best.content
        self.all[best.index] = Slot(best.index, State.TAKEN)
        return best.index, lost

    def _costs_nothing(self, slot: Slot[Content]) -> bool:
        return slot.saved or slot.content is None

    def _may_go(self, slot: Slot[Content]) -> bool:
        if slot.state is State.FREE:
            return True
        if slot.state is not State.SEALED or slot is self.newest():
            return False
        if slot.saved or slot.failures:
            return True
        return self.policy == "skip" and not slot.wanted

    def take(self, index: int) -> None:
        """Note that the trainer is filling a slot."""
        self.all[index] = Slot(index, State.TAKEN)

    def has(self, index: int) -> bool:
        """Whether there is such a slot."""
        return 0 <= index < len(self.all)

    def release(self, index: int) -> None:
        """Note that the trainer has given up filling a slot; one that it is not filling stays."""
        if self.all[index].state is State.TAKEN:
            self.all[index] = Slot(index)

    def seal(self, index: int, content: Content, *, wanted: bool) -> None:
        """Note that a slot holds a whole step."""
        self._sealed += 1
        wanted = wanted or self.policy == "block"
        self.all[index] = Slot(index, State.SEALED, content, self._sealed, wanted=wanted)

    def lend(self, index: int) -> None:
        """Let the replica change what is in a slot."""
        self.all[index] = Slot(index, State.LENT)

    def give_up(self, index: int) -> None:
        """The replica does not need its slot any more, nor anybody what is in it."""
        if self.all[index].state is not State.TAKEN:
            self.all[index] = Slot(index)

    def next_to_write(self, *, only_wanted: bool) -> Slot[Content] | None:
        """The slot to write now; it is marked as being written. None: nothing is to be written.

        Args:
            only_wanted: leave alone what is not wanted, unless no new step will come.
        """
        waiting = [slot for slot in self.unsaved() if slot.state is State.SEALED]
        fresh = [slot for slot in waiting if not slot.failures]
        wanted = [slot for slot in fresh if slot.wanted]
        chosen: Slot[Content] | None = None
        if self.draining:
            chosen = next(iter(fresh or waiting), None)
        elif wanted:
            chosen = wanted[-1]
        elif waiting and waiting[0] is self.newest():
            newest = waiting[0]  # is tried again where it has failed
            chosen = newest if newest.failures or not only_wanted else None
        if chosen is not None:
            chosen.state = State.WRITING
        return chosen

    def written(self, slot: Slot[Content], *, saved: bool) -> None:
        """Note how writing a slot has ended."""
        slot.state = State.SEALED
        slot.saved = saved
        slot.failures += not saved
