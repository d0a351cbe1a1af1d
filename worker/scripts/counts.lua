-- How full the lanes are. KEYS: lanes   ARGV: prefix
-- Returns for each lane {entries, held by workers, age in ms of the oldest one that waits, released, suspects, not due yet, last
-- entry id delivered}. What it costs does not depend on how many wait.

local function first_waiting(lane, last)
  local new = redis.call('XRANGE', lane, '(' .. last, '+', 'COUNT', 1)[1]
  return new and entry_ms(new[1])
end

local function first_of(lane, consumer)
  local first = redis.call('XPENDING', lane, GROUP, '-', '+', 1, consumer)[1]
  return first and entry_ms(first[1])
end

local rows, now = {}, now_ms()
for i, lane in ipairs(KEYS) do
  local group = group_of(lane)
  local waits = { [RELEASED] = 0, [SUSPECTS] = 0 }
  local oldest = first_waiting(lane, group.last) or now
  if group.pending > 0 then
    for _, consumer in ipairs(redis.call('XPENDING', lane, GROUP)[4] or {}) do
      if waits[consumer[1]] then waits[consumer[1]] = tonumber(consumer[2]) end
    end
    for name in pairs(waits) do oldest = math.min(oldest, first_of(lane, name) or now) end
  end
  local held = group.pending - waits[RELEASED] - waits[SUSPECTS]
  local delayed = redis.call('ZCARD', delayed_key(lane_of(lane)))
  rows[i] = { redis.call('XLEN', lane), held, math.max(0, now - oldest), waits[RELEASED], waits[SUSPECTS], delayed, group.last }
end
return rows
