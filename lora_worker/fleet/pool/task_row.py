"""A generate task on its way through the engine, as Celery sees it."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from celery.states import FAILURE, READY_STATES
from celery.worker import state

from lora_worker.errors import GenerationError
from lora_worker.fleet.connection import REDIS_ERRORS
from lora_worker.fleet.pool.generate_message import GenerateMessage
from lora_worker.fleet.pool.results import ForeignMessageError, finished, result_of

if TYPE_CHECKING:
    from lora_worker.engine import Engine
    from lora_worker.engine.engine import Outcome
    from lora_worker.fleet.membership.member import Held
    from lora_worker.fleet.pool.request import FleetRequest

logger = logging.getLogger(__name__)

RETRY_SECONDS = (0.2, 5.0)  # the first wait while Redis is away, and the longest


class Owner(Protocol):
    """What a row asks of the pool it belongs to."""

    engine: Engine

    @property
    def is_stopping(self) -> bool: ...

    def run_later(self, function: Callable[[], None]) -> None:
        """Run a function on a finisher thread."""

    def note_started(self, row: TaskRow) -> None:
        """The row starts; for a suspect, Redis knows when this returns. Called on the engine's thread."""

    def is_own(self, row: TaskRow) -> bool:
        """Whether its message is this worker's; waits until that is certain."""

    def held(self, row: TaskRow) -> Held | None:
        """By what Redis knows whether its message is this worker's; None where it can't be asked any more."""

    def forget(self, row: TaskRow) -> None:
        """The row has ended."""


