"""Revoked tasks, as workers remember them that start later or were cut off.

Celery tells the workers that live of a revocation, and each keeps it in its memory. Here every worker also writes down
in Redis what it hears, and reads what others have written: before its first row, and once a second. From there on it
is Celery's: a revoked task is not started, its state becomes REVOKED, and its message is acknowledged. One that is here
already, since the worker didn't hear in time, is cancelled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from celery.worker import state
from celery.worker.control import Panel
from redis import Redis
from redis.exceptions import RedisError

from lora_worker.fleet.keys import Keys
from lora_worker.fleet.revoked import write_revoked

logger = logging.getLogger(__name__)


class Revocations:
    """One worker's; `heard` is called on Celery's loop, `sync` on one thread at a time.

    Args:
        remember_seconds: so long a task may wait in its queue and is still known to be revoked.
        cancel: ends the row of a task, if it is here; must not block.
    """

    def __init__(self, redis: Redis, keys: Keys, *, remember_seconds: float, cancel: Callable[[str], None]) -> None:
        self._redis = redis
        self._keys = keys
        self._remember_seconds = remember_seconds
        self._cancel = cancel
        self._heard: list[str] = []
        self._read_to = 0.0
        state.revoked.expires = max(state.revoked.expires, remember_seconds)

    def heard(self, task_ids: Iterable[str]) -> None:
        self._heard += task_ids

    def sync(self) -> None:
        """Write what was heard, and read what is new; raises RedisError, and is then to be called again."""
        heard, self._heard = self._heard, []
        try:
            if heard:
                write_revoked(self._redis, self._keys, heard, remember_seconds=self._remember_seconds)
            found: list[Any] = self._redis.zrangebyscore(self._keys.revoked, self._read_to, "+inf", withscores=True)
        except RedisError:
            self._heard = heard + self._heard
            raise
        for task_id, revoked_at in found:
            if task_id.decode() not in state.revoked:
                state.revoked.add(task_id.decode())
                self._cancel(task_id.decode())
            self._read_to = revoked_at


def listen(heard: Callable[[list[str]], None]) -> None:
    """Call `heard` with the task ids of every `revoke` and `terminate` that reaches this worker."""

    def wrap(command: Callable[..., Any]) -> Callable[..., Any]:
        def run(panel: Any, *, task_id: str | list[str], **arguments: Any) -> Any:
            heard([task_id] if isinstance(task_id, str) else task_id)
            return command(panel, task_id=task_id, **arguments)

        return run

    for name in ("revoke", "terminate"):
        Panel.data[name] = wrap(Panel.data[name])
