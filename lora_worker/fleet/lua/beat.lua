-- Renew a worker's lease, and tell it who else lives.
-- KEYS: workers, fleet, generation.  ARGV: worker id, lease in seconds, partitions, something random.
-- Returns: the lease's end as it was before ('' where there was none), the fleet's partitions, epoch and members, the
-- registry's generation, {expired}, {living}.
local workers, id = KEYS[1], ARGV[1]
local time = redis.call('TIME')
local now = time[1] + time[2] / 1e6
local before = redis.call('ZSCORE', workers, id)
-- A write that frees memory comes first: a full Redis then lets the others pass, and nobody loses a lease over it.
redis.call('ZREM', workers, id)
redis.call('ZADD', workers, now + ARGV[2], id)
redis.call('HSETNX', KEYS[2], 'partitions', ARGV[3])
redis.call('HSETNX', KEYS[2], 'epoch', ARGV[4])
if not before then redis.call('HINCRBY', KEYS[2], 'members', 1) end
return {
  before or '',
  tonumber(redis.call('HGET', KEYS[2], 'partitions')),
  redis.call('HGET', KEYS[2], 'epoch'),
  tonumber(redis.call('HGET', KEYS[2], 'members') or 0),
  tonumber(redis.call('GET', KEYS[3]) or 0),
  redis.call('ZRANGEBYSCORE', workers, '-inf', now),
  redis.call('ZRANGEBYSCORE', workers, '(' .. now, '+inf'),
}
