"""Where tasks are that no answer comes for: waiting in a queue, claimed by a worker, or nowhere."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from redis import Redis

READ_MESSAGES = 500
# A queue of more than this is not stuck but long.
MOST_MESSAGES = 50_000

_TASK_ID = re.compile(rb"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


def find_messages(connection: Redis, queue_prefix: str, task_ids: Iterable[str]) -> set[str] | None:
    """Which of these tasks have a message that waits or is claimed; None where there is too much to look through.

    Queues first, since a message goes from there to the claimed ones. One that moves while it is looked for can be
    missed, so who acts on an absence looks twice.
    """
    wanted = {task_id.encode() for task_id in task_ids}
    queues = list(connection.scan_iter(match=f"{queue_prefix}*", count=1000, _type="LIST"))
    if sum(_length(connection.llen(queue)) for queue in queues) > MOST_MESSAGES:
        return None
    found: set[bytes] = set()
    for queue in queues:
        for messages in _read_queue(connection, queue):
            found |= wanted.intersection(_TASK_ID.findall(messages))
    for claimed in connection.scan_iter(match="*unacked*", count=1000, _type="HASH"):
        for _, message in connection.hscan_iter(claimed, count=READ_MESSAGES):
            found |= wanted.intersection(_TASK_ID.findall(message))
    return {task_id.decode() for task_id in found}


def _read_queue(connection: Redis, queue: bytes) -> Iterator[bytes]:
    end = -1
    # From the end where messages are taken.
    while messages := connection.lrange(queue, end - READ_MESSAGES + 1, end):
        yield b" ".join(messages)  # type: ignore[arg-type]
        end -= READ_MESSAGES


def _length(value: Any) -> int:
    return int(value)
