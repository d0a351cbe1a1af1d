-- Adds a job once. A known id or idempotency key answers `duplicate`; a queue at its bound answers `full`.
-- KEYS: lane, job, done, all lanes (3), [idempotency key]
-- ARGV: prefix, id, body, max_queued ('' = no bound), idempotency_ttl_s, then field, value pairs for the job's hash
-- Returns {status, job id, retry after in ms}

local lane, job, done, idempotency = KEYS[1], KEYS[2], KEYS[3], KEYS[7]
local id, max_queued = ARGV[2], tonumber(ARGV[4])

-- How long until `excess` more jobs have ended, from the pace of the last hundred; between 0.1 and 60 s.
local function retry_after_ms(excess)
  local ended = redis.call('XREVRANGE', done, '+', '-', 'COUNT', 100)
  if #ended < 2 then return 1000 end
  local pace = (entry_ms(ended[1][1]) - entry_ms(ended[#ended][1])) / (#ended - 1)
  return math.max(100, math.min(60000, math.ceil(pace * excess)))
end

local known = idempotency and redis.call('GET', idempotency)
if known then return { 'duplicate', known, '0' } end
if redis.call('EXISTS', job) == 1 then return { 'duplicate', resolve(id), '0' } end
if max_queued then
  local queued = redis.call('XLEN', KEYS[4]) + redis.call('XLEN', KEYS[5]) + redis.call('XLEN', KEYS[6])
  if queued >= max_queued then return { 'full', id, text(retry_after_ms(queued - max_queued + 1)) } end
end

local entry = redis.call('XADD', lane, '*', 'v', '1', 'id', id, 'm', ARGV[3])
forget(id)
redis.call('HSET', job, 'state', 'queued', 'entry', entry, 'stream', lane_of(lane), 'attempt', '0', 'released', '0', 'n', '0',
  'enqueued_ms', text(now_ms()), unpack(ARGV, 6))
if idempotency then redis.call('SET', idempotency, id, 'EX', ARGV[5]) end
return { 'queued', id, '0' }
