"""The engine: continuous batching of rows for different adapters over one base model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lora_worker.engine.engine import Engine

__all__ = ["Engine"]


def __getattr__(name: str) -> Any:
    # The scheduler and its like import no torch; importing this package must not either.
    if name == "Engine":
        from lora_worker.engine.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
