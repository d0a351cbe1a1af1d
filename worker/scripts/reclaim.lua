-- Lets the jobs of workers that have stopped renewing wait for their next claim, as suspects, going on where the last call on
-- this queue stopped. Who holds a suspect runs it alone: so that one is charged, and the others of its holder are not.
-- KEYS: cursor, lanes   ARGV: prefix, owner, min_idle (ms), entries looked at, then <lane>/<entry> of all in the caller's hands
-- Returns how many

local cursor, owner, min_idle, count = KEYS[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local in_hand, num_found = {}, 0
for i = 5, #ARGV do in_hand[ARGV[i]] = true end

-- The id of the entry proves nothing: an earlier process of the same name may have claimed it.
local function is_mine(id, key, entry)
  return in_hand[lane_of(key) .. '/' .. entry] and redis.call('HGET', job_key(id), 'owner') == owner
end

local alone = {}

-- Whether a worker holds a suspect, in whatever lane and however young its claim. Looked up before its first job moves.
local function has_suspect(holder)
  if alone[holder] == nil then
    alone[holder] = false
    for i = 2, #KEYS do
      for _, held in ipairs(redis.call('XPENDING', KEYS[i], GROUP, '-', '+', count, holder)) do
        local item = redis.call('XRANGE', KEYS[i], held[1], held[1])[1]
        local job = item and job_key(id_of(KEYS[i], held[1], item[2]))
        if job and redis.call('HGET', job, 'owner') == holder and redis.call('HEXISTS', job, 'suspect') == 1 then
          alone[holder] = true
          return true
        end
      end
    end
  end
  return alone[holder]
end

local function reclaim(key, entry, holder)
  local is_alone = has_suspect(holder)
  local item = redis.call('XRANGE', key, entry, entry)[1]
  if not item then return redis.call('XACK', key, GROUP, entry) end -- deleted by hand
  local id = id_of(key, entry, item[2])
  local state, at, stream, suspect = unpack(redis.call('HMGET', job_key(id), 'state', 'entry', 'stream', 'suspect'))
  if state and (ENDED[state] or at ~= entry or stream ~= lane_of(key)) then return drop(key, entry) end
  if is_mine(id, key, entry) then return end
  num_found = num_found + 1
  if state ~= 'running' then return redis.call('XCLAIM', key, GROUP, suspect and SUSPECTS or RELEASED, 0, entry, 'JUSTID') end
  give_back(id, key, entry, suspect and 'solo' or is_alone and 'bystander' or 'batch')
  redis.call('HSET', job_key(id), 'was_reclaimed', '1')
end

for i = 2, #KEYS do
  local key, from = KEYS[i], redis.call('HGET', cursor, lane_of(KEYS[i])) or '-'
  local page = redis.call('XPENDING', key, GROUP, 'IDLE', min_idle, from, '+', count)
  for _, held in ipairs(page) do
    if not PSEUDO[held[2]] then reclaim(key, held[1], held[2]) end
  end
  redis.call('HSET', cursor, lane_of(key), #page == count and '(' .. page[#page][1] or '-')
end
return num_found
