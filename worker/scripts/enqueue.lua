-- Adds a job once. A known id or idempotency key answers `duplicate`, a queue at its bound `full`, one that drains `closed`,
-- a batch that was cancelled `cancelled`.
-- KEYS: lane, job, done, config, all lanes (3), what is delayed of each (3), [idempotency key]
-- ARGV: prefix, id, body, max_queued ('' = no bound), idempotency_ttl_s, delay (ms), then field, value pairs for the job's hash
-- Returns {status, job id, retry after in ms}

local lane, job, done, config, idempotency = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[11]
local id, delay_ms = ARGV[2], tonumber(ARGV[6])
local closed, bound = unpack(redis.call('HMGET', config, 'closed', 'max_queued'))
local batch
for i = 7, #ARGV, 2 do
  if ARGV[i] == 'batch' then batch = ARGV[i + 1] end
end
local max_queued = math.min(tonumber(ARGV[4]) or math.huge, tonumber(bound) or math.huge)

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
if batch and redis.call('HEXISTS', batch_key(batch), 'cancelled_ms') == 1 then return { 'cancelled', id, '0' } end
if closed == '1' then return { 'closed', id, '0' } end
local queued = 0
for i = 5, 7 do queued = queued + redis.call('XLEN', KEYS[i]) + redis.call('ZCARD', KEYS[i + 3]) end
if queued >= max_queued then return { 'full', id, text(retry_after_ms(queued - max_queued + 1)) } end

local fields = { 'v', '1', 'id', id, 'm', ARGV[3] }
local entry = delay_ms > 0 and '' or redis.call('XADD', lane, '*', unpack(fields))
begin(id, entry, lane_of(lane), now_ms(), unpack(ARGV, 7))
forget(id)
if delay_ms > 0 then park(id, lane_of(lane), now_ms() + delay_ms, fields) end
if idempotency then redis.call('SET', idempotency, id, 'EX', ARGV[5]) end
tally(batch, 'added', 1)
return { delay_ms > 0 and 'delayed' or 'queued', id, '0' }
