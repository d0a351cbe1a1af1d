-- A page of the dead, newest first, without their bodies.
-- KEYS: dead   ARGV: prefix, first row to look at ('+' = the newest, '(' leaves it out), rows, bytes to look through at most
-- Returns {rows, where to go on, or '' when there are no more}; a row is {its id, bytes of the body, field, value...}

local dead, before, count, bytes = KEYS[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local rows = {}

local function without_body(row, fields)
  local shown, size = { row, 0 }, 0
  for i = 1, #fields, 2 do
    size = size + #fields[i + 1]
    if fields[i] == 'm' or fields[i] == 'j' then
      shown[2] = #fields[i + 1]
    else
      shown[#shown + 1] = fields[i]
      shown[#shown + 1] = fields[i + 1]
    end
  end
  bytes = bytes - size
  return shown
end

while #rows < count and bytes > 0 do
  local item = redis.call('XREVRANGE', dead, before, '-', 'COUNT', 1)[1] -- one at a time, since bodies may be big
  if not item then return { rows, '' } end
  rows[#rows + 1] = without_body(item[1], item[2])
  before = '(' .. item[1]
end
return { rows, before }
