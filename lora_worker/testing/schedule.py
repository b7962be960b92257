"""When the paced engine's rows start and end."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable

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
    """Waiting and running rows. One thread starts and ends them; whoever calls holds the same lock, `changed`.

    Rows start by priority, then arrival; one whose adapter is on its way, or finds every slot held, lets later ones
    pass.
    """

    def __init__(self, adapters: PacedAdapters, *, max_running: int, tokens_per_second: float) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.waiting: list[Row] = []
        self.running: dict[str, Row] = {}
        self.generated_tokens = 0
        self._adapters = adapters
        self._max_running = max_running
        self._tokens_per_second = tokens_per_second
        self._ids: set[str] = set()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="paced-engine", daemon=True)
        self._thread.start()

    def add(self, row: Row) -> None:
        with self.changed:
            if self._is_closing:
                raise EngineStoppedError("the engine has stopped and takes no requests")
            if row.request_id in self._ids:
                raise InvalidRequestError(f"a request with the id {row.request_id!r} is running; give each its own")
            self._ids.add(row.request_id)
            self.waiting.append(row)
            self.waiting.sort(key=lambda other: other.priority)  # stable: within one, arrival decides
            self.changed.notify_all()

    def fail(self, error: LoraWorkerError, is_meant: Callable[[Row], bool]) -> None:
        """End the rows that are meant, waiting or running, with the error."""
        with self.changed:
            for row in [row for row in (*self.waiting, *self.running.values()) if is_meant(row)]:
                self._fail_row(row, error)

    def close(self) -> None:
        with self.changed:
            self._is_closing = True
            self.fail(EngineStoppedError("the engine was stopped before the request had ended"), lambda _: True)
            self.changed.notify_all()
        self._thread.join()

    def check_integrity(self) -> None:
        self._adapters.check_integrity(Counter(row.adapter.digest for row in self.running.values() if row.adapter))
        assert len(self.running) <= self._max_running, f"{len(self.running)} rows run"
        assert self._ids == {row.request_id for row in (*self.waiting, *self.running.values())}, "rows are lost"

    # ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with self.changed:
            while not self._is_closing:
                self._end_rows()
                wake_at = min([*self._start_rows(), *(row.ends_at for row in self.running.values())], default=None)
                self.changed.wait(None if wake_at is None else max(0.0, wake_at - time.monotonic()))

    def _end_rows(self) -> None:
        now = time.monotonic()
        for row in [row for row in self.running.values() if row.ends_at <= now]:
            if POISON in row.text:
                os.kill(os.getpid(), signal.SIGKILL)
            if row.is_over_time:
                self._fail_row(row, TimeLimitError(f"the request ran longer than {row.time_limit_seconds} s"))
                continue
            self._remove(row)
            self.generated_tokens += row.tokens
            row.done(row.answer)

    def _start_rows(self) -> set[float]:
        """Start what can start; returns when the adapters will be there that rows wait for."""
        loads: set[float] = set()
        not_ready: set[str | None] = set()
        for row in list(self.waiting):
            if len(self.running) >= self._max_running:
                break
            if row.adapter_name in not_ready:
                continue
            try:
                ready_at = self._prepare(row)
            except LoraWorkerError as error:
                self._fail_row(row, error)
                continue
            if ready_at <= time.monotonic():
                self._start(row)
                continue
            not_ready.add(row.adapter_name)
            if ready_at < math.inf:
                loads.add(ready_at)
        return loads

    def _prepare(self, row: Row) -> float:
        """When the row may start; infinity where it waits for a slot that others hold."""
        if row.adapter_name is None:
            return 0.0
        ready_at = self._adapters.prepare(self._adapters.registry.get(row.adapter_name))
        return math.inf if ready_at is None else ready_at

    def _start(self, row: Row) -> None:
        if row.may_start is not None and not row.may_start():
            self._fail_row(row, RequestWithdrawnError(f"the request {row.request_id} was withdrawn in time"))
            return
        self.waiting.remove(row)
        self.running[row.request_id] = row
        if row.adapter_name is not None:
            row.adapter = self._adapters.registry.get(row.adapter_name)
            self._adapters.hold(row.adapter.digest)
        row.started_at = time.monotonic()
        tokens = 1 if POISON in row.text else row.tokens
        row.ends_at = row.started_at + min(tokens / self._tokens_per_second, row.time_limit_seconds or math.inf)
        if row.on_started is not None:
            row.on_started()

    def _fail_row(self, row: Row, error: LoraWorkerError) -> None:
        self._remove(row)
        row.done(raiser(error))

    def _remove(self, row: Row) -> None:
        self._ids.remove(row.request_id)
        if row.request_id not in self.running:
            self.waiting.remove(row)
            return
        del self.running[row.request_id]
        if row.adapter is not None:
            self._adapters.release(row.adapter.digest)
        self.changed.notify_all()
