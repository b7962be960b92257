"""The paced engine's side of the fleet's registry; see `lora_worker.engine.registered`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lora_worker.adapters.reference import AdapterReference, check_name
from lora_worker.adapters.registry import unloaded_adapter
from lora_worker.adapters.source import portable_path, resolve_task_path
from lora_worker.settings import Settings
from lora_worker.testing.adapters import PacedAdapters, read_reference
from lora_worker.testing.schedule import RowSchedule


class PacedRegistered:
    def __init__(self, adapters: PacedAdapters, rows: RowSchedule, settings: Settings) -> None:
        self._adapters = adapters
        self._rows = rows
        self._roots = settings.adapter_roots

    def references(self) -> dict[str, AdapterReference]:
        return {reference.name: reference for reference in self._adapters.registry}

    def read(self, lora_name: str, lora_path: str, *, pinned: bool) -> AdapterReference:
        folder = resolve_task_path(check_name(lora_name), lora_path, self._roots)
        found = read_reference(lora_name, folder, pinned=pinned)
        return replace(found, lora_path=portable_path(lora_path, folder, self._roots))

    def apply(self, changes: Mapping[str, AdapterReference | None]) -> None:
        with self._rows.changed:
            for name, reference in changes.items():
                if reference is not None:
                    self._adapters.register(reference)
                    continue
                self._adapters.unregister(name)
                error = unloaded_adapter(name)
                self._rows.fail(error, lambda row, name=name: row.adapter_name == name and row.adapter is None)  # type: ignore[misc]
            self._rows.changed.notify_all()

    def here(self) -> dict[str, dict[str, Any]]:
        with self._rows.changed:
            found = {reference.name: self._adapters.here(reference.digest) for reference in self._adapters.registry}
        return {name: here.model_dump() for name, here in found.items() if here.resident or here.error}
