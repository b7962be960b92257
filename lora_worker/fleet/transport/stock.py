"""kombu's Redis transport for a fleet: what is unacknowledged belongs to the worker, not to a connection.

kombu gives back what is unacknowledged when a connection breaks, though its rows go on, and what it can't give back
waits for a visibility timeout. Here acknowledgements go through the worker's ledger, whose key in Redis peers know, and
a broken connection gives back only what nothing here works on (tasks with an ETA). Claims are kombu's own (BRPOP): a
process that dies between the pop and the record loses that one message, hence `atomic`.
"""

from __future__ import annotations

from itertools import count
from typing import Any

from kombu.transport import redis, virtual
from kombu.utils.json import dumps

from lora_worker.fleet.keys import list_of
from lora_worker.fleet.membership.member import FleetMember, current_member
from lora_worker.fleet.pool.generate_message import DEATHS, RESTORED
from lora_worker.fleet.transport.full_redis import BindingChannel

# Which queue a message came from, on its way from the transport to the ledger.
QUEUE = "lora_queue"

_numbers = count()


def member() -> FleetMember:
    found = current_member()
    assert found is not None, "the fleet's transport is used outside of a worker"
    return found


def priority_of(message: dict[str, Any]) -> int:
    """A message's priority as kombu bounds it."""
    try:
        return max(0, min(int(message["properties"]["priority"]), 9))
    except (TypeError, ValueError, KeyError):
        return 0


class QoS(redis.QoS):
    """Acknowledgements by way of the ledger."""

    def can_consume(self) -> bool:
        return not self.prefetch_count or len(member().unacknowledged) < self.prefetch_count

    def append(self, message: Any, delivery_tag: str) -> None:
        """Record what kombu's own claim has popped."""
        raw = dict(message._raw)
        name = list_of(raw.pop(QUEUE), priority_of(raw))
        with self.channel.conn_or_acquire() as client:
            client.hset(self.unacked_key, delivery_tag, f"{name}\n{dumps(raw)}")
        member().unacknowledged.add(delivery_tag)

    def ack(self, delivery_tag: str) -> None:
        member().unacknowledged.acknowledge(delivery_tag)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:  # noqa: FBT001, FBT002 - kombu's signature
        ledger = member().unacknowledged
        if requeue:
            ledger.give_back(delivery_tag)
        else:
            ledger.acknowledge(delivery_tag)

    def restore_unacked_once(self, stderr: Any = None) -> None:  # noqa: ARG002 - kombu's signature
        """The channel closes."""
        self._on_collect.cancel()
        member().give_back_unworked()

    def restore_visible(self, *_: Any, **__: Any) -> None:
        """Nothing: leases take the place of the visibility timeout."""


class Channel(BindingChannel):
    """A channel of a worker's."""

    QoS = QoS

    def _connparams(self, asynchronous: bool = False) -> dict[str, Any]:  # noqa: FBT001, FBT002 - kombu's own signature
        # kombu 5.7.0 closes a broken channel twice, and would end the worker with an AttributeError the second time.
        if self.connection.client is None:
            raise ConnectionError("the connection to Redis is closed already")
        parameters: dict[str, Any] = super()._connparams(asynchronous=asynchronous)
        return parameters


class Transport(redis.Transport):
    """The worker's transport with `transport = "stock"`; clients use kombu's own."""

    Channel = Channel

    def _deliver(self, message: dict[str, Any], queue: str) -> None:
        # Not the sender's tag, which a message that is restored would come back with.
        message["properties"]["delivery_tag"] = f"{next(_numbers):012d}"
        self.deliver(message, queue)

    def deliver(self, message: dict[str, Any], queue: str) -> None:
        """Give a message to Celery, under a tag that no other delivery to this worker has."""
        headers = message.get("headers")
        if isinstance(headers, dict):
            headers[RESTORED] = message.get(RESTORED, 0)
            headers[DEATHS] = message.get(DEATHS, 0)
        message[QUEUE] = queue
        virtual.Transport._deliver(self, message, queue)


class OwnFirst:
    """kombu's order of queues with `transport = "stock"`: own partitions first, others' for free rows only."""

    def __init__(self) -> None:
        self._queues: list[str] = []
        self._turn = 0

    def update(self, queues: list[str]) -> None:
        self._queues = list(queues)

    def rotate(self, _: str) -> None:
        self._turn += 1

    def consume(self, _: int) -> list[str]:
        claimer = member().claimer
        if claimer is None or not claimer.may_claim:
            return []
        own, others = claimer.partitions
        first = [queue for queue in self._queues if queue not in others and queue not in own] + own
        turn = self._turn % max(1, len(first))
        rest = others if claimer.has_free_rows else []
        known = set(self._queues)
        return [queue for queue in (*first[turn:], *first[:turn], *rest) if queue in known]
