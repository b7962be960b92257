"""What a person sees of a batch while it runs: a bar on a terminal, a line every ten seconds in a log."""

from __future__ import annotations

import time
from datetime import timedelta
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lora_worker.batch.tally import Tally

LOG_SECONDS = 10.0
SHOWN_MODELS = 5
FRAMES_PER_SECOND = 4


class Progress:
    """Shows a tally. On a terminal it is redrawn in place; else a plain line every LOG_SECONDS says the same."""

    def __init__(self, tally: Tally, console: Console) -> None:
        self._tally = tally
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._shown_at = time.monotonic()

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self) -> None:
        """Show how far it is, if it is time to."""
        self._tally.sample()
        seconds = time.monotonic() - self._shown_at
        if seconds < (1 / FRAMES_PER_SECOND if self._live is not None else LOG_SECONDS):
            return
        self._shown_at = time.monotonic()
        if self._live is not None:
            self._live.update(self._drawn(), refresh=True)
        else:
            self.say(f"{self._counts()}; {self._models()}")

    def say(self, sentence: str) -> None:
        """A line that stays."""
        self._console.print(escape(sentence), soft_wrap=True, highlight=False)

    def _drawn(self) -> RenderableType:
        tally = self._tally
        row = Table.grid(padding=(0, 1))
        row.add_row(ProgressBar(total=max(tally.total, 1), completed=tally.done, width=30), Text(self._counts()))
        return Group(row, Text(self._models(), style="dim"))

    def _counts(self) -> str:
        tally = self._tally
        percent = 100 * tally.done / max(tally.total, 1)
        eta = "unknown" if tally.eta_seconds is None else str(timedelta(seconds=round(tally.eta_seconds)))
        return (
            f"{tally.done:,} of {tally.total:,} done ({percent:.1f} %), {tally.failed:,} failed, "
            f"{tally.tokens_per_second:,.0f} tokens/s, {tally.rows_per_second:,.1f} rows/s, ETA {eta}"
        )

    def _models(self) -> str:
        models = self._tally.models_in_flight
        shown = ", ".join(f"{model.name} {model.done:,}/{model.lines:,}" for model in models[:SHOWN_MODELS])
        more = f" and {len(models) - SHOWN_MODELS} more" if len(models) > SHOWN_MODELS else ""
        return f"{self._tally.in_flight:,} in flight" + (f": {shown}{more}" if shown else "")
