"""Which adapter gets the next slot before any other, and which residents drain for it.

A resident drains when it is closed: rows that wait for it don't start, and those that run end. Nothing is remembered
from step to step. The residents that drain soonest are closed, and stay the soonest, since none of their rows start.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cached_property
from typing import NamedTuple, Protocol

from lora_worker.adapters.reference import AdapterState
from lora_worker.engine.sequence import Sequence
from lora_worker.engine.waiting import Level

# Whether an adapter, by name, must stay in its slot.
Spared = Callable[[str], bool]


class Slots(Protocol):
    """What is asked about adapters and their places."""

    def state(self, name: str) -> AdapterState: ...

    def pages(self, name: str) -> int:
        """The pages of the pool that the adapter takes."""

    def names_of(self, digest: str) -> Collection[str]: ...

    def is_pinned(self, name: str) -> bool: ...

    def pinned_without_slot(self) -> list[str]: ...

    def room(self, spared: Spared, drained: Collection[str] = ()) -> int:
        """The pages another adapter could have if all left that nobody holds and `spared` doesn't name.

        Those of the digests `drained` are taken for held by nobody.
        """


class Draining(NamedTuple):
    """What a look has found.

    Args:
        starved: the adapter that gets the next slot; nobody else is given one.
        spared: what may not leave for it.
        closed: names of adapters whose waiting rows don't start.
        slots_for: rows of lower priorities than this are given no slot; None: all may be.
    """

    starved: str | None = None
    spared: Spared = lambda _: False
    closed: frozenset[str] = frozenset()
    slots_for: int | None = None


class Drains:
    """One look at the rows and slots of a step.

    Args:
        levels: in the order in which they are served.
        started: all rows that hold an adapter.
        is_promoted: whether the first level comes before one of a higher priority.
        wants: whether rows of a priority or a higher one wait for an adapter.
    """

    def __init__(
        self,
        slots: Slots,
        levels: list[Level],
        started: Collection[Sequence],
        *,
        is_promoted: bool,
        is_overdue: Callable[[Sequence], bool],
        wants: Callable[[str, int], bool],
    ) -> None:
        self._slots = slots
        self._levels = levels
        self._started = started
        self._is_promoted = is_promoted
        self._is_overdue = is_overdue
        self._wants = wants

    def look(self) -> Draining:
        """Pinned adapters come first; then, level by level, what is overdue, and whom lower levels keep from a slot."""
        for name in self._slots.pinned_without_slot():
            found = self._for_starved(name, earlier=[], goes_before=lambda _: False)
            if found is not None:
                return found
        for i, level in enumerate(self._levels):
            for row in self._overdue(level):
                found = self._of_overdue(row, level, self._levels[:i])
                if found is not None:
                    return found
            if not (i == 0 and self._is_promoted) and any(map(self._lacks_slot, level.groups)):
                return self._for_passed(level)
        return Draining()

    def _overdue(self, level: Level) -> list[Sequence]:
        if not level.rows or not self._is_overdue(next(iter(level.rows.values()))):
            return []
        return sorted(filter(self._is_overdue, self._lacking(level)), key=lambda row: row.arrival)

    def _of_overdue(self, row: Sequence, level: Level, earlier: list[Level]) -> Draining | None:
        assert row.adapter_name is not None
        return self._for_starved(
            row.adapter_name,
            earlier=earlier,
            goes_before=lambda name: name in level.groups and level.head(name).arrival < row.arrival,
        )

    def _for_starved(self, name: str, *, earlier: list[Level], goes_before: Callable[[str], bool]) -> Draining | None:
        """None where no draining could make room: all is pinned, or wanted by levels that are served earlier.

        What an older row of the same level waits for (`goes_before`) stays open until that has started, and can then
        be closed: no younger one is given a slot meanwhile.
        """

        def spared(other: str) -> bool:
            return any(other in level.groups for level in earlier)

        may_drain = [digest for digest in self._ends if not self._any_name(digest, spared)]
        if self._slots.pages(name) > self._slots.room(spared, may_drain):
            return None
        may_close = [digest for digest in may_drain if not self._any_name(digest, goes_before)]
        return Draining(name, spared, self._closed(name, spared, may_close))

    def _for_passed(self, level: Level) -> Draining:
        """A row lacks a slot: none goes to lower levels, and what only they use drains for the oldest such row."""

        def spared(other: str) -> bool:
            return self._wants(other, level.priority)

        used = {row.adapter.digest for row in self._started if row.adapter and row.priority <= level.priority}
        may_close = [digest for digest in self._ends if digest not in used and not self._any_name(digest, spared)]
        if not may_close:
            return Draining(slots_for=level.priority)
        name = min(self._lacking(level), key=lambda row: row.arrival).adapter_name
        assert name is not None
        return Draining(closed=self._closed(name, spared, may_close), slots_for=level.priority)

    def _closed(self, name: str, spared: Spared, may_close: list[str]) -> frozenset[str]:
        """As many of these digests, soonest first, as have to drain until the adapter fits; by their names."""
        soonest = sorted(may_close, key=lambda digest: self._ends[digest])
        closed: list[str] = []
        while soonest and self._slots.room(spared, closed) < self._slots.pages(name):
            closed.append(soonest.pop(0))
        return frozenset(name for digest in closed for name in self._slots.names_of(digest))

    @cached_property
    def _ends(self) -> dict[str, int]:
        """By digest, the most tokens that one of the rows may still make; without what is pinned."""
        ends: dict[str, int] = {}
        for row in self._started:
            if row.adapter is not None:
                ends[row.adapter.digest] = max(ends.get(row.adapter.digest, 0), row.max_tokens - row.output_count)
        return {digest: end for digest, end in ends.items() if not self._any_name(digest, self._slots.is_pinned)}

    def _any_name(self, digest: str, is_so: Callable[[str], bool]) -> bool:
        return any(map(is_so, self._slots.names_of(digest)))

    def _lacking(self, level: Level) -> list[Sequence]:
        """The oldest row of each adapter that needs a slot."""
        return [level.head(name) for name in level.groups if self._lacks_slot(name)]

    def _lacks_slot(self, name: str | None) -> bool:
        return name is not None and self._slots.state(name) is AdapterState.CACHED
