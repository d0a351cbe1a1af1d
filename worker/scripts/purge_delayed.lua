-- Asks for the end of a lane's jobs that are not due yet, and makes them due: they end when they are fetched.
-- KEYS: delayed   ARGV: prefix, cursor, jobs to look at
-- Returns {jobs asked, cursor, '0' when there are no more}

local asked, now = 0, text(now_ms())
local reply = redis.call('ZSCAN', KEYS[1], ARGV[2], 'COUNT', ARGV[3])
for i = 1, #reply[2], 2 do
  local id = reply[2][i]
  local state, lane = unpack(redis.call('HMGET', job_key(id), 'state', 'stream'))
  if state == 'delayed' and delayed_key(lane) == KEYS[1] then -- else a later job of this id waits in another lane
    redis.call('HSET', job_key(id), 'cancel', '1')
    redis.call('ZADD', KEYS[1], 'XX', 'LT', now, id)
    asked = asked + 1
  end
end
return { asked, reply[1] }
