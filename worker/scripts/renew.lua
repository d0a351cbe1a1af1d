-- Makes the claims of `owner` young again; JUSTID, so that the delivery count stays.
-- KEYS: cursor (for routing)   ARGV: prefix, owner, then id, lease, lane, entry for each job
-- Returns {ids lost, ids with a cancel request}

local owner, lost, cancelled = ARGV[2], {}, {}

for i = 3, #ARGV, 4 do
  local id, lane, entry = ARGV[i], ARGV[i + 2], ARGV[i + 3]
  local holder, lease, state, cancel = unpack(redis.call('HMGET', job_key(id), 'owner', 'lease', 'state', 'cancel'))
  if holder ~= owner or lease ~= ARGV[i + 1] then
    lost[#lost + 1] = id
  elseif not ENDED[state] then
    -- FORCE: the hash decides who holds the job, also after somebody made the group anew
    redis.call('XCLAIM', lane_key(lane), GROUP, owner, 0, entry, 'JUSTID', 'FORCE')
    if cancel then cancelled[#cancelled + 1] = id end
  end
end
return { lost, cancelled }
