-- Holds a running job back until its next attempt is due. The attempt counts. A repeat by the same lease answers ok.
-- KEYS: job, lane   ARGV: prefix, id, lease, entry, delay (ms)
-- Returns 'ok' or 'fenced'

local job, lane = KEYS[1], KEYS[2]
local id, entry = ARGV[2], ARGV[4]

local lease, state = unpack(redis.call('HMGET', job, 'lease', 'state'))
if lease ~= ARGV[3] then return 'fenced' end
if state ~= 'running' then return 'ok' end
local item = redis.call('XRANGE', lane, entry, entry)[1]
if not item then return 'fenced' end -- deleted by hand

local fields = { 'id', id }
for i = 1, #item[2], 2 do
  if item[2][i] ~= 'id' then
    fields[#fields + 1] = item[2][i]
    fields[#fields + 1] = item[2][i + 1]
  end
end
park(id, lane_of(lane), now_ms() + ARGV[5], fields)
drop(lane, entry)
return 'ok'
