-- The body names another id than the entry did: the claimed job moves to it, unless that job already exists.
-- KEYS: job claimed, job named, lane   ARGV: prefix, claimed id, named id, lease, entry
-- Returns 'ok', 'duplicate' (the entry is dropped) or 'fenced'

local claimed, named, lane = KEYS[1], KEYS[2], KEYS[3]
local id, new_id, lease, entry = ARGV[2], ARGV[3], ARGV[4], ARGV[5]

local holder, came_from = unpack(redis.call('HMGET', named, 'lease', 'claimed_as'))
if holder == lease and came_from == id then return 'ok' end -- a repeat; the jobs of one fetch share the lease's text
if redis.call('HGET', claimed, 'lease') ~= lease then return 'fenced' end
if redis.call('EXISTS', named) == 1 then
  redis.call('UNLINK', claimed)
  drop(lane, entry)
  return 'duplicate'
end
forget(new_id)
redis.call('RENAME', claimed, named)
redis.call('HSET', named, 'claimed_as', id)
-- Whoever reclaims the entry must find this job, not start another; the entry of that id in another lane must not.
change(id, 'alias', new_id, 'entry', entry, 'stream', lane_of(lane))
return 'ok'
