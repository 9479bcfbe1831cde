"""The bookkeeping of slots: what may be granted, and what is written next."""

from __future__ import annotations

import copy
from typing import Literal

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from everystep.agent.slots import Slot, Slots, State


class Life(RuleBasedStateMachine):
    """Any order of events, of steps 1, 2, …; a write is begun by one rule and ended by another."""

    slots: Slots[int]

    @initialize(count=st.integers(2, 4), policy=st.sampled_from(["block", "skip"]))
    def begin(self, count: int, policy: Literal["block", "skip"]) -> None:
        self.slots = Slots(count, policy)
        self.count, self.policy = count, policy
        self.taken: int | None = None
        self.writing: Slot[int] | None = None
        self.sealed = 0
        self.wanted: set[int] = set()
        self.saved: set[int] = set()
        self.failed: set[int] = set()
        self.given_up: set[int] = set()

    def held(self) -> dict[int, Slot[int]]:
        return {slot.content: slot for slot in self.slots.all if slot.content is not None}

    @rule()
    def grant(self) -> None:
        before = copy.deepcopy(self.slots.all)
        newest = max(self.held(), default=None)
        granted = self.slots.grant()
        if granted is None:
            return
        index, lost = granted
        was = before[index]
        assert self.taken is None
        assert not self.slots.draining
        assert was.state in (State.FREE, State.SEALED)
        assert was.content is None or was.content != newest
        assert lost == (None if was.content in self.saved else was.content)
        if lost is not None:
            assert lost in self.failed or (self.policy == "skip" and lost not in self.wanted)
            self.given_up.add(lost)
        self.taken = index

    @precondition(lambda self: self.taken is not None)
    @rule()
    def release(self) -> None:
        assert self.taken is not None
        self.slots.release(self.taken)
        self.taken = None

    @rule(index=st.integers(0, 3))
    def release_by_mistake(self, index: int) -> None:
        if index != self.taken and self.slots.has(index):
            before = copy.deepcopy(self.slots.all)
            self.slots.release(index)
            assert self.slots.all == before

    @precondition(lambda self: self.taken is not None)
    @rule(wanted=st.booleans())
    def seal(self, wanted: bool) -> None:
        assert self.taken is not None
        self.sealed += 1
        if wanted or self.policy == "block":
            self.wanted.add(self.sealed)
        self.slots.seal(self.taken, self.sealed, wanted=wanted)
        self.taken = None

    @precondition(lambda self: self.writing is None)
    @rule(only_wanted=st.booleans())
    def write(self, only_wanted: bool) -> None:
        held = self.held()
        unsaved = sorted(set(held) - self.saved)
        fresh = [step for step in unsaved if step not in self.failed]
        wanted = [step for step in fresh if step in self.wanted]
        slot = self.slots.next_to_write(only_wanted=only_wanted)
        step = None if slot is None else slot.content
        if self.slots.draining:
            assert step == max(fresh or unsaved, default=None)
        elif wanted:
            assert step == min(wanted)
        elif unsaved and unsaved[-1] == max(held):  # is tried again where it has failed
            left_alone = only_wanted and unsaved[-1] not in self.failed
            assert step == (None if left_alone else unsaved[-1])
        else:
            assert step is None
        self.writing = slot

    @precondition(lambda self: self.writing is not None)
    @rule(saved=st.booleans())
    def written(self, saved: bool) -> None:
        assert self.writing is not None
        assert self.writing.content is not None
        assert self.slots.all[self.writing.index] is self.writing
        (self.saved if saved else self.failed).add(self.writing.content)
        self.slots.written(self.writing, saved=saved)
        self.writing = None

    @rule(on=st.booleans())
    def drain(self, on: bool) -> None:
        self.slots.draining = on

    @rule(failing=st.booleans())
    def training_goes_on_whatever_the_store_does(self, failing: bool) -> None:
        if self.taken is not None:
            return
        slots = copy.deepcopy(self.slots)
        slots.draining = False
        for slot in slots.all:
            if slot.state is State.WRITING:
                slots.written(slot, saved=not failing)
        for _ in range(3 * self.count):
            if slots.grant() is not None:
                return
            slot = slots.next_to_write(only_wanted=False)
            assert slot is not None, "nothing is written, and nothing is granted"
            slots.written(slot, saved=not failing)
        raise AssertionError("no slot is granted")

    @rule()
    def draining_writes_everything_newest_first(self) -> None:
        slots = copy.deepcopy(self.slots)
        slots.draining = True
        for slot in slots.all:
            if slot.state is State.WRITING:
                slots.written(slot, saved=True)
        waiting = {slot.content for slot in slots.unsaved()}
        fresh = [slot.content for slot in slots.unsaved() if not slot.failures]
        order: list[int | None] = []
        while (slot := slots.next_to_write(only_wanted=True)) is not None:
            order.append(slot.content)
            slots.written(slot, saved=True)
        assert set(order) == waiting
        assert order[: len(fresh)] == fresh == sorted(fresh, key=lambda step: -(step or 0))
        assert slots.unsaved() == []

    @invariant()
    def no_slot_is_lost(self) -> None:
        if not hasattr(self, "slots"):
            return
        assert [slot.index for slot in self.slots.all] == list(range(self.count))
        taken = [slot.index for slot in self.slots.all if slot.state is State.TAKEN]
        assert taken == ([] if self.taken is None else [self.taken])
        for slot in self.slots.all:
            assert (slot.content is None) == (slot.state in (State.FREE, State.TAKEN))

    @invariant()
    def no_step_is_lost_in_silence(self) -> None:
        if not hasattr(self, "slots"):
            return
        gone = set(range(1, self.sealed + 1)) - set(self.held())
        assert gone <= self.saved | self.given_up
        assert not self.saved & self.given_up
        newest = self.slots.newest()
        assert self.sealed == 0 or (newest is not None and newest.content == self.sealed)


Life.TestCase.settings = settings(max_examples=80, stateful_step_count=30)
TestLife = Life.TestCase


@pytest.mark.parametrize("policy", ["block", "skip"])
def test_a_slot_is_being_filled_while_another_is_written(policy: Literal["block", "skip"]) -> None:
    slots: Slots[str] = Slots(2, policy)
    assert slots.grant() == (0, None)
    assert slots.grant() is None
    slots.seal(0, "one", wanted=False)
    assert slots.next_to_write(only_wanted=False) is slots.all[0]
    assert slots.grant() == (1, None)


def test_what_is_skipped_is_told() -> None:
    slots: Slots[str] = Slots(3, "skip")
    for index, step in enumerate(["one", "two", "three"]):
        slots.grant()
        slots.seal(index, step, wanted=False)
    assert slots.grant() == (0, "one")


def test_the_slot_that_the_trainer_of_a_dead_agent_fills_is_not_granted_again() -> None:
    slots: Slots[str] = Slots(2, "block")
    slots.take(1)
    assert slots.grant() is None
    slots.seal(1, "one", wanted=False)
    assert slots.grant() == (0, None)
