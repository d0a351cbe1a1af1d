-- Claims up to `count` jobs whose lease ran out, going on where the last call on this queue stopped.
-- KEYS: cursor, lanes
-- ARGV: prefix, owner, nonce, max_body, max_reply (bytes), count, min_idle (ms), rounds, entries in the caller's hands...
-- Returns deliveries

local cursor, count, min_idle, rounds = KEYS[1], tonumber(ARGV[6]), ARGV[7], tonumber(ARGV[8])
local in_hand = {}
for i = 9, #ARGV do in_hand[ARGV[i]] = true end
for i = 2, #KEYS do redis.call('XPENDING', KEYS[i], GROUP) end -- fails with NOGROUP before anything is claimed

-- Two lanes may hold the same entry id, so the id alone does not prove that the caller runs it.
local function is_mine(lane, entry, fields)
  return in_hand[entry] and redis.call('HGET', job_key(id_of(lane, entry, fields)), 'owner') == owner
end

local function reclaim(lane, entry)
  local fields = redis.call('XRANGE', lane, entry, entry)[1][2] -- XAUTOCLAIM has dropped those that are gone
  if is_mine(lane, entry, fields) then -- XAUTOCLAIM made it young; a worker that stopped renewing must stay claimable by others
    return redis.call('XCLAIM', lane, GROUP, owner, 0, entry, 'IDLE', min_idle, 'JUSTID')
  end
  take(lane, entry, fields, 'released')
end

for i = 2, #KEYS do
  local lane, from = KEYS[i], redis.call('HGET', cursor, lane_of(KEYS[i])) or '0-0'
  repeat
    local want = math.min(count - #taken, 8)
    if want <= 0 or rounds <= 0 or shipped >= max_reply then break end
    local reply = redis.call('XAUTOCLAIM', lane, GROUP, owner, min_idle, from, 'COUNT', want, 'JUSTID')
    from, rounds = reply[1], rounds - 1
    for _, entry in ipairs(reply[2]) do reclaim(lane, entry) end
  until from == '0-0'
  redis.call('HSET', cursor, lane_of(lane), from)
end
return taken
