"""What the workers say before a batch: which adapters there are, how many slots and how many rows."""

from __future__ import annotations

from typing import Any, NamedTuple

from celery import Celery
from celery.exceptions import TimeoutError as ResultTimeoutError
from kombu.entity import Queue

from lora_worker.messages import LIST_LORA_ADAPTERS

ANSWER_SECONDS = 10.0
INSPECT_SECONDS = 3.0
# Where no worker says how many it has: the settings' defaults on a CPU.
DEFAULT_SLOTS = 8
DEFAULT_ROWS = 64
MOST_LANES = 64
# With fewer lines in flight than this for each row that can run, more adapters are sent than there are slots.
LINES_PER_ROW = 2


class Roster(NamedTuple):
    """Models that can be asked for (None: nobody answered), and the workers that answered with their slots and rows."""

    models: frozenset[str] | None
    workers: int
    slots: int
    rows: int

    @property
    def lane_count(self) -> int:
        """How many adapters to send side by side: half of the slots, so that a change of adapter finds a free one."""
        return min(max(1, self.most_models // 2), MOST_LANES)

    @property
    def most_models(self) -> int:
        """How many adapters may be in flight at a time, if that is enough lines: one for each slot."""
        return self.slots or DEFAULT_SLOTS

    @property
    def enough_lines(self) -> int:
        """How many lines in flight keep the workers busy: a second one behind each row that runs."""
        return LINES_PER_ROW * (self.rows or DEFAULT_ROWS)

    def is_unknown(self, model: str | None) -> bool:
        return model is not None and self.models is not None and model not in self.models


def ask_workers(
    app: Celery, living: list[str], listing_queue: Queue, *, wait_seconds: float = ANSWER_SECONDS
) -> Roster:
    """Ask the workers of these names; the one task that this sends expires with the wait."""
    if not living:
        return Roster(None, 0, 0, 0)
    stats: dict[str, Any] = app.control.inspect(destination=living, timeout=INSPECT_SECONDS).stats() or {}
    pools = [info.get("pool", {}) for info in stats.values()]
    engines = [pool.get("lora", {}) for pool in pools]
    slots = sum(int(engine.get("pool", {}).get("max_loras_per_batch", 0)) for engine in engines)
    rows = sum(int(pool.get("max-rows", 0)) for pool in pools)
    bases = {engine["model"] for engine in engines if engine.get("model")}
    if not bases:
        return Roster(None, 0, 0, 0)
    listing = app.send_task(LIST_LORA_ADAPTERS, queue=listing_queue, expires=wait_seconds)
    try:
        adapters = listing.get(timeout=wait_seconds)
    except ResultTimeoutError:
        return Roster(None, len(engines), slots, rows)
    finally:
        listing.forget()
    return Roster(frozenset(adapters) | bases, len(engines), slots, rows)
