-- Ends a job: result, end frame, lifetimes, acknowledgement. A repeat by the same lease answers ok and changes nothing.
-- KEYS: job, log, result, lane, done, dead
-- ARGV: prefix, id, lease, attempt, expected n ('' = any), entry, state, code, result, end frame, channel, ttl_s, batch, error,
--       done_maxlen, dead_maxlen
-- Returns 'ok', 'fenced' or 'behind'. The first write is one that a full server refuses, so that it refuses all or nothing.

local job, log, result, lane, done, dead = unpack(KEYS)
local id, attempt, expected_n, entry, state, code = ARGV[2], ARGV[4], ARGV[5], ARGV[6], ARGV[7], ARGV[8]
local frame, channel, ttl = ARGV[10], ARGV[11], ARGV[12]

local lease, was, n, released, owner, batch, alias = unpack(redis.call('HMGET', job,
  'lease', 'state', 'n', 'released', 'owner', 'batch', 'claimed_as'))
if lease ~= ARGV[3] then return 'fenced' end
if ENDED[was] then return 'ok' end
if expected_n ~= '' and n ~= expected_n then return 'behind' end

local function bury()
  local tried = attempt - released - (code == 'dead_letter' and 1 or 0) -- it is claimed once more for its end
  local row = { 'id', id, 'lane', lane_of(lane), 'why', code, 'attempts', text(tried), 'owner', owner, 'error', ARGV[14] }
  local item = redis.call('XRANGE', lane, entry, entry)[1]
  for i = 1, item and #item[2] or 0, 2 do
    local field = item[2][i]
    if field == 'v' or field == 'm' or field == 'j' then -- what replay.lua puts back
      row[#row + 1] = field
      row[#row + 1] = item[2][i + 1]
    end
  end
  redis.call('XADD', dead, 'MAXLEN', '~', ARGV[16], '*', unpack(row))
end

redis.call('SET', result, ARGV[9], 'EX', ttl)
redis.call('XADD', log, attempt .. '-*', 'm', frame)
redis.call('HSET', job, 'state', state, 'code', code, 'finished_ms', text(now_ms()))
redis.call('EXPIRE', log, ttl)
redis.call('EXPIRE', job, ttl)
if alias then redis.call('EXPIRE', job_key(alias), ttl) end
redis.call('XADD', done, 'MAXLEN', '~', ARGV[15], '*', 'id', id, 'state', state, 'batch', batch or ARGV[13], 'code', code)
tally(batch, state, 1)
if state == 'dead' then bury() end
drop(lane, entry)
publish(channel, frame)
return 'ok'
