"""Threads that never hold up the end of the process."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


class DaemonThreads:
    """Runs functions in the order they come on a few threads.

    Unlike concurrent.futures' pool, whose threads the interpreter waits for: one that stores a result waits for Redis
    as long as Redis is away, and a worker must end all the same. What it was to store is delivered again.
    """

    def __init__(self, count: int, name: str) -> None:
        self._functions: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.RLock()  # a signal handler may come in between, on the same thread
        self._unfinished = 0
        for i in range(count):
            threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True).start()

    @property
    def unfinished(self) -> int:
        """Functions that run or wait."""
        return self._unfinished

    def submit(self, function: Callable[[], None]) -> None:
        with self._lock:
            self._unfinished += 1
        self._functions.put(function)

    def _run(self) -> None:
        while True:
            function = self._functions.get()
            try:
                function()
            except BaseException:  # an end of the process is none of a function's here to call for
                logger.exception("A thread of the pool caught an error that nobody else did.")
            finally:
                with self._lock:
                    self._unfinished -= 1
