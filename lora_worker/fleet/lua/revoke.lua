-- Write down which tasks are revoked, for workers that were not there to hear it.
-- KEYS: revoked.  ARGV: seconds to remember them, then task ids.
local time = redis.call('TIME')
local now = time[1] + time[2] / 1e6
-- Forgetting comes first: a full Redis then lets the rest pass.
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - ARGV[1])
for i = 2, #ARGV do redis.call('ZADD', KEYS[1], 'NX', now, ARGV[i]) end
