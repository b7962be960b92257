"""The thread that owns the engine's core, and how others have something done on it."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from lora_worker.engine.core import EngineCore
from lora_worker.errors import EngineStoppedError, GenerationError

logger = logging.getLogger(__name__)

T = TypeVar("T")

# While rows wait for a read or for time to pass, the engine looks again this often.
IDLE_LOOK_SECONDS = 0.05
FAILED_STEPS_TO_GIVE_UP = 3


class Inbox(queue.SimpleQueue[Callable[[], None]]):
    """Functions to run on the engine's thread, between two steps."""


class EngineThread:
    """Runs the inbox and the core's steps in turn until it is closed."""

    def __init__(self, core: EngineCore, inbox: Inbox, *, on_broken: Callable[[], None]) -> None:
        self._core = core
        self._inbox = inbox
        self._on_broken = on_broken
        self._failed_steps = 0
        self._drift = ""
        self._is_closing = False
        self._closing_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def post(self, action: Callable[[], None]) -> None:
        """Run a function on the thread, some time."""
        self._inbox.put(action)

    def call(self, function: Callable[[], T], timeout_seconds: float | None = None) -> T:
        """Run a function on the thread and return what it returns; TimeoutError where that takes too long."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        # With the lock, nothing is posted behind the thread's back when it has looked for the last time.
        with self._closing_lock:
            if self._is_closing:
                raise EngineStoppedError("the engine has stopped")
            self.post(run)
        return future.result(timeout_seconds)

    def close(self) -> None:
        """End the thread; rows that have not ended fail with EngineStoppedError."""
        with self._closing_lock:
            self._is_closing = True
            self.post(self._fail_all)
        self._thread.join()

    def _run(self) -> None:
        progressed = True
        while not (self._is_closing and self._inbox.empty()):
            self._take_inbox(wait=not (progressed and self._core.has_rows))
            try:
                progressed = self._core.step()
                self._failed_steps = 0
            except Exception as error:
                self._failed_steps += 1
                logger.exception("A step failed.")
                self._fail_running(error)

    def _fail_running(self, error: Exception) -> None:
        """Fail the rows that ran; after several such steps in a row, hand everything back, for the device is broken."""
        if self._failed_steps < FAILED_STEPS_TO_GIVE_UP:
            sentence = f"a step failed with {type(error).__name__}: {str(error)[:200]}"
            for sequence in list(self._core.scheduler.running):
                self._core.fail(sequence, GenerationError(sentence))
            return
        logger.critical("%d steps in a row have failed; the engine gives up.", self._failed_steps)
        self._fail_all()
        if self._failed_steps == FAILED_STEPS_TO_GIVE_UP:
            self._on_broken()

    def _take_inbox(self, *, wait: bool) -> None:
        if wait and not self._core.has_rows:
            self._check_integrity()
        try:
            # With no rows at all nothing can happen until something is posted.
            timeout = IDLE_LOOK_SECONDS if self._core.has_rows else None
            action = self._inbox.get(timeout=timeout) if wait else self._inbox.get_nowait()
            while True:
                self._run_action(action)
                action = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _check_integrity(self) -> None:
        """Between two bursts of work, when nobody waits for it: a count that has drifted is told at once, and once."""
        drift = ""
        try:
            self._core.check_integrity()
        except AssertionError as error:
            drift = str(error)
            if drift != self._drift:
                logger.critical("A count has drifted, which is a fault of lora-worker; restart this worker: %s", drift)
        self._drift = drift

    def _run_action(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:
            logger.exception("Something posted to the engine failed; the engine goes on.")

    def _fail_all(self) -> None:
        for sequence in self._core.rows:
            self._core.fail(sequence, EngineStoppedError("the engine was stopped before the request had ended"))
