-- Says that a worker is alive, by the server's clock. KEYS: workers, worker   ARGV: prefix, id, ttl_s, field, value...

local now = now_ms()
redis.call('ZADD', KEYS[1], text(now), ARGV[2])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', text(now - ARGV[3] * 1000))
redis.call('EXPIRE', KEYS[1], ARGV[3])
redis.call('HSET', KEYS[2], 'seen_ms', text(now), unpack(ARGV, 4))
redis.call('EXPIRE', KEYS[2], ARGV[3])
return 'ok'
