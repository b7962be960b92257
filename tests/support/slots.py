"""Slots and pages that only count, for the scheduler's tests."""

from __future__ import annotations

from collections.abc import Collection

from lora_worker.adapters.reference import AdapterReference, AdapterState, LoadReport
from lora_worker.engine.blocks import BlockManager
from lora_worker.engine.draining import Spared
from lora_worker.engine.scheduler import Scheduler
from lora_worker.engine.sequence import SamplingParams, Sequence

BLOCK = 4


class Slots:
    """Stands for the adapters. Each takes one page unless `sizes` says otherwise, and is cached unless it is `away`."""

    def __init__(self, slots: int = 100, pages: int | None = None) -> None:
        self.slots = slots
        self.total_pages = pages or slots
        self.sizes: dict[str, int] = {}
        self.aliases: dict[str, str] = {}  # other names of a content, which is called by one of its names
        self.away: set[str] = set()
        self.pinned_waiting: list[str] = []
        self.held: dict[str, int] = {}
        self.pinned: set[str] = set()
        self.fetched: list[str] = []
        self.urgent: list[str] = []
        self.loaded: list[str] = []
        self.started: list[str] = []
        self.evicted: list[str] = []

    def state(self, name: str) -> AdapterState:
        if self._content(name) in self.held:
            return AdapterState.RESIDENT
        return AdapterState.AWAY if name in self.away else AdapterState.CACHED

    def residents(self) -> list[str]:
        return [name for content in self.held for name in self.names_of(content)]

    def pages(self, name: str) -> int:
        return self.sizes.get(name, 1)

    def names_of(self, digest: str) -> list[str]:
        return [digest, *(name for name, content in self.aliases.items() if content == digest)]

    def room(self, spared: Spared, drained: Collection[str] = ()) -> int:
        going = self._going(spared, drained)
        if len(self.held) == self.slots and not going:
            return 0
        return self.total_pages - sum(map(self.pages, self.held)) + sum(map(self.pages, going))

    def fetch(self, name: str, *, is_urgent: bool) -> None:
        self.fetched.append(name)
        self.urgent += [name] * is_urgent

    def is_pinned(self, name: str) -> bool:
        return name in self.pinned

    def pinned_without_slot(self) -> list[str]:
        return self.pinned_waiting

    def start(self, row: Sequence, spared: Spared) -> bool:
        name = self._content(row.adapter_name) if row.adapter_name is not None else None
        if name is not None and name not in self.held:
            going = self._going(spared)
            while not self._fits(name):
                if not going:
                    return False
                self.evicted.append(going.pop(0))
                del self.held[self.evicted[-1]]
            self.held[name] = 0
            self.loaded.append(name)
        if name is not None:
            self.held[name] += 1
            report = LoadReport(name, "", name, [], [], 0, 0)
            row.adapter = AdapterReference(
                name, "", digest=name, rank=1, has_bias=False, nbytes=0, pinned=False, report=report
            )
        row.started_at = 0.0
        self.started.append(row.request_id)
        return True

    def prepare_pinned(self) -> None:
        """As the engine does at the beginning of a step."""
        for name in [name for name in self.pinned_waiting if self.room(lambda _: False) >= self.pages(name)]:
            for victim in self._going(lambda _: False):
                if not self._fits(name):
                    del self.held[victim]
            self.held[name] = 0
            self.pinned_waiting.remove(name)

    def end(self, scheduler: Scheduler, row: Sequence) -> None:
        scheduler.remove(row)
        if row.adapter_name is not None:
            self.held[self._content(row.adapter_name)] -= 1

    def _fits(self, name: str) -> bool:
        taken = sum(map(self.pages, self.held))
        return len(self.held) < self.slots and taken + self.pages(name) <= self.total_pages

    def _going(self, spared: Spared, drained: Collection[str] = ()) -> list[str]:
        idle = [name for name, held in self.held.items() if not held or name in drained]
        return [name for name in idle if not any(map(spared, self.names_of(name))) and name not in self.pinned]

    def _content(self, name: str) -> str:
        return self.aliases.get(name, name)


def make_row(
    name: str, adapter: str | None = None, *, prompt: int = 3, priority: int = 0, tokens: int = 100
) -> Sequence:
    params = SamplingParams(0, 1, 0, 0)
    return Sequence(name, [1] * prompt, params, tokens, lambda _: None, adapter, priority=priority)


def make_scheduler(slots: Slots, *, blocks: int = 100, running: int = 10, wait: float = 1000.0) -> Scheduler:
    return Scheduler(
        BlockManager(blocks, BLOCK),
        slots,
        start=slots.start,
        stop=lambda _: None,
        max_running=running,
        max_prefill_tokens=6,
        max_wait_seconds=wait,
    )
