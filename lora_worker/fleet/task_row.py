"""A generate task on its way through the engine, as Celery sees it."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from billiard.exceptions import SoftTimeLimitExceeded, TimeLimitExceeded
from celery.worker import state
from kombu.exceptions import OperationalError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from lora_worker.errors import EngineStoppedError, LoraWorkerError, RequestWithdrawnError, TimeLimitError

if TYPE_CHECKING:
    from lora_worker.engine import Engine
    from lora_worker.engine.engine import Outcome

logger = logging.getLogger(__name__)

REDIS_ERRORS = (OperationalError, RedisConnectionError, RedisTimeoutError, ConnectionError)
RETRY_SECONDS = (0.2, 5.0)  # the first wait while Redis is away, and the longest


class _Finished(NamedTuple):
    """What the trace of a generate task returns or raises, and how long its row ran."""

    answer: Callable[[], Any]
    run_seconds: float


# By task id, while the trace runs.
_finished: dict[str, _Finished] = {}


def finished_answer(task_id: str) -> dict[str, Any]:
    """The body of every generate task: the answer that the engine has ready, or its error."""
    answer: dict[str, Any] = _finished[task_id].answer()
    return answer


def run_seconds(task_id: str) -> float | None:
    """How long the row of a task that is being finished ran."""
    return _finished[task_id].run_seconds if task_id in _finished else None


class Owner(Protocol):
    """What a row asks of the pool it belongs to."""

    engine: Engine

    @property
    def is_stopping(self) -> bool: ...

    def run_later(self, function: Callable[[], None]) -> None:
        """Run a function on a finisher thread."""

    def forget(self, row: TaskRow) -> None:
        """The row has ended."""


class TaskRow:
    """A generate task in the engine. Celery keeps a weak reference to it and calls `terminate`.

    Args:
        request: Celery's request; copies of the message that come while the row runs are attached to it.
        run_trace: runs Celery's trace of the task, and then what it is given, with the trace's outcome.
        soft_limit, hard_limit: seconds from admission.
    """

    def __init__(
        self,
        pool: Owner,
        request: Any,
        *,
        run_trace: Callable[[Callable[..., None]], None],
        soft_limit: float | None,
        hard_limit: float | None,
    ) -> None:
        self.task_id: str = request.id
        self.is_started = False
        self._pool = pool
        self._requests = [request]
        self._run_trace = run_trace
        self._soft_limit = soft_limit
        self._hard_limit = hard_limit
        self._lock = threading.Lock()
        self._is_accepted = False
        self._is_finished = False
        self._started_at = 0.0

    @property
    def time_limit_seconds(self) -> float | None:
        return min((limit for limit in (self._soft_limit, self._hard_limit) if limit), default=None)

    def attach(self, request: Any) -> bool:
        """Let a copy of the message share the answer; False where that has just been given out."""
        with self._lock:
            if not self._is_finished:
                self._requests.append(request)
            return not self._is_finished

    def may_start(self) -> bool:
        """Whether the task is still wanted: not revoked, not expired. No Redis here, the engine waits."""
        request = self._requests[0]
        return request.id not in state.revoked and not request.maybe_expire()

    def on_started(self) -> None:
        self._started_at = time.monotonic()
        self.is_started = True
        self._pool.run_later(self._accept)

    def on_done(self, outcome: Outcome) -> None:
        self._pool.run_later(lambda: self._finish(outcome))

    def terminate(self, signal: int | None = None) -> None:  # noqa: ARG002 - Celery's signature; there is no process
        """Celery revokes or cancels the task."""
        self._pool.engine.cancel(self.task_id)

    def _accept(self) -> None:
        # Celery counts a task as active from here, and must have done so before it is told that the task is ready.
        with self._lock:
            if not self._is_accepted:
                self._requests[0].on_accepted(os.getpid(), self._started_at)
                self._is_accepted = True

    def _finish(self, outcome: Outcome) -> None:
        """Give the outcome to Celery, again and again while Redis is away."""
        wait, longest = RETRY_SECONDS
        while True:
            try:
                self._tell_celery(outcome)
                return
            except REDIS_ERRORS as error:
                if self._pool.is_stopping:
                    break
                logger.warning("Redis is away (%s); the answer of %s waits %.1f s.", error, self.task_id, wait)
                time.sleep(wait)
                wait = min(2 * wait, longest)
            except Exception:
                logger.exception("The task %s could not be finished; it stays in the queue.", self.task_id)
                break
        self._take_requests()

    def _tell_celery(self, outcome: Outcome) -> None:
        if self.is_started:
            self._accept()
        result = self._result(outcome)
        if result is None:
            # Revoked or expired: Celery stores that and acknowledges. Cancelled by a shutdown: the message goes back.
            for request in self._take_requests():
                request.revoked()
            return
        _finished[self.task_id] = _Finished(result, self._run_seconds)
        try:
            self._run_trace(self._tell_requests)
        finally:
            del _finished[self.task_id]

    def _result(self, outcome: Outcome) -> Callable[[], Any] | None:
        """What the trace is to return or raise; None where the task ends without one."""
        try:
            answer = outcome()
        except (RequestWithdrawnError, EngineStoppedError):
            return None
        except TimeLimitError:
            if self._soft_limit and self._soft_limit <= (self._hard_limit or self._soft_limit):
                return _raiser(SoftTimeLimitExceeded(self._soft_limit))
            return _raiser(TimeLimitExceeded(self._hard_limit))
        except LoraWorkerError as error:
            return _raiser(error)
        return lambda: answer

    def _tell_requests(self, traced: tuple[Any, Any, float]) -> None:
        """Celery's callback with the real run time, and without the answer, which events would show."""
        failed, value, _ = traced
        runtime = self._run_seconds
        for request in self._take_requests():
            request.on_success((failed, value if failed else "", runtime))

    def _take_requests(self) -> list[Any]:
        """The row has ended: no copy can be attached from now on."""
        with self._lock:
            self._is_finished = True
        self._pool.forget(self)
        return self._requests

    @property
    def _run_seconds(self) -> float:
        return time.monotonic() - self._started_at if self.is_started else 0.0


def _raiser(error: Exception) -> Callable[[], Any]:
    def raise_error() -> Any:
        raise error

    return raise_error
