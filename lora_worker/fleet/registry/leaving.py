"""Which adapters' former content rows still run with, after it was replaced or unloaded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Protocol


class Row(Protocol):
    """A request on this worker, from its claim until its result is stored; `adapter` is the name it asks for.

    `begun_at` is the registry's generation, as far as applied, when it was about to start; None before.
    """

    adapter: str | None
    begun_at: int | None


class Leaving:
    """Any thread may use it.

    Args:
        rows: all that are here.
        changed: called when fewer may run with former content; must not block.
    """

    def __init__(self, rows: Callable[[], Iterable[Row]], changed: Callable[[], None]) -> None:
        self._rows = rows
        self._changed = changed
        self._left_at: dict[str, int] = {}
        self._lock = threading.Lock()

    def note(self, names: Iterable[str], generation: int) -> None:
        """What these names stood for before this generation is gone."""
        with self._lock:
            self._left_at |= dict.fromkeys(names, generation)

    def note_ended(self, row: Row) -> None:
        """The row is here no more: its result is stored, or it is somebody else's."""
        if row.adapter in self._left_at:
            self._changed()

    def names(self) -> list[str]:
        """Names with rows that run, or whose results are not stored yet, with former content."""
        with self._lock:
            left_at = dict(self._left_at)
        begun = [(row.adapter, row.begun_at) for row in self._rows() if row.begun_at is not None]
        found = {name for name, begun_at in begun if name in left_at and begun_at < left_at[name]}
        with self._lock:
            for name in left_at.keys() - found:
                if self._left_at.get(name) == left_at[name]:
                    del self._left_at[name]
        return sorted(found)
