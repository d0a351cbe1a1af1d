-- Gives jobs back: claimable at once by any worker, ahead of newer entries.
-- KEYS: cursor (for routing)   ARGV: prefix, blame (see _give_back.lua), then id, lease, lane, entry for each job
-- Leases that are no longer held are passed over.

for i = 3, #ARGV, 4 do
  local id, lane, entry = ARGV[i], lane_key(ARGV[i + 2]), ARGV[i + 3]
  local lease, state = unpack(redis.call('HMGET', job_key(id), 'lease', 'state'))
  if lease == ARGV[i + 1] and state == 'running' then give_back(id, lane, entry, ARGV[2]) end
end
return 'ok'
