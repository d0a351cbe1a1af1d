-- Claims up to `free` jobs: high before normal before low, but that of each `aging` claims that pass by a job of a lower lane the
-- next is that lane's. Of a lane a suspect goes first, one in all, then what was released, then what nobody has seen. Jobs that
-- have become due join their lanes first.
-- KEYS: lanes in the order to serve them, config, cursor
-- ARGV: prefix, owner, nonce, max_body, max_reply (bytes), free, scan (entries looked at, at most), aging, suspects (0 or 1),
--       then the nonces of earlier calls whose answer the owner never heard: what they claimed is given back first
-- Returns {deliveries, last delivered entry id of each lane, ms until a delayed job is due or -1, 1 if the queue is paused}

local owner, nonce, max_body, max_reply = ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local free, scan, aging, suspects = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9])
local lanes, config, cursor = { KEYS[1], KEYS[2], KEYS[3] }, KEYS[4], KEYS[5]
local PROMOTED = 100 -- at most of each lane in one call
local HELD = 1000 -- claims of the owner that are looked through in each lane

local taken, shipped, num_suspects = {}, 0, 0
local purged = {} -- per lane, the last entry that `purge` meant

-- Bytes of the body and of all that stands around it: a limit holds for each.
local function sizes_of(fields)
  local body, around = 0, 0
  for i = 1, #fields, 2 do
    local size = #fields[i + 1]
    if fields[i] == 'm' or fields[i] == 'j' then body = body + size else around = around + #fields[i] + size end
  end
  return body, around
end

local function is_up_to(entry, last)
  local ms, number = string.match(entry, '(%d+)-(%d+)')
  local last_ms, last_number = string.match(last or '0-0', '(%d+)-(%d+)')
  ms, number, last_ms, last_number = tonumber(ms), tonumber(number), tonumber(last_ms), tonumber(last_number)
  return ms < last_ms or (ms == last_ms and number <= last_number)
end

local function ending_of(cancel, deadline_ms, now)
  if cancel then return 'cancelled' end
  if deadline_ms and tonumber(deadline_ms) <= now then return 'expired' end
  return ''
end

-- Claims one pending entry under a new lease and adds it to `taken`, or drops it when its job has ended or lives in another
-- entry. Cancelled and expired jobs are claimed too: only the worker can write the result they end with.
local function take(key, entry, fields, source)
  local id, lane, now = id_of(key, entry, fields), lane_of(key), now_ms()
  local state, at, stream, attempt, released, n, enqueued, started, seed, cancel, deadline, suspect, crashes, reclaimed =
    unpack(redis.call('HMGET', job_key(id), 'state', 'entry', 'stream', 'attempt', 'released', 'n', 'enqueued_ms',
      'started_ms', 'seed', 'cancel', 'deadline_ms', 'suspect', 'crashes', 'was_reclaimed'))
  if state and (ENDED[state] or at ~= entry or stream ~= lane) then return drop(key, entry) end
  -- One to be tried again is new in its lane as well; one that runs is where somebody made the group anew.
  if source == 'new' and state ~= 'running' and is_up_to(entry, purged[lane]) then
    cancel = '1'
    redis.call('HSET', job_key(id), 'cancel', cancel) -- whoever gets it next does not see it new
  end
  if suspect and num_suspects >= suspects then -- new in its lane: it was tried again later, after a fault
    return redis.call('XCLAIM', key, GROUP, SUSPECTS, 0, entry, 'JUSTID')
  end

  if suspect then num_suspects = num_suspects + 1 end
  if not state then forget(id) end
  if not n or redis.call('EXISTS', log_key(id)) == 0 then n = '0' end -- a log that is gone cannot be resumed
  attempt = text((tonumber(attempt) or 0) + 1)
  released = released or '0'
  enqueued = enqueued or text(math.min(now, entry_ms(entry)))
  started = started or text(now)
  seed = seed or string.sub(redis.sha1hex(nonce .. id), 1, 15)
  local lease = nonce .. ':' .. attempt
  change(id, 'state', 'running', 'entry', entry, 'stream', lane, 'attempt', attempt, 'released', released,
    'lease', lease, 'owner', owner, 'n', n, 'seed', seed, 'enqueued_ms', enqueued, 'started_ms', started)
  if reclaimed then
    redis.call('HDEL', job_key(id), 'was_reclaimed')
    source = 'reclaimed'
  end

  local body, around = sizes_of(fields)
  local size = math.max(body, around)
  if size > max_body then fields = false else shipped = shipped + body + around end
  taken[#taken + 1] = { id, entry, lane, fields, text(size), attempt, released, lease, seed, n, enqueued, started, source,
    ending_of(cancel, deadline, now), suspect or '', crashes or '0' }
end

local function take_held(lane, holder, most)
  for _, held in ipairs(redis.call('XPENDING', lane, GROUP, '-', '+', most, holder)) do
    if shipped >= max_reply then return end
    for _, item in ipairs(redis.call('XCLAIM', lane, GROUP, owner, 0, held[1])) do take(lane, item[1], item[2], 'released') end
  end
