-- Claims up to `free` jobs: lane by lane, in each what was released first, then what nobody has seen.
-- KEYS: lanes in the order to serve them
-- ARGV: prefix, owner, nonce, max_body, max_reply (bytes), free, scan (entries looked at, at most)
-- Returns {deliveries, last delivered entry id of each lane}

local free, scan = tonumber(ARGV[6]), tonumber(ARGV[7])

local function room()
  if shipped >= max_reply then return 0 end
  return math.min(free - #taken, scan, 4) -- few at a time, since a read may overshoot max_reply
end

local released = {}
for i, lane in ipairs(KEYS) do -- fails with NOGROUP before anything is claimed
  released[i] = redis.call('XPENDING', lane, GROUP, '-', '+', free, RELEASED)
end

local function take_released(lane, pending)
  for _, held in ipairs(pending) do
    if room() <= 0 then return end
    for _, item in ipairs(redis.call('XCLAIM', lane, GROUP, owner, 0, held[1])) do take(lane, item[1], item[2], 'released') end
  end
end

local function take_new(lane)
  while room() > 0 do
    local reply = redis.call('XREADGROUP', 'GROUP', GROUP, owner, 'COUNT', room(), 'STREAMS', lane, '>')
    if not reply then return end
    for _, item in ipairs(reply[1][2]) do take(lane, item[1], item[2], 'new') end
    scan = scan - #reply[1][2]
  end
end

local seen = {}
for i, lane in ipairs(KEYS) do
  take_released(lane, released[i])
  take_new(lane)
  for _, group in ipairs(redis.call('XINFO', 'GROUPS', lane)) do
    if group[2] == GROUP then seen[i] = group[8] end
  end
end
return { taken, seen }
