"""Engines in the test's own process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from lora_worker.engine import Engine
from lora_worker.settings import Settings


@contextmanager
def engines(model: Path, **common: Any) -> Iterator[Callable[..., Engine]]:
    """Makes engines in float64 on the CPU, where the settings given don't say otherwise; they end with the block."""
    with ExitStack() as made:

        def make(**settings: Any) -> Engine:
            given = {"model": model, "dtype": "float64", "device": "cpu", **common, **settings}
            return made.enter_context(Engine(Settings(**given)))

        yield make
