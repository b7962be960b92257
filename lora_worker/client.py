"""The Python client: sends tasks, returns Celery results, imports no torch."""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

from celery import Celery
from celery.result import AsyncResult
from kombu.entity import Exchange, Queue

from lora_worker.batch.flight import FREED_SECONDS, Flight
from lora_worker.batch.stream import MAX_IN_FLIGHT, BatchResult, run_rows

# Celery raises a task's error as its own class where this module has been imported.
from lora_worker.errors import BatchError
from lora_worker.fleet.configuration import common_configuration
from lora_worker.fleet.keys import Keys
from lora_worker.fleet.revoked import IDS_A_CALL, write_revoked
from lora_worker.fleet.routing import queue_for
from lora_worker.messages import (
    GENERATE,
    LIST_LORA_ADAPTERS,
    LOAD_LORA_ADAPTER,
    PIN_LORA_ADAPTER,
    UNLOAD_LORA_ADAPTER,
    UNPIN_LORA_ADAPTER,
)
from lora_worker.settings import Settings

# How `apply_async` options are told from the fields of a request's body.
OPTIONS = ("task_id", "priority", "expires", "time_limit", "soft_time_limit", "countdown", "eta", "link", "link_error")


class Client:
    """Sends work to the workers on one Redis.

    Args:
        redis_url: the workers' Redis; `redis_url` of the settings where it is left out.
        queue_prefix, partitions: the workers' settings of these names.
    """

    def __init__(
        self, redis_url: str | None = None, *, queue_prefix: str | None = None, partitions: int | None = None
    ) -> None:
        given = {"redis_url": redis_url, "queue_prefix": queue_prefix, "partitions": partitions}
        settings = Settings(**{name: value for name, value in given.items() if value is not None})
        self.app = Celery("lora_worker.client", set_as_current=False)
        self.app.conf.update(common_configuration(settings))
        self._keys = Keys(settings.queue_prefix, settings.partitions)
        self._lease_seconds = settings.lease_seconds
        self._base_name = settings.base_name if settings.model or settings.served_model_name else None

    def generate(self, **body: Any) -> AsyncResult:
        """Generate text: an OpenAI completions or chat body, `model` an adapter's name.

        Beside the body's fields it takes Celery's task_id, priority, expires, time_limit, soft_time_limit, countdown,
        eta, link and link_error. The result is the OpenAI object, or one of `lora_worker.errors` raised by `.get()`.
        """
        options = {name: body.pop(name) for name in OPTIONS if name in body}
        return self._send(GENERATE, body, **options)

    def load_lora_adapter(
        self, lora_name: str, lora_path: str, *, pinned: bool = False, replace: bool = False
    ) -> AsyncResult:
        """Load an adapter from a folder under the workers' `adapter_roots`."""
        return self._send(
            LOAD_LORA_ADAPTER,
            {"lora_name": lora_name, "lora_path": lora_path, "pinned": pinned, "replace": replace},
        )

    def unload_lora_adapter(
        self, lora_name: str, *, force: bool = False, timeout_seconds: float | None = None
    ) -> AsyncResult:
        """Unload an adapter; a pinned one needs `force`."""
        return self._send(
            UNLOAD_LORA_ADAPTER, {"lora_name": lora_name, "force": force, "timeout_seconds": timeout_seconds}
        )

    def pin_lora_adapter(self, lora_name: str) -> AsyncResult:
        """Keep an adapter in its slot."""
        return self._send(PIN_LORA_ADAPTER, {"lora_name": lora_name})

    def unpin_lora_adapter(self, lora_name: str) -> AsyncResult:
        """Let an adapter be evicted again."""
        return self._send(UNPIN_LORA_ADAPTER, {"lora_name": lora_name})

    def list_lora_adapters(self) -> AsyncResult:
        """Every loaded adapter, and where its weights are."""
        return self._send(LIST_LORA_ADAPTERS, {})

    def cancel(self, *task_ids: str) -> None:
        """Revoke tasks, queued or running: also those that only a worker which starts later will see."""
        remember = self.app.conf.result_expires
        write_revoked(self.app.backend.client, self._keys, task_ids, remember_seconds=remember)
        for first in range(0, len(task_ids), IDS_A_CALL):
            self.app.control.revoke(list(task_ids[first : first + IDS_A_CALL]), terminate=True)

    def batch(self, rows: Iterable[Any], *, max_in_flight: int = MAX_IN_FLIGHT) -> Iterator[BatchResult]:
        """Generate for any number of rows, and yield each row's result as it is ready.

        A row is a request body, or an object in OpenAI's batch form. Rows are taken from the iterable, on a thread of
        its own, as room comes up, `max_in_flight` at a time, so a slow consumer holds up the producer and memory stays
        flat; among those that are there, rows of one adapter are sent together. A row that fails yields its error.
        Leaving the loop early revokes what is in flight. Raises BatchError where `max_in_flight` is less than 1.
        """
        if max_in_flight < 1:
            raise BatchError(f"max_in_flight is {max_in_flight}; it must be at least 1")
        return run_rows(rows, self.flight(str(uuid.uuid4())), max_in_flight=max_in_flight)

    def flight(self, job: str) -> Flight:
        """What `batch` and the batch command send by; `job` is a UUID."""
        return Flight(
            self.app,
            job,
            self._keys,
            queue_of=self.queue_of,
            cancel=self.cancel,
            freed_seconds=max(FREED_SECONDS, math.ceil(2 * self._lease_seconds)),
        )

    def queue_of(self, model: Any, task: str = GENERATE) -> Queue:
        """The queue of a model's requests (None: the bare base), or of another task."""
        name = queue_for(task, model, self._keys, base_name=self._base_name)
        return Queue(name, exchange=Exchange(""), routing_key=name)

    def close(self) -> None:
        """Give the connections back."""
        self.app.close()

    def _send(self, name: str, kwargs: dict[str, Any], **options: Any) -> AsyncResult:
        # Celery would put the arguments into the message a second time, in clear, for logs and events to show.
        queue = self.queue_of(kwargs.get("model"), name)
        return self.app.send_task(name, kwargs=kwargs, queue=queue, argsrepr="", kwargsrepr="", **options)
