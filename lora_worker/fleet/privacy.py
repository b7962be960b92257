"""Prompts and answers stay out of logs, events, `inspect` and Flower.

A task's arguments reach those places on four ways: as the message's own representation of them, as what `inspect`
reports of a task, as the result that Celery logs at INFO, and as the body of a message that Celery can't dispatch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from celery.worker.consumer.consumer import INVALID_TASK_ERROR, MESSAGE_DECODE_ERROR, UNKNOWN_FORMAT, UNKNOWN_TASK_ERROR
from celery.worker.request import Request

HIDDEN = "(hidden)"


class PrivateRequest(Request):
    """A Celery request whose arguments can't be read by whoever watches the worker."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._argsrepr = self._kwargsrepr = HIDDEN
        self._request_dict["argsrepr"] = self._request_dict["kwargsrepr"] = HIDDEN

    def info(self, safe: bool = False) -> dict[str, Any]:  # noqa: FBT001, FBT002 - Celery's own signature
        return {**super().info(safe=safe), "args": HIDDEN, "kwargs": HIDDEN}


class HideResults(logging.Filter):
    """'Task ... succeeded in 0.2s: (hidden)', with the time the row ran, which the trace can't know."""

    def __init__(self, run_seconds: Callable[[], float | None]) -> None:
        super().__init__()
        self._run_seconds = run_seconds

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, dict) and "return_value" in record.args:
            seconds = self._run_seconds()
            runtime = {} if seconds is None else {"runtime": round(seconds, 4)}
            record.args = {**record.args, "return_value": HIDDEN, **runtime}
        return True


_WITHOUT_BODY = {
    UNKNOWN_TASK_ERROR: "Received a task of a name that this worker does not serve, and discarded it: %s",
    INVALID_TASK_ERROR: "Received a task message that is not well formed, and discarded it: %s",
    MESSAGE_DECODE_ERROR: "Received a message that cannot be decoded, and discarded it: %r",
    UNKNOWN_FORMAT: "Received a message of unknown form, and discarded it.",
}


class HideBodies(logging.Filter):
    """Celery prints the whole body of a message that is no task it knows; the reason alone must do."""

    def filter(self, record: logging.LogRecord) -> bool:
        sentence = _WITHOUT_BODY.get(str(record.msg))
        if sentence is not None:
            args = record.args if isinstance(record.args, tuple) else ()
            record.msg, record.args = sentence, args[: sentence.count("%")]
        return True


def hide_from_logs(run_seconds: Callable[[], float | None]) -> None:
    """Install the filters, once; `run_seconds` tells how long the row ran of the task that this thread finishes."""
    for name, hide in (
        ("celery.app.trace", HideResults(run_seconds)),
        ("celery.worker.consumer.consumer", HideBodies()),
    ):
        logger = logging.getLogger(name)
        if not any(type(present) is type(hide) for present in logger.filters):
            logger.addFilter(hide)
