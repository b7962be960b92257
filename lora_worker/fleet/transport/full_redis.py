"""What a worker writes besides its queues, so that it passes when Redis has no memory left.

A full Redis refuses whatever may take memory. A script that has written something else is let through, though, and a
worker's writes are small, or make room soon after: a stored result is followed by the acknowledgement, which frees the
message. So every such script removes first what it writes anew. Claims, leases and moves do the same (`fleet/lua`).
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from celery.backends.redis import RedisBackend
from kombu.transport import redis
from redis.exceptions import OutOfMemoryError, RedisError

from lora_worker.fleet.pool.results import ForeignMessageError, held_message

# KEYS: a set of bindings and its permanent part.  ARGV: the binding.
BIND = "for _, key in ipairs(KEYS) do redis.call('SREM', key, ARGV[1]); redis.call('SADD', key, ARGV[1]) end"
# KEYS: the result's, which is its channel too, and, where it depends on a message, the worker's unacked and the fleet.
# ARGV: the result, how long it is kept in seconds, 0 for ever, and then the message's tag and the fleet's epoch.
#
# A message that is no longer the worker's was restored by a peer, unless all is gone: then nobody else has it either.
STORE = """
if KEYS[2] and redis.call('HEXISTS', KEYS[2], ARGV[3]) == 0 and redis.call('HGET', KEYS[3], 'epoch') == ARGV[4] then
  return 0
end
redis.call('DEL', KEYS[1])
redis.call('SET', KEYS[1], ARGV[1])
if ARGV[2] ~= '0' then redis.call('EXPIRE', KEYS[1], ARGV[2]) end
redis.call('PUBLISH', KEYS[1], ARGV[1])
return 1
"""


class BindingChannel(redis.Channel):
    """A channel of kombu's that can declare its queues in a full Redis."""

    @cached_property
    def _refresh_binding(self) -> Any:
        # KEYS[1] is the set of bindings and ARGV[1] the binding here, too.
        return self._create_client().register_script("redis.call('SREM', KEYS[1], ARGV[1])" + redis.REFRESH_BINDING)

    def _queue_bind(self, exchange: str, routing_key: str, pattern: str, queue: str) -> None:
        try:
            super()._queue_bind(exchange, routing_key, pattern, queue)
        except OutOfMemoryError:
            keys = [self.keyprefix_queue % (exchange,), self.keyprefix_binding_permanent % (exchange,)]
            with self.conn_or_acquire() as client:
                client.eval(BIND, len(keys), *keys, self.sep.join([routing_key or "", pattern or "", queue or ""]))


class ResultBackend(RedisBackend):
    """Celery's, whose results are stored in a full Redis too, and those of rows only while these are the worker's own.

    One step in Redis, since a worker may be stopped for longer than its lease between a look and what follows it.
    """

    @cached_property
    def _store(self) -> Any:
        return self.client.register_script(STORE)

    def exception_safe_to_retry(self, exc: Exception) -> bool:
        """What Redis answers with passes like its absence: it has become a replica, its disk is full, a script runs."""
        return isinstance(exc, RedisError) or bool(super().exception_safe_to_retry(exc))

    def _set(self, key: str, value: str, expires: int | None = None) -> None:
        seconds = self.expires if expires is None else expires
        held = held_message()
        keys, arguments = ([held.unacked, held.fleet], [held.tag, held.epoch]) if held else ([], [])
        if not self._store(keys=[key, *keys], args=[value, int(seconds or 0), *arguments]):
            raise ForeignMessageError
