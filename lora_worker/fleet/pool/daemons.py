"""Threads that never hold up the end of the process."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


class DaemonThreads:
    """Runs functions in the order they come, on as many threads as they need, up to `most`.

    Unlike concurrent.futures' pool, whose threads the interpreter waits for: one that stores a result waits for Redis
    as long as Redis is away, and a worker must end all the same. What it was to store is delivered again.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._functions: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.RLock()  # a signal handler may come in between, on the same thread
        self._unfinished = 0
        self._started = 0

    @property
    def unfinished(self) -> int:
        """Functions that run or wait."""
        return self._unfinished

    @property
    def free(self) -> int:
        """How many more functions would run at once."""
        return max(0, self._most - self._unfinished)

    def submit(self, function: Callable[[], None]) -> None:
        with self._lock:
            self._unfinished += 1
            if self._started < min(self._unfinished, self._most):
                threading.Thread(target=self._run, name=f"{self._name}-{self._started}", daemon=True).start()
                self._started += 1
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
