"""The fleet's own connections to Redis, beside kombu's, and what of a server it can't use."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Any

from kombu.exceptions import OperationalError
from redis import ConnectionPool, Redis
from redis.backoff import NoBackoff
from redis.exceptions import NoPermissionError, RedisError
from redis.retry import Retry

from lora_worker.errors import SettingsError

OLDEST_REDIS = (6, 2)
# What the fleet's connections, kombu's and the system raise where Redis is away, or refuses.
REDIS_ERRORS = (OperationalError, RedisError, ConnectionError)


def connect(url: str, *, timeout_seconds: float, is_single: bool = False) -> Redis:
    """A client that answers or raises within the timeout, and never tries again by itself.

    `is_single`: on one connection, whose every break is raised; a pool replaces in silence what it finds broken.
    Who asks must learn of every break: the lease counts its unbroken contact, and a script must not run twice unknown.
    """
    # Celery writes CERT_REQUIRED where redis-py writes required.
    url = re.sub(r"ssl_cert_reqs=CERT_(\w+)", lambda found: f"ssl_cert_reqs={found[1].lower()}", url)
    options: dict[str, Any] = {
        "socket_timeout": timeout_seconds,
        "socket_connect_timeout": timeout_seconds,
        "retry": Retry(NoBackoff(), 0),
        "socket_keepalive": True,
    }
    if is_single:
        return Redis(connection_pool=_OneConnection.from_url(url, **options), single_connection_client=True)
    return Redis.from_url(url, **options)


class _OneConnection(ConnectionPool):
    """Gives a connection out as it is made: it connects with its first command, and not while Redis is away."""

    def get_connection(self, *_: Any, **__: Any) -> Any:
        return self.make_connection()

    def release(self, connection: Any) -> None:
        """The client is closed."""
        connection.disconnect()


def tags_under(redis: Redis, key: str) -> set[str]:
    """The tags of the messages under a worker's key."""
    return {tag.decode() if isinstance(tag, bytes) else tag for tag in redis.hkeys(key)}


def check_server(redis: Redis) -> None:
    """Raise SettingsError where the server is of a kind on which claims and leases would not hold."""
    try:
        server = redis.info("server")
    except NoPermissionError:
        return  # an account that may not ask (docs/redis.md): nothing is known against the server
    mode = server.get("redis_mode", "standalone")
    if mode == "cluster":
        raise SettingsError(
            "redis_url names a Redis Cluster, which would spread a fleet's keys over servers, so that no claim could "
            "be atomic; name a single Redis server"
        )
    if mode == "sentinel":
        raise SettingsError(
            "redis_url names a Redis Sentinel, which holds no queues, and failing over through Sentinel is not "
            "supported; name the Redis server itself"
        )
    version = str(server.get("redis_version", ""))
    if version and tuple(int(part) for part in version.split(".")[:2]) < OLDEST_REDIS:
        raise SettingsError(f"the Redis at redis_url is of version {version}; 6.2 or newer is needed")


def script(name: str) -> str:
    """The text of a Lua script of `fleet/lua`."""
    return files("lora_worker.fleet").joinpath("lua", f"{name}.lua").read_text()
