module slotmill-producer-example

go 1.19

require (
	github.com/gomodule/redigo v1.8.9
	github.com/vmihailenco/msgpack/v5 v5.4.1
)
