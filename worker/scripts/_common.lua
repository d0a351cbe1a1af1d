-- Shared text that worker/lua.py puts in front of every script, after the constants that Python decides (GROUP, RELEASED, SUSPECTS,
-- JOB_TTL_S; ENDED, LANES and PSEUDO as sets) and PUBLISH, the command (SPUBLISH where the server is a cluster). It relies on
-- ARGV[1] being the queue's key prefix; job:, tok:, res: and batch: keys are built from it, all in the queue's hash slot. No script
-- decodes a payload: Lua's numbers lose integers above 2^53, so ids, seeds and counts travel as text.

local prefix = ARGV[1]
local MAX_ID_BYTES = 512 -- worker/wire.py allows 128 characters

local function publish(channel, message) redis.call(PUBLISH, channel, message) end

local function text(number) return string.format('%.0f', number) end

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function job_key(id) return prefix .. 'job:' .. id end
local function log_key(id) return prefix .. 'tok:' .. id end
local function batch_key(id) return prefix .. 'batch:' .. id end
local function parked_key(id) return prefix .. 'parked:' .. id end
local function result_key(id) return prefix .. 'res:' .. id end
local function lane_key(lane) return prefix .. 'jobs:' .. lane end
local function delayed_key(lane) return prefix .. 'delayed:' .. lane end
local function lane_of(key) return string.sub(key, #prefix + #'jobs:' + 1) end
local function entry_ms(entry) return tonumber(string.match(entry, '^%d+')) end

-- How many entries of a lane the group holds, and the last one that it delivered; nothing where there is no group yet.
local function group_of(lane)
  if redis.call('EXISTS', lane) == 1 then
    for _, group in ipairs(redis.call('XINFO', 'GROUPS', lane)) do
      if group[2] == GROUP then return { pending = group[6], last = group[8] } end
    end
  end
  return { pending = 0, last = '0-0' }
end

-- The job that is really meant: a body may have named another id than the entry did (adopt.lua leaves the alias).
local function resolve(id) return redis.call('HGET', job_key(id), 'alias') or id end

local function drop(key, entry)
  redis.call('XACK', key, GROUP, entry)
  redis.call('XDEL', key, entry)
end

-- A change of a job that has not ended. Its hash lives on from here for JOB_TTL_S, so that one nobody comes back to goes by itself.
local function change(id, ...)
  redis.call('HSET', job_key(id), ...)
  redis.call('EXPIRE', job_key(id), JOB_TTL_S)
end

-- Counts in a batch's record. A producer that only names a batch has made none, and gets none.
local function tally(batch, count, by)
  if not batch or redis.call('EXISTS', batch_key(batch)) == 0 then return end
  redis.call('HINCRBY', batch_key(batch), count, by)
  redis.call('EXPIRE', batch_key(batch), JOB_TTL_S)
end

-- A job that has never run, in this entry ('' = none yet) of this lane, and more fields of its hash.
local function begin(id, entry, lane, enqueued_ms, ...)
  change(id, 'state', 'queued', 'entry', entry, 'stream', lane, 'attempt', '0', 'released', '0', 'n', '0',
    'enqueued_ms', text(enqueued_ms), ...)
end

-- Keeps an entry's fields until `due_ms`, or the job's deadline; worker/scripts/fetch.lua puts them back into the lane.
local function park(id, lane, due_ms, fields)
  due_ms = math.min(due_ms, tonumber(redis.call('HGET', job_key(id), 'deadline_ms')) or due_ms)
  local left_s = math.max(0, math.ceil((due_ms - now_ms()) / 1000))
  redis.call('HSET', parked_key(id), unpack(fields))
  redis.call('ZADD', delayed_key(lane), text(due_ms), id)
  change(id, 'state', 'delayed')
  for _, key in ipairs({ parked_key(id), job_key(id) }) do redis.call('EXPIRE', key, JOB_TTL_S + left_s) end
end

-- What an earlier job of this id left behind must never pass for this one's.
local function forget(id) redis.call('UNLINK', log_key(id), result_key(id), parked_key(id)) end

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

-- What an entry says its job is called.
local function named(entry, fields)
  local id = entry
  for i = 1, #fields, 2 do
    if fields[i] == 'id' then id = is_job_id(fields[i + 1]) and fields[i + 1] or entry end
  end
  return id
end

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
