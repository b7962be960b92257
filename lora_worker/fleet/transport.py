"""kombu's Redis transport, kept alive when Redis goes away while messages are unacknowledged.

kombu 5.7.0 closes a broken channel twice. The second time it wants to give unacknowledged messages back over a
connection that no longer has its parameters, and the AttributeError ends the worker. As a connection error it is what
Celery expects there: it reconnects, rows go on, and the messages are delivered again after the visibility timeout.
"""

from __future__ import annotations

from typing import Any

from kombu.transport import redis


class Channel(redis.Channel):
    """A channel that says so when its connection is closed."""

    def _connparams(self, asynchronous: bool = False) -> dict[str, Any]:  # noqa: FBT001, FBT002 - kombu's own signature
        if self.connection.client is None:
            raise ConnectionError("the connection to Redis is closed already")
        parameters: dict[str, Any] = super()._connparams(asynchronous=asynchronous)
        return parameters


class Transport(redis.Transport):
    """The worker's transport; clients use kombu's own."""

    Channel = Channel