class TaskRow:
    """A generate task in the engine. Celery keeps a weak reference to it and calls `terminate`.

    Args:
        request: Celery's request; copies of the message that come while the row runs are attached to it.
        run_trace: runs Celery's trace of the task, and then what it is given, with the trace's outcome.
    """

    def __init__(
        self,
        pool: Owner,
        request: FleetRequest,
        message: GenerateMessage,
        *,
        run_trace: Callable[[Callable[..., None]], None],
    ) -> None:
        self.task_id: str = request.id
        self.message = message
        self.adapter = message.adapter
        self.is_started = False
        self.begun_at: int | None = None
        self.arrived_at = time.monotonic()
        self._pool = pool
        self._requests = [request]
        self._run_trace = run_trace
        # Reentrant, since an engine may call `on_done` from within its `submit`.
        self._lock = threading.RLock()
        self._is_starting = False
        self._is_accepted = False
        self._is_finished = False
        self._started_at = 0.0

    @property
    def time_limit_seconds(self) -> float | None:
        return min((limit for limit in (self.message.soft_limit, self.message.hard_limit) if limit), default=None)

    @property
    def tag(self) -> str:
        """Of the message it runs for. A copy that came while it ran may have been claimed with a newer registry."""
        return self._requests[0].tag

    @property
    def tags(self) -> list[str]:
        """Of the message and its copies."""
        return [request.tag for request in self._requests]

    def attach(self, request: FleetRequest) -> bool:
        """Let a copy of the message share the answer; False where that has just been given out."""
        with self._lock:
            if not self._is_finished:
                self._requests.append(request)
            return not self._is_finished

    def submit(self, submit: Callable[[], Any]) -> None:
        """Give it to the engine, unless it was withdrawn before it came to that."""
        with self._lock:
            if not self._is_finished:
                submit()

    def may_start(self) -> bool:
        """Whether the task is still wanted: not handed back, revoked or expired."""
        with self._lock:
            if self._is_finished:
                return False
            self._is_starting = True
        request = self._requests[0]
        if request.id in state.revoked or request.maybe_expire():
            return False
        self._pool.note_started(self)
        return True

    def on_started(self) -> None:
        self._started_at = time.monotonic()
        self.is_started = True
        self._pool.run_later(self._accept)

    def on_done(self, outcome: Outcome) -> None:
        with self._lock:
            self._is_starting = True  # and has ended: its message can't be handed back any more
        self._pool.run_later(lambda: self._finish(outcome))

    def terminate(self, signal: int | None = None) -> None:  # noqa: ARG002 - Celery's signature; there is no process
        """Celery revokes or cancels the task; a cold shutdown does so from within a signal handler.

        The thread that it interrupts may hold a lock that the engine's door needs, so another knocks there.
        """
        self._pool.run_later(lambda: self._pool.engine.cancel(self.task_id))

    def withdraw(self) -> list[str]:
        """Take a row that has not started out of the engine; returns the tags of its messages, for another to run.

        Nothing happens where it has started or ended: no tags.
        """
        with self._lock:
            if self._is_starting or self._is_finished:
                return []
            self._is_finished = True
        return self._leave()

    def abandon(self) -> None:
        """Take a row out of the engine, started or not: its message is another worker's by now.

        Copies may be this worker's, and go back to the front of their queues, to be run anew.
        """
        with self._lock:
            if self._is_finished:
                return
            self._is_finished = True
        self._leave()
        for copy in self._requests[1:]:
            copy.give_back()

    def has_result(self) -> bool:
        """Whether the task's result is stored already; asks Redis."""
        request = self._requests[0]
        return request.task.backend.get_state(self.task_id) in READY_STATES

    def acknowledge(self) -> None:
        """End a task whose result is there."""
        self._end(_acknowledge)

    def _leave(self) -> list[str]:
        self._pool.forget(self)
        # Outside of the lock: an engine may ask `may_start` under its own.
        self._pool.engine.cancel(self.task_id)
        for request in self._requests:
            request.let_go()
        return self.tags

    def _accept(self) -> None:
        # Celery counts a task as active from here, and must have done so before it is told that the task is ready.
        with self._lock:
            if not self._is_accepted:
                self._requests[0].on_accepted(os.getpid(), self._started_at)
                self._is_accepted = True

    def _finish(self, outcome: Outcome) -> None:
        """Give the outcome to Celery, again and again while Redis is away."""
        if self._is_finished:
            return
        wait, longest = RETRY_SECONDS
        while True:
            if not self._pool.is_own(self):
                self.abandon()
                return
            try:
                self._tell_celery(outcome)
                return
            except ForeignMessageError:
                logger.warning("The row of %s was another worker's by now; its answer is not stored.", self.task_id)
                self.abandon()
                return
            except REDIS_ERRORS as error:
                if self._pool.is_stopping:
                    break
                logger.warning("Redis gives no help (%s); the answer of %s waits %.1f s.", error, self.task_id, wait)
                time.sleep(wait)
                wait = min(2 * wait, longest)
            except Exception:
                logger.exception("The task %s could not be finished; it goes back to its queue.", self.task_id)
                self._end(_give_back)
                return
        self._end(lambda _: None)  # the worker ends, and then gives back all that it has

    def _tell_celery(self, outcome: Outcome) -> None:
        try:
            self._trace(outcome)
        except REDIS_ERRORS:
            raise
        except Exception as error:
            logger.exception("Celery could not finish the task %s, which fails.", self.task_id)
            sentence = f"the answer of {self.task_id} could not be given to Celery ({type(error).__name__}: {error})"
            self._requests[0].task.backend.store_result(self.task_id, GenerationError(sentence), FAILURE)
            self.acknowledge()

    def _trace(self, outcome: Outcome) -> None:
        if self.is_started:
            self._accept()
        result = result_of(outcome, self.message.soft_limit, self.message.hard_limit)
        if result is None:
            # Revoked or expired: Celery stores that and acknowledges. Cancelled by a shutdown: the message goes back.
            self._end(lambda request: None if request.revoked() else request.give_back())
            return
        with finished(result, self._run_seconds, lambda: self._pool.held(self)):
            self._run_trace(self._tell_requests)

    def _tell_requests(self, traced: tuple[Any, Any, float]) -> None:
        """Celery's callback with the real run time, and without the answer, which events would show."""
        failed, value, _ = traced
        runtime = self._run_seconds
        self._end(lambda request: request.on_success((failed, value if failed else "", runtime)))

    def _end(self, settle: Callable[[FleetRequest], None]) -> None:
        """No copy can be attached from now on. The row is worked on until all its messages are settled."""
        with self._lock:
            self._is_finished = True
        try:
            for request in self._requests:
                settle(request)
        finally:
            self._pool.forget(self)

    @property
    def _run_seconds(self) -> float:
        return time.monotonic() - self._started_at if self.is_started else 0.0


def _acknowledge(request: FleetRequest) -> None:
    request.acknowledge()
    request.let_go()


def _give_back(request: FleetRequest) -> None:
    request.give_back()