end

-- Up to `most` jobs of a lane; how many.
local function take_from(lane, most)
  local before = #taken
  local function room() return shipped >= max_reply and 0 or math.min(most - (#taken - before), free - #taken) end
  if room() > 0 and num_suspects < suspects then take_held(lane, SUSPECTS, 1) end
  if room() > 0 then take_held(lane, RELEASED, room()) end
  while room() > 0 and scan > 0 do
    local count = math.min(room(), scan, 4) -- few at a time, since a read may overshoot max_reply
    local reply = redis.call('XREADGROUP', 'GROUP', GROUP, owner, 'COUNT', count, 'STREAMS', lane, '>')
    if not reply then break end
    for _, item in ipairs(reply[1][2]) do take(lane, item[1], item[2], 'new') end
    scan = scan - #reply[1][2]
  end
  return #taken - before
end

local function promote(lane)
  local delayed = delayed_key(lane_of(lane))
  for _, id in ipairs(redis.call('ZRANGE', delayed, '-inf', now_ms(), 'BYSCORE', 'LIMIT', 0, PROMOTED)) do
    local attempt, stream = unpack(redis.call('HMGET', job_key(id), 'attempt', 'stream'))
    if not stream or stream == lane_of(lane) then -- else what is parked is of a later job of this id, in another lane
      local fields = redis.call('HGETALL', parked_key(id))
      local entry = #fields > 0 and redis.call('XADD', lane, '*', unpack(fields)) -- first, as a full server refuses it
      if entry and attempt then -- else its hash is gone: it begins as one that nobody has seen
        change(id, 'state', 'queued', 'entry', entry)
        if attempt == '0' then redis.call('HSET', job_key(id), 'enqueued_ms', text(entry_ms(entry))) end
        redis.call('HDEL', job_key(id), 'lease', 'owner')
      end
      redis.call('UNLINK', parked_key(id))
    end
    redis.call('ZREM', delayed, id)
  end
end

local function give_back_unheard(lane, unheard)
  for _, held in ipairs(redis.call('XPENDING', lane, GROUP, '-', '+', HELD, owner)) do
    local item = redis.call('XRANGE', lane, held[1], held[1])[1]
    local id = item and id_of(lane, held[1], item[2])
    local lease, state, at = unpack(id and redis.call('HMGET', job_key(id), 'lease', 'state', 'entry') or {})
    local is_unheard = lease and unheard[string.match(lease, '^[^:]*')]
    if is_unheard and state == 'running' and at == held[1] then give_back(id, lane, held[1], 'none') end
  end
end

local function has_held(lane, holder)
  return #redis.call('XPENDING', lane, GROUP, '-', '+', 1, holder) > 0
end

-- What is owed to a lane whose claims so far come to `passed`: to suspects alone one at most, as more are not given out at once.
local function still_passed(lane, last, passed)
  if #redis.call('XRANGE', lane, '(' .. last, '+', 'COUNT', 1) > 0 or has_held(lane, RELEASED) then return passed end
  return has_held(lane, SUSPECTS) and math.min(passed, aging) or 0
end

for _, lane in ipairs(lanes) do redis.call('XPENDING', lane, GROUP) end -- fails with NOGROUP before anything is done
if #ARGV > 9 then
  local unheard = {}
  for i = 10, #ARGV do unheard[ARGV[i]] = true end
  for _, lane in ipairs(lanes) do give_back_unheard(lane, unheard) end
end
if redis.call('HGET', config, 'paused') == '1' then return { {}, {}, -1, 1 } end
for _, lane in ipairs(lanes) do
  promote(lane)
  purged[lane_of(lane)] = redis.call('HGET', config, 'purged:' .. lane_of(lane))
end

local passed, served = {}, {}
for i, lane in ipairs(lanes) do
  passed[i] = tonumber(redis.call('HGET', cursor, 'passed:' .. lane_of(lane))) or 0
  served[i] = 0
end
for i = 2, #lanes do served[i] = take_from(lanes[i], math.floor(passed[i] / aging)) end
local num_above, seen = 0, {}
for i, lane in ipairs(lanes) do
  local owed = served[i]
  served[i] = owed + take_from(lane, free)
  seen[i] = group_of(lane).last
  local left = still_passed(lane, seen[i], passed[i] - owed * aging + num_above)
  if left ~= passed[i] then redis.call('HSET', cursor, 'passed:' .. lane_of(lane), text(math.max(0, left))) end
  num_above = num_above + served[i]
end
local due = math.huge
for _, lane in ipairs(lanes) do
  due = math.min(due, tonumber(redis.call('ZRANGE', delayed_key(lane_of(lane)), 0, 0, 'WITHSCORES')[2]) or due)
end
return { taken, seen, due < math.huge and math.max(0, due - now_ms()) or -1, 0 }
