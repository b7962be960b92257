"""How far a batch is: counts, rates, and when it will be done."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from lora_worker.batch.store import ModelCount

# Rates are those of the last minute, looked at once a second.
WINDOW_SECONDS = 60.0
SAMPLE_SECONDS = 1.0


class ModelTally:
    """One model's share of the batch."""

    def __init__(self, name: str | None, lines: int, done: int) -> None:
        self.name = name or "(base)"
        self.lines = lines
        self.done = done
        self.in_flight = 0


class Tally:
    """Counts of a whole batch, those of earlier runs of the command included; tokens and rates are of this run.

    Args:
        total: all lines of the input.
        done: lines that have a row already.
        failed: those of them that are errors.
    """

    def __init__(self, models: Iterable[ModelCount], *, total: int, done: int, failed: int) -> None:
        self.total = total
        self.done = done
        self.failed = failed
        self.completion_tokens = 0
        self.in_flight = 0
        self.models = {model.id: ModelTally(model.name, model.lines, model.done) for model in models}
        self._samples: deque[tuple[float, int, int]] = deque([(time.monotonic(), done, 0)])

    def sent(self, model: int) -> None:
        self.in_flight += 1
        self.models[model].in_flight += 1

    def landed(self, model: int) -> None:
        """A task is no longer in flight, with or without an answer."""
        self.in_flight -= 1
        self.models[model].in_flight -= 1

    def answered(self, model: int, *, response: dict[str, Any] | None) -> None:
        self.done += 1
        self.models[model].done += 1
        if response is None:
            self.failed += 1
        else:
            self.completion_tokens += int((response.get("usage") or {}).get("completion_tokens") or 0)

    def sample(self) -> None:
        now = time.monotonic()
        if now - self._samples[-1][0] >= SAMPLE_SECONDS:
            self._samples.append((now, self.done, self.completion_tokens))
            while now - self._samples[0][0] > WINDOW_SECONDS:
                self._samples.popleft()

    @property
    def rows_per_second(self) -> float:
        return self._rate(1, self.done)

    @property
    def tokens_per_second(self) -> float:
        return self._rate(2, self.completion_tokens)

    @property
    def eta_seconds(self) -> float | None:
        """None where nothing has come back lately."""
        rate = self.rows_per_second
        return (self.total - self.done) / rate if rate > 0 else None

    @property
    def models_in_flight(self) -> list[ModelTally]:
        """Those in flight, the furthest first."""
        found = [model for model in self.models.values() if model.in_flight]
        return sorted(found, key=lambda model: (-model.done, model.name))

    def _rate(self, which: int, now_at: int) -> float:
        first = self._samples[0]
        seconds = time.monotonic() - first[0]
        return (now_at - int(first[which])) / seconds if seconds > 0 else 0.0
