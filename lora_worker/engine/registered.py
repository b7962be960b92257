"""What a fleet's registry asks of the engine: to read an adapter, and to follow what is registered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lora_worker.adapters.reference import AdapterReference, check_name
from lora_worker.adapters.source import portable_path, resolve_task_path
from lora_worker.adapters.status import adapter_here
from lora_worker.messages import AdapterOnWorker
from lora_worker.settings import Settings

if TYPE_CHECKING:
    from lora_worker.engine.core import EngineCore
    from lora_worker.engine.thread import EngineThread


class RegisteredAdapters:
    """Any thread but the engine's may use it."""

    def __init__(self, core: EngineCore, thread: EngineThread, settings: Settings) -> None:
        self._core = core
        self._thread = thread
        self._settings = settings

    def references(self) -> dict[str, AdapterReference]:
        """All that are registered here, by name."""
        return {reference.name: reference for reference in self._core.adapters.registry}

    def read(self, lora_name: str, lora_path: str, *, pinned: bool) -> AdapterReference:
        """Read and check an adapter that a task names, and register nothing; the path must lie under a root."""
        check_name(lora_name)
        roots = self._settings.adapter_roots
        folder = resolve_task_path(lora_name, lora_path, roots, allow_hub=self._settings.allow_hub)
        loaded = self._core.adapters.planner.load(lora_name, folder)
        return loaded.reference(pinned=pinned, lora_path=portable_path(lora_path, folder, roots))

    def apply(self, changes: Mapping[str, AdapterReference | None]) -> None:
        """Register these names with this content, or no more for None; between two steps, all at once.

        Waiting rows of a name that goes fail; rows that start from now on use the new content.
        """
        self._thread.call(lambda: self._apply(changes))

    def here(self) -> dict[str, dict[str, Any]]:
        """By name, where the weights are on this worker; those that are nowhere, for no reason, are left out."""
        return {name: here.model_dump() for name, here in self._thread.call(self._here).items()}

    def _apply(self, changes: Mapping[str, AdapterReference | None]) -> None:
        adapters = self._core.adapters
        for name, reference in changes.items():
            if reference is not None:
                adapters.register_reference(reference)
            else:
                self._core.unload(name, force=True)

    def _here(self) -> dict[str, AdapterOnWorker]:
        adapters = self._core.adapters
        places = (adapters.cache, adapters.pool, adapters.errors)
        return {
            reference.name: adapter_here(adapters, reference.digest)
            for reference in adapters.registry
            if any(reference.digest in place for place in places)
        }
