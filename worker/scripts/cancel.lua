-- Asks for a job's end: a running one is told through `ctl`, a queued one ends when it is fetched, a delayed one is due now.
-- KEYS: job   ARGV: prefix, id, control channel
-- Returns the job's state, or nil when there is no such job

local id = resolve(ARGV[2])
local state, lane = unpack(redis.call('HMGET', job_key(id), 'state', 'stream'))
if state and not ENDED[state] then
  redis.call('HSET', job_key(id), 'cancel', '1')
  if state == 'delayed' then redis.call('ZADD', delayed_key(lane), 0, id) end
  publish(ARGV[3], 'cancel ' .. id)
end
return state
