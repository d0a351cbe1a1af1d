-- Makes the hash of a job that a bare XADD has added and no worker has seen, so that it can be followed and cancelled.
-- KEYS: lanes in the order in which they are served   ARGV: prefix, id, entries, bytes to look through at most
-- Returns the job's state, or nil when it was not found. An id that stands in the body alone is not found.

local id, entries, bytes = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local known = redis.call('HGET', job_key(resolve(id)), 'state')
if known or not is_job_id(id) then return known end

local function size_of(fields)
  local size = 0
  for _, part in ipairs(fields) do size = size + #part end
  return size
end

local function find(lane)
  local last = group_of(lane).last
  while entries > 0 and bytes > 0 do
    local page = redis.call('XRANGE', lane, '(' .. last, '+', 'COUNT', 10) -- few at a time, since bodies may be big
    if #page == 0 then return nil end
    for _, item in ipairs(page) do
      if named(item[1], item[2]) == id then return item[1] end
      last, entries, bytes = item[1], entries - 1, bytes - size_of(item[2])
    end
  end
end

for _, lane in ipairs(KEYS) do
  local entry = find(lane)
  if entry then
    forget(id)
    begin(id, entry, lane_of(lane), math.min(now_ms(), entry_ms(entry)))
    return 'queued'
  end
end
return nil
