"""When the paced engine's rows start and end."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable

from lora_worker.engine.blocks import BlockManager
from lora_worker.engine.draining import Spared
from lora_worker.engine.scheduler import Scheduler
from lora_worker.errors import (
    EngineStoppedError,
    InvalidRequestError,
    LoraWorkerError,
    RequestWithdrawnError,
    TimeLimitError,
    raiser,
)
from lora_worker.testing.adapters import PacedAdapters
from lora_worker.testing.rows import POISON, Row


class RowSchedule:
    """Waiting and running rows, in the order of the real engine's scheduler. One thread starts and ends them.

    Whoever calls holds the same lock, `changed`.
    """

    def __init__(
        self, adapters: PacedAdapters, *, max_running: int, max_wait_seconds: float, tokens_per_second: float
    ) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.rows: dict[str, Row] = {}
        self.generated_tokens = 0
        self._adapters = adapters
        self._scheduler = Scheduler(
            # A block a row, and the one for each that must be left: the cache is never what is short.
            BlockManager(2 * max_running, 1),
            adapters,
            start=lambda row, spared: self._start(self.rows[row.request_id], spared),
            stop=lambda row: adapters.release(row.adapter.digest) if row.adapter else None,
            max_running=max_running,
            max_prefill_tokens=1,
            max_wait_seconds=max_wait_seconds,
        )
        self._tokens_per_second = tokens_per_second
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="paced-engine", daemon=True)
        self._thread.start()

    @property
    def running(self) -> list[Row]:
        return [self.rows[row.request_id] for row in self._scheduler.running]

    @property
    def waiting_count(self) -> int:
        return len(self._scheduler.waiting)

    def add(self, row: Row) -> None:
        with self.changed:
            if self._is_closing:
                raise EngineStoppedError("the engine has stopped and takes no requests")
            if row.request_id in self.rows:
                raise InvalidRequestError(f"a request with the id {row.request_id!r} is running; give each its own")
            self.rows[row.request_id] = row
            self._scheduler.add(row)
            self.changed.notify_all()

    def fail(self, error: LoraWorkerError, is_meant: Callable[[Row], bool]) -> None:
        """End the rows that are meant, waiting or running, with the error."""
        with self.changed:
            for row in [row for row in self.rows.values() if is_meant(row)]:
                self._fail_row(row, error)

    def close(self) -> None:
        with self.changed:
            self._is_closing = True
            self.fail(EngineStoppedError("the engine was stopped before the request had ended"), lambda _: True)
            self.changed.notify_all()
        self._thread.join()

    def check_integrity(self) -> None:
        self._scheduler.check_integrity()
        self._adapters.check_integrity(self._scheduler.held())
        scheduled = {row.request_id for row in self._scheduler.rows()}
        assert scheduled == set(self.rows), f"rows are lost: {scheduled ^ set(self.rows)}"

    # ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with self.changed:
            while not self._is_closing:
                self._end_rows()
                self._scheduler.admit()
                wake_at = min((row.ends_at for row in self.running), default=None)
                self.changed.wait(None if wake_at is None else max(0.0, wake_at - time.monotonic()))

    def _end_rows(self) -> None:
        now = time.monotonic()
        for row in [row for row in self.running if row.ends_at <= now]:
            if POISON in row.text:
                os.kill(os.getpid(), signal.SIGKILL)
            if row.is_over_time(now):
                self._fail_row(row, TimeLimitError(f"the request ran longer than {row.time_limit_seconds} s"))
                continue
            self._remove(row)
            self.generated_tokens += row.max_tokens
            row.done(row.answer)

    def _start(self, row: Row, spared: Spared) -> bool:
        """As the real engine's. A row whose adapter is being loaded takes its place, and waits there."""
        ready_at = now = time.monotonic()
        if row.adapter_name is not None:
            reference = self._adapters.registry.get(row.adapter_name)
            try:
                loaded_at = self._adapters.prepare(reference, spared)
            except LoraWorkerError as error:
                self._fail_row(row, error)
                return False
            if loaded_at is None:
                return False
            ready_at = max(now, loaded_at)
        if row.may_start is not None and not row.may_start():
            self._fail_row(row, RequestWithdrawnError(f"the request {row.request_id} was withdrawn in time"))
            return False
        if row.adapter_name is not None:
            row.adapter = reference
            self._adapters.hold(reference.digest)
        row.started_at = now
        tokens = 1 if POISON in row.text else row.max_tokens
        row.ends_at = min(ready_at + tokens / self._tokens_per_second, now + (row.time_limit_seconds or math.inf))
        if row.on_started is not None:
            row.on_started()
        return True

    def _fail_row(self, row: Row, error: LoraWorkerError) -> None:
        self._remove(row)
        row.done(raiser(error))

    def _remove(self, row: Row) -> None:
        del self.rows[row.request_id]
        row.is_finished = True
        self._scheduler.remove(row)
        self.changed.notify_all()
