"""Rows of somebody's iterable, as they come: one that is slow, or waits for results itself, holds nothing up."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple


class _Row(NamedTuple):
    row: Any


class _End(NamedTuple):
    """There are no more rows; `error` is why, where the iterable failed."""

    error: BaseException | None


class Feed:
    """Reads an iterable on a thread of its own, and no further than it is asked to."""

    def __init__(self, rows: Iterable[Any]) -> None:
        self._rows = iter(rows)
        self._may_read = threading.Semaphore(0)
        self._read: SimpleQueue[_Row | _End] = SimpleQueue()
        self._awaited = 0
        self._is_closed = False
        self.is_exhausted = False
        threading.Thread(target=self._run, name="lora-worker-rows", daemon=True).start()

    def take(self, count: int, *, wait_seconds: float) -> list[Any]:
        """Up to `count` rows: those that come within the time. Raises what the iterable raises."""
        if count > self._awaited:
            self._may_read.release(count - self._awaited)
            self._awaited = count
        taken: list[Any] = []
        end = time.monotonic() + wait_seconds
        while len(taken) < count and not self.is_exhausted:
            try:
                found = self._read.get(timeout=max(0.0, end - time.monotonic()))
            except Empty:
                break
            if isinstance(found, _Row):
                self._awaited -= 1
                taken.append(found.row)
                continue
            self.is_exhausted = True
            if found.error is not None:
                raise found.error
        return taken

    def close(self) -> None:
        """Read no more; a row that is being waited for is not waited for."""
        self._is_closed = True
        self._may_read.release()

    def _run(self) -> None:
        while True:
            self._may_read.acquire()
            if self._is_closed:
                return
            try:
                self._read.put(_Row(next(self._rows)))
            except StopIteration:
                self._read.put(_End(None))
                return
            except BaseException as error:
                self._read.put(_End(error))
                return
