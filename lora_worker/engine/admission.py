"""Which waiting row starts next: scheduling by adapter, with a bounded wait.

The queue is known, so a slot is given to an adapter and not to a request: whoever gets one is joined by all the rows
that wait for the same adapter. Every choice is made in this order:

1. Priority. A row of a higher priority goes first, for rows and for slots. While a lower one waits, one start of
   LOWEST_SHARE is the lowest's, so that it goes on.
2. Age. A row that has waited longer than `max_wait_seconds` since its claim is overdue; of these the oldest goes first.
   If it lacks a slot, nobody else is given one before it, and residents are closed (none of their rows start any more)
   until what drains makes room for it: those whose rows have the fewest tokens left to make, among those for which no
   older row waits. So a row of the highest priority that waits gets its slot within `max_wait_seconds`, plus, where
   older ones are overdue as well, their turns, plus the steps that the rows of the closed adapters still may run: as
   many as their `max_tokens`. A row that a lower priority would pass for want of a slot is treated as overdue at once.
3. Rows full. Residents with waiting rows are never evicted by choice, so a cycle of slots + 1 adapters costs one load a
   turn of the queue and not one a request. Who gets a free slot depends on what is scarce. With many requests an
   adapter, rows are: the adapter of the oldest request gets the slot, and waits stay even. With few (fewer than
   SCARCE_SLOTS times what a slot must carry for the rows to be full), slots are: small backlogs go first and
   share the rows with large ones, since a tail of small ones left over would run with most rows empty; if the residents
   can't fill the rows, the largest backlog goes first.

An adapter that is not in host memory never holds up others: it is fetched (FETCH_AHEAD adapters ahead, in the order of
their oldest requests), and takes part once it is there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from typing import Protocol

from lora_worker.adapters.reference import AdapterState
from lora_worker.engine.sequence import Sequence
from lora_worker.engine.waiting import Level, WaitingRows

# By simulation: at 3, 64 adapters on 16 slots are treated as scarce rows, 256 as scarce slots.
SCARCE_SLOTS = 3
LOWEST_SHARE = 16
FETCH_AHEAD = 16


class Adapters(Protocol):
    """What admission asks about adapters, by name."""

    @property
    def slots(self) -> int: ...

    def state(self, name: str) -> AdapterState: ...

    def residents(self) -> list[str]:
        """The adapters whose rows could start without a load."""

    def pages(self, name: str) -> int:
        """The pages of the pool that the adapter takes."""

    def room(self, *, wanted_may_go: bool, drained: Collection[str] = ()) -> int:
        """The pages another adapter could have, if those of the digests `drained` were held by nobody."""

    def fetch(self, name: str) -> None:
        """Have the adapter read into host memory, if there is room for it."""

    def is_pinned(self, name: str) -> bool: ...

    def pinned_without_slot(self) -> list[str]: ...


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
        self._starts_since_lowest = 0
        self.starved: str | None = None
        self.closed: set[str] = set()

    def begin(self, free_rows: int) -> None:
        """A new step: look who is starved, and close residents for it."""
        self._now = time.monotonic()
        self._passed.clear()
        self._free_rows = free_rows
        before, self.starved = self.starved, self._find_starved()
        if self.starved != before:
            self.closed.clear()
        if self.starved is not None:
            self._close_for(self.starved)

    def choose(self) -> Sequence | None:
        """The row to start next; None where no waiting row can start in this step."""
        return next((row for row in map(self._of_level, self._levels()) if row is not None), None)

    def note_started(self, sequence: Sequence) -> None:
        self._free_rows -= 1
        levels = self._waiting.levels
        is_passing = bool(levels) and sequence.priority < levels[-1].priority
        self._starts_since_lowest = self._starts_since_lowest + 1 if is_passing else 0
        if sequence.adapter_name == self.starved:
            self.begin(self._free_rows)

    def pass_over(self, name: str | None) -> None:
        """The adapter's rows can't start in this step."""
        self._passed.add(name)

    def spares_wanted(self, name: str | None) -> bool:
        """Whether a load for this adapter must leave those in their slots for which rows wait."""
        return name != self.starved

    def fetch_ahead(self) -> None:
        """Have the adapters that come next read into host memory."""
        left = FETCH_AHEAD
        for name in self._names():
            state = self._adapters.state(name)
            if state is AdapterState.AWAY:
                self._adapters.fetch(name)
            if state in (AdapterState.AWAY, AdapterState.CACHED):
                left -= 1
                if not left:
                    return

    # ---------------------------------------------------------------------------------------------

    def _levels(self) -> list[Level]:
        """In the order in which they are served now."""
        levels = self._waiting.levels
        if len(levels) > 1 and self._starts_since_lowest >= LOWEST_SHARE - 1:
            levels.insert(0, levels.pop())
        return levels

    def _names(self) -> Iterator[str]:
        return (name for level in self._levels() for name in level.groups if name is not None)

    def _of_level(self, level: Level) -> Sequence | None:
        ready = [name for name in (None, *self._adapters.residents()) if self._can_join(level, name)]
        overdue = self._first(level, (name for name in ready if self._is_overdue(level.head(name))))
        if self._can_be_loaded(level, self.starved) and (
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
        if self.starved is not None:
            return None
        room = self._adapters.room(wanted_may_go=False)
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

    def _are_slots_scarce(self, level: Level) -> bool:
        full = self._max_running * len(level.groups)
        return len(level.rows) * self._adapters.slots < SCARCE_SLOTS * full

    def _can_join(self, level: Level, name: str | None) -> bool:
        return name in level.groups and name not in self._passed and name not in self.closed

    def _fits(self, name: str | None, room: int) -> bool:
        if name is None or name in self._passed:
            return False
        return self._adapters.state(name) is AdapterState.CACHED and self._adapters.pages(name) <= room

    def _can_be_loaded(self, level: Level, name: str | None) -> bool:
        return name in level.groups and self._fits(name, self._adapters.room(wanted_may_go=True))

    def _first(self, level: Level, names: Iterator[str | None] | list[str | None]) -> Sequence | None:
        """The oldest row of these adapters."""
        return min((level.head(name) for name in names), key=lambda row: row.arrival, default=None)

    def _is_overdue(self, sequence: Sequence) -> bool:
        return self._now - sequence.arrived_at > self._max_wait_seconds

    # A starved adapter, and what is closed for it ------------------------------------------------

    def _find_starved(self) -> str | None:
        """The adapter that is to get the next slot before any other, or None."""
        pinned = self._adapters.pinned_without_slot()
        if pinned:
            return pinned[0]
        levels = self._levels()
        lowest = max((level.priority for level in levels), default=0)
        for level in levels:
            is_passed = level.priority < lowest or any(row.priority > level.priority for row in self._started())
            if not is_passed and not self._is_overdue(level.oldest):
                continue
            heads = (level.head(name) for name in level.groups if self._lacks_slot(name))
            oldest = min(heads, key=lambda row: row.arrival, default=None)
            if oldest is not None and (is_passed or self._is_overdue(oldest)):
                return oldest.adapter_name
        return None

    def _lacks_slot(self, name: str | None) -> bool:
        return name is not None and self._adapters.state(name) is AdapterState.CACHED

    def _goes_before(self, name: str, other: str) -> bool:
        """Whether a row waits for `name` that comes before all that wait for `other`."""
        first, second = (
            min((level.head(n).queue_order for level in self._waiting.levels if n in level.groups), default=None)
            for n in (name, other)
        )
        return name == other or (first is not None and second is not None and first < second)

    def _close_for(self, name: str) -> None:
        """Close as many residents as have to drain until the adapter fits."""
        needed = self._adapters.pages(name)
        ends: dict[str, int] = {}
        digests: dict[str, set[str]] = {}
        for row in self._started():
            if row.adapter is not None and not self._adapters.is_pinned(row.adapter.name):
                left = row.max_tokens - row.output_count
                ends[row.adapter.name] = max(ends.get(row.adapter.name, 0), left)
                digests.setdefault(row.adapter.name, set()).add(row.adapter.digest)
        may_close = [other for other in ends if other not in self.closed and not self._goes_before(other, name)]
        soonest = sorted(may_close, key=lambda other: ends[other])
        while self._adapters.room(wanted_may_go=True, drained=_joined(digests, self.closed)) < needed and soonest:
            self.closed.add(soonest.pop(0))


def _joined(digests: dict[str, set[str]], names: Collection[str]) -> set[str]:
    return {digest for name in names for digest in digests.get(name, ())}
