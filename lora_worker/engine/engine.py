"""The engine without Celery: one thread runs it, any thread may ask it.

Who wants something done on the engine's thread posts a function to its inbox. Checking and tokenizing happen on a
second thread, reading adapters on others, so a step is never held up by them.
"""

from __future__ import annotations

import logging
import socket
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

from lora_worker.adapters.status import pool_info
from lora_worker.engine.adapter_methods import AdapterMethods
from lora_worker.engine.building import build
from lora_worker.engine.registered import RegisteredAdapters
from lora_worker.engine.requests import RequestOptions, RequestReader
from lora_worker.engine.responses import ResponseWriter
from lora_worker.engine.sequence import Finished
from lora_worker.engine.thread import EngineThread, Inbox
from lora_worker.errors import (
    EngineStoppedError,
    GenerationError,
    LoraWorkerError,
    raiser,
)
from lora_worker.settings import LoraPath, Settings

logger = logging.getLogger(__name__)

# Called on any thread: the response of a finished row, or its error raised.
Outcome = Callable[[], dict[str, Any]]

PINNED_LOOK_SECONDS = 0.05
INFO_TIMEOUT_SECONDS = 1.0


class Engine(AdapterMethods):
    """Serves one base model and its adapters.

    Raises SettingsError, UnsupportedModelError or InvalidAdapterError, each with one sentence, where it can't start.
    `on_broken` is called once, on the engine's thread, where several steps in a row have failed and it has given up.
    An adapter of `lora_paths` that can't be loaded stops the start if it is pinned, and is logged and left out if not.
    """

    def __init__(
        self, settings: Settings, *, worker_name: str | None = None, on_broken: Callable[[], None] = lambda: None
    ) -> None:
        self.settings = settings
        inbox = Inbox()
        built = build(settings, inbox.put)
        self._core = built.core
        self._loaded = built.loaded
        self._reader = RequestReader(
            built.loaded.tokenizer,
            base_name=settings.base_name,
            vocabulary=built.loaded.model.config.get_text_config().vocab_size,
            eos_ids=built.loaded.eos_ids,
            max_model_len=built.max_model_len,
            check_adapter=self._core.adapters.registry.get,
        )
        self.worker_name = worker_name or socket.gethostname()
        self._writer = ResponseWriter(
            built.loaded.tokenizer, base_name=settings.base_name, worker_name=self.worker_name
        )
        self._tokenizing = ThreadPoolExecutor(1, "engine-tokenizer")
        self._is_closing = False
        self._last_info: dict[str, Any] = {}
        self._thread = EngineThread(self._core, inbox, on_broken=on_broken)
        # For a fleet, whose registry is in Redis; it goes past the registry that the methods here change.
        self.registered = RegisteredAdapters(self._core, self._thread, settings)
        try:
            self._load_configured()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Generation ----------------------------------------------------------------------------------

    def generate(
        self, requests: Sequence[Mapping[str, Any]], *, return_exceptions: bool = False
    ) -> list[dict[str, Any] | BaseException]:
        """Run request bodies, as of the generate task, and return their responses in the same order.

        The first row that failed raises its error once all rows have ended; with `return_exceptions` every row's error
        stands in its place.
        """
        futures: list[Future[Outcome]] = []
        for body in requests:
            future: Future[Outcome] = Future()
            self.submit(body, future.set_result)
            futures.append(future)
        results: list[dict[str, Any] | BaseException] = []
        for future in futures:
            try:
                results.append(future.result()())
            except LoraWorkerError as error:
                results.append(error)
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors and not return_exceptions:
            raise errors[0]
        return results

    def submit(
        self,
        body: Mapping[str, Any],
        done: Callable[[Outcome], None],
        *,
        request_id: str | None = None,
        priority: int = 0,
        time_limit_seconds: float | None = None,
        may_start: Callable[[], bool] | None = None,
        on_started: Callable[[], None] | None = None,
    ) -> str:
        """Run one request; returns its id at once and calls `done` once, on a thread of the engine, when it has ended.

        `done` must not block and must not call the outcome, which decodes; another thread does. `may_start` is asked on
        the engine's thread when the first row of the request is about to start; the time limit counts from then, for
        all of them. Lower priorities go first.
        """
        identity = request_id or uuid.uuid4().hex

        def finished(ends: list[Finished]) -> None:
            done(lambda: self._respond(ends))

        options = RequestOptions(
            identity, finished, priority, time_limit_seconds, may_start, on_started, time.monotonic()
        )
        try:
            self._tokenizing.submit(self._read, body, options, done)
        except RuntimeError:  # the executor has been shut down
            done(raiser(EngineStoppedError("the engine has stopped and takes no requests")))
        return identity

    def cancel(self, request_id: str) -> None:
        """Take a request out wherever it is; its outcome raises RequestWithdrawnError. Nothing happens if it ended."""
        # By way of the tokenizer, so that a row that is just being read is found.
        try:
            self._tokenizing.submit(self._thread.post, lambda: self._core.cancel(request_id))
        except RuntimeError:
            return

    # State ---------------------------------------------------------------------------------------

    def info(self) -> dict[str, Any]:
        """Pool, rows and counters; while a long step runs, those of the last time it was asked."""
        try:
            self._last_info = self._thread.call(self._make_info, timeout_seconds=INFO_TIMEOUT_SECONDS)
        except (TimeoutError, EngineStoppedError):
            logger.debug("The engine is busy; the figures are those of the last time.")
        return self._last_info

    def check_integrity(self) -> None:
        """Raise AssertionError where a count of rows, blocks or slots has drifted."""
        self._thread.call(self._core.check_integrity)

    def close(self) -> None:
        """Stop; rows that have not ended fail with EngineStoppedError."""
        if self._is_closing:
            return
        self._is_closing = True
        self._tokenizing.shutdown(wait=True)
        self._thread.close()
        self._core.adapters.close()
        self._loaded.attention.close()

    # ---------------------------------------------------------------------------------------------

    def _load_configured(self) -> None:
        for entry in self.settings.lora_paths:
            self._load_entry(entry)
        while not self._thread.call(self._core.adapters.are_pinned_ready):
            time.sleep(PINNED_LOOK_SECONDS)

    def _load_entry(self, entry: LoraPath) -> None:
        try:
            self.load_lora_adapter(entry.lora_name, entry.lora_path, pinned=entry.pinned)
        except LoraWorkerError as error:
            if entry.pinned:
                raise
            logger.error("The adapter %r of lora_paths is left out: %s", entry.lora_name, error)

    def _read(self, body: Mapping[str, Any], options: RequestOptions, done: Callable[[Outcome], None]) -> None:
        try:
            sequence = self._reader.read(body, options)
        except LoraWorkerError as error:
            done(raiser(error))
        except Exception as error:
            logger.exception("Reading the request %s failed.", options.request_id)
            done(raiser(GenerationError(f"the request could not be read: {type(error).__name__}")))
        else:
            self._thread.post(lambda: self._core.add(sequence))

    def _respond(self, ends: list[Finished]) -> dict[str, Any]:
        for end in ends:
            if end.error is not None:
                raise end.error
        try:
            return self._writer.write(ends)
        except Exception as error:
            logger.exception("The answer of %s could not be written.", ends[0].sequence.request_id)
            raise GenerationError(f"the answer could not be written: {type(error).__name__}") from error

    def _make_info(self) -> dict[str, Any]:
        scheduler = self._core.scheduler
        return {
            "model": self.settings.base_name,
            "device": str(self._loaded.model.device),
            "dtype": str(self._loaded.model.dtype).removeprefix("torch."),
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "steps": self._core.steps,
            "generated_tokens": self._core.generated_tokens,
            "preemptions": scheduler.preemptions,
            "kv_tokens": scheduler.blocks.count * scheduler.blocks.block_size,
            "kv_tokens_free": scheduler.blocks.free_count * scheduler.blocks.block_size,
            "pool": pool_info(self._core.adapters, self.settings.lora_eviction_policy),
        }
