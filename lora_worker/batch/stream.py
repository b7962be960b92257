"""Rows in, results out, for `Client.batch`: no files, and nothing to go on with after a kill."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from lora_worker.batch.flight import Answer, Flight
from lora_worker.batch.lines import BadLine, Line, check_line

MAX_IN_FLIGHT = 1024
PUBLISH_ROWS = 250
WAIT_SECONDS = 0.05
LOOK_SECONDS = 5.0


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
    source = enumerate(rows)
    pending: dict[str, _Row] = {}
    is_exhausted = False
    looked_at = time.monotonic()
    try:
        while pending or not is_exhausted:
            room = min(max_in_flight - len(pending), PUBLISH_ROWS)
            taken = list(islice(source, room)) if not is_exhausted else []
            is_exhausted = is_exhausted or len(taken) < room
            bad, good = _read(taken)
            yield from bad
            _send(flight, good)
            pending |= good
            waiting = len(pending)
            for answers in flight.collect():
                for answer in answers:
                    yield _result(pending.pop(answer.name), answer)
                flight.free([answer.name for answer in answers])
            if not taken and len(pending) == waiting:
                time.sleep(WAIT_SECONDS)
            if time.monotonic() - looked_at > LOOK_SECONDS:
                looked_at = time.monotonic()
                _send(flight, {name: pending[name] for name in flight.vanished()})
    finally:
        flight.revoke()
        flight.close()


def _read(taken: Iterable[tuple[int, Any]]) -> tuple[list[BatchResult], dict[str, _Row]]:
    bad, good = [], []
    for index, found in taken:
        line = check_line(dict(found) if isinstance(found, Mapping) else found, index + 1)
        if isinstance(line, BadLine):
            bad.append(BatchResult(index, line.custom_id, None, RowError(line.code, line.message)))
        else:
            good.append(_Row(index, line))
    # One adapter's rows together, so that it is loaded once for all of them.
    good.sort(key=lambda row: row.line.model or "")
    return bad, {str(row.place): row for row in good}


def _send(flight: Flight, rows: dict[str, _Row]) -> None:
    if rows:
        flight.send({name: row.line.body for name, row in rows.items()})


def _result(row: _Row, answer: Answer) -> BatchResult:
    error = None if answer.response is not None else RowError(answer.code or "error", answer.message)
    return BatchResult(row.place, row.line.custom_id, answer.response, error)
