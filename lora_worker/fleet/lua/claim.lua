-- Claim messages: pop them and record them as this worker's in one step.
--
-- KEYS: workers, unacked, fleet, generation, idle, then the lists, all of one priority step before the next; within
-- a step: manage, the inbox, base, the worker's own (direct queue, partitions), the others'.
-- ARGV: worker id, tag prefix, how many steps, how many own, and the limits, all counts of messages:
--   ahead    from its own lists and base, which may run ahead of its rows
--   near     of these from base while nothing else waits, since base requests gain nothing from being held: one
--            number for each priority step, with spaces between
--   free     up to which others' lists may fill up: the rows that would stay empty
--   spill    what is left in another's list, but for the lists named last
--   inbox, manage   beyond `ahead`, since they are forwarded, or run beside the rows
--   turn     how many it has claimed in all: one of 8 is the share of the lower priorities, each in its turn
--   room     rows it could take from busy peers if it gets nothing here, or -1 to say nothing
--   listen   1 for a worker with requests to spare, which wants to know of idle peers
--   then the names of others' lists in which the same message has waited too long for its owner to claim it
--
-- Returns: whether it has a lease, members, generation, {idle peer, its room, ...}, {index of another's list with
-- something in it, what it would give next, ...} where rows stay empty, and for each message the index of its list
-- (from 1), its tag, 1 if it came before others as the share of the lower priorities, and the message.
--
-- What is first written frees memory (RPOP, or HDEL), so that a full Redis drains.
local QUEUES, MANAGE, INBOX, BASE, OWN = 5, 1, 2, 3, 4
local LIMIT_BYTES, SHARE, FRESH_SECONDS, MOST_WATCHED, HEAD = 8388608, 8, 2, 16, 5
local id, prefix, steps, own = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local ahead, near, free, spill = tonumber(ARGV[5]), {}, tonumber(ARGV[7]), tonumber(ARGV[8])
for number in string.gmatch(ARGV[6], '%d+') do near[#near + 1] = tonumber(number) end
local inbox, manage, turn = tonumber(ARGV[9]), tonumber(ARGV[10]), tonumber(ARGV[11])
local room, listen = tonumber(ARGV[12]), ARGV[13] == '1'
local width = (#KEYS - QUEUES) / steps
local time = redis.call('TIME')
local now = time[1] + time[2] / 1e6

local lease = redis.call('ZSCORE', KEYS[1], id)
local members = tonumber(redis.call('HGET', KEYS[3], 'members') or 0)
local generation = tonumber(redis.call('GET', KEYS[4]) or 0)
if not lease or tonumber(lease) <= now then return { 0, members, generation, {}, {} } end
local answer, peers, bytes, taken, is_stuck = { 1, members, generation, {}, {} }, {}, 0, 0, {}
for i = 14, #ARGV do is_stuck[ARGV[i]] = true end

local function kept(list) return is_stuck[KEYS[QUEUES + list]] and 0 or spill end

local function pop(list, is_share)
  local message = redis.call('RPOP', KEYS[QUEUES + list])
  if not message then return false end
  local tag = prefix .. string.format('%04d', #answer)
  redis.call('HSET', KEYS[2], tag, KEYS[QUEUES + list] .. '\n' .. message)
  answer[#answer + 1] = { list, tag, is_share and 1 or 0, message }
  bytes = bytes + #message
  return true
end

local function beyond(place, limit)
  local got = 0
  for step = 0, steps - 1 do
    while got < limit and bytes < LIMIT_BYTES and pop(step * width + place) do got = got + 1 end
  end
end

-- The lists of a step in which something waits, turned so that each comes first in its turn.
local function waiting(step, first, last, kept)
  local found, turned = {}, {}
  for place = first, last do
    local list = step * width + place
    if redis.call('LLEN', KEYS[QUEUES + list]) > kept(list) then found[#found + 1] = list end
  end
  for i = 1, #found do turned[i] = found[(i + turn - 1) % #found + 1] end
  return turned
end

-- One message of a step, the lists taking turns; base waits when only it is left and enough of it is here.
local function one_of(step, lists, is_share)
  for _ = 1, #lists do
    local list = table.remove(lists, 1)
    if list == step * width + BASE and taken >= near[step + 1] and #lists == 0 then
      lists[1] = list
      return false
    end
    if pop(list, is_share) then
      lists[#lists + 1] = list
      taken = taken + 1
      return true
    end
  end
  return false
end

local function passes(lists, step)
  for higher = 0, step - 1 do
    if #lists[higher] > 0 then return true end
  end
  return false
end

-- The steps in the order in which the next claim looks at them; a share is each lower step's in its turn.
local function order()
  local steps_of, number = {}, turn + taken
  local is_share = number % SHARE == SHARE - 1 and steps > 1
  if is_share then
    local first = math.floor(number / SHARE) % (steps - 1)
    for i = 0, steps - 2 do steps_of[#steps_of + 1] = steps - 1 - (first + i) % (steps - 1) end
    steps_of[#steps_of + 1] = 0
  else
    for step = 0, steps - 1 do steps_of[#steps_of + 1] = step end
  end
  return steps_of, is_share
end

local function claim_ahead()
  local lists = {}
  for step = 0, steps - 1 do lists[step] = waiting(step, BASE, OWN + own - 1, function() return 0 end) end
  while taken < ahead and bytes < LIMIT_BYTES do
    local steps_of, is_share = order()
    local got = false
    for _, step in ipairs(steps_of) do
      got = one_of(step, lists[step], is_share and passes(lists, step))
      if got then break end
    end
    if not got then return end
  end
end

local function claim_from_others()
  for step = 0, steps - 1 do
    local lists = waiting(step, OWN + own, width, kept)
    while #lists > 0 and taken < free and bytes < LIMIT_BYTES do
      local list = table.remove(lists, 1)
      if redis.call('LLEN', KEYS[QUEUES + list]) > kept(list) and pop(list) then
        taken = taken + 1
        lists[#lists + 1] = list
      end
    end
  end
end

-- What others have not claimed, for the worker to see whether it is the same the next time.
local function watch_others()
  local watched = {}
  for step = 0, steps - 1 do
    for place = OWN + own, width do
      local list = step * width + place
      local message = #watched < 2 * MOST_WATCHED and redis.call('LINDEX', KEYS[QUEUES + list], -1)
      if message then
        watched[#watched + 1] = list
        watched[#watched + 1] = redis.sha1hex(message)
      end
    end
  end
  return watched
end

local queues = {}
for i = QUEUES + 1, #KEYS do queues[#queues + 1] = KEYS[i] end
if redis.call('EXISTS', unpack(queues)) > 0 then
  beyond(MANAGE, manage)
  claim_ahead()
  claim_from_others()
  if taken < free then answer[5] = watch_others() end
  beyond(INBOX, inbox)
end

if room >= 0 then
  redis.call('HDEL', KEYS[5], id)
  if room > 0 and #answer == HEAD then redis.call('HSET', KEYS[5], id, room .. ' ' .. now) end
end
if listen then
  local idle = redis.call('HGETALL', KEYS[5])
  for i = 1, #idle, 2 do
    local rows, said = string.match(idle[i + 1], '^(%d+) (.+)$')
    if idle[i] ~= id and rows and now - tonumber(said) < FRESH_SECONDS then
      peers[#peers + 1] = idle[i]
      peers[#peers + 1] = tonumber(rows)
    end
  end
  answer[4] = peers
end
return answer
