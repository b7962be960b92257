"""The adapter-management tasks. Each may run twice without harm."""

from __future__ import annotations

from typing import Any

from celery import shared_task

from lora_worker.fleet.task import LoraTask, checked
from lora_worker.messages import (
    LIST_LORA_ADAPTERS,
    LOAD_LORA_ADAPTER,
    PIN_LORA_ADAPTER,
    UNLOAD_LORA_ADAPTER,
    UNPIN_LORA_ADAPTER,
)


@shared_task(name=LOAD_LORA_ADAPTER, base=LoraTask, bind=True, typing=False)
@checked
def load_lora_adapter(
    self: LoraTask, lora_name: str, lora_path: str, pinned: bool = False, replace: bool = False
) -> dict[str, Any]:
    """Load an adapter from a folder under `adapter_roots`, for all workers."""
    return self.registry.load_lora_adapter(lora_name, lora_path, pinned=pinned, replace=replace)


@shared_task(name=UNLOAD_LORA_ADAPTER, base=LoraTask, bind=True, typing=False)
@checked
def unload_lora_adapter(
    self: LoraTask, lora_name: str, force: bool = False, timeout_seconds: int | float | None = None
) -> dict[str, Any]:
    """Unload an adapter once the rows that run with it have ended, on all workers."""
    return self.registry.unload_lora_adapter(lora_name, force=force, timeout_seconds=timeout_seconds)


@shared_task(name=PIN_LORA_ADAPTER, base=LoraTask, bind=True, typing=False)
@checked
def pin_lora_adapter(self: LoraTask, lora_name: str) -> dict[str, Any]:
    """Keep an adapter in a slot, on all workers."""
    return self.registry.pin_lora_adapter(lora_name)


@shared_task(name=UNPIN_LORA_ADAPTER, base=LoraTask, bind=True, typing=False)
@checked
def unpin_lora_adapter(self: LoraTask, lora_name: str) -> dict[str, Any]:
    """Let an adapter be evicted again."""
    return self.registry.unpin_lora_adapter(lora_name)


@shared_task(name=LIST_LORA_ADAPTERS, base=LoraTask, bind=True, typing=False)
@checked
def list_lora_adapters(self: LoraTask) -> dict[str, Any]:
    """Every loaded adapter, and where its weights are on each worker."""
    return self.registry.list_lora_adapters()
