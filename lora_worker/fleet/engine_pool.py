"""Celery's pool as the engine's front: a generation occupies no thread.

A generate task goes to the engine from Celery's loop, which may not be held up, and comes back by a callback. Celery's
own trace then runs on a finisher thread with the finished answer as the task's body, so results, links, retries,
signals and events are Celery's as ever, and the acknowledgement follows the stored result. All other tasks run on a
few threads of their own, so that an unload that waits for rows to end holds up no answer.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from billiard.exceptions import SoftTimeLimitExceeded, TimeLimitExceeded
from celery.concurrency.base import BasePool, apply_target
from celery.worker import state
from kombu.exceptions import OperationalError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from lora_worker.errors import EngineStoppedError, LoraWorkerError, RequestWithdrawnError, TimeLimitError
from lora_worker.settings import Settings

if TYPE_CHECKING:
    from lora_worker.engine import Engine
    from lora_worker.engine.engine import Outcome

logger = logging.getLogger(__name__)

FINISHER_THREADS = 8
MANAGEMENT_THREADS = 4
DRAIN_LOOK_SECONDS = 0.05
REDIS_ERRORS = (OperationalError, RedisConnectionError, RedisTimeoutError, ConnectionError)
RETRY_SECONDS = (0.2, 5.0)  # the first wait while Redis is away, and the longest


class _Finished(NamedTuple):
    """What the trace of a generate task returns or raises, and how long its row ran."""

    answer: Callable[[], Any]
    run_seconds: float


# By task id, while the trace runs.
_finished: dict[str, _Finished] = {}
_current: list[EnginePool] = []


def finished_answer(task_id: str) -> dict[str, Any]:
    """The body of every generate task: the answer that the engine has ready, or its error."""
    answer: dict[str, Any] = _finished[task_id].answer()
    return answer


def run_seconds(task_id: str) -> float | None:
    """How long the row of a task that is being finished ran."""
    return _finished[task_id].run_seconds if task_id in _finished else None


def current_engine() -> Engine:
    """The engine of this worker process; EngineStoppedError where none runs."""
    if not _current:
        raise EngineStoppedError("this process runs no engine; adapter tasks are for a worker with the engine pool")
    return _current[-1].engine


class EnginePool(BasePool):
    """The pool that `worker_pool` names; `limit` is the rows that run and those claimed ahead of them."""

    body_can_be_buffer = True
    signal_safe = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rows: dict[str, _Row] = {}
        self._finishers = ThreadPoolExecutor(FINISHER_THREADS, "finisher")
        self._managers = ThreadPoolExecutor(MANAGEMENT_THREADS, "management")
        self._is_stopping = False
        self.engine: Engine

    def on_start(self) -> None:
        from transformers.utils.logging import disable_progress_bar

        from lora_worker.engine import Engine

        disable_progress_bar()  # a log is no terminal
        settings: Settings = self.app.lora_settings
        _, worker_name = self.options.get("initargs") or (None, None)
        logger.info("Loading %s.", settings.model)
        try:
            self.engine = Engine(settings, worker_name=worker_name)
        except LoraWorkerError as error:
            logger.critical("The worker cannot start: %s", error)
            raise SystemExit(1) from None
        _current.append(self)

    def on_apply(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        callback: Callable[..., Any] | None = None,
        accept_callback: Callable[..., Any] | None = None,
        timeout: float | None = None,
        soft_timeout: float | None = None,
        **_: Any,
    ) -> _Row | None:
        name, task_id, message = args[:3]
        if not getattr(self.app.tasks.get(name), "runs_in_engine", False):
            self._managers.submit(apply_target, target, args, kwargs, callback, accept_callback)
            return None
        # `callback` is a method of the request, which alone knows of revocation and expiry.
        request = callback.__self__ if callback else None
        running = self._rows.get(task_id)
        if running is not None:
            logger.warning("A copy of the running task %s was delivered; it shares the answer.", task_id)
            running.requests.append(request)
            return running
        row = _Row(self, task_id, request, run_trace=lambda done: apply_target(target, args, kwargs, done))
        row.soft_limit, row.hard_limit = soft_timeout, timeout
        self._rows[task_id] = row
        limits = [limit for limit in (soft_timeout, timeout) if limit]
        self.engine.submit(
            body_of(message),
            row.on_done,
            request_id=task_id,
            priority=(message.get("delivery_info") or {}).get("priority") or 0,
            time_limit_seconds=min(limits, default=None),
            may_start=row.may_start,
            on_started=row.on_started,
        )
        return row

    def terminate_job(self, pid: int, signal: int | None = None) -> None:
        """Nothing: Celery calls the row's own `terminate` too, and there is no process to signal."""

    def on_stop(self) -> None:
        """Warm shutdown: hand back what has not started, let rows finish for `drain_seconds`, hand back the rest."""
        rows = list(self._rows.values())
        for row in rows:
            if not row.is_started:
                self.engine.cancel(row.task_id)
        end = time.monotonic() + self.app.lora_settings.drain_seconds
        logger.info("Draining: %d rows run, %d go back to the queue.", *_counts(rows))
        while self._rows and time.monotonic() < end:
            time.sleep(DRAIN_LOOK_SECONDS)
        if self._rows:
            logger.warning("%d rows did not finish within drain_seconds and go back to the queue.", len(self._rows))
        self._close()

    def on_terminate(self) -> None:
        """Cold shutdown: everything goes back to the queue."""
        self._close()

    def _close(self) -> None:
        self._is_stopping = True
        if self in _current:
            _current.remove(self)
            self.engine.close()
        self._finishers.shutdown(wait=True)
        self._managers.shutdown(wait=False, cancel_futures=True)

    def _get_info(self) -> dict[str, Any]:
        return {"max-concurrency": self.limit, "rows": len(self._rows), "lora": self.engine.info()}

    @property
    def is_stopping(self) -> bool:
        return self._is_stopping

    def run_later(self, function: Callable[[], None]) -> None:
        try:
            self._finishers.submit(function)
        except RuntimeError:
            logger.debug("The pool has stopped; what was to be finished stays in the queue.")

    def forget(self, task_id: str) -> None:
        self._rows.pop(task_id, None)


