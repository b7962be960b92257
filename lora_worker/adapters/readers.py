"""Reads of registered adapters from their folders, beside generation."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lora_worker.adapters.host_adapter import HostAdapter
from lora_worker.adapters.plan import AdapterPlanner
from lora_worker.adapters.reference import AdapterReference
from lora_worker.adapters.statistics import Durations
from lora_worker.errors import AdapterError

READER_THREADS = 2
READ_AGAIN_SECONDS = 1.0

logger = logging.getLogger(__name__)


class AdapterReaders:
    """Threads that read. Used by the engine thread, but for `read`, which any thread may call.

    Args:
        locate: the folder of a registered adapter.
        post: runs a function on the engine thread.
        on_read, on_failed: told there how a read ended; a digest that failed is not read again for a moment.
    """

    def __init__(
        self,
        planner: AdapterPlanner,
        durations: Durations,
        *,
        locate: Callable[[AdapterReference], Path],
        post: Callable[[Callable[[], None]], None],
        on_read: Callable[[HostAdapter], None],
        on_failed: Callable[[str, AdapterError], None],
    ) -> None:
        self._planner = planner
        self._durations = durations
        self._locate = locate
        self._post = post
        self._on_read = on_read
        self._on_failed = on_failed
        self._reading: set[str] = set()
        self._read_after: dict[str, float] = {}
        self._threads = ThreadPoolExecutor(READER_THREADS, "adapter-reader")

    @property
    def reading(self) -> int:
        """Reads that run or wait for a thread."""
        return len(self._reading)

    def read(self, reference: AdapterReference) -> HostAdapter:
        """The weights of a registered adapter; InvalidAdapterError where its files have changed."""
        adapter = self._planner.load(reference.name, self._locate(reference)).adapter
        reference.check_digest(adapter.digest)
        return adapter

    def can_start(self, digest: str) -> bool:
        return digest not in self._reading and time.monotonic() >= self._read_after.get(digest, 0)

    def start(self, reference: AdapterReference) -> None:
        """Read on a thread of their own."""
        self._reading.add(reference.digest)
        self._threads.submit(self._run, reference)

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _run(self, reference: AdapterReference) -> None:
        started = time.monotonic()
        try:
            adapter = self.read(reference)
        except AdapterError as error:
            failure = error
        except Exception as error:
            logger.exception("Reading the adapter %r failed.", reference.name)
            failure = AdapterError(f"the adapter {reference.name!r} could not be read: {type(error).__name__}")
        else:
            seconds = time.monotonic() - started
            self._post(lambda: self._done(adapter, seconds))
            return
        self._post(lambda: self._failed(reference.digest, failure))

    def _done(self, adapter: HostAdapter, seconds: float) -> None:
        self._reading.discard(adapter.digest)
        self._read_after.pop(adapter.digest, None)
        self._durations.add(seconds)
        self._on_read(adapter)

    def _failed(self, digest: str, error: AdapterError) -> None:
        self._reading.discard(digest)
        self._read_after[digest] = time.monotonic() + READ_AGAIN_SECONDS
        logger.error("An adapter is not served: %s", error)
        self._on_failed(digest, error)
