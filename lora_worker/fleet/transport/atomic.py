"""Claims that nothing falls out of: one Lua script pops messages and records them as this worker's.

Where kombu would send BRPOP, this channel sends claim.lua, with as many messages as the worker has credit for, from
all of the fleet's queues in the worker's own order. What comes back is delivered as if it came from the inbox, the one
queue that Celery consumes. It leans on a few of kombu's private names; `check_contract` says which.
"""

from __future__ import annotations

import inspect
import logging
import time
from queue import Empty
from typing import Any

import kombu
from kombu.common import PREFETCH_COUNT_MAX
from kombu.transport import redis
from kombu.utils.encoding import bytes_to_str
from kombu.utils.json import loads
from redis.exceptions import RedisError

from lora_worker.errors import SettingsError
from lora_worker.fleet.claiming.claimer import ClaimedMessage, Claimer, PreparedClaim
from lora_worker.fleet.claiming.claims import POLL_SECONDS
from lora_worker.fleet.connection import script
from lora_worker.fleet.pool.generate_message import PROMOTED
from lora_worker.fleet.transport import stock
from lora_worker.fleet.transport.stock import member, priority_of

logger = logging.getLogger(__name__)

SWEEP_SECONDS = 60.0

# kombu's private names this channel leans on, with their parameters.
CONTRACT = {
    (redis.Channel, "_brpop_start"): ["self", "timeout"],
    (redis.Channel, "_brpop_read"): ["self", "options"],
    (redis.Channel, "_flush_brpop_reauth"): ["self"],
    (redis.MultiChannelPoller, "_register_BRPOP"): ["self", "channel"],
    (redis.Transport, "register_with_event_loop"): ["self", "connection", "loop"],
    (redis.Transport, "_deliver"): ["self", "message", "queue"],
}
# What calls them, and how it decides to.
CALLS: dict[Any, str] = {
    redis.MultiChannelPoller._register_BRPOP: "if not channel._in_poll:",
    redis.MultiChannelPoller.on_readable: "chan.handlers[type]()",
    redis.MultiChannelPoller.maybe_check_brpop_health: "channel._brpop_sent_at",
    redis.Channel.__init__: "'BRPOP': self._brpop_read",
    redis.Channel.close: "if self._in_poll:",
}


def check_contract() -> None:
    """Raise SettingsError where the installed kombu is not as this transport needs it."""
    for (owner, name), parameters in CONTRACT.items():
        function = getattr(owner, name, None)
        if function is None or list(inspect.signature(function).parameters) != parameters:
            raise _broken(f"{owner.__name__}.{name}({', '.join(parameters)})")
    for caller, words in CALLS.items():
        try:
            source = inspect.getsource(caller)
        except OSError:  # installed without its source: the names alone must do
            continue
        if words not in source:
            raise _broken(f"{words!r} in {caller.__qualname__}")


def _broken(what: str) -> SettingsError:
    return SettingsError(
        f"kombu {kombu.__version__} has no {what}, on which atomic claims depend; install kombu>=5.7,<5.8, or set "
        'transport = "stock"'
    )


class QoS(stock.QoS):
    """Credit is counted by the claim, and management tasks are claimed beyond it."""

    def can_consume(self) -> bool:
        return self.channel.is_claiming or super().can_consume()

    def append(self, message: Any, delivery_tag: str) -> None:
        if delivery_tag not in member().unacknowledged:  # else the script has recorded it
            super().append(message, delivery_tag)


class Channel(stock.Channel):
    """A channel that claims while Celery's loop runs it; a synchronous consumer gets kombu's own behaviour."""

    QoS = QoS
    _swept_at = 0.0
    _in_poll: Any
    _brpop_sent_at: Any
    _claim: PreparedClaim

    @property
    def is_claiming(self) -> bool:
        return getattr(self.connection, "is_in_loop", False)

    def _brpop_start(self, timeout: float | None = None) -> None:
        if not self.is_claiming:
            super()._brpop_start(timeout)
            return
        now = time.monotonic()
        claimer = member().claimer
        if claimer is None or not claimer.is_due(now):
            return
        self._sweep(now)
        # Celery writes 0 for a count beyond what AMQP can carry.
        claim = claimer.prepare(self.qos.prefetch_count or PREFETCH_COUNT_MAX, now)
        if claim is None:
            return
        self._claim = claim
        self._in_poll = connection = self.client.connection
        self._brpop_sent_at = now
        connection.send_command("EVAL", SCRIPT, len(claim.keys), *claim.keys, *claim.arguments)

    def _brpop_read(self, **options: Any) -> bool:
        if not self.is_claiming:
            found: bool = super()._brpop_read(**options)
            return found
        try:
            try:
                answer = self.client.parse_response(self.client.connection, "EVAL", **options)
            except self.connection_errors:
                self.client.connection.disconnect()
                raise
        finally:
            self._in_poll = None
            self._flush_brpop_reauth()
        if not self._take(answer):
            raise Empty
        return True

    def _take(self, answer: list[Any]) -> int:
        """Deliver what a claim has brought, or forward it."""
        ledger = member().unacknowledged
        claimer, claim = member().claimer, self._claim
        assert claimer is not None
        messages = claim.read(answer)
        for message in messages:
            ledger.add(message.tag)
        if self._closing or not self.active_queues:  # Celery has stopped consuming
            for message in messages:
                ledger.give_back(message.tag)
            return 0
        claimer.note(claim, answer, len(messages), time.monotonic())
        for position, message in enumerate(messages):
            try:
                self._dispatch(message, claimer)
            except BaseException:
                for left in messages[position + 1 :]:
                    ledger.give_back(left.tag)
                raise
        claimer.share(answer)
        return len(messages)

    def _dispatch(self, message: ClaimedMessage, claimer: Claimer) -> None:
        ledger = member().unacknowledged
        try:
            payload = loads(bytes_to_str(message.raw))
            payload["properties"]["delivery_tag"] = message.tag
            payload["headers"][PROMOTED] = message.is_promoted
            target = claimer.target(message.queue, priority_of(payload), lambda: self._opened(payload))
        except Exception as error:
            logger.error("Discarded a message that is none of Celery's, from %s: %r", message.queue, error)
            ledger.acknowledge(message.tag)
            return
        if target is None:
            self.connection.deliver(payload, member().keys.inbox)
        else:
            ledger.forward(message.tag, target.list_name, worker=target.worker_id)

    def _opened(self, payload: dict[str, Any]) -> tuple[Any, Any]:
        """A message's headers and its decoded body."""
        message = self.Message(payload, channel=self)
        return message.headers, message.decode()

    def _sweep(self, now: float) -> None:
        """Give back what the script has recorded and no answer has brought: the connection broke in between.

        No claim is under way on this channel now, and a worker has but one that claims.
        """
        if now - self._swept_at < SWEEP_SECONDS:
            return
        self._swept_at = now
        try:
            member().give_back_unknown()
        except RedisError as error:
            logger.warning("Messages that got lost on the way could not be looked for (%s).", error)
            self._swept_at = now - SWEEP_SECONDS + 1


class Transport(stock.Transport):
    """The worker's transport with `transport = "atomic"`."""

    Channel = Channel
    is_in_loop = False

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        super().register_with_event_loop(connection, loop)
        connection.is_in_loop = True
        # Wakes the loop, which claims whenever it is awake.
        loop.call_repeatedly(POLL_SECONDS, lambda: None)


SCRIPT = script("claim")
