#!/bin/sh
# Puts one job in as JSON, waits for its end and prints its text: redis-cli or valkey-cli is all that it needs.
#
#     examples/producer.sh '{"prompt": "The capital of France is", "max_tokens": 16, "temperature": 0}'
#
# CLI names the client with its options (CLI="redis-cli -h queue.example -p 6380"), SLOTMILL_QUEUE the queue.
set -eu
cli="${CLI:-redis-cli} -e" # an error of the server is one of the program
queue="slotmill:{${SLOTMILL_QUEUE:-default}}"
id=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')

# Before the first claim nothing but the entry is known of a job; so its id is ours to choose.
$cli XADD "$queue:jobs:normal" '*' id "$id" j "${1:?a job body is missing}" >/dev/null

# Sleeps until a job of the queue ends, a second at most, and then looks whether it was ours.
until [ "$($cli EXISTS "$queue:res:$id")" = 1 ]; do
    $cli XREAD BLOCK 1000 STREAMS "$queue:done" '$' >/dev/null
done

# Results are msgpack, which the server can read for us. A script by its hash: users of ops/redis/users.acl may not EVAL.
script=$($cli SCRIPT LOAD "local r = cmsgpack.unpack(redis.call('GET', KEYS[1]))
if r.state ~= 'succeeded' then return r.state .. ': ' .. tostring(r.error) end
return r.choices[1].text")
$cli --raw EVALSHA "$script" 1 "$queue:res:$id"
