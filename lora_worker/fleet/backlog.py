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
    places = [
        [keys.inbox],
        [keys.manage],
        [keys.base],
        keys.partitions,
        [keys.direct(worker_id) for worker_id in ids],
    ]
    # At one moment: a message that is claimed between two looks would be in neither.
    with redis.pipeline() as pipe:
        for queues in places:
            for name in _lists(queues):
                pipe.llen(name)
        for worker_id in ids:
            pipe.hlen(keys.unacked(worker_id))
        counts = iter(pipe.execute())
    lengths = [sum(next(counts) for _ in _lists(queues)) for queues in places]
    return Backlog._make([*lengths, sum(counts)])


def _lists(queues: list[str]) -> list[str]:
    return [name for queue in queues for name in lists_of(queue)]
