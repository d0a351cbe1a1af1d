-- Shared text that worker/broker.py puts in front of every script. It relies on ARGV[1] being the queue's key prefix;
-- job:, tok: and res: keys are built from it, all in the queue's hash slot. No script decodes a payload: Lua's numbers
-- lose integers above 2^53, so ids, seeds and counts travel as text.

local prefix = ARGV[1]
local GROUP = 'workers'
local RELEASED = 'released' -- pseudo consumer that holds what workers gave back
local ENDED = { succeeded = true, failed = true, cancelled = true, expired = true, dead = true }
local MAX_ID_BYTES = 512 -- worker/wire.py allows 128 characters

local function text(number) return string.format('%.0f', number) end

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function job_key(id) return prefix .. 'job:' .. id end
local function log_key(id) return prefix .. 'tok:' .. id end
local function result_key(id) return prefix .. 'res:' .. id end
local function lane_key(lane) return prefix .. 'jobs:' .. lane end
local function lane_of(key) return string.sub(key, #prefix + #'jobs:' + 1) end
local function entry_ms(entry) return tonumber(string.match(entry, '^%d+')) end

-- The job that is really meant: a body may have named another id than the entry did (adopt.lua leaves the alias).
local function resolve(id) return redis.call('HGET', job_key(id), 'alias') or id end

local function drop(key, entry)
  redis.call('XACK', key, GROUP, entry)
  redis.call('XDEL', key, entry)
end

-- What an earlier job of this id left behind must never pass for this one's.
local function forget(id) redis.call('UNLINK', log_key(id), result_key(id)) end

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
