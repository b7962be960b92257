"""The rows that wait to start, by priority and adapter."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from lora_worker.engine.sequence import Sequence

# A row's adapter by name; None is the base.
AdapterName = str | None
Rows = OrderedDict[tuple[str, int], Sequence]


class Level:
    """Waiting rows of one priority. All operations are O(1) but for walks over `groups`.

    `joining` are rows of requests that have started: they hold their adapters, and lack nothing but room.
    """

    def __init__(self, priority: int) -> None:
        self.priority = priority
        self.rows: Rows = OrderedDict()
        self.groups: OrderedDict[AdapterName, Rows] = OrderedDict()
        self.joining: Rows = OrderedDict()

    @property
    def is_empty(self) -> bool:
        return not self.rows and not self.joining

    @property
    def oldest(self) -> Sequence:
        heads = [next(iter(rows.values())) for rows in (self.rows, self.joining) if rows]
        return min(heads, key=lambda row: row.arrival)

    def head(self, name: AdapterName) -> Sequence:
        """The oldest row of an adapter."""
        return next(iter(self.groups[name].values()))

    def add(self, sequence: Sequence) -> None:
        if sequence.started_at is not None:
            self.joining[_key(sequence)] = sequence
            return
        self.rows[_key(sequence)] = sequence
        self.groups.setdefault(sequence.adapter_name, OrderedDict())[_key(sequence)] = sequence

    def remove(self, sequence: Sequence) -> None:
        if self.joining.pop(_key(sequence), None) is not None:
            return
        del self.rows[_key(sequence)]
        group = self.groups[sequence.adapter_name]
        del group[_key(sequence)]
        if not group:
            del self.groups[sequence.adapter_name]

    def __contains__(self, sequence: Sequence) -> bool:
        return (self.rows.get(_key(sequence)) or self.joining.get(_key(sequence))) is sequence


class WaitingRows:
    """Levels, the highest priority (the lowest number) first. Within a level and a group rows stand as they came."""

    def __init__(self) -> None:
        self._levels: dict[int, Level] = {}

    def __len__(self) -> int:
        return sum(len(level.rows) + len(level.joining) for level in self._levels.values())

    def __iter__(self) -> Iterator[Sequence]:
        return (row for level in self.levels for rows in (level.joining, level.rows) for row in rows.values())

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.priority in self._levels and sequence in self._levels[sequence.priority]

    @property
    def levels(self) -> list[Level]:
        """Those that have rows."""
        return [self._levels[priority] for priority in sorted(self._levels)]

    @property
    def joining(self) -> list[Sequence]:
        return [row for level in self.levels for row in level.joining.values()]

    def wants(self, name: AdapterName, *, priority: int | None = None) -> bool:
        """Whether a row that has not started waits for the adapter; of this `priority` or a higher one, if given."""
        levels = self._levels.values()
        return any(name in level.groups for level in levels if priority is None or level.priority <= priority)

    def add(self, sequence: Sequence) -> None:
        self._levels.setdefault(sequence.priority, Level(sequence.priority)).add(sequence)

    def remove(self, sequence: Sequence) -> None:
        level = self._levels[sequence.priority]
        level.remove(sequence)
        if level.is_empty:
            del self._levels[sequence.priority]

    def check_integrity(self) -> None:
        for level in self._levels.values():
            assert not level.is_empty, f"priority {level.priority} has no rows and is kept"
            in_groups = [row for group in level.groups.values() for row in group.values()]
            assert len(in_groups) == len(level.rows), "waiting: groups and rows disagree"
            for name, group in level.groups.items():
                assert all(row.adapter_name == name and row in level for row in group.values())
            started = [row.request_id for row in level.rows.values() if row.started_at is not None or row.adapter]
            assert not started, f"rows wait to start, and have: {started}"


def _key(sequence: Sequence) -> tuple[str, int]:
    return sequence.request_id, sequence.index
