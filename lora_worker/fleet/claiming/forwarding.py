"""Where a message belongs that this worker has claimed: here, or in another queue."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

from lora_worker.fleet.keys import Keys, list_of
from lora_worker.fleet.members import Members
from lora_worker.fleet.routing import queue_for
from lora_worker.messages import GENERATE


class Target(NamedTuple):
    """A list, and the worker whose own it is, if it is one's own."""

    list_name: str
    worker_id: str = ""


def task_and_model(headers: Any, payload: Any) -> tuple[str, object]:
    """The task's name and the model it asks for, of a message in either of Celery's protocols."""
    if isinstance(payload, dict):
        return str(payload.get("task")), (payload.get("kwargs") or {}).get("model")
    _, kwargs, *_ = payload
    return str(headers.get("task")), kwargs.get("model") if isinstance(kwargs, dict) else None


class Forwarder:
    """Decides for one worker."""

    def __init__(self, keys: Keys, worker_id: str, base_name: str) -> None:
        self._keys = keys
        self._worker_id = worker_id
        self._base_name = base_name
        self._own: frozenset[str] = frozenset()

    def set_own(self, partitions: list[str]) -> None:
        self._own = frozenset(partitions)

    def of_inbox(self, model: object, priority: int, members: Members, *, has_room: bool) -> Target | None:
        """Where a request of the inbox goes on to; None: it is run here. `has_room`: a row could start soon."""
        pinned = self.to_pinning(model, priority, members)
        if pinned is not None:
            return pinned
        queue = queue_for(GENERATE, model, self._keys, base_name=self._base_name)
        if has_room and (queue == self._keys.inbox or queue in self._own):
            return None
        return Target(list_of(self._keys.base if queue == self._keys.inbox else queue, priority))

    def to_pinning(self, model: object, priority: int, members: Members) -> Target | None:
        """The queue of a worker that pins the adapter, where others do and this one doesn't."""
        pinning = members.pinned_elsewhere(model, self._worker_id) if isinstance(model, str) else []
        if not pinning:
            return None
        worker_id = random.choice(pinning)
        return Target(list_of(self._keys.direct(worker_id), priority), worker_id)
