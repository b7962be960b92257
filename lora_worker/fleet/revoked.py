"""The list of revoked tasks in Redis."""

from __future__ import annotations

from collections.abc import Iterable

from redis import Redis

from lora_worker.fleet.connection import script
from lora_worker.fleet.keys import Keys

IDS_A_CALL = 1000


def write_revoked(redis: Redis, keys: Keys, task_ids: Iterable[str], *, remember_seconds: float) -> None:
    """Have workers that start later revoke these tasks too; raises RedisError."""
    ids = list(task_ids)
    write = redis.register_script(script("revoke"))
    for first in range(0, len(ids), IDS_A_CALL):
        write(keys=[keys.revoked], args=[remember_seconds, *ids[first : first + IDS_A_CALL]])
