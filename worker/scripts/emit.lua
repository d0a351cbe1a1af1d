-- Appends one frame to a job's log and publishes it, if the log ends exactly where the frame begins.
-- KEYS: job, log   ARGV: prefix, lease, attempt, previous n, n, channel ('' = do not publish), ttl_s, frame
-- Returns {'ok' | 'cancel' | 'fenced' | 'behind', n of the log}. A control frame has previous n = n and is the attempt's first.

local job, log = KEYS[1], KEYS[2]
local previous_n, n, channel, frame = ARGV[4], ARGV[5], ARGV[6], ARGV[8]
local entry = ARGV[3] .. '-' .. n

local lease, logged, state, cancel = unpack(redis.call('HMGET', job, 'lease', 'n', 'state', 'cancel'))
if lease ~= ARGV[2] or state ~= 'running' then return { 'fenced', logged or '0' } end

local function is_repeat()
  if logged ~= n then return false end
  local last = redis.call('XREVRANGE', log, '+', '-', 'COUNT', 1)[1]
  return last and last[1] == entry
end

local answer = cancel and 'cancel' or 'ok'
if is_repeat() then return { answer, n } end
if logged ~= previous_n then return { 'behind', logged } end
redis.call('XADD', log, entry, 'm', frame)
redis.call('EXPIRE', log, ARGV[7])
if previous_n ~= n then redis.call('HSET', job, 'n', n) end
if channel ~= '' then publish(channel, frame) end
return { answer, n }
