"""An engine that generates at a fixed pace."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from lora_worker.adapters.reference import check_name
from lora_worker.adapters.source import resolve_operator_path, resolve_task_path
from lora_worker.errors import (
    AdapterTimeoutError,
    LoraWorkerError,
    RequestWithdrawnError,
    UnknownAdapterError,
)
from lora_worker.messages import parse_generate
from lora_worker.settings import Settings
from lora_worker.testing.adapters import PacedAdapters, read_reference
from lora_worker.testing.rows import Outcome, Row, raiser
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
            tokens_per_second=float(os.environ.get("PACED_TOKENS_PER_SECOND", "100")),
        )
        for entry in settings.lora_paths:
            self.load_lora_adapter(entry.lora_name, entry.lora_path, pinned=entry.pinned)

    # Generation ----------------------------------------------------------------------------------

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
            row = Row(identity, request, name, done, priority, time_limit_seconds, may_start, on_started)
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

    # Adapters ------------------------------------------------------------------------------------

    def load_lora_adapter(
        self,
        lora_name: str,
        lora_path: str | None,
        *,
        pinned: bool = False,
        replace: bool = False,
        within_roots: bool = False,
    ) -> dict[str, Any]:
        check_name(lora_name)
        roots = self.settings.adapter_roots
        folder = (
            resolve_task_path(lora_name, str(lora_path), roots)
            if within_roots
            else resolve_operator_path(lora_name, lora_path, roots)
        )
        reference = read_reference(lora_name, folder, pinned=pinned)
        with self._rows.changed:
            self._adapters.register(reference, replace=replace)
        return {"lora_name": lora_name, "report": asdict(reference.report), **self._success()}

    def unload_lora_adapter(
        self, lora_name: str, *, force: bool = False, timeout_seconds: float | None = None
    ) -> dict[str, Any]:
        with self._rows.changed:
            removed = self._adapters.unregister(check_name(lora_name), force=force)
            if removed is not None:
                error = UnknownAdapterError(f"the adapter {lora_name!r} was unloaded before the request started")
                self._rows.fail(error, lambda row: row.adapter_name == lora_name and row.adapter is None)
            rows = {row.request_id for row in self._rows.running.values() if row.adapter_name == lora_name}
            if not self._rows.changed.wait_for(lambda: not rows & set(self._rows.running), timeout_seconds):
                raise AdapterTimeoutError(f"rows that use the adapter {lora_name!r} run after {timeout_seconds} s")
        result = self._success()
        return result if removed else result | {"message": f"the adapter {lora_name!r} was not loaded"}

    def pin_lora_adapter(self, lora_name: str) -> dict[str, Any]:
        with self._rows.changed:
            self._adapters.check_pin(lora_name, self._adapters.registry.get(check_name(lora_name)).digest)
            self._adapters.registry.set_pinned(lora_name, pinned=True)
        return self._success()

    def unpin_lora_adapter(self, lora_name: str) -> dict[str, Any]:
        registry = self._adapters.registry
        with self._rows.changed:
            was_pinned = check_name(lora_name) in registry and registry.get(lora_name).pinned
            if was_pinned:
                registry.set_pinned(lora_name, pinned=False)
        return self._success() if was_pinned else self._success() | {"message": f"{lora_name!r} was not pinned"}

    def list_lora_adapters(self) -> dict[str, Any]:
        with self._rows.changed:
            return self._adapters.status(self.worker_name)

    def loaded_adapters(self) -> dict[str, str]:
        return self._adapters.registry.loaded()

    # State ---------------------------------------------------------------------------------------

    def info(self) -> dict[str, Any]:
        with self._rows.changed:
            return {
                "model": self.settings.base_name,
                "device": "paced",
                "running": len(self._rows.running),
                "waiting": len(self._rows.waiting),
                "generated_tokens": self._rows.generated_tokens,
                "pool": self._adapters.info(),
            }

    def check_integrity(self) -> None:
        with self._rows.changed:
            self._rows.check_integrity()

    # ---------------------------------------------------------------------------------------------

    def _success(self) -> dict[str, Any]:
        return {"success": True, "loaded_adapters": self.loaded_adapters()}
