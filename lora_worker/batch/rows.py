"""The rows of an output: OpenAI's batch output form."""

from __future__ import annotations

import json
import re
from typing import Any

_CAPITAL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def row_id(job: str, number: int) -> str:
    """The id of a row, which names the batch and the line."""
    return f"batch_req_{job}_{number}"


def number_of(found: str) -> int:
    """The line of the row with this id."""
    return int(found.rpartition("_")[2])


def response_row(row_id: str, custom_id: str, *, task_id: str, body: dict[str, Any]) -> bytes:
    """A line that was answered; `body` is the OpenAI object."""
    response = {"status_code": 200, "request_id": task_id, "body": body}
    return _dump({"id": row_id, "custom_id": custom_id, "response": response, "error": None})


def error_row(row_id: str, custom_id: str | None, *, code: str, message: str, number: int) -> bytes:
    """A line that was not; `line` is its number in the input, from 1."""
    error = {"code": code, "message": message, "line": number}
    return _dump({"id": row_id, "custom_id": custom_id, "response": None, "error": error})


def code_of(class_name: str) -> str:
    """The kind of an error, by its class: UnknownAdapterError is 'unknown_adapter'."""
    return _CAPITAL.sub("_", class_name.removesuffix("Error")).lower() or "error"


def _dump(row: dict[str, Any]) -> bytes:
    try:
        return json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
    except UnicodeEncodeError:  # half of a surrogate pair, which only an escape can write
        return json.dumps(row, separators=(",", ":")).encode() + b"\n"
