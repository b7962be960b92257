"""Which waiting row starts next: scheduling by adapter, with a bounded wait.

The queue is known, so a slot is given to an adapter and not to a request: whoever gets one is joined by all the rows
that wait for the same adapter. Every choice is made in this order:

1. Priority. A row of a higher priority goes first, for rows and for slots: while one lacks a slot, lower ones are given
   none, and what only they use drains. One start of LOWER_SHARE goes to the lower level whose oldest row is oldest, so
   that each goes on; such a turn closes nothing unless that row is overdue.
2. Age. A row that has waited longer than `max_wait_seconds` since its claim is overdue; of these the oldest goes first.
   If it lacks a slot, nobody else is given one before it, and residents are closed (none of their rows start any more)
   until what drains makes room for it: those whose rows have the fewest tokens left to make, among those for which no
   older row waits. So a row of the highest priority gets its slot within `max_wait_seconds`, plus, where older ones are
   overdue as well, their turns, plus the steps that the rows of the closed adapters still may run: as many as their
   `max_tokens`. `draining` has the details.
3. Rows full. Residents with waiting rows are never evicted by choice, so a cycle of slots + 1 adapters costs one load a
   turn of the queue and not one a request. Who gets a free slot depends on what is scarce. With many requests an
   adapter, rows are: the adapter of the oldest request gets the slot, and waits stay even. With few (fewer than
   SCARCE_SLOTS times what a slot must carry for the rows to be full), slots are: small backlogs go first and
   share the rows with large ones, since a tail of small ones left over would run with most rows empty; if the residents
   can't fill the rows, the largest backlog goes first.

The other rows of a request that has started hold its adapter, and go first within their priority. An adapter that is
not in host memory never holds up others: it is fetched (FETCH_AHEAD adapters ahead, in the order of their oldest
requests) and takes part once it is there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from typing import Protocol

from lora_worker.adapters.reference import AdapterState
from lora_worker.engine.draining import Draining, Drains, Slots, Spared
from lora_worker.engine.sequence import Sequence
from lora_worker.engine.waiting import Level, WaitingRows

# By simulation: at 3, 64 adapters on 16 slots are treated as scarce rows, 256 as scarce slots.
SCARCE_SLOTS = 3
LOWER_SHARE = 16
FETCH_AHEAD = 16


class Adapters(Slots, Protocol):
    """What admission asks about adapters, by name."""

    @property
    def slots(self) -> int: ...

    def residents(self) -> list[str]:
        """The adapters whose rows could start without a load."""

    def fetch(self, name: str, *, is_urgent: bool) -> None:
        """Have the adapter read into host memory, if there is room for it; if it is urgent, others make room."""


class Admission:
    """Chooses among the waiting rows. `started` gives the rows that have started and not ended."""

    def __init__(
        self,
        waiting: WaitingRows,
        adapters: Adapters,
        *,
        started: Callable[[], Collection[Sequence]],
        max_running: int,
        max_wait_seconds: float,
    ) -> None:
        self._waiting = waiting
        self._adapters = adapters
        self._started = started
        self._max_running = max_running
        self._max_wait_seconds = max_wait_seconds
        self._passed: set[str | None] = set()
        self._free_rows = 0
        self._now = 0.0
        self._starts_since_lower = 0
        self._promoted: int | None = None  # the priority whose turn it is before a higher one
        self._levels: list[Level] = []
        self._draining = Draining()

    @property
    def starved(self) -> str | None:
        return self._draining.starved

    @property
    def closed(self) -> frozenset[str]:
        return self._draining.closed

    def begin(self, free_rows: int) -> None:
        """A new step."""
        self._now = time.monotonic()
        self._passed.clear()
        self._free_rows = free_rows
        self._look()

    def choose(self) -> Sequence | None:
        """The row to start next; None where no waiting row can start in this step."""
        return next((row for row in map(self._of_level, self._levels) if row is not None), None)

    def note_started(self, sequence: Sequence) -> None:
        """A row that waited has started."""
        self._free_rows -= 1
        waiting = [level.priority for level in self._waiting.levels]
        is_passing = bool(waiting) and waiting[0] >= sequence.priority and waiting[-1] > sequence.priority
        self._starts_since_lower = self._starts_since_lower + 1 if is_passing else 0
        if sequence.adapter_name == self.starved or self._in_order() != (self._levels, self._promoted):
            self._look()

    def pass_over(self, name: str | None) -> None:
        """The adapter's rows can't start in this step."""
        self._passed.add(name)

    def spared(self, sequence: Sequence) -> Spared:
        """What must stay in its slot when this row's adapter is loaded."""
        name = sequence.adapter_name
        if name is None or name != self.starved:
            return self._spared_by(sequence.priority)
        has_room = self._adapters.room(self._waiting.wants) >= self._adapters.pages(name)
        return self._waiting.wants if has_room else self._draining.spared

    def fetch_ahead(self) -> None:
        """Have the adapters that come next read into host memory."""
        heads = [row for level in self._levels for row in self._without_slot(level)]
        for i, row in enumerate(heads[:FETCH_AHEAD]):
            if self._state(row.adapter_name) is AdapterState.AWAY:
                self._adapters.fetch(row.adapter_name or "", is_urgent=i == 0 and self._is_overdue(row))

    # ---------------------------------------------------------------------------------------------

    def _look(self) -> None:
        self._levels, self._promoted = self._in_order()
        self._draining = Drains(
            self._adapters,
            self._levels,
            self._started(),
            is_promoted=self._promoted is not None,
            is_overdue=self._is_overdue,
            wants=lambda name, priority: self._waiting.wants(name, priority=priority),
        ).look()

    def _in_order(self) -> tuple[list[Level], int | None]:
        """The levels as they are served now, and the priority that comes before a higher one."""
        levels = self._waiting.levels
        if len(levels) < 2 or self._starts_since_lower < LOWER_SHARE - 1:
            return levels, None
        promoted = min(levels[1:], key=lambda level: level.oldest.arrival)
        levels.remove(promoted)
        return [promoted, *levels], promoted.priority

    def _of_level(self, level: Level) -> Sequence | None:
        if level.joining:
            return next(iter(level.joining.values()))
        ready = [name for name in (None, *self._adapters.residents()) if self._can_join(level, name)]
        overdue = self._first(level, (name for name in ready if self._is_overdue(level.head(name))))
        if self._is_starved_next(level) and (
            overdue is None or level.head(self.starved).queue_order < overdue.queue_order
        ):
            return level.head(self.starved)
        if overdue is not None:
            return overdue
        is_scarce = self._are_slots_scarce(level)
        new = self._next_for_a_slot(level, ready, is_scarce=is_scarce)
        if new is not None:
            return new
        if is_scarce:
            # Small backlogs first, so that their slots are free again soon.
            name = min(ready, key=lambda name: (len(level.groups[name]), level.head(name).arrival), default=None)
            return level.head(name) if ready else None
        return self._first(level, ready)

    def _next_for_a_slot(self, level: Level, ready: list[str | None], *, is_scarce: bool) -> Sequence | None:
        """A row whose adapter is to be given a free slot, or one that nobody waits for."""
        if not self._may_have_slots(level.priority):
            return None
        room = self._adapters.room(self._spared_by(level.priority))
        if not room:
            return None
        names = [name for name in level.groups if self._fits(name, room)]
        if not names:
            return None
        if not is_scarce:
            return self._first(level, names)
        are_rows_full = sum(len(level.groups[name]) for name in ready) >= self._free_rows
        pick = min if are_rows_full else max
        return level.head(pick(names, key=lambda name: len(level.groups[name])))

    def _may_have_slots(self, priority: int) -> bool:
        slots_for = self._draining.slots_for
        return self.starved is None and (slots_for is None or priority <= slots_for or priority == self._promoted)

    def _spared_by(self, priority: int) -> Spared:
        """What rows of this or a higher priority wait for; a level whose turn it is spares all."""
        if priority == self._promoted:
            return self._waiting.wants
        return lambda name: self._waiting.wants(name, priority=priority)

    def _are_slots_scarce(self, level: Level) -> bool:
        full = self._max_running * len(level.groups)
        return len(level.rows) * self._adapters.slots < SCARCE_SLOTS * full

    def _can_join(self, level: Level, name: str | None) -> bool:
        return name in level.groups and name not in self._passed and name not in self.closed

    def _fits(self, name: str | None, room: int) -> bool:
        if name is None or name in self._passed:
            return False
        return self._state(name) is AdapterState.CACHED and self._adapters.pages(name) <= room

    def _is_starved_next(self, level: Level) -> bool:
        return self.starved in level.groups and self._fits(self.starved, self._adapters.room(self._draining.spared))

    def _without_slot(self, level: Level) -> list[Sequence]:
        """The oldest row of each adapter that is not resident, in their order."""
        heads = [level.head(name) for name in level.groups if self._state(name) is not AdapterState.RESIDENT]
        return sorted(heads, key=lambda row: row.arrival)

    def _state(self, name: str | None) -> AdapterState:
        return AdapterState.RESIDENT if name is None else self._adapters.state(name)

    def _first(self, level: Level, names: Iterable[str | None]) -> Sequence | None:
        """The oldest row of these adapters."""
        return min((level.head(name) for name in names), key=lambda row: row.arrival, default=None)

    def _is_overdue(self, sequence: Sequence) -> bool:
        return self._now - sequence.arrived_at > self._max_wait_seconds
