-- Shared by fetch, release and reclaim: a claimed job waits for its next claim.
--
-- blame       the next attempt runs alone first   this one counts   it was alone
-- none
-- bystander   x
-- batch       x                                    x
-- solo        x                                    x                 x

local function give_back(id, key, entry, blame)
  local job = job_key(id)
  if blame ~= 'none' then redis.call('HSET', job, 'suspect', '1') end
  if blame == 'none' or blame == 'bystander' then redis.call('HINCRBY', job, 'released', 1) end
  if blame == 'solo' then redis.call('HINCRBY', job, 'crashes', 1) end
  local holder = redis.call('HEXISTS', job, 'suspect') == 1 and SUSPECTS or RELEASED
  redis.call('XCLAIM', key, GROUP, holder, 0, entry, 'JUSTID', 'FORCE')
  redis.call('HDEL', job, 'lease', 'owner')
  change(id, 'state', 'queued')
end
