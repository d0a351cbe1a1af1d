-- Ends the suspicion of jobs that have run alone for long enough. Leases that are no longer held are passed over.
-- KEYS: cursor (for routing)   ARGV: prefix, then id, lease for each job

for i = 2, #ARGV, 2 do
  local job = job_key(ARGV[i])
  if redis.call('HGET', job, 'lease') == ARGV[i + 1] then redis.call('HDEL', job, 'suspect') end
end
return 'ok'
