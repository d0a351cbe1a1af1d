-- Marks what nobody has started in these lanes for its end; fetch.lua ends it, nothing is deleted here.
-- KEYS: cfg, lanes   ARGV: prefix
-- Returns how many entries of each lane lie before the mark and have never been delivered

local counts = {}
for i = 2, #KEYS do
  local lane = KEYS[i]
  local last = redis.call('XREVRANGE', lane, '+', '-', 'COUNT', 1)[1]
  if last then redis.call('HSET', KEYS[1], 'purged:' .. lane_of(lane), last[1]) end
  counts[i - 1] = math.max(0, redis.call('XLEN', lane) - group_of(lane).pending)
end
return counts
