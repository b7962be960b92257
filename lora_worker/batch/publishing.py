"""Many generate tasks into Redis at once, each message as Celery's own `apply_async` makes it.

Celery and kombu make the messages; only the channel's last step is another one, which keeps a message instead of
pushing it. A script then pushes hundreds in one step and remembers each, so that publishing again after a broken
connection, or by a client that comes back after a kill, pushes nothing twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from celery import Celery
from kombu.entity import Queue
from kombu.transport import redis as kombu_redis
from kombu.utils.json import dumps
from redis import Redis

from lora_worker.messages import GENERATE

# One of the steps 0, 3, 6 and 9 of the contract, and the lowest of them.
BATCH_PRIORITY = 9
# Past this nobody comes back for a batch, and its results have expired long since.
KEEP_SECONDS = 7 * 86400

# KEYS: the set of what is in flight, then a queue for each message. ARGV: seconds to keep the set, then for each
# message its name in the set and its text.
_PUSH = """
for i = 2, #KEYS do
  if redis.call('SADD', KEYS[1], ARGV[2 * i - 2]) == 1 then
    redis.call('LPUSH', KEYS[i], ARGV[2 * i - 1])
  end
end
redis.call('EXPIRE', KEYS[1], ARGV[1])
"""


class Outgoing(NamedTuple):
    """A task to publish: its name within the batch, its id, the queue, and the body of the generate request."""

    name: str
    task_id: str
    queue: Queue
    body: dict[str, Any]


class _Kept(NamedTuple):
    key: str
    text: str


class _KeepingChannel(kombu_redis.Channel):
    """A channel that keeps what it should push."""

    def _put(self, queue: str, message: dict[str, Any], **_: Any) -> None:
        key = self._q_for_pri(queue, self._get_message_priority(message, reverse=False))
        self.connection.kept.append(_Kept(key, dumps(message)))


class _KeepingTransport(kombu_redis.Transport):
    Channel = _KeepingChannel

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kept: list[_Kept] = []


class Publisher:
    """Publishes generate tasks of one batch. `in_flight_key` is the set that remembers what was published."""

    def __init__(self, app: Celery, connection: Redis, in_flight_key: str) -> None:
        self._app = app
        self._redis = connection
        self._key = in_flight_key
        self._push = connection.register_script(_PUSH)
        self._broker: Any = None

    def publish(self, tasks: Iterable[Outgoing]) -> None:
        """Push what isn't in flight already, in one step."""
        tasks = list(tasks)
        kept = self._messages(tasks)
        names = [part for task, message in zip(tasks, kept, strict=True) for part in (task.name, message.text)]
        self._push(keys=[self._key, *(message.key for message in kept)], args=[KEEP_SECONDS, *names])

    def close(self) -> None:
        if self._broker is not None:
            self._broker.release()
            self._broker = None

    def _messages(self, tasks: list[Outgoing]) -> list[_Kept]:
        if self._broker is None:
            self._broker = self._app.connection_for_write(transport=_KeepingTransport)
        try:
            with self._app.amqp.Producer(self._broker, auto_declare=False) as producer:
                for task in tasks:
                    self._make(producer, task)
            kept: list[_Kept] = self._broker.transport.kept
            made, kept[:] = list(kept), []
        except BaseException:
            self.close()  # the next try begins with a connection that holds nothing
            raise
        return made

    def _make(self, producer: Any, task: Outgoing) -> None:
        """What `Celery.send_task` does, but for the subscription to the result."""
        amqp = self._app.amqp
        # The arguments would stand in the message a second time, in clear, for logs and events to show.
        options = {"priority": BATCH_PRIORITY, "argsrepr": "", "kwargsrepr": ""}
        message = amqp.create_task_message(
            task.task_id, GENERATE, (), task.body, reply_to=self._app.thread_oid, ignore_result=None, **options
        )
        amqp.send_task_message(producer, GENERATE, message, queue=task.queue, retry=False, **options)
