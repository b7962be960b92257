"""Who gets the next slot before any other, and who makes room for it, with no model behind it."""

from __future__ import annotations

import pytest
from support.scheduling import Stream, add, age, names, step
from support.slots import Slots, make_scheduler


def test_one_hot_adapter_does_not_starve_another() -> None:
    """One slot and a stream of rows of 8 tokens for A, which never ends by itself: B starts within 8 steps."""
    slots = Slots(1)
    scheduler = make_scheduler(slots, running=4)
    add(scheduler, "a1", "a2", "a3", "a4", tokens=8)
    for i in range(20):
        add(scheduler, f"ax{i}", tokens=8)
        step(scheduler, slots)
    add(scheduler, "b1", tokens=8)
    for i in range(20, 40):
        add(scheduler, f"ax{i}", tokens=8)
        step(scheduler, slots)
    assert "b" not in slots.held, "nothing is overdue yet, so the slot stays with what waits for it"
    age(scheduler, "b1")
    steps = 0
    while "b" not in slots.held:
        assert steps < 9, "B has waited longer than the rows of A still had tokens"
        add(scheduler, f"ay{steps}", tokens=8)
        step(scheduler, slots)
        steps += 1
    assert names(scheduler.running) == ["b1"]


def test_the_slot_that_drains_soonest_is_closed_and_the_others_go_on() -> None:
    slots = Slots(2)
    scheduler = make_scheduler(slots, running=6)
    add(scheduler, "a1", "b1", tokens=30)
    step(scheduler, slots)
    add(scheduler, "c1")
    age(scheduler, "c1")
    add(scheduler, "b2", tokens=4)
    scheduler.admit()
    assert scheduler.admission.closed == {"a"}, "both have 29 tokens left; the first is taken"
    add(scheduler, "a2", "b3", tokens=5)
    scheduler.admit()
    assert names(scheduler.running) == ["a1", "b1", "b2", "b3"]
    for _ in range(29):
        step(scheduler, slots)
    step(scheduler, slots)
    assert "c1" in names(scheduler.running)
    assert slots.evicted == ["b"], "both are free by then, and a row waits for a"


def test_of_several_overdue_the_oldest_gets_the_slot() -> None:
    slots = Slots(1)
    scheduler = make_scheduler(slots, running=2)
    add(scheduler, "a1", tokens=3)
    step(scheduler, slots)
    add(scheduler, "b1", "c1", "d1", tokens=1)
    age(scheduler, "b1", "c1", "d1")
    while scheduler.waiting or scheduler.running:
        step(scheduler, slots)
    assert slots.loaded == ["a", "b", "c", "d"]


def test_an_adapter_for_which_an_older_row_waits_is_not_closed() -> None:
    slots = Slots(1)
    scheduler = make_scheduler(slots, running=2)
    add(scheduler, "a1", tokens=3)
    step(scheduler, slots)
    add(scheduler, "a2", "b1", "a3", tokens=1)
    age(scheduler, "a2", "b1", "a3")
    scheduler.admit()
    assert names(scheduler.running) == ["a1", "a2"]
    while scheduler.waiting or scheduler.running:
        step(scheduler, slots)
    assert slots.started == ["a1", "a2", "b1", "a3"]
    assert slots.loaded == ["a", "b", "a"], "once for a1 and a2, and again for a3"


def test_nobody_else_is_given_a_slot_before_a_wide_adapter_that_is_overdue() -> None:
    """Pages that drain one by one are kept for it."""
    slots = Slots(4)
    slots.sizes["w"] = 3
    scheduler = make_scheduler(slots, running=8)
    for i, name in enumerate("abcd"):
        add(scheduler, f"{name}1", tokens=3 * (i + 1))
    step(scheduler, slots)
    add(scheduler, "w1", tokens=1)
    age(scheduler, "w1")
    for name in "efgh":
        add(scheduler, f"{name}1", tokens=1)
    while "w" not in slots.loaded:
        step(scheduler, slots)
    assert slots.loaded == ["a", "b", "c", "d", "w"]


def test_a_pinned_adapter_without_a_slot_gets_the_next_one() -> None:
    slots = Slots(1)
    scheduler = make_scheduler(slots, running=2)
    add(scheduler, "a1", tokens=5)
    step(scheduler, slots)
    slots.pinned_waiting = ["p"]
    add(scheduler, "a2", "b1")
    for _ in range(4):
        step(scheduler, slots)
    assert slots.held == {"a": 0}, "a2 did not start"
    slots.prepare_pinned()
    assert slots.held == {"p": 0}


