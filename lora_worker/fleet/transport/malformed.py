"""Messages that Celery cannot take: each is named in the log, answered with its failure, and gone.

What Celery's handler raises would end the worker otherwise, and then, since its message comes again, the next one.
"""

from __future__ import annotations

import logging
from typing import Any

from celery import current_app
from celery.states import FAILURE
from celery.worker import state
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from lora_worker.errors import InvalidRequestError
from lora_worker.fleet.membership.member import FleetMember

logger = logging.getLogger(__name__)

LONGEST_REASON = 200


def is_innocent(error: Exception) -> bool:
    """Whether an error that came up while a message was delivered tells of this worker or of Redis, not of it."""
    if isinstance(error, OSError):
        # The decompressors raise OSError too, and no system call has failed then.
        return isinstance(error, ConnectionError | TimeoutError) or error.errno is not None
    return isinstance(error, RedisError | OperationalError | MemoryError)


def refuse(member: FleetMember, message: Any, tag: str, error: Exception) -> None:
    """Get rid of a message. `message`: as far as it could be read."""
    task_id, task = _name(message)
    reason = f"{type(error).__name__}: {error}"[:LONGEST_REASON]
    logger.error("Discarded a malformed message, tag %s, task %s, id %s (%s).", tag, task, task_id, reason)
    request = state.requests.get(task_id)
    if request is not None and request.message.delivery_tag == tag:
        state.task_ready(request)  # Celery had it on its books by then

    def answer() -> None:
        try:
            error = InvalidRequestError(f"the message of the task {task_id} is malformed ({reason})")
            current_app.backend.store_result(task_id, error, FAILURE)
        finally:
            member.unacknowledged.acknowledge(tag)

    if task_id:
        member.run_later(answer)
    else:
        member.unacknowledged.acknowledge(tag)


def _name(message: Any) -> tuple[str, str]:
    """The id, '' where there is none to answer under, and the task's name."""
    headers = message.get("headers") if isinstance(message, dict) else None
    if not isinstance(headers, dict):
        return "", "unknown"
    task_id, task = headers.get("id"), headers.get("task")
    return task_id if isinstance(task_id, str) else "", task if isinstance(task, str) else "unknown"
