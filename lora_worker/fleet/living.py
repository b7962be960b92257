"""The leases of a fleet's workers, as whoever holds none of them reads them.

Celery's broadcasts reach every fleet on a Redis; these are of one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from redis import Redis

from lora_worker.fleet.keys import Keys
from lora_worker.fleet.routing import node_of


class Leases(NamedTuple):
    """When the leases of workers end, by id, and which of these have not ended."""

    until: dict[str, float]
    living: frozenset[str]


def read_leases(redis: Redis, keys: Keys) -> Leases:
    """At one moment, by Redis's clock; raises RedisError."""
    with redis.pipeline() as pipe:
        pipe.time()
        pipe.zrange(keys.workers, 0, -1, withscores=True)
        (seconds, micros), found = pipe.execute()
    now = seconds + micros / 1e6
    until: dict[str, Any] = {(w.decode() if isinstance(w, bytes) else w): end for w, end in found}
    return Leases(until, frozenset(worker for worker, end in until.items() if end > now))


def living_workers(redis: Redis, keys: Keys) -> list[str]:
    """The node names of the workers whose lease runs; raises RedisError."""
    return sorted(set(map(node_of, read_leases(redis, keys).living)))
