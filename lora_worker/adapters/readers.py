"""Reads of registered adapters from their folders, beside generation."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from lora_worker.adapters.host_adapter import HostAdapter
from lora_worker.adapters.plan import AdapterPlanner
from lora_worker.adapters.reference import AdapterReference
from lora_worker.adapters.statistics import Durations
from lora_worker.errors import AdapterError

READS_AT_ONCE = 8
STALLED_SECONDS = 2.0
MAX_THREADS = 64
READ_AGAIN_SECONDS = 1.0
CLOSE_SECONDS = 1.0

logger = logging.getLogger(__name__)


class _Read(NamedTuple):
    reference: AdapterReference
    thread: threading.Thread
    started: float

    @property
    def is_stalled(self) -> bool:
        return time.monotonic() - self.started >= STALLED_SECONDS


class AdapterReaders:
    """Reads, each on a thread of its own. Used by the engine thread, but for `read`, which any thread may call.

    A read may never end (a share that hangs), and nothing can stop its thread. So one that has taken STALLED_SECONDS no
    longer counts among the READS_AT_ONCE, and delays the requests of its own adapter alone. An adapter is read once at
    a time, and MAX_THREADS bounds those that hang: beyond them nothing is read until one has ended.

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
        self._reads: dict[str, _Read] = {}  # by digest
        self._read_after: dict[str, float] = {}  # by digest, of what failed a moment ago

    def coming(self) -> list[AdapterReference]:
        """What is being read, but for what has stalled."""
        return [read.reference for read in self._reads.values() if not read.is_stalled]

    def read(self, reference: AdapterReference) -> HostAdapter:
        """The weights of a registered adapter; InvalidAdapterError where its files have changed."""
        adapter = self._planner.load(reference.name, self._locate(reference)).adapter
        reference.check_digest(adapter.digest)
        return adapter

    def can_start(self, digest: str) -> bool:
        if digest in self._reads or time.monotonic() < self._read_after.get(digest, 0):
            return False
        return len(self.coming()) < READS_AT_ONCE and len(self._reads) < MAX_THREADS

    def start(self, reference: AdapterReference) -> None:
        """Read on a thread of its own."""
        thread = threading.Thread(target=self._run, args=(reference,), name="adapter-reader", daemon=True)
        thread.start()
        self._reads[reference.digest] = _Read(reference, thread, time.monotonic())

    def close(self) -> None:
        """Let reads that are about to end do so; what hangs is left behind."""
        until = time.monotonic() + CLOSE_SECONDS
        for read in self._reads.values():
            read.thread.join(max(0.0, until - time.monotonic()))

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
        self._reads.pop(adapter.digest)
        self._read_after.pop(adapter.digest, None)
        self._durations.add(seconds)
        self._on_read(adapter)

    def _failed(self, digest: str, error: AdapterError) -> None:
        self._reads.pop(digest)
        now = time.monotonic()
        self._read_after = {other: after for other, after in self._read_after.items() if after > now}
        self._read_after[digest] = now + READ_AGAIN_SECONDS
        logger.error("An adapter is not served: %s", error)
        self._on_failed(digest, error)
