"""What an engine does with adapters when it is asked to."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lora_worker.adapters.reference import check_name
from lora_worker.adapters.registry import was_not
from lora_worker.adapters.source import resolve_operator_path, resolve_task_path
from lora_worker.adapters.status import adapter_status
from lora_worker.errors import AdapterTimeoutError
from lora_worker.settings import Settings

if TYPE_CHECKING:
    from lora_worker.engine.core import EngineCore
    from lora_worker.engine.thread import EngineThread


class AdapterMethods:
    """The part of `Engine` that is about adapters. Any thread but the engine's may call it."""

    settings: Settings
    worker_name: str
    _core: EngineCore
    _thread: EngineThread

    def load_lora_adapter(
        self,
        lora_name: str,
        lora_path: str | None,
        *,
        pinned: bool = False,
        replace: bool = False,
        within_roots: bool = False,
    ) -> dict[str, Any]:
        """Read, check and register an adapter, beside what runs.

        Returns `{success, lora_name, report, loaded_adapters}`. `within_roots` binds the path to `adapter_roots`, as
        a task's is.
        """
        check_name(lora_name)
        roots = self.settings.adapter_roots
        if within_roots:
            folder = resolve_task_path(lora_name, str(lora_path), roots, allow_hub=self.settings.allow_hub)
        else:
            folder = resolve_operator_path(lora_name, lora_path, roots, allow_hub=self.settings.allow_hub)
        loaded = self._core.adapters.planner.load(lora_name, folder)
        self._thread.call(lambda: self._core.adapters.register(loaded, pinned=pinned, replace=replace))
        return {
            "success": True,
            "lora_name": lora_name,
            "report": asdict(loaded.report),
            "loaded_adapters": self.loaded_adapters(),
        }

    def unload_lora_adapter(
        self, lora_name: str, *, force: bool = False, timeout_seconds: float | None = None
    ) -> dict[str, Any]:
        """Hide the name at once, let rows that run finish, free the memory, return. Waiting rows of the name fail.

        A pinned adapter needs `force`. AdapterTimeoutError where rows still run after `timeout_seconds`; the name
        stays gone all the same, and the memory comes back with the last of them.
        """

        check_name(lora_name)

        def unload() -> tuple[bool, Future[None]]:
            return self._core.unload(lora_name, force=force), self._core.drained(lora_name)

        was_loaded, drained = self._thread.call(unload)
        try:
            drained.result(timeout_seconds)
        except TimeoutError:
            raise AdapterTimeoutError(
                f"the adapter {lora_name!r} is unloaded, but rows that use it still run after {timeout_seconds} s; "
                f"its memory comes back when they end"
            ) from None
        result: dict[str, Any] = {"success": True, "loaded_adapters": self.loaded_adapters()}
        return result if was_loaded else result | {"message": was_not(lora_name, "loaded")}

    def pin_lora_adapter(self, lora_name: str) -> dict[str, Any]:
        """Keep the adapter in a slot; AdapterConflictError where no slot would stay unpinned."""
        adapters = self._core.adapters
        reference = adapters.registry.get(check_name(lora_name))
        is_cached = self._thread.call(lambda: reference.digest in adapters.cache)
        weights = None if is_cached else adapters.read_again(reference)
        self._thread.call(lambda: adapters.pin(lora_name, weights))
        return {"success": True, "loaded_adapters": self.loaded_adapters()}

    def unpin_lora_adapter(self, lora_name: str) -> dict[str, Any]:
        """Let the adapter be evicted again; succeeds, and says so, where it wasn't pinned."""
        check_name(lora_name)
        was_pinned = self._thread.call(lambda: self._core.adapters.unpin(lora_name))
        result: dict[str, Any] = {"success": True, "loaded_adapters": self.loaded_adapters()}
        return result if was_pinned else result | {"message": was_not(lora_name, "pinned")}

    def list_lora_adapters(self) -> dict[str, Any]:
        """Per adapter: source, digest, rank, bytes, pinned, and where its weights are on this worker."""
        return self._thread.call(lambda: adapter_status(self._core.adapters, self.worker_name))

    def loaded_adapters(self) -> dict[str, str]:
        """`{name: path}` of the registered adapters."""
        return self._core.adapters.registry.loaded()
