"""Steps of a scheduler with no model behind it."""

from __future__ import annotations

import random
from collections.abc import Iterable

from lora_worker.engine.scheduler import Scheduler
from lora_worker.engine.sequence import Sequence
from support.slots import Slots, make_row


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
