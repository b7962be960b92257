"""What is in flight: tasks that were published and whose answers have not been taken yet."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from celery import Celery, states
from kombu.entity import Queue

from lora_worker.batch.lost import find_messages
from lora_worker.batch.publishing import Outgoing, Publisher
from lora_worker.batch.rows import code_of
from lora_worker.fleet.keys import Keys
from lora_worker.fleet.living import living_workers

# Few enough that answers of a megabyte each still fit into memory.
FETCH_KEYS = 200
REVOKE_IDS = 1000
# A worker that dies between storing an answer and acknowledging its message leaves the message to its peers, who run it
# once more if they don't find the answer. They have it within two leases, of 15 s by default.
FREED_SECONDS = 30
LOOK_SECONDS = 5.0
# After this long without any answer it is looked whether there is still something to wait for.
STALL_SECONDS = 60.0


class Answer(NamedTuple):
    """How a task ended: with OpenAI's object, or with the kind of its error and a sentence."""

    name: str
    task_id: str
    response: dict[str, Any] | None
    code: str | None = None
    message: str = ""


class _Task(NamedTuple):
    id: str
    result_key: bytes


class Flight:
    """Publishes tasks, takes their answers in bulk, and frees them; holds no subscription.

    A task has a name within the batch, and its id follows from both, so that a client that comes back finds its tasks.

    Args:
        app: the client's Celery app.
        job: the batch's id, a UUID.
        keys: the fleet's names in Redis.
        queue_of: the queue of a model's requests.
        cancel: revokes the tasks of these ids, wherever they are.
        freed_seconds: how long answers stay in Redis after they are freed.
    """

    def __init__(
        self,
        app: Celery,
        job: str,
        keys: Keys,
        *,
        queue_of: Callable[[str | None], Queue],
        cancel: Callable[..., None],
        freed_seconds: int = FREED_SECONDS,
    ) -> None:
        self._app = app
        self._job = uuid.UUID(job)
        self._queue_of = queue_of
        self._cancel = cancel
        self._freed_seconds = freed_seconds
        self._redis = app.backend.client
        self._key = keys.batch(job)
        self._keys = keys
        self._publisher = Publisher(app, self._redis, self._key)
        self._in_flight: dict[str, _Task] = {}
        self._looked_at = self._moved_at = self._searched_at = time.monotonic()
        self._suspects: set[str] = set()

    def __len__(self) -> int:
        return len(self._in_flight)

    @property
    def names(self) -> list[str]:
        """The names of the tasks in flight, the oldest first."""
        return list(self._in_flight)

    @property
    def stalled_seconds(self) -> float:
        """How long nothing has come back."""
        return time.monotonic() - self._moved_at

    def living(self) -> list[str]:
        """The node names of the fleet's living workers."""
        return living_workers(self._redis, self._keys)

    def task_id(self, name: str) -> str:
        return str(uuid.uuid5(self._job, name))

    def send(self, bodies: dict[str, dict[str, Any]]) -> None:
        """Publish generate requests by name. One that is in flight already is awaited and not published again."""
        tasks = [
            Outgoing(name, self.task_id(name), self._queue_of(body.get("model")), body) for name, body in bodies.items()
        ]
        self._publisher.publish(tasks)
        self._in_flight.update((task.name, self._task(task.task_id)) for task in tasks)

    def collect(self) -> Iterator[list[Answer]]:
        """The answers that are there, some hundreds at a time. They stay in Redis until they are freed."""
        tasks = list(self._in_flight.items())
        for i in range(0, len(tasks), FETCH_KEYS):
            part = tasks[i : i + FETCH_KEYS]
            found = self._redis.mget([task.result_key for _, task in part])
            answers = [
                self._answer(name, task.id, text)
                for (name, task), text in zip(part, found, strict=True)
                if text is not None
            ]
            ended = [answer for answer in answers if answer is not None]
            if ended:
                self._moved_at = time.monotonic()
                yield ended

    def free(self, names: Sequence[str]) -> None:
        """Let go of answers that have been kept elsewhere; Redis removes them after `freed_seconds`."""
        if not names:
            return
        with self._redis.pipeline(transaction=True) as pipe:
            for name in names:
                pipe.expire(self._task(self.task_id(name)).result_key, self._freed_seconds)
            pipe.srem(self._key, *names)
            pipe.execute()
        for name in names:
            self._in_flight.pop(name, None)

    def published(self) -> Iterator[str]:
        """The names of what any client of this batch has published and not freed."""
        for name in self._redis.sscan_iter(self._key, count=1000):
            yield name.decode() if isinstance(name, bytes) else str(name)

    def lost(self) -> list[str]:
        """Now and then: what is to be published again, if it is still awaited.

        That is what Redis no longer knows of, having lost its data; and, where nothing comes back, what twice in a row
        had neither an answer nor a message.
        """
        now = time.monotonic()
        if now - self._looked_at < LOOK_SECONDS or not self._in_flight:
            return []
        self._looked_at = now
        lost = self._vanished()
        if not lost and min(self.stalled_seconds, now - self._searched_at) > STALL_SECONDS:
            self._searched_at = now
            missing = self._missing()
            lost, self._suspects = list(missing & self._suspects), missing
            if lost:
                self._redis.srem(self._key, *lost)
        return lost

    def revoke(self, names: Sequence[str]) -> None:
        """Take back tasks, wherever they are."""
        for i in range(0, len(names), REVOKE_IDS):
            part = names[i : i + REVOKE_IDS]
            self._cancel(*(self.task_id(name) for name in part))
            self.free(part)

    def close(self) -> None:
        self._publisher.close()

    def _vanished(self) -> list[str]:
        names = self.names
        known = self._redis.smismember(self._key, names)
        return [name for name, is_known in zip(names, known, strict=True) if not is_known]

    def _missing(self) -> set[str]:
        """What has neither an answer nor a message; see `find_messages` for what it can miss."""
        ids = {task.id: name for name, task in self._in_flight.items()}
        found = find_messages(self._redis, self._keys.prefix, ids)
        return set() if found is None else {ids[task_id] for task_id in ids.keys() - found}

    def _task(self, task_id: str) -> _Task:
        return _Task(task_id, self._app.backend.get_key_for_task(task_id))

    def _answer(self, name: str, task_id: str, text: bytes) -> Answer | None:
        meta = self._app.backend.decode(text)
        status, result = meta["status"], meta["result"]
        if status == states.SUCCESS:
            return Answer(name, task_id, result)
        if status not in states.READY_STATES:
            return None
        kind, arguments = result["exc_type"], result["exc_message"]
        message = str(arguments[0]) if isinstance(arguments, list | tuple) and arguments else str(arguments)
        return Answer(name, task_id, None, code_of(kind), message)
