-- Gives jobs back: claimable at once by any worker, ahead of newer entries.
-- KEYS: cursor (for routing)   ARGV: prefix, '1' if the attempt counts, then id, lease, lane, entry for each job
-- Leases that are no longer held are passed over.

for i = 3, #ARGV, 4 do
  local job, lane, entry = job_key(ARGV[i]), lane_key(ARGV[i + 2]), ARGV[i + 3]
  local lease, state = unpack(redis.call('HMGET', job, 'lease', 'state'))
  if lease == ARGV[i + 1] and state == 'running' then
    redis.call('XCLAIM', lane, GROUP, RELEASED, 0, entry, 'JUSTID', 'FORCE')
    redis.call('HSET', job, 'state', 'queued')
    if ARGV[2] == '0' then redis.call('HINCRBY', job, 'released', 1) end
    redis.call('HDEL', job, 'lease', 'owner')
  end
end
return 'ok'
