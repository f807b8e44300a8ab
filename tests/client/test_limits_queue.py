"""The fair queue: turns between flows, order within one, removal from the middle."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fullbore.limits.fair import FairQueue


def test_flows_take_turns_and_each_keeps_its_order() -> None:
    """A flow with many items does not hold up one with few."""
    queue: FairQueue[str] = FairQueue()
    for item in ("a1", "a2", "a3", "b1", "c1", "c2"):
        queue.push(item[0], item)
    assert [queue.pop() for _ in range(6)] == ["a1", "b1", "c1", "a2", "c2", "a3"]


def test_pop_of_nothing_is_an_error() -> None:
    """An empty queue gives nothing."""
    queue: FairQueue[str] = FairQueue()
    assert queue.peek() is None
    with pytest.raises(KeyError):
        queue.pop()


def test_a_hundred_thousand_items_are_taken_from_the_middle_and_the_front() -> None:
    """Work per item does not grow with the line: quadratic work would run into the time limit."""
    queue: FairQueue[int] = FairQueue()
    for item in range(100_000):
        queue.push(item % 7, item)
    for item in range(0, 100_000, 2):
        queue.remove(item % 7, item)
    taken = [queue.pop() for _ in range(50_000)]
    assert sorted(taken) == list(range(1, 100_000, 2))


class FairQueueMachine(RuleBasedStateMachine):
    """The queue against a model made of plain lists."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: FairQueue[int] = FairQueue()
        self.model: list[tuple[str, list[int]]] = []  # flows by turn, each with its items
        self.serial = 0

    @rule(flow=st.sampled_from("abcd"))
    def push(self, flow: str) -> None:
        self.serial += 1
        self.queue.push(flow, self.serial)
        for name, items in self.model:
            if name == flow:
                items.append(self.serial)
                return
        self.model.append((flow, [self.serial]))

    @precondition(lambda self: self.model)
    @rule()
    def pop(self) -> None:
        flow, items = self.model.pop(0)
        assert self.queue.peek() == items[0]
        assert self.queue.pop() == items.pop(0)
        if items:
            self.model.append((flow, items))

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        flow, items = data.draw(st.sampled_from(self.model))
        item = data.draw(st.sampled_from(items))
        self.queue.remove(flow, item)
        items.remove(item)
        self.model = [(name, line) for name, line in self.model if line]

    @invariant()
    def same_size_and_head(self) -> None:
        assert len(self.queue) == sum(len(items) for _, items in self.model)
        assert self.queue.peek() == (self.model[0][1][0] if self.model else None)


FairQueueMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)
TestFairQueue = FairQueueMachine.TestCase
