"""Which workers of a fleet live, for whoever is none of them; Celery's broadcasts reach every fleet on a Redis."""

from __future__ import annotations

from typing import Any

from redis import Redis

from lora_worker.fleet.keys import Keys
from lora_worker.fleet.routing import node_of


def living_workers(redis: Redis, keys: Keys) -> list[str]:
    """The node names of the workers whose lease runs; raises RedisError."""
    now: Any = redis.time()
    found: Any = redis.zrangebyscore(keys.workers, f"({now[0] + now[1] / 1e6}", "+inf")
    return sorted({node_of(worker.decode() if isinstance(worker, bytes) else worker) for worker in found})
