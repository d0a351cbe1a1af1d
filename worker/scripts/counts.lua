-- How full the lanes are. KEYS: lanes   ARGV: prefix
-- Returns for each lane {entries, held by workers, age in ms of the oldest one that waits}

local function first_waiting(lane, last)
  local new = redis.call('XRANGE', lane, '(' .. last, '+', 'COUNT', 1)[1]
  return new and entry_ms(new[1])
end

local function group_of(lane)
  if redis.call('EXISTS', lane) == 0 then return nil end
  for _, group in ipairs(redis.call('XINFO', 'GROUPS', lane)) do
    if group[2] == GROUP then return { pending = group[6], last = group[8] } end
  end
end

local rows, now = {}, now_ms()
for i, lane in ipairs(KEYS) do
  local group, pending = group_of(lane), 0
  local oldest = first_waiting(lane, group and group.last or '0-0')
  if group then
    pending = group.pending
    for _, consumer in ipairs(redis.call('XPENDING', lane, GROUP)[4] or {}) do
      if consumer[1] == RELEASED then pending = pending - tonumber(consumer[2]) end
    end
    local released = redis.call('XPENDING', lane, GROUP, '-', '+', 1, RELEASED)[1]
    if released then oldest = math.min(oldest or now, entry_ms(released[1])) end
  end
  rows[i] = { redis.call('XLEN', lane), pending, math.max(0, now - (oldest or now)) }
end
return rows
