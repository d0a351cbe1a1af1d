-- Forgets consumers that hold nothing and whose worker has said nothing for `ttl_s`; with a name, that one at once if it holds
-- nothing, and its heartbeat: that worker leaves.
-- KEYS: workers, worker or '', lanes   ARGV: prefix, ttl_s, name or ''
-- Returns how many consumers are gone

local workers, ttl_ms, leaver, num_gone = KEYS[1], ARGV[2] * 1000, ARGV[3], 0
local now = now_ms()

local function is_gone(name, idle)
  if PSEUDO[name] then return false end
  if leaver ~= '' then return name == leaver end
  local seen = tonumber(redis.call('ZSCORE', workers, name) or 0)
  return idle > ttl_ms and now - seen > ttl_ms
end

for i = 3, #KEYS do
  local is_there = redis.call('EXISTS', KEYS[i]) == 1
  for _, consumer in ipairs(is_there and redis.call('XINFO', 'CONSUMERS', KEYS[i], GROUP) or {}) do
    if consumer[4] == 0 and is_gone(consumer[2], consumer[6]) then
      redis.call('XGROUP', 'DELCONSUMER', KEYS[i], GROUP, consumer[2])
      num_gone = num_gone + 1
    end
  end
end
if leaver ~= '' then
  redis.call('ZREM', workers, leaver)
  redis.call('UNLINK', KEYS[2])
end
return num_gone
