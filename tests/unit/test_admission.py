"""Scheduling by adapter, with no model behind it: who starts next, who leaves its slot, and how long anybody waits."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from support.slots import Slots, make_row, make_scheduler

from lora_worker.engine.admission import FETCH_AHEAD, LOWER_SHARE
from lora_worker.engine.scheduler import Scheduler
from lora_worker.engine.sequence import Sequence


def names(rows: Iterable[Sequence]) -> list[str]:
    return [row.request_id for row in rows]


def add(scheduler: Scheduler, *rows: str, priority: int = 0, tokens: int = 100) -> None:
    """Rows named after their adapters: 'a1' is of the adapter 'a', '-1' of the base."""
    for row in rows:
        adapter = None if row[0] == "-" else row[0]
        scheduler.add(make_row(row, adapter, priority=priority, tokens=tokens))


def step(scheduler: Scheduler, slots: Slots) -> None:
    """Start what can start, and give every running row a token."""
    scheduler.admit()
    scheduler.check_integrity()
    for row in list(scheduler.running):
        row.tokens.append(1)
        if row.output_count == row.max_tokens:
            slots.end(scheduler, row)


def age(scheduler: Scheduler, *rows: str) -> None:
    for row in scheduler.waiting:
        if row.request_id in rows:
            row.arrived_at -= 10_000


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
    scheduler = make_scheduler(slots, running=1)
    add(scheduler, "a1", tokens=3)
    step(scheduler, slots)
    add(scheduler, "a2", "b1", "a3", tokens=1)
    age(scheduler, "a2", "b1", "a3")
    while scheduler.waiting or scheduler.running:
        step(scheduler, slots)
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


class Stream:
    """As many rows of the highest priority as wait for these adapters at any time, which never ends by itself."""

    def __init__(self, scheduler: Scheduler, slots: Slots, adapters: str) -> None:
        self.scheduler, self.slots, self.adapters = scheduler, slots, adapters
        self._chance = random.Random(1)
        self._count = 0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self._fill()
            self.slots.prepare_pinned()
            step(self.scheduler, self.slots)

    def steps_until_started(self, row: str, *, most: int) -> int:
        for steps in range(most):
            if row not in names(self.scheduler.waiting):
                return steps
            self.run(1)
        raise AssertionError(f"{row} has not started within {most} steps")

    def _fill(self) -> None:
        waiting = sum(row.adapter_name in [*self.adapters] for row in self.scheduler.waiting)
        for _ in range(waiting, 24 * len(self.adapters)):
            adapter = self.adapters[self._count % len(self.adapters)]
            self._count += 1
            add(self.scheduler, f"{adapter}-{self._count}", tokens=self._chance.randint(3, 9))


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


def test_a_low_priority_does_not_keep_a_pinned_adapter_from_its_slot() -> None:
    slots = Slots(4)
    scheduler = make_scheduler(slots, running=32)
    stream = Stream(scheduler, slots, "adef")
    stream.run(30)
    slots.pinned_waiting = ["p"]
    add(scheduler, "p1", tokens=4, priority=9)
    stream.steps_until_started("p1", most=100)
    assert "p" in slots.held


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


def test_the_other_rows_of_a_started_request_go_by_its_priority() -> None:
    slots = Slots(4)
    scheduler = make_scheduler(slots, running=4)
    for i in range(127):
        row = make_row(f"n{i}", tokens=50, priority=9)
        row.started_at = 0.0
        scheduler.add(row)
    step(scheduler, slots)
    add(scheduler, "-1", tokens=1)
    for _ in range(50):
        step(scheduler, slots)
    assert "-1" not in names(scheduler.waiting)


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
