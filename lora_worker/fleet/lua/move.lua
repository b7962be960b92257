-- Give claimed messages to other lists. What is no longer this worker's is left alone, so a move may be tried again.
-- KEYS: unacked, started, workers, idle.
-- ARGV: for each message its tag, the list to whose back it goes ('' for the front of the one it came from), and the id
-- of the worker whose own queue that list is ('' for none): the message goes back where it came from if that one is gone;
-- and '1' for a message of which nobody knows what became of it: it counts as restored, so that its result is looked for.
local time = redis.call('TIME')
local now = time[1] + time[2] / 1e6
local moved = 0
for i = 1, #ARGV, 4 do
  local tag, target, worker = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local record = redis.call('HGET', KEYS[1], tag)
  if record then
    local cut = string.find(record, '\n', 1, true)
    if worker ~= '' then
      local lease = redis.call('ZSCORE', KEYS[3], worker)
      if not lease or tonumber(lease) <= now then target = '' end
    end
    local push = target == '' and 'RPUSH' or 'LPUSH'
    if target == '' then target = string.sub(record, 1, cut - 1) end
    local message = string.sub(record, cut + 1)
    if ARGV[i + 3] == '1' and string.match(message, '^{"') and not string.match(message, '^{"lora_restored"') then
      message = '{"lora_restored": 1, "lora_deaths": 0, ' .. string.sub(message, 2)
    end
    redis.call('HDEL', KEYS[1], tag)
    redis.call('SREM', KEYS[2], tag)
    redis.call(push, target, message)
    if worker ~= '' then redis.call('HDEL', KEYS[4], worker) end
    moved = moved + 1
  end
end
return moved
