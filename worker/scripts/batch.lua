-- Says what a batch is; makes its record where there is none. Its counts are kept by enqueue, finish, replay and forget.
-- KEYS: batch, batches   ARGV: prefix, id, then field, value pairs
-- Returns the record as it is now

local batch, batches, now = KEYS[1], KEYS[2], now_ms()
redis.call('HSET', batch, unpack(ARGV, 3))
if redis.call('HEXISTS', batch, 'created_ms') == 0 then
  redis.call('HSET', batch, 'created_ms', text(now))
  redis.call('ZADD', batches, text(now), ARGV[2])
end
redis.call('EXPIRE', batch, JOB_TTL_S)
redis.call('ZREMRANGEBYSCORE', batches, '-inf', text(now - 2 * JOB_TTL_S * 1000)) -- older ones hold no job
redis.call('EXPIRE', batches, 2 * JOB_TTL_S)
return redis.call('HGETALL', batch)
