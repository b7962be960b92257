-- Change the registry of adapters.
-- KEYS: registry, its changes, its generation.  ARGV: the new generation, then names and their entries, '' to remove one.
--
-- Removing comes first: a full Redis then lets the rest pass.
redis.call('DEL', KEYS[3])
redis.call('SET', KEYS[3], ARGV[1])
for i = 2, #ARGV, 2 do
  redis.call('ZADD', KEYS[2], ARGV[1], ARGV[i])
  redis.call('HDEL', KEYS[1], ARGV[i])
  if ARGV[i + 1] ~= '' then redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
end
