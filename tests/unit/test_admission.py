"""Scheduling by adapter, with no model behind it: who starts next, and who is read ahead."""

from __future__ import annotations

import random

import pytest
from support.scheduling import Stream, add, age, names, step
from support.slots import Slots, make_row, make_scheduler

from lora_worker.engine.admission import FETCH_AHEAD, LOWER_SHARE


def test_rows_start_by_priority_and_then_by_arrival() -> None:
    scheduler = make_scheduler(Slots(), running=3)
    for name, priority in (("a", 9), ("b", 0), ("c", 3), ("d", 0)):
        scheduler.add(make_row(name, priority=priority))
    scheduler.admit()
    assert names(scheduler.running) == ["b", "d", "c"]
    assert names(scheduler.waiting) == ["a"]


def test_rows_of_one_adapter_run_together_and_share_one_load() -> None:
    slots = Slots(1)
    scheduler = make_scheduler(slots, running=2)
    add(scheduler, "a1", "b1", "a2", "b2", "a3", "b3", tokens=4)
    while scheduler.waiting or scheduler.running:
        step(scheduler, slots)
    assert slots.loaded == ["a", "b"]


def test_base_rows_need_no_slot() -> None:
    slots = Slots(1)
    scheduler = make_scheduler(slots)
    add(scheduler, "a1", "b1", "-1", "-2")
    scheduler.admit()
    assert names(scheduler.running) == ["a1", "-1", "-2"]


def test_a_cycle_of_one_adapter_more_than_slots_costs_one_load_an_adapter_and_window() -> None:
    slots = Slots(4)
    scheduler = make_scheduler(slots, running=8)
    for i in range(200):
        add(scheduler, f"{'abcde'[i % 5]}{i}", tokens=5)
    while scheduler.waiting or scheduler.running:
        step(scheduler, slots)
    assert len(slots.loaded) == 5


def test_what_waiting_rows_need_is_not_evicted_while_something_else_can_be() -> None:
    slots = Slots(2)
    slots.held = {"a": 0, "b": 0}
    scheduler = make_scheduler(slots, running=1)
    add(scheduler, "a1", "c1", tokens=1)
    while scheduler.waiting or scheduler.running:
        step(scheduler, slots)
    assert slots.evicted == ["b"]


def test_the_lowest_priority_goes_on_beside_a_stream_of_higher_ones() -> None:
    slots = Slots()
    scheduler = make_scheduler(slots, running=1)
    add(scheduler, "-low", priority=9, tokens=1)
    started = 0
    while "-low" in names(scheduler.waiting):
        add(scheduler, f"-high{started}", tokens=1)
        step(scheduler, slots)
        started += 1
        assert started <= LOWER_SHARE


def test_a_level_between_others_goes_on() -> None:
    slots = Slots()
    scheduler = make_scheduler(slots, running=1)
    add(scheduler, "-middle", tokens=1, priority=3)
    for i in range(2 * LOWER_SHARE):
        add(scheduler, f"-high{i}", tokens=1)
        add(scheduler, f"-low{i}", tokens=1, priority=9)
        step(scheduler, slots)
    assert "-middle" not in names(scheduler.waiting)


def test_rows_of_a_low_priority_that_need_no_slot_change_nothing_about_loads() -> None:
    def loads(low: int) -> int:
        chance = random.Random(2)
        slots = Slots(4)
        scheduler = make_scheduler(slots, running=16)
        for i in range(1000):
            add(scheduler, f"{chance.choice('abcdefghijklmnop')}{i}", tokens=chance.randint(6, 12))
        for i in range(low):
            add(scheduler, f"-{i}", tokens=8, priority=9)
        while scheduler.waiting or scheduler.running:
            step(scheduler, slots)
        return len(slots.loaded)

    assert loads(20) <= loads(0) * 1.2


def test_the_other_rows_of_a_started_request_go_by_its_priority() -> None:
    slots = Slots(4)
    scheduler = make_scheduler(slots, running=4)
    for i in range(127):
        row = make_row(f"n{i}", tokens=50, priority=9)
        row.started_at = 0.0
        scheduler.add(row)
    step(scheduler, slots)
    assert names(scheduler.running) == ["n0", "n1", "n2", "n3"]
    add(scheduler, "-1", tokens=1)
    for _ in range(50):
        step(scheduler, slots)
    assert "-1" not in names(scheduler.waiting)


def test_an_adapter_that_is_away_holds_up_nobody_and_is_fetched() -> None:
    slots = Slots(1)
    slots.away = {"a"}
    scheduler = make_scheduler(slots)
    add(scheduler, "a1", "b1")
    age(scheduler, "a1")
    scheduler.admit()
    assert names(scheduler.running) == ["b1"]
    assert slots.fetched == ["a"]


def test_so_many_adapters_are_fetched_ahead_and_no_more() -> None:
    slots = Slots(1)
    coming = [chr(ord("A") + i) for i in range(FETCH_AHEAD + 5)]
    slots.away = set(coming)
    scheduler = make_scheduler(slots)
    add(scheduler, *(f"{name}1" for name in coming))
    scheduler.admit()
    assert slots.fetched == coming[:FETCH_AHEAD]


def test_an_adapter_is_fetched_when_its_turn_comes_however_many_wait_in_host_memory() -> None:
    """Twenty with a backlog that never ends, by age since all are overdue."""
    slots = Slots(1)
    slots.away = {"z"}
    scheduler = make_scheduler(slots, running=4, wait=0.0)
    stream = Stream(scheduler, slots, "abcdefghijklmnopqrst")
    stream.run(5)
    add(scheduler, "z1")
    older = len(scheduler.waiting)
    while "z" not in slots.fetched:
        assert len(slots.loaded) <= older
        stream.run(1)


def test_what_is_overdue_and_next_is_fetched_whatever_has_to_make_room() -> None:
    slots = Slots(1)
    slots.away = {"b", "c"}
    scheduler = make_scheduler(slots)
    add(scheduler, "a1", "b1", "c1")
    step(scheduler, slots)
    assert (slots.fetched, slots.urgent) == (["b", "c"], [])
    age(scheduler, "b1", "c1")
    step(scheduler, slots)
    assert slots.urgent == ["b"]


@pytest.mark.parametrize("seed", range(5))
def test_no_row_waits_longer_than_its_turn_whatever_comes(seed: int) -> None:
    """With a bound of 0 all are overdue, so slots go round by age: a row waits for at most all that came before it."""
    chance = random.Random(seed)
    slots = Slots(3, pages=5)
    slots.sizes = {"a": 3, "b": 2}
    scheduler = make_scheduler(slots, running=4, wait=0.0)
    claimed: dict[str, int] = {}
    before: dict[str, int] = {}  # the tokens that came before a row
    tokens_so_far = 0
    for now in range(400):
        for row in scheduler.running:
            assert now - claimed[row.request_id] <= before[row.request_id] + row.output_count + 1
        if now < 200 and chance.random() < 0.5:
            row_name, tokens = f"{chance.choice('abcdefgh-')}{now}", chance.randrange(1, 9)
            claimed[row_name], before[row_name] = now, tokens_so_far
            tokens_so_far += tokens
            add(scheduler, row_name, tokens=tokens)
        step(scheduler, slots)
    assert not scheduler.waiting
    assert not scheduler.running
