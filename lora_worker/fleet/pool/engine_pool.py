"""Celery's pool as the engine's front: a generation occupies no thread.

A generate task goes to the engine from Celery's loop, which may not be held up, and comes back by a callback. Celery's
own trace then runs on a finisher thread with the finished answer as the task's body, so results, links, retries,
signals and events are Celery's as ever, and the acknowledgement follows the stored result. All other tasks run on
threads of their own, so that an unload that waits for rows to end holds up no answer and no other task.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from celery.concurrency.base import BasePool, apply_target
from celery.worker import state

from lora_worker.errors import EngineStoppedError, LoraWorkerError
from lora_worker.fleet.membership.member import Held, current_member
from lora_worker.fleet.pool.daemons import DaemonThreads
from lora_worker.fleet.pool.generate_message import read_message
from lora_worker.fleet.pool.pool_in_fleet import PoolInFleet
from lora_worker.fleet.pool.request import FleetRequest
from lora_worker.fleet.pool.results import ForeignMessageError
from lora_worker.fleet.pool.task_row import TaskRow
from lora_worker.fleet.registry.joining import join_registry
from lora_worker.fleet.registry.registry import FleetRegistry
from lora_worker.settings import Settings

if TYPE_CHECKING:
    from lora_worker.engine import Engine

logger = logging.getLogger(__name__)

FINISHER_THREADS = 8
# Most of them wait, for rows to end or for other workers. No more tasks are claimed than there are threads left.
MANAGEMENT_THREADS = 64
DRAIN_LOOK_SECONDS = 0.05
CLOSE_SECONDS = 5.0

# Called with the settings, the worker's name, and what to call when the engine gives up.
MakeEngine = Callable[..., Any]

_current: list[EnginePool] = []


def current_registry() -> FleetRegistry:
    """The fleet's registry, as this worker process has it; EngineStoppedError where no engine runs."""
    if not _current:
        raise EngineStoppedError("the engine of this worker has stopped, or the task runs outside of a worker")
    return _current[-1].registry


def start_engine(settings: Settings, *, worker_name: str | None, on_broken: Callable[[], None]) -> Engine:
    """The engine of a worker that serves; torch is imported here and not before."""
    from transformers.utils.logging import disable_progress_bar

    from lora_worker.engine import Engine

    disable_progress_bar()  # a log is no terminal
    return Engine(settings, worker_name=worker_name, on_broken=on_broken)


