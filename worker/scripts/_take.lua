-- Shared by fetch and reclaim, which define what ARGV[2..5] are: owner, nonce, max_body, max_reply.

local owner, nonce, max_body, max_reply = ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local taken, shipped = {}, 0

-- The well-formed characters of more than one byte (Unicode 15, table 3-7).
local MULTIBYTE = {
  '\240[\144-\191][\128-\191][\128-\191]', '[\241-\243][\128-\191][\128-\191][\128-\191]',
  '\244[\128-\143][\128-\191][\128-\191]', '\224[\160-\191][\128-\191]', '\237[\128-\159][\128-\191]',
  '[\225-\236\238\239][\128-\191][\128-\191]', '[\194-\223][\128-\191]',
}

-- UTF-8 of a sane length; anything else cannot name a key that a client could ask for, so the entry's id stands in.
local function is_job_id(id)
  if id == '' or #id > MAX_ID_BYTES then return false end
  for _, character in ipairs(MULTIBYTE) do id = string.gsub(id, character, 'x') end
  return not string.find(id, '[\128-\255]')
end

local function id_of(entry, fields)
  local id = entry
  for i = 1, #fields, 2 do
    if fields[i] == 'id' then id = is_job_id(fields[i + 1]) and fields[i + 1] or entry end
  end
  return resolve(id)
end

local function size_of(fields)
  local size = 0
  for _, value in ipairs(fields) do size = size + #value end
  return size
end

local function ending_of(cancel, deadline_ms, now)
  if cancel then return 'cancelled' end
  if deadline_ms and tonumber(deadline_ms) <= now then return 'expired' end
  return ''
end

-- Claims one pending entry under a new lease and adds it to `taken`, or drops it when its job has ended or lives in another
-- entry. Cancelled and expired jobs are claimed too: only the worker can write the result they end with.
local function take(key, entry, fields, source)
  local id, lane, now = id_of(entry, fields), lane_of(key), now_ms()
  local state, at, stream, attempt, released, n, enqueued, started, seed, cancel, deadline = unpack(redis.call('HMGET',
    job_key(id), 'state', 'entry', 'stream', 'attempt', 'released', 'n', 'enqueued_ms', 'started_ms', 'seed', 'cancel',
    'deadline_ms'))
  if state and (ENDED[state] or at ~= entry or stream ~= lane) then return drop(key, entry) end

  if not state then forget(id) end
  if not n or redis.call('EXISTS', log_key(id)) == 0 then n = '0' end -- a log that is gone cannot be resumed
  attempt = text((tonumber(attempt) or 0) + 1)
  released = released or '0'
  enqueued = enqueued or text(math.min(now, entry_ms(entry)))
  seed = seed or string.sub(redis.sha1hex(nonce .. id), 1, 15)
  local lease = nonce .. ':' .. attempt
  redis.call('HSET', job_key(id), 'state', 'running', 'entry', entry, 'stream', lane, 'attempt', attempt, 'released', released,
    'lease', lease, 'owner', owner, 'n', n, 'seed', seed, 'enqueued_ms', enqueued, 'started_ms', started or text(now))

  local size = size_of(fields)
  if size > max_body then fields = false else shipped = shipped + size end
  if state == 'running' then source = 'reclaimed' end
  taken[#taken + 1] = { id, entry, lane, fields, text(size), attempt, released, lease, seed, n, enqueued, source,
    ending_of(cancel, deadline, now) }
end
