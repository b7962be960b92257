"""Requests that may kill their worker run one at a time, with nothing beside them.

A request that was running at `max_redeliveries` deaths is suspect, and so are all that ran beside it each time. The
worker that claims one hands back what has not started, claims nothing, waits for what runs, and then runs it alone: if
it dies now, the request is to blame, and fails the next time it is claimed; if not, it is answered like any other.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from lora_worker.fleet.pool.task_row import TaskRow


class Quarantine:
    """The suspects that wait, and the one that runs.

    Args:
        run: gives a row to the engine.
        others: how many rows are in the engine that are not in quarantine.
    """

    def __init__(self, *, run: Callable[[TaskRow], None], others: Callable[[], int]) -> None:
        self._run = run
        self._others = others
        self._waiting: deque[TaskRow] = deque()
        self._alone: TaskRow | None = None
        self._lock = threading.Lock()

    @property
    def is_active(self) -> bool:
        return self._alone is not None or bool(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting) + (self._alone is not None)

    def has(self, row: TaskRow) -> bool:
        return row is self._alone or row in self._waiting

    def add(self, row: TaskRow) -> None:
        with self._lock:
            self._waiting.append(row)
        self.look()

    def ended(self, row: TaskRow) -> None:
        """A row is gone from the worker, one in quarantine or another."""
        with self._lock:
            if row is self._alone:
                self._alone = None
            elif row in self._waiting:
                self._waiting.remove(row)
        self.look()

    def look(self) -> None:
        """Start the next suspect where nothing runs any more."""
        with self._lock:
            if self._alone is not None or not self._waiting or self._others():
                return
            self._alone = row = self._waiting.popleft()
        self._run(row)