class EnginePool(BasePool):
    """The pool that `worker_pool` names; `limit` is the rows that run and those claimed ahead of them."""

    body_can_be_buffer = True
    signal_safe = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rows: dict[str, TaskRow] = {}
        self._managed: set[FleetRequest] = set()
        self._finishers = DaemonThreads(FINISHER_THREADS, "finisher")
        self._managers = DaemonThreads(MANAGEMENT_THREADS, "management")
        self._is_draining = False
        self._is_stopping = False
        self.engine: Engine
        self.fleet: PoolInFleet
        self.registry: FleetRegistry

    def on_start(self) -> None:
        self._does_debug = False  # Celery would log every task's arguments at DEBUG
        settings: Settings = self.app.lora_settings
        _, worker_name = self.options.get("initargs") or (None, None)
        logger.info("Loading %s.", settings.model)
        try:
            self.engine = self.app.make_lora_engine(settings, worker_name=worker_name, on_broken=_end_worker)
        except LoraWorkerError as error:
            logger.critical("lora-worker cannot start: %s", error)
            raise SystemExit(1) from None
        _current.append(self)
        member = current_member()
        assert member is not None, "the pool starts in a worker only"
        member.on_refused = _refuse
        self.fleet = PoolInFleet(self, member)
        self.registry = join_registry(
            member,
            self.engine.registered,
            worker_name=self.engine.worker_name,
            rows=lambda: self.rows,
            cancel=self._cancel,
        )
        member.join()
        self.registry.start()

    def on_apply(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        callback: Any = None,
        accept_callback: Callable[..., Any] | None = None,
        timeout: float | None = None,
        soft_timeout: float | None = None,
        **_: Any,
    ) -> TaskRow | None:
        name, task_id, message = args[:3]
        # `callback` is a method of the request, which alone knows of revocation and expiry.
        request: FleetRequest = callback.__self__
        if not getattr(self.app.tasks.get(name), "runs_in_engine", False):
            self._manage(request, lambda: apply_target(target, args, kwargs, callback, accept_callback))
            return None
        running = self._rows.get(task_id)
        if running is not None and running.attach(request):
            logger.warning("A copy of the running task %s was delivered; it shares the answer.", task_id)
            return running
        read = read_message(
            request,
            message,
            base_name=self.app.lora_settings.base_name,
            soft_limit=soft_timeout,
            hard_limit=timeout,
        )

        def run_trace(done: Callable[..., None]) -> None:
            apply_target(target, args, kwargs, done, propagate=ForeignMessageError)

        row = TaskRow(self, request, read, run_trace=run_trace)
        self._rows[task_id] = row
        self.fleet.admit(row)
        return row

    def submit(self, row: TaskRow) -> None:
        """Give a row to the engine, once that knows what the fleet's registry says of its adapter."""
        self.registry.reconciler.admit(row.adapter, lambda: row.submit(lambda: self._submit(row)))

    def _submit(self, row: TaskRow) -> None:
        self.engine.submit(
            row.message.body,
            lambda outcome: row.on_done(self.registry.explained(row.adapter, outcome)),
            request_id=row.task_id,
            priority=row.message.priority,
            time_limit_seconds=row.time_limit_seconds,
            may_start=row.may_start,
            on_started=row.on_started,
        )

    def _cancel(self, task_id: str) -> None:
        row = self._rows.get(task_id)
        if row is not None:
            row.terminate()

    def terminate_job(self, pid: int, signal: int | None = None) -> None:
        """Nothing: Celery calls the row's own `terminate` too, and there is no process to signal."""

    def on_stop(self) -> None:
        """Warm shutdown: hand back what has not started, let rows finish for `drain_seconds`, hand back the rest."""
        self._is_draining = True
        self.fleet.drain()
        end = time.monotonic() + self.app.lora_settings.drain_seconds
        logger.info("Draining: %d rows run.", len(self._rows))
        while (self._rows or self._managers.unfinished) and time.monotonic() < end:
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
            self.registry.stop()
            # A moment for what the engine has just failed; with Redis away it is left, and its messages come again.
            end = time.monotonic() + CLOSE_SECONDS
            while (self._finishers.unfinished or self._managers.unfinished) and time.monotonic() < end:
                time.sleep(DRAIN_LOOK_SECONDS)
            self.fleet.leave()

    def _manage(self, request: FleetRequest, run: Callable[[], None]) -> None:
        """Run a task on a thread of its own."""

        def manage() -> None:
            try:
                if not request.revoked():
                    run()
            finally:
                self._managed.discard(request)

        self._managed.add(request)
        self._managers.submit(manage)

    def _get_info(self) -> dict[str, Any]:
        return {
            "max-concurrency": self.limit,
            "rows": len(self._rows),
            "max-rows": self.row_limit,
            "lora": self.engine.info(),
        }

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    @property
    def is_stopping(self) -> bool:
        return self._is_stopping

    @property
    def row_limit(self) -> int:
        """How many rows run at once."""
        limit: int = self.app.lora_row_limit
        return limit

    @property
    def free_managers(self) -> int:
        """How many more management tasks would run at once."""
        return self._managers.free

    @property
    def rows(self) -> list[TaskRow]:
        return list(self._rows.values())

    @property
    def worked_on(self) -> set[str]:
        """The tags of all messages that something here works on."""
        tags = {tag for row in self.rows for tag in row.tags}
        return tags | {request.tag for request in list(self._managed)}

    @property
    def managed(self) -> int:
        """How many tasks that are no rows are in hand."""
        return len(self._managed)

    def run_later(self, function: Callable[[], None]) -> None:
        self._finishers.submit(function)

    def note_started(self, row: TaskRow) -> None:
        row.begun_at = self.registry.reconciler.generation
        self.fleet.note_started(row)

    def is_own(self, row: TaskRow) -> bool:
        return self.fleet.is_own(row)

    def held(self, row: TaskRow) -> Held | None:
        return self.fleet.held(row)

    def forget(self, row: TaskRow) -> None:
        if self._rows.get(row.task_id) is row:
            del self._rows[row.task_id]
            self.registry.reconciler.leaving.note_ended(row)
        self.fleet.ended(row)


def _end_worker() -> None:
    """Let Celery's loop end the worker as by a cold shutdown: everything goes back to the queue."""
    state.should_terminate = 1


def _refuse(sentence: str) -> None:
    """End the worker: this Redis, or the fleet on it, is none for it."""
    logger.critical("lora-worker cannot go on: %s", sentence)
    state.should_terminate = 1
