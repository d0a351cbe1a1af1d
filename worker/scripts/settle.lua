-- Lets go of jobs that have ended, whose results are elsewhere: their logs, the most of their memory, at once; hash and result,
-- which answer a late duplicate and another reader, a little later.
-- KEYS: cursor (for routing)   ARGV: prefix, ttl_s, then ids

for i = 3, #ARGV do
  local id = ARGV[i]
  if ENDED[redis.call('HGET', job_key(id), 'state') or ''] then
    redis.call('UNLINK', log_key(id))
    for _, key in ipairs({ job_key(id), result_key(id) }) do redis.call('EXPIRE', key, ARGV[2], 'LT') end
  end
end
return 'ok'
