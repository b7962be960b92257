"""What the workers say before a batch: which adapters there are, and how many slots."""

from __future__ import annotations

from typing import Any, NamedTuple

from celery import Celery
from celery.exceptions import TimeoutError as ResultTimeoutError
from kombu.entity import Queue

from lora_worker.messages import LIST_LORA_ADAPTERS

ANSWER_SECONDS = 10.0
INSPECT_SECONDS = 3.0
# Where no worker says how many slots it has: the setting's default.
DEFAULT_SLOTS = 8
MOST_LANES = 64
# With fewer rows in flight than this for each worker, more adapters are sent than there are slots.
ENOUGH_ROWS = 256


class Roster(NamedTuple):
    """Models that can be asked for (None: nobody answered), the workers that answered, and their slots together."""

    models: frozenset[str] | None
    workers: int
    slots: int

    @property
    def lane_count(self) -> int:
        """How many adapters to send side by side: half of the slots, so that a change of adapter finds a free one."""
        return min(max(1, self.most_models // 2), MOST_LANES)

    @property
    def most_models(self) -> int:
        """How many adapters may be in flight at a time, if that is enough rows: one for each slot."""
        return self.slots or DEFAULT_SLOTS

    @property
    def enough_rows(self) -> int:
        return ENOUGH_ROWS * max(1, self.workers)

    def is_unknown(self, model: str | None) -> bool:
        return model is not None and self.models is not None and model not in self.models


def ask_workers(app: Celery, listing_queue: Queue, *, wait_seconds: float = ANSWER_SECONDS) -> Roster:
    """Ask whoever is there; the one task that this sends expires with the wait."""
    stats: dict[str, Any] = app.control.inspect(timeout=INSPECT_SECONDS).stats() or {}
    engines = [info.get("pool", {}).get("lora", {}) for info in stats.values()]
    slots = sum(int(engine.get("pool", {}).get("max_loras_per_batch", 0)) for engine in engines)
    bases = {engine["model"] for engine in engines if engine.get("model")}
    if not bases:
        return Roster(None, 0, 0)
    listing = app.send_task(LIST_LORA_ADAPTERS, queue=listing_queue, expires=wait_seconds)
    try:
        adapters = listing.get(timeout=wait_seconds)
    except ResultTimeoutError:
        return Roster(None, len(engines), slots)
    finally:
        listing.forget()
    return Roster(frozenset(adapters) | bases, len(engines), slots)
