"""A Celery worker that serves many LoRA adapters over one base model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lora_worker.client import Client

__all__ = ["Client"]


def __getattr__(name: str) -> Any:
    # Imported on first use, so that the engine can be used where Celery is not wanted.
    if name == "Client":
        from lora_worker.client import Client

        return Client
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
