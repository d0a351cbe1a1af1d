-- Sets fields of the queue's settings, or clears those given as '', and tells the workers.
-- KEYS: cfg   ARGV: prefix, control channel, word for it ('' = none), then field, value pairs
-- Returns how many were not so before

local changed = 0
for i = 4, #ARGV, 2 do
  local field, value = ARGV[i], ARGV[i + 1]
  if (redis.call('HGET', KEYS[1], field) or '') ~= value then changed = changed + 1 end
  if value == '' then redis.call('HDEL', KEYS[1], field) else redis.call('HSET', KEYS[1], field, value) end
end
if ARGV[3] ~= '' then publish(ARGV[2], ARGV[3]) end
return changed
