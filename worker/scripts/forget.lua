-- Forgets a job that has ended and did not succeed, so that its id may be added again; its batch counts as if it never was.
-- KEYS: job   ARGV: prefix, id
-- Returns the state that it was in, or nil when there is no such job; one that is open or has succeeded stays as it is

local job, id = KEYS[1], ARGV[2]
local state, batch = unpack(redis.call('HMGET', job, 'state', 'batch'))
if state and ENDED[state] and state ~= 'succeeded' then
  forget(id)
  redis.call('UNLINK', job)
  tally(batch, state, -1)
  tally(batch, 'added', -1)
end
return state
