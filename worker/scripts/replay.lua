-- Gives a dead job a new life under its id: back into its lane, as if it had never run; its rows leave the dead.
-- KEYS: job, dead   ARGV: prefix, id, its rows, newest first: the first is the one that counts
-- Returns 'queued', 'gone' (no such row: somebody was faster), 'exists' (a job of that id that is not dead) or 'bodiless'

local job, dead, id = KEYS[1], KEYS[2], ARGV[2]

local item = redis.call('XRANGE', dead, ARGV[3], ARGV[3])[1]
if not item then return 'gone' end
local lane, entry, has_body = 'normal', { 'id', id }, false
for i = 1, #item[2], 2 do
  local field, value = item[2][i], item[2][i + 1]
  if field == 'lane' and LANES[value] then lane = value end
  if field == 'm' or field == 'j' then has_body = true end
  if field == 'v' or field == 'm' or field == 'j' then
    entry[#entry + 1] = field
    entry[#entry + 1] = value
  end
end

local state, alias, deadline, tenant, batch = unpack(redis.call('HMGET', job, 'state', 'alias', 'deadline_ms', 'tenant', 'batch'))
if alias or (state and state ~= 'dead') then return 'exists' end
if not has_body then return 'bodiless' end

local at = redis.call('XADD', lane_key(lane), '*', unpack(entry))
forget(id)
redis.call('UNLINK', job)
begin(id, at, lane, now_ms())
for name, value in pairs({ deadline_ms = deadline, tenant = tenant, batch = batch }) do
  if value then redis.call('HSET', job, name, value) end
end
if state == 'dead' then tally(batch, 'dead', -1) end
for i = 3, #ARGV do redis.call('XDEL', dead, ARGV[i]) end
return 'queued'
