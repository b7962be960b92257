-- Mark messages as those whose rows have started. What is no longer this worker's gets no mark.
-- KEYS: unacked, started.  ARGV: tags.
--
-- Removing comes first: a full Redis then lets the rest pass.
redis.call('SREM', KEYS[2], unpack(ARGV))
for _, tag in ipairs(ARGV) do
  if redis.call('HEXISTS', KEYS[1], tag) == 1 then redis.call('SADD', KEYS[2], tag) end
end
