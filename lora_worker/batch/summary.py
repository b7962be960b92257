"""What became of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from lora_worker.batch.store import ModelCount, Store

SHOWN_LINES = 5


class ErrorKind(NamedTuple):
    """A kind of error, its rows, and the first of their lines."""

    code: str
    rows: int
    first_lines: list[int]


class Summary(NamedTuple):
    """Counts of a whole batch, over all runs of its command."""

    lines: int
    done: int
    errors: list[ErrorKind]
    models: list[ModelCount]

    @property
    def failed(self) -> int:
        return sum(kind.rows for kind in self.errors)

    @property
    def is_complete(self) -> bool:
        return self.done == self.lines

    def sentences(self, *, is_dry_run: bool = False) -> Iterator[str]:
        if is_dry_run:
            yield f"{self.lines:,} lines: {self.lines - self.done:,} can be sent, {self.failed:,} cannot."
            yield from (f"  {model.name or '(base)'}: {model.lines:,}" for model in self.models)
        elif not self.is_complete:
            yield f"{self.done:,} of {self.lines:,} lines are done, {self.failed:,} of them failed."
        elif self.failed and self.failed == self.lines:
            yield f"All {self.lines:,} rows failed."
        else:
            yield f"{self.lines:,} lines: {self.done - self.failed:,} answered, {self.failed:,} failed."
        for kind in self.errors:
            lines = ", ".join(str(number) for number in kind.first_lines)
            yield f"  {kind.code}: {kind.rows:,} ({_lines(kind)} {lines}{', ...' if _has_more(kind) else ''})"


def summarize(store: Store) -> Summary:
    errors = [ErrorKind(code, rows, store.first_errors(code, SHOWN_LINES)) for code, rows in store.errors().items()]
    return Summary(store.count(), store.count_done(), errors, store.models())


def _lines(kind: ErrorKind) -> str:
    return "line" if kind.rows == 1 else "lines"


def _has_more(kind: ErrorKind) -> bool:
    return kind.rows > len(kind.first_lines)
