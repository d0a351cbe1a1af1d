-- Shared by fetch and reclaim, which define what ARGV[2..5] are: owner, nonce, max_body, max_reply.

local owner, nonce, max_body, max_reply = ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local taken, shipped = {}, 0

-- The job of an entry. Two lanes may give the same entry id, so of entries without an id the second claimed is called
-- `<entry>-<lane>`; its hash keeps that name for it when the first one's has expired.
local function id_of(key, entry, fields)
  local id = named(entry, fields)
  if id == entry then
    local lane, own = lane_of(key), entry .. '-' .. lane_of(key)
    local at, stream = unpack(redis.call('HMGET', job_key(id), 'entry', 'stream'))
    if redis.call('EXISTS', job_key(own)) == 1 or (at and (at ~= entry or stream ~= lane)) then id = own end
  end
  return resolve(id)
end

-- Bytes of the body and of all that stands around it: a limit holds for each.
local function sizes_of(fields)
  local body, around = 0, 0
  for i = 1, #fields, 2 do
    local size = #fields[i + 1]
    if fields[i] == 'm' or fields[i] == 'j' then body = body + size else around = around + #fields[i] + size end
  end
  return body, around
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
  local state, at, stream, attempt, released, n, enqueued, started, seed, cancel, deadline = unpack(redis.call('HMGET',
    job_key(id), 'state', 'entry', 'stream', 'attempt', 'released', 'n', 'enqueued_ms', 'started_ms', 'seed', 'cancel',
    'deadline_ms'))
  if state and (ENDED[state] or at ~= entry or stream ~= lane) then return drop(key, entry) end

  if not state then forget(id) end
  if not n or redis.call('EXISTS', log_key(id)) == 0 then n = '0' end -- a log that is gone cannot be resumed
  attempt = text((tonumber(attempt) or 0) + 1)
  released = released or '0'
  enqueued = enqueued or text(math.min(now, entry_ms(entry)))
  started = started or text(now)
  seed = seed or string.sub(redis.sha1hex(nonce .. id), 1, 15)
  local lease = nonce .. ':' .. attempt
  redis.call('HSET', job_key(id), 'state', 'running', 'entry', entry, 'stream', lane, 'attempt', attempt, 'released', released,
    'lease', lease, 'owner', owner, 'n', n, 'seed', seed, 'enqueued_ms', enqueued, 'started_ms', started)

  local body, around = sizes_of(fields)
  local size = math.max(body, around)
  if size > max_body then fields = false else shipped = shipped + body + around end
  if state == 'running' then source = 'reclaimed' end
  taken[#taken + 1] = { id, entry, lane, fields, text(size), attempt, released, lease, seed, n, enqueued, started, source,
    ending_of(cancel, deadline, now) }
end