class _Row:
    """A generate task in the engine. Celery keeps a weak reference to it and calls `terminate`."""

    def __init__(
        self, pool: EnginePool, task_id: str, request: Any, *, run_trace: Callable[[Callable[..., None]], None]
    ) -> None:
        self.task_id = task_id
        self.requests = [request]
        self.soft_limit: float | None = None
        self.hard_limit: float | None = None
        self.is_started = False
        self._pool = pool
        self._run_trace = run_trace
        self._accept_lock = threading.Lock()
        self._is_accepted = False
        self._started_at = 0.0

    def may_start(self) -> bool:
        """Whether the task is still wanted: not revoked, not expired. No Redis here, the engine waits."""
        request = self.requests[0]
        return request.id not in state.revoked and not request.maybe_expire()

    def on_started(self) -> None:
        self.is_started = True
        self._started_at = time.monotonic()
        self._pool.run_later(self._accept)

    def on_done(self, outcome: Outcome) -> None:
        self._pool.run_later(lambda: self._finish(outcome))

    def terminate(self, signal: int | None = None) -> None:  # noqa: ARG002 - Celery's signature; there is no process
        """Celery revokes or cancels the task."""
        self._pool.engine.cancel(self.task_id)

    def _accept(self) -> None:
        # Celery counts a task as active from here, and must have done so before it is told that the task is ready.
        with self._accept_lock:
            if not self._is_accepted:
                self._is_accepted = True
                self.requests[0].on_accepted(os.getpid(), self._started_at)

    def _finish(self, outcome: Outcome) -> None:
        if self.is_started:
            self._accept()
        result = self._result(outcome)
        if result is None:
            return
        _finished[self.task_id] = _Finished(result, self._run_seconds)
        wait, longest = RETRY_SECONDS
        while True:
            try:
                self._run_trace(self._tell_requests)
                return
            except REDIS_ERRORS as error:
                logger.warning("Redis is away (%s); the answer of %s waits %.1f s.", error, self.task_id, wait)
            except Exception:
                logger.exception("The task %s could not be finished; it stays in the queue.", self.task_id)
                self._forget()
                return
            if self._pool.is_stopping:
                self._forget()
                return
            time.sleep(wait)
            wait = min(2 * wait, longest)

    def _result(self, outcome: Outcome) -> Callable[[], Any] | None:
        """What the trace is to return or raise; None where the task ends without one."""
        try:
            answer = outcome()
        except (RequestWithdrawnError, EngineStoppedError):
            # Revoked or expired: Celery stores that and acknowledges. Cancelled by a shutdown: the message goes back.
            for request in self.requests:
                request.revoked()
            self._forget()
            return None
        except TimeLimitError:
            is_soft = bool(self.soft_limit) and (not self.hard_limit or self.soft_limit <= self.hard_limit)
            limit = self.soft_limit if is_soft else self.hard_limit
            return _raiser(SoftTimeLimitExceeded(limit) if is_soft else TimeLimitExceeded(limit))
        except LoraWorkerError as error:
            return _raiser(error)
        except Exception as error:
            logger.exception("The answer of %s could not be written.", self.task_id)
            return _raiser(LoraWorkerError(f"the answer could not be written: {type(error).__name__}"))
        return lambda: answer

    def _tell_requests(self, traced: tuple[Any, Any, float]) -> None:
        """Celery's callback with the real run time, and without the answer, which events would show."""
        failed, value, _ = traced
        runtime = self._run_seconds
        self._forget()
        for request in self.requests:
            request.on_success((failed, value if failed else "", runtime))

    @property
    def _run_seconds(self) -> float:
        return time.monotonic() - self._started_at if self.is_started else 0.0

    def _forget(self) -> None:
        _finished.pop(self.task_id, None)
        self._pool.forget(self.task_id)


def body_of(message: dict[str, Any]) -> dict[str, Any]:
    """The body of a generate message; positional arguments are kept under a name that the check refuses."""
    positional = {"positional arguments": True} if message["args"] else {}
    return {**message["kwargs"], **positional}


def _raiser(error: Exception) -> Callable[[], Any]:
    def raise_error() -> Any:
        raise error

    return raise_error


def _counts(rows: list[_Row]) -> tuple[int, int]:
    started = sum(row.is_started for row in rows)
    return started, len(rows) - started