def test_a_higher_priority_that_lacks_a_slot_closes_residents_at_once() -> None:
    slots = Slots(1)
    scheduler = make_scheduler(slots, running=2)
    add(scheduler, "a1", tokens=4, priority=9)
    step(scheduler, slots)
    add(scheduler, *(f"a{i}" for i in range(2, 10)), tokens=4, priority=9)
    add(scheduler, "b1", tokens=4)
    for _ in range(4):
        step(scheduler, slots)
    assert names(scheduler.running) == ["b1"]


@pytest.mark.parametrize("adapters", ["a", "adef"])
def test_a_low_priority_that_is_overdue_holds_up_no_slot_for_a_high_one(adapters: str) -> None:
    slots = Slots(len(adapters))
    scheduler = make_scheduler(slots, running=16 * len(adapters))
    stream = Stream(scheduler, slots, adapters)
    stream.run(30)
    add(scheduler, "b1", tokens=4, priority=9)
    age(scheduler, "b1")
    assert stream.steps_until_started("b1", most=30) < 30, "its turn has come, and something has drained for it"
    add(scheduler, "b2", tokens=4, priority=9)
    add(scheduler, "c1", tokens=4)
    age(scheduler, "b2", "c1")
    assert stream.steps_until_started("c1", most=30) < 30
    assert stream.steps_until_started("b2", most=30) < 30


def test_a_low_priority_that_is_overdue_closes_nothing_before_its_turn() -> None:
    slots = Slots(1)
    scheduler = make_scheduler(slots, running=4)
    stream = Stream(scheduler, slots, "a")
    stream.run(30)
    add(scheduler, "b1", priority=9)
    age(scheduler, "b1")
    stream.run(1)
    assert not scheduler.admission.closed


def test_a_low_priority_whose_turn_it_is_and_that_is_not_overdue_holds_up_nobody() -> None:
    slots = Slots(1)
    scheduler = make_scheduler(slots, running=4)
    stream = Stream(scheduler, slots, "a")
    stream.run(30)
    add(scheduler, "b1", priority=9)
    stream.run(30)
    assert "b1" in names(scheduler.waiting), "it would close what a higher priority waits for"
    add(scheduler, "c1", tokens=4)
    age(scheduler, *(name for name in names(scheduler.waiting) if name != "b1"))
    stream.steps_until_started("c1", most=100)


def test_what_is_overdue_and_cannot_be_helped_holds_up_no_other() -> None:
    slots = Slots(2)
    slots.sizes["w"] = 2
    slots.held = {"p": 0}
    slots.pinned = {"p"}
    scheduler = make_scheduler(slots, running=4)
    add(scheduler, "w1", "b1")
    age(scheduler, "w1", "b1")
    step(scheduler, slots)
    assert slots.started == ["b1"]


def test_while_a_higher_priority_lacks_room_lower_ones_are_given_none() -> None:
    slots = Slots(2)
    slots.sizes["w"] = 2
    scheduler = make_scheduler(slots, running=4)
    add(scheduler, "a1", tokens=5, priority=9)
    step(scheduler, slots)
    add(scheduler, "d1", tokens=5, priority=9)
    add(scheduler, "w1", tokens=5)
    while scheduler.waiting or scheduler.running:
        step(scheduler, slots)
    assert slots.loaded == ["a", "w", "d"]


def test_a_low_priority_does_not_keep_a_pinned_adapter_from_its_slot() -> None:
    slots = Slots(4)
    scheduler = make_scheduler(slots, running=32)
    stream = Stream(scheduler, slots, "adef")
    stream.run(30)
    slots.pinned_waiting = ["p"]
    add(scheduler, "p1", tokens=4, priority=9)
    stream.steps_until_started("p1", most=100)
    assert "p" in slots.held


def test_what_only_lower_priorities_use_drains_for_a_higher_one_and_nothing_else_does() -> None:
    slots = Slots(2)
    scheduler = make_scheduler(slots, running=4)
    add(scheduler, "a1", tokens=9)
    add(scheduler, "b1", tokens=9, priority=9)
    step(scheduler, slots)
    add(scheduler, "a2", "c1", tokens=9)
    add(scheduler, "b2", "d1", tokens=9, priority=9)
    step(scheduler, slots)
    assert scheduler.admission.closed == {"b"}
    for _ in range(8):
        step(scheduler, slots)
    assert set(slots.held) == {"a", "c"}


def test_names_of_one_content_drain_together() -> None:
    slots = Slots(1)
    slots.aliases = {"A": "a"}
    scheduler = make_scheduler(slots, running=4)
    add(scheduler, "a1", tokens=5)
    step(scheduler, slots)
    add(scheduler, "b1", tokens=1)
    age(scheduler, "b1")
    for i in range(5):
        add(scheduler, f"A{i}", f"a{i + 2}", tokens=5)
        step(scheduler, slots)
    assert "b" in slots.held
