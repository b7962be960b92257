"""Rows in, results out, for `Client.batch`: no files, and nothing to go on with after a kill."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

from kombu.utils.json import dumps

from lora_worker.batch.feed import Feed
from lora_worker.batch.flight import Answer, Flight
from lora_worker.batch.lines import BadLine, Line, check_line

MAX_IN_FLIGHT = 1024
PUBLISH_ROWS = 250
# What has come by then is sent, however slow the next row is.
WAIT_SECONDS = 0.05


class RowError(NamedTuple):
    """Why a row failed: the kind of error, as in a batch file's rows, and a sentence."""

    code: str
    message: str


@dataclass(frozen=True)
class BatchResult:
    """How one row ended: `response` is the OpenAI object, or `error` says why there is none.

    `index` counts the rows from 0; `custom_id` is the row's own, or made from its number.
    """

    index: int
    custom_id: str | None
    response: dict[str, Any] | None
    error: RowError | None


class _Row(NamedTuple):
    place: int
    line: Line


def run_rows(rows: Iterable[Any], flight: Flight, *, max_in_flight: int) -> Iterator[BatchResult]:
    """See `Client.batch`. Errors of Redis are the caller's, after a few tries of the connection's own."""
    pending: dict[str, _Row] = {}
    count = 0
    with closing(flight), closing(Feed(rows)) as feed:
        try:
            while pending or not feed.is_exhausted:
                taken = feed.take(min(max_in_flight - len(pending), PUBLISH_ROWS), wait_seconds=WAIT_SECONDS)
                bad, good = _read(enumerate(taken, count))
                count += len(taken)
                pending |= good
                _send(flight, good)
                yield from bad
                waiting = len(pending)
                for answers in flight.collect():
                    for answer in answers:
                        yield _result(pending.pop(answer.name), answer)
                    flight.free([answer.name for answer in answers])
                if not taken and len(pending) == waiting:
                    time.sleep(WAIT_SECONDS)
                _send(flight, {name: pending[name] for name in flight.lost()})
        finally:
            flight.revoke(flight.names)


def _read(taken: Iterable[tuple[int, Any]]) -> tuple[list[BatchResult], dict[str, _Row]]:
    bad, good = [], []
    for index, found in taken:
        line = _read_row(index, found)
        if isinstance(line, BadLine):
            bad.append(BatchResult(index, line.custom_id, None, RowError(line.code, line.message)))
        else:
            good.append(_Row(index, line))
    # One adapter's rows together, so that it is loaded once for all of them.
    good.sort(key=lambda row: row.line.model or "")
    return bad, {str(row.place): row for row in good}


def _read_row(index: int, found: Any) -> Line | BadLine:
    line = check_line(dict(found) if isinstance(found, Mapping) else found, index + 1)
    if isinstance(line, Line):
        try:
            dumps(line.body)
        except (TypeError, ValueError, RecursionError) as error:
            return BadLine("invalid_json", f"row {index} (from 0) can't be written as JSON: {error}", line.custom_id)
    return line


def _send(flight: Flight, rows: dict[str, _Row]) -> None:
    if rows:
        flight.send({name: row.line.body for name, row in rows.items()})


def _result(row: _Row, answer: Answer) -> BatchResult:
    error = None if answer.response is not None else RowError(answer.code or "error", answer.message)
    return BatchResult(row.place, row.line.custom_id, answer.response, error)
