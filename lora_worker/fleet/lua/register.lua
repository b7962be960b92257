-- Change the registry of adapters.
-- KEYS: registry, its changes, its generation, fleet.
-- ARGV: the new generation, something random, how many changes to remember, then names and their entries, '' to remove
-- one.
--
-- Removing comes first: a full Redis then lets the rest pass.
redis.call('DEL', KEYS[3])
redis.call('SET', KEYS[3], ARGV[1])
redis.call('HSETNX', KEYS[4], 'registry', ARGV[2])
for i = 4, #ARGV, 2 do
  redis.call('ZADD', KEYS[2], ARGV[1], ARGV[i])
  redis.call('HDEL', KEYS[1], ARGV[i])
  if ARGV[i + 1] ~= '' then redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
end
-- Twice as many before the oldest go, so that few workers find that what they have missed is forgotten.
local kept = tonumber(ARGV[3])
local over = redis.call('ZCARD', KEYS[2]) - kept
if over > kept then
  redis.call('HSET', KEYS[4], 'registry_floor', redis.call('ZRANGE', KEYS[2], over - 1, over - 1, 'WITHSCORES')[2])
  redis.call('ZREMRANGEBYRANK', KEYS[2], 0, over - 1)
end
