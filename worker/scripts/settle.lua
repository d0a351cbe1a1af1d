-- Shortens the lives of jobs that have ended, whose results are elsewhere; their hashes answer late duplicates until then.
-- KEYS: cursor (for routing)   ARGV: prefix, ttl_s, then ids

for i = 3, #ARGV do
  local id = ARGV[i]
  if ENDED[redis.call('HGET', job_key(id), 'state') or ''] then
    for _, key in ipairs({ job_key(id), log_key(id), result_key(id) }) do redis.call('EXPIRE', key, ARGV[2], 'LT') end
  end
end
return 'ok'
