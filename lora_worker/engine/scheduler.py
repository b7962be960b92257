"""Which tokens of the running rows make up a step, and what they hold.

A step carries one token of every row that decodes, and fills up with chunks of prompts. Where the KV cache runs out,
the row admitted last is paused: it keeps its adapter and its tokens, goes on before any other row starts, and computes
its keys and values again. Who starts is admission's choice.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from lora_worker.engine.admission import Adapters, Admission
from lora_worker.engine.blocks import BlockManager
from lora_worker.engine.draining import Spared
from lora_worker.engine.sequence import Sequence
from lora_worker.engine.waiting import WaitingRows


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


# Starts a row, with its adapter in a slot and held; False where it can't start, or has ended instead. The second
# argument says what must stay in its slot.
Start = Callable[[Sequence, Spared], bool]


class Scheduler:
    """Waiting, running and paused rows, and the blocks they hold.

    Args:
        start: see `Start`.
        stop: lets go of a row's adapter.
    """

    def __init__(
        self,
        blocks: BlockManager,
        adapters: Adapters,
        *,
        start: Start,
        stop: Callable[[Sequence], None],
        max_running: int,
        max_prefill_tokens: int,
        max_wait_seconds: float,
    ) -> None:
        self.blocks = blocks
        self.waiting = WaitingRows()
        self.running: list[Sequence] = []
        self.paused: list[Sequence] = []
        self.preemptions = 0
        self.admission = Admission(
            self.waiting,
            adapters,
            started=lambda: self._started,
            max_running=max_running,
            max_wait_seconds=max_wait_seconds,
        )
        self._new_blocks: list[int] = []
        self._start = start
        self._stop = stop
        self._max_running = max_running
        self._max_prefill_tokens = max_prefill_tokens

    def add(self, sequence: Sequence) -> None:
        """A row that waits; where its request has started by another of its rows, it holds its adapter already."""
        self.waiting.add(sequence)

    def admit(self) -> None:
        """Move rows from waiting to running as long as rows, blocks and slots allow."""
        while self.paused and self._has_row and self._has_blocks(self.paused[0]):
            self.running.append(self.paused.pop(0))
        if not self.waiting:
            return
        self.admission.begin(self._max_running - len(self.running))
        if not self.paused:
            self._start_rows()
        self.admission.fetch_ahead()

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
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        for rows in (self.running, self.paused):
            if sequence in rows:
                rows.remove(sequence)
        self._free_blocks(sequence)
        if sequence.adapter is not None:
            self._stop(sequence)

    def check_integrity(self) -> None:
        self.blocks.check_integrity([block for sequence in self.running for block in sequence.blocks])
        self.waiting.check_integrity()
        assert all(not row.blocks for row in (*self.waiting, *self.paused)), "a row that does not run holds blocks"
        assert len(self.running) <= self._max_running, f"{len(self.running)} rows run"

    def rows(self) -> list[Sequence]:
        return [*self.running, *self.paused, *self.waiting]

    def held(self) -> dict[str, int]:
        """Rows that have started, by their adapter's digest; a paused row goes on holding its adapter."""
        return dict(Counter(row.adapter.digest for row in self._started if row.adapter is not None))

    def _start_rows(self) -> None:
        while self._has_row and (sequence := self.admission.choose()) is not None and self._has_blocks(sequence):
            if sequence.started_at is not None or self._start(sequence, self.admission.spared(sequence)):
                self.waiting.remove(sequence)
                self.running.append(sequence)
                self.admission.note_started(sequence)
            elif not sequence.is_finished:
                self.admission.pass_over(sequence.adapter_name)

    @property
    def _started(self) -> list[Sequence]:
        return self.running + self.paused + self.waiting.joining

    @property
    def _has_row(self) -> bool:
        return len(self.running) < self._max_running

    def _has_blocks(self, sequence: Sequence) -> bool:
        # One block to spare for every running row: rows that have just been admitted are not to be preempted at once.
        needed = self.blocks.needed(len(sequence.tokens), 0) + len(self.running)
        return needed <= self.blocks.free_count or not self.running

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
        bisect.insort(self.paused, sequence, key=lambda row: row.queue_order)

    def _free_blocks(self, sequence: Sequence) -> None:
        self.blocks.give_back(sequence.blocks)
        sequence.blocks = []
