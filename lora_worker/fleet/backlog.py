"""What waits in a fleet, for people to look at."""

from __future__ import annotations

from typing import Any, NamedTuple

from redis import Redis

from lora_worker.fleet.keys import Keys, lists_of


class Backlog(NamedTuple):
    """Messages, by where they are."""

    inbox: int
    manage: int
    base: int
    partitions: int
    handed_over: int
    in_hand: int

    @property
    def waiting(self) -> int:
        """Those that no worker has claimed."""
        return sum(self) - self.in_hand


def read_backlog(redis: Redis, keys: Keys) -> Backlog:
    """Count all messages of a fleet; raises RedisError."""
    workers: Any = redis.zrange(keys.workers, 0, -1)
    ids = [worker.decode() if isinstance(worker, bytes) else worker for worker in workers]
    with redis.pipeline(transaction=False) as pipe:
        for worker_id in ids:
            pipe.hlen(keys.unacked(worker_id))
        in_hand = sum(pipe.execute())
    return Backlog(
        _length(redis, [keys.inbox]),
        _length(redis, [keys.manage]),
        _length(redis, [keys.base]),
        _length(redis, keys.partitions),
        _length(redis, [keys.direct(worker_id) for worker_id in ids]),
        in_hand,
    )


def _length(redis: Redis, queues: list[str]) -> int:
    with redis.pipeline(transaction=False) as pipe:
        for name in (name for queue in queues for name in lists_of(queue)):
            pipe.llen(name)
        return sum(pipe.execute())
