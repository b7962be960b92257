-- Put messages of a worker that is gone back to the front of the lists they came from.
-- KEYS: workers, unacked, started, fleet, idle, its hash, the lists of its own queue, the inbox's in the same order.
-- ARGV: worker id, 'dead' or 'leaving', then tags, the youngest first.  Without tags: take the worker off the books.
-- Returns: messages that are left, or -1 where the worker lives, or another peer has taken it off the books.
--
-- A message of a dead worker tells how often it was restored, and how often its row was running then, at its very
-- front: {"lora_restored": 2, "lora_deaths": 1, ...}. The rest stays byte for byte what its sender wrote.
local workers, unacked, started = KEYS[1], KEYS[2], KEYS[3]
local id, is_dead = ARGV[1], ARGV[2] == 'dead'
local time = redis.call('TIME')
local now = time[1] + time[2] / 1e6
local lease = redis.call('ZSCORE', workers, id)
if is_dead and not lease and redis.call('EXISTS', unacked) == 0 then return -1 end
if is_dead and lease then
  if tonumber(lease) > now then return -1 end
  -- From here on the worker knows at its next beat that it has lost its lease, and claims nothing until then.
  redis.call('ZREM', workers, id)
  redis.call('ZADD', workers, 0, id)
end

local function counted(message, was_running)
  message = string.match(message, '^%s*({.*)$') or message
  if string.sub(message, 1, 1) ~= '{' then return message end  -- no message of Celery's: whoever claims it will say so
  local restored, deaths, rest = string.match(message, '^{"lora_restored": ?(%d+), ?"lora_deaths": ?(%d+), ?(.*)$')
  if not restored then restored, deaths, rest = 0, 0, string.sub(message, 2) end
  return '{"lora_restored": ' .. string.format('%d', restored + 1)
    .. ', "lora_deaths": ' .. string.format('%d', deaths + was_running) .. ', ' .. rest
end

for i = 3, #ARGV do
  local record = redis.call('HGET', unacked, ARGV[i])
  if record then
    local cut = string.find(record, '\n', 1, true)
    local message = string.sub(record, cut + 1)
    if is_dead then message = counted(message, redis.call('SISMEMBER', started, ARGV[i])) end
    redis.call('HDEL', unacked, ARGV[i])
    redis.call('SREM', started, ARGV[i])
    redis.call('RPUSH', string.sub(record, 1, cut - 1), message)
  end
end

local left = redis.call('HLEN', unacked)
if #ARGV > 2 or left > 0 then return left end
redis.call('DEL', started, KEYS[6])
redis.call('HDEL', KEYS[5], id)
local steps = (#KEYS - 6) / 2
for step = 7, 6 + steps do
  while redis.call('LMOVE', KEYS[step], KEYS[step + steps], 'LEFT', 'RIGHT') do end
end
redis.call('ZREM', workers, id)
redis.call('HINCRBY', KEYS[4], 'members', 1)
return 0
