-- Write down what a worker says of itself.
-- KEYS: its hash, fleet.  ARGV: seconds to keep it, 1 where peers must look at once, then fields and values.
--
-- Removing comes first: a full Redis then lets the rest pass.
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], unpack(ARGV, 3))
redis.call('EXPIRE', KEYS[1], ARGV[1])
if ARGV[2] == '1' then redis.call('HINCRBY', KEYS[2], 'members', 1) end
