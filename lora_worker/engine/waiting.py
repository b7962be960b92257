"""The rows that wait to start, by priority and adapter."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from lora_worker.engine.sequence import Sequence

# A row's adapter by name; None is the base.
AdapterName = str | None


class Level:
    """Waiting rows of one priority. All operations are O(1) but for walks over `groups`."""

    def __init__(self, priority: int) -> None:
        self.priority = priority
        self.rows: OrderedDict[str, Sequence] = OrderedDict()
        self.groups: OrderedDict[AdapterName, OrderedDict[str, Sequence]] = OrderedDict()

    @property
    def oldest(self) -> Sequence:
        return next(iter(self.rows.values()))

    def head(self, name: AdapterName) -> Sequence:
        """The oldest row of an adapter."""
        return next(iter(self.groups[name].values()))

    def add(self, sequence: Sequence) -> None:
        self.rows[sequence.request_id] = sequence
        self.groups.setdefault(sequence.adapter_name, OrderedDict())[sequence.request_id] = sequence

    def remove(self, sequence: Sequence) -> None:
        del self.rows[sequence.request_id]
        group = self.groups[sequence.adapter_name]
        del group[sequence.request_id]
        if not group:
            del self.groups[sequence.adapter_name]


class WaitingRows:
    """Levels, the highest priority (the lowest number) first. Within a level and a group rows stand as they came."""

    def __init__(self) -> None:
        self._levels: dict[int, Level] = {}
        self._counts: dict[AdapterName, int] = {}

    def __len__(self) -> int:
        return sum(len(level.rows) for level in self._levels.values())

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for level in self.levels for sequence in level.rows.values())

    @property
    def levels(self) -> list[Level]:
        """Those that have rows."""
        return [self._levels[priority] for priority in sorted(self._levels)]

    def has(self, name: AdapterName) -> bool:
        """Whether any row waits for the adapter."""
        return name in self._counts

    def add(self, sequence: Sequence) -> None:
        level = self._levels.setdefault(sequence.priority, Level(sequence.priority))
        level.add(sequence)
        self._counts[sequence.adapter_name] = self._counts.get(sequence.adapter_name, 0) + 1

    def remove(self, sequence: Sequence) -> None:
        level = self._levels[sequence.priority]
        level.remove(sequence)
        if not level.rows:
            del self._levels[sequence.priority]
        self._counts[sequence.adapter_name] -= 1
        if not self._counts[sequence.adapter_name]:
            del self._counts[sequence.adapter_name]

    def __contains__(self, sequence: Sequence) -> bool:
        level = self._levels.get(sequence.priority)
        return level is not None and level.rows.get(sequence.request_id) is sequence

    def check_integrity(self) -> None:
        grouped = dict.fromkeys(self._counts, 0)
        for level in self._levels.values():
            assert level.rows, f"priority {level.priority} has no rows and is kept"
            in_groups = [row for group in level.groups.values() for row in group.values()]
            assert len(in_groups) == len(level.rows), "waiting: groups and rows disagree"
            for name, group in level.groups.items():
                grouped[name] = grouped.get(name, 0) + len(group)
                assert all(row.adapter_name == name and row.request_id in level.rows for row in group.values())
        assert grouped == self._counts, f"waiting: counts drifted, {grouped} are there, {self._counts} counted"
