-- Who lives, and what each says of itself.
-- KEYS: workers, fleet.  ARGV: what a worker's hash is called without its id.
-- Returns: members, then for each living worker its id, '1' where it drains, its pins, its resident adapters. Not its
-- report, which grows with the adapters, and is read by every worker's every look.
local time = redis.call('TIME')
local now = time[1] + time[2] / 1e6
local found = { tonumber(redis.call('HGET', KEYS[2], 'members') or 0) }
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. now, '+inf')) do
  local fields = redis.call('HMGET', ARGV[1] .. id, 'draining', 'pinned', 'resident')
  found[#found + 1] = { id, fields[1] or '', fields[2] or '', fields[3] or '' }
end
return found
