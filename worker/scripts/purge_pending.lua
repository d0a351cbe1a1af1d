-- Asks for the end of jobs that ran before and wait now, under a pseudo consumer; they end when they are fetched.
-- KEYS: lane   ARGV: prefix, consumer, first entry to look at ('(' leaves it out), entries, bytes to look through at most
-- Returns {jobs asked, where to go on, or '' when there are no more}

local lane, entries, bytes = KEYS[1], tonumber(ARGV[4]), tonumber(ARGV[5])

local function flag(entry, fields)
  local job = job_key(id_of(lane, entry, fields))
  local state, at, stream = unpack(redis.call('HMGET', job, 'state', 'entry', 'stream'))
  if state ~= 'queued' or at ~= entry or stream ~= lane_of(lane) then return 0 end
  redis.call('HSET', job, 'cancel', '1')
  return 1
end

local asked = 0
local page = redis.call('XPENDING', lane, GROUP, ARGV[3], '+', entries, ARGV[2])
for _, held in ipairs(page) do
  local item = redis.call('XRANGE', lane, held[1], held[1])[1]
  for _, part in ipairs(item and item[2] or {}) do bytes = bytes - #part end
  if item then asked = asked + flag(held[1], item[2]) end
  if bytes <= 0 then return { asked, '(' .. held[1] } end
end
return { asked, #page == entries and '(' .. page[entries][1] or '' }
