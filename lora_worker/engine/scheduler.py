"""Who runs: which waiting rows are admitted, and which tokens of the running rows make up a step.

Waiting rows are taken by priority, then arrival. A row whose adapter has no slot lets later ones pass, which keeps the
rows busy; once it has waited `max_wait_seconds` it lets none of them pass, so the slots drain and it gets the next one.
Its wait is then bounded by `max_wait_seconds` plus the longest running row. A step carries one token of every row that
decodes, and fills up with chunks of prompts. Where the KV cache runs out, the row admitted last goes back to wait and
computes its tokens again later.
"""

from __future__ import annotations

import bisect
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from lora_worker.adapters.reference import Readiness
from lora_worker.engine.blocks import BlockManager
from lora_worker.engine.sequence import Sequence


class Chunk(NamedTuple):
    """The tokens [start, start + length) of a row that a step computes."""

    sequence: Sequence
    start: int
    length: int

    @property
    def samples(self) -> bool:
        """Whether the row's last token is among them, so that its next one is drawn."""
        return self.start + self.length == len(self.sequence.tokens)


class Step(NamedTuple):
    """What to compute, and which blocks their rows have just been given."""

    chunks: list[Chunk]
    new_blocks: list[int]


class Scheduler:
    """Waiting and running rows, and the blocks they hold.

    Args:
        start: makes a row's adapter ready and holds it, where that can be done now.
        stop: lets go of a row's adapter.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        start: Callable[[Sequence], Readiness],
        stop: Callable[[Sequence], None],
        max_running: int,
        max_prefill_tokens: int,
        max_wait_seconds: float,
    ) -> None:
        self.blocks = blocks
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._new_blocks: list[int] = []
        self._start = start
        self._stop = stop
        self._max_running = max_running
        self._max_prefill_tokens = max_prefill_tokens
        self._max_wait_seconds = max_wait_seconds

    def add(self, sequence: Sequence) -> None:
        bisect.insort(self.waiting, sequence, key=lambda s: s.queue_order)

    def admit(self) -> None:
        """Move rows from waiting to running as long as rows, blocks and slots allow."""
        now = time.monotonic()
        left: list[Sequence] = []
        waiting, self.waiting = self.waiting, []
        for position, sequence in enumerate(waiting):
            if len(self.running) >= self._max_running or not self._has_blocks(sequence):
                left += waiting[position:]
                break
            readiness = self._start(sequence)
            if readiness is Readiness.READY:
                self.running.append(sequence)
            elif not sequence.is_finished:
                left.append(sequence)
                if readiness is Readiness.NO_SLOT and now - sequence.arrived_at > self._max_wait_seconds:
                    left += waiting[position + 1 :]
                    break
        self.waiting = left + self.waiting

    def schedule(self) -> Step:
        """The next step; its rows have the blocks they need."""
        chunks: list[Chunk] = []
        self._new_blocks = []
        budget = self._max_prefill_tokens
        for sequence in list(self.running):
            if sequence not in self.running:
                continue  # preempted for an earlier row of this loop
            decodes = sequence.remaining == 1
            count = 1 if decodes else min(sequence.remaining, budget)
            if count == 0 or not self._take_blocks(sequence, sequence.computed + count):
                continue
            if not decodes:
                budget -= count
            chunks.append(Chunk(sequence, sequence.computed, count))
        return Step(chunks, self._new_blocks)

    def remove(self, sequence: Sequence) -> None:
        """Take a row out, wherever it is, and free what it holds."""
        for rows in (self.running, self.waiting):
            if sequence in rows:
                rows.remove(sequence)
        self._free_blocks(sequence)
        if sequence.adapter is not None:
            self._stop(sequence)

    def check_integrity(self) -> None:
        self.blocks.check_integrity([block for sequence in self.running for block in sequence.blocks])
        assert all(not sequence.blocks for sequence in self.waiting), "a waiting row holds blocks"
        assert len(self.running) <= self._max_running, f"{len(self.running)} rows run"

    def held(self) -> dict[str, int]:
        """Rows that have started, by their adapter's digest; a preempted row goes on holding its adapter."""
        rows = self.running + self.waiting
        return dict(Counter(sequence.adapter.digest for sequence in rows if sequence.adapter is not None))

    def _has_blocks(self, sequence: Sequence) -> bool:
        # One block to spare for every running row: rows that have just been admitted are not to be preempted at once.
        return self.blocks.needed(len(sequence.tokens), 0) + len(self.running) <= self.blocks.free_count or (
            not self.running
        )

    def _take_blocks(self, sequence: Sequence, tokens: int) -> bool:
        """Give the row blocks for so many tokens, from later rows if need be; False where it had to go itself."""
        while (more := self.blocks.needed(tokens, len(sequence.blocks))) > self.blocks.free_count:
            last = self.running[-1]
            self._preempt(last)
            if last is sequence:
                return False
        taken = self.blocks.take(more)
        sequence.blocks += taken
        self._new_blocks += taken
        return True

    def _preempt(self, sequence: Sequence) -> None:
        assert len(self.running) > 1, "one row alone needs more blocks than there are"
        self.running.remove(sequence)
        self._free_blocks(sequence)
        sequence.computed = 0
        self.preemptions += 1
        self.add(sequence)

    def _free_blocks(self, sequence: Sequence) -> None:
        self.blocks.give_back(sequence.blocks)
        sequence.blocks = []
