"""The scheduler's policy, with no model behind it."""

from __future__ import annotations

import pytest

from lora_worker.adapters.reference import Readiness
from lora_worker.engine.blocks import BlockManager
from lora_worker.engine.scheduler import Scheduler
from lora_worker.engine.sequence import SamplingParams, Sequence

BLOCK = 4


def make_sequence(name: str, *, prompt: int = 3, priority: int = 0) -> Sequence:
    return Sequence(name, [1] * prompt, SamplingParams(0, 1, 0, 0), 100, lambda _: None, priority=priority)


class Slots:
    """Stands for the adapters: which rows may start."""

    def __init__(self) -> None:
        self.answers: dict[str, Readiness] = {}

    def start(self, sequence: Sequence) -> Readiness:
        return self.answers.get(sequence.request_id, Readiness.READY)


def make_scheduler(slots: Slots, *, blocks: int = 100, running: int = 10, wait: float = 1000.0) -> Scheduler:
    return Scheduler(
        BlockManager(blocks, BLOCK),
        start=slots.start,
        stop=lambda _: None,
        max_running=running,
        max_prefill_tokens=6,
        max_wait_seconds=wait,
    )


def names(rows: list[Sequence]) -> list[str]:
    return [row.request_id for row in rows]


def run_step(scheduler: Scheduler) -> list[tuple[str, int, int]]:
    chunks, new_blocks = scheduler.schedule()
    assert set(new_blocks) <= {block for row in scheduler.running for block in row.blocks}
    for chunk in chunks:
        chunk.sequence.computed += chunk.length
        if chunk.samples or chunk.sequence.remaining == 0:
            chunk.sequence.tokens.append(1)
    scheduler.check_integrity()
    return [(chunk.sequence.request_id, chunk.start, chunk.length) for chunk in chunks]


def test_rows_start_by_priority_and_then_by_arrival() -> None:
    scheduler = make_scheduler(Slots(), running=3)
    for name, priority in (("a", 9), ("b", 0), ("c", 3), ("d", 0)):
        scheduler.add(make_sequence(name, priority=priority))
    scheduler.admit()
    assert names(scheduler.running) == ["b", "d", "c"]
    assert names(scheduler.waiting) == ["a"]


def test_a_row_without_a_slot_lets_others_pass_until_it_has_waited_too_long() -> None:
    slots = Slots()
    slots.answers["a"] = Readiness.NO_SLOT
    scheduler = make_scheduler(slots)
    scheduler.add(make_sequence("a"))
    scheduler.add(make_sequence("b"))
    scheduler.admit()
    assert names(scheduler.running) == ["b"]
    scheduler.waiting[0].arrived_at -= 2000
    scheduler.add(make_sequence("c"))
    scheduler.admit()
    assert names(scheduler.running) == ["b"]
    assert names(scheduler.waiting) == ["a", "c"]
    slots.answers["a"] = Readiness.READY
    scheduler.admit()
    assert names(scheduler.running) == ["b", "a", "c"]


def test_a_row_whose_adapter_is_being_read_holds_up_nobody() -> None:
    slots = Slots()
    slots.answers["a"] = Readiness.NOT_YET
    scheduler = make_scheduler(slots, wait=0.001)
    scheduler.add(make_sequence("a"))
    scheduler.waiting[0].arrived_at -= 2000
    scheduler.add(make_sequence("b"))
    scheduler.admit()
    assert names(scheduler.running) == ["b"]


def test_prompts_are_computed_in_chunks_beside_rows_that_decode() -> None:
    scheduler = make_scheduler(Slots())
    scheduler.add(make_sequence("short", prompt=2))
    scheduler.admit()
    assert run_step(scheduler) == [("short", 0, 2)]
    scheduler.add(make_sequence("long", prompt=14))
    scheduler.add(make_sequence("next", prompt=3))
    scheduler.admit()
    assert run_step(scheduler) == [("short", 2, 1), ("long", 0, 6)]
    assert run_step(scheduler) == [("short", 3, 1), ("long", 6, 6)]
    assert run_step(scheduler) == [("short", 4, 1), ("long", 12, 2), ("next", 0, 3)]


def test_the_row_admitted_last_makes_room_and_comes_back() -> None:
    scheduler = make_scheduler(Slots(), blocks=4)
    for name in ("first", "last"):
        scheduler.add(make_sequence(name, prompt=4))
    scheduler.admit()
    assert names(scheduler.running) == ["first", "last"]
    for _ in range(10):
        run_step(scheduler)
        scheduler.admit()
        if scheduler.preemptions:
            break
    assert names(scheduler.running) == ["first"]
    assert scheduler.waiting[0].request_id == "last"
    assert scheduler.waiting[0].computed == 0
    scheduler.remove(scheduler.running[0])
    scheduler.admit()
    assert names(scheduler.running) == ["last"]
    scheduler.check_integrity()


def test_integrity_tells_of_a_lost_block() -> None:
    scheduler = make_scheduler(Slots())
    scheduler.add(make_sequence("a"))
    scheduler.admit()
    run_step(scheduler)
    scheduler.running[0].blocks.pop()
    with pytest.raises(AssertionError, match="lost or shared"):
        scheduler.check_integrity()
