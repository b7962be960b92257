"""An engine that generates at a fixed pace."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from lora_worker.adapters.source import resolve_operator_path
from lora_worker.errors import (
    LoraWorkerError,
    RequestWithdrawnError,
    raiser,
)
from lora_worker.messages import parse_generate
from lora_worker.settings import Settings
from lora_worker.testing.adapters import PacedAdapters, read_reference
from lora_worker.testing.registered import PacedRegistered
from lora_worker.testing.rows import Outcome, Row
from lora_worker.testing.schedule import RowSchedule


class PacedEngine:
    """The doors of `lora_worker.engine.Engine`, as far as a worker uses them; see there for what each does."""

    def __init__(
        self,
        settings: Settings,
        *,
        worker_name: str | None = None,
        on_broken: Callable[[], None] = lambda: None,  # noqa: ARG002 - part of the signature; this engine never breaks
    ) -> None:
        self.settings = settings
        self.worker_name = worker_name or socket.gethostname()
        self._adapters = PacedAdapters(settings, float(os.environ.get("PACED_LOAD_SECONDS", "0.1")))
        self._rows = RowSchedule(
            self._adapters,
            max_running=settings.running_limit("cpu"),
            max_wait_seconds=settings.max_wait_seconds,
            tokens_per_second=float(os.environ.get("PACED_TOKENS_PER_SECOND", "100")),
        )
        for entry in settings.lora_paths:
            folder = resolve_operator_path(entry.lora_name, entry.lora_path, settings.adapter_roots)
            self._adapters.register(read_reference(entry.lora_name, folder, pinned=entry.pinned))
        self.registered = PacedRegistered(self._adapters, self._rows, settings)

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
        identity = request_id or uuid.uuid4().hex
        try:
            request = parse_generate(body)
            name = None if request.model in (None, self.settings.base_name) else request.model
            if name is not None:
                self._adapters.registry.get(name)
            row = Row(
                identity,
                request,
                done,
                adapter_name=name,
                priority=priority,
                time_limit_seconds=time_limit_seconds,
                may_start=may_start,
                on_started=on_started,
            )
            row.model, row.worker = name or self.settings.base_name, self.worker_name
            self._rows.add(row)
        except LoraWorkerError as error:
            done(raiser(error))
        return identity

    def cancel(self, request_id: str) -> None:
        error = RequestWithdrawnError(f"the request {request_id} was cancelled")
        self._rows.fail(error, lambda row: row.request_id == request_id)

    def close(self) -> None:
        self._rows.close()

    def info(self) -> dict[str, Any]:
        with self._rows.changed:
            return {
                "model": self.settings.base_name,
                "device": "paced",
                "running": len(self._rows.running),
                "waiting": self._rows.waiting_count,
                "generated_tokens": self._rows.generated_tokens,
                "pool": self._adapters.info(),
            }

    def check_integrity(self) -> None:
        with self._rows.changed:
            self._rows.check_integrity()
