"""The rows of a step, and what they hold, with no model behind them."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from support.slots import Slots, make_row, make_scheduler

from lora_worker.engine.scheduler import Scheduler
from lora_worker.engine.sequence import Sequence


def names(rows: Iterable[Sequence]) -> list[str]:
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


def test_prompts_are_computed_in_chunks_beside_rows_that_decode() -> None:
    scheduler = make_scheduler(Slots())
    scheduler.add(make_row("short", prompt=2))
    scheduler.admit()
    assert run_step(scheduler) == [("short", 0, 2)]
    scheduler.add(make_row("long", prompt=14))
    scheduler.add(make_row("next", prompt=3))
    scheduler.admit()
    assert run_step(scheduler) == [("short", 2, 1), ("long", 0, 6)]
    assert run_step(scheduler) == [("short", 3, 1), ("long", 6, 6)]
    assert run_step(scheduler) == [("short", 4, 1), ("long", 12, 2), ("next", 0, 3)]


def test_the_row_admitted_last_makes_room_and_comes_back() -> None:
    scheduler = make_scheduler(Slots(), blocks=4)
    for name in ("first", "last"):
        scheduler.add(make_row(name, prompt=4))
    scheduler.admit()
    assert names(scheduler.running) == ["first", "last"]
    for _ in range(10):
        run_step(scheduler)
        scheduler.admit()
        if scheduler.preemptions:
            break
    assert names(scheduler.running) == ["first"]
    assert names(scheduler.paused) == ["last"]
    assert scheduler.paused[0].computed == 0
    scheduler.add(make_row("later", prompt=1))
    scheduler.admit()
    assert names(scheduler.running) == ["first"]
    scheduler.remove(scheduler.running[0])
    scheduler.admit()
    assert names(scheduler.running) == ["last", "later"]
    scheduler.check_integrity()


def test_integrity_tells_of_a_lost_block() -> None:
    scheduler = make_scheduler(Slots())
    scheduler.add(make_row("a"))
    scheduler.admit()
    run_step(scheduler)
    scheduler.running[0].blocks.pop()
    with pytest.raises(AssertionError, match="lost or shared"):
        scheduler.check_integrity()
