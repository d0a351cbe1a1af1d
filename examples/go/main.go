// Puts one job in as JSON, prints its tokens as they come, and then how it ended.
//
//	go mod tidy && go run . "Why is the sky blue?"
//
// SLOTMILL_REDIS_URL and SLOTMILL_QUEUE say where. enqueue and follow are what a program of your own would take over.
package main

import (
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"log"
	"os"
	"time"

	"github.com/gomodule/redigo/redis"
	"github.com/vmihailenco/msgpack/v5"
)

const (
	silence = 5 * time.Second // after which we subscribe and look anew
	page    = 512             // entries of the log read at a time
)

// A frame as docs/protocol.md has it, of tokens or of control.
type frame struct {
	Attempt int     `msgpack:"a"`
	Event   string  `msgpack:"e"`
	Choice  int     `msgpack:"c"`
	Index   int     `msgpack:"i"`
	IDs     []int64 `msgpack:"ids"`
	Text    string  `msgpack:"s"`
	Offset  int     `msgpack:"o"`
}

type result struct {
	ID      string  `msgpack:"id" json:"id"`
	State   string  `msgpack:"state" json:"state"`
	Code    *string `msgpack:"code" json:"code"`
	Choices []struct {
		Index    int     `msgpack:"index"`
		Text     string  `msgpack:"text"`
		TokenIDs []int64 `msgpack:"token_ids"`
	} `msgpack:"choices" json:"-"`
}

// The text of a choice is what it was up to offset, in runes, and then text.
type delta struct {
	choice, offset int
	text           string
	isRestart      bool
}

// How far one choice has been given.
type progress struct{ tokens, runes, restartedBy int }

type follower struct {
	dial    func() (redis.Conn, error)
	key     func(kind string) string
	choices map[int]*progress
	give    func(delta)
}

// enqueue puts a job in; its id. Safe to repeat with the same id.
func enqueue(conn redis.Conn, queue, id string, body map[string]any) error {
	encoded, err := json.Marshal(body)
	if err == nil {
		_, err = conn.Do("XADD", "slotmill:{"+queue+"}:jobs:normal", "*", "v", 1, "id", id, "j", encoded)
	}
	return err
}

// follow gives what the job has produced and will produce, each token once, in order; then its result.
func follow(dial func() (redis.Conn, error), queue, id string, timeout time.Duration, give func(delta)) (*result, error) {
	f := &follower{dial, func(kind string) string { return "slotmill:{" + queue + "}:" + kind + ":" + id }, map[int]*progress{}, give}
	var last error
	for deadline := time.Now().Add(timeout); time.Now().Before(deadline); {
		ended, err := f.listen()
		if ended != nil {
			return ended, nil
		}
		if last = err; err != nil {
			time.Sleep(time.Second) // the server is away
		}
	}
	return nil, fmt.Errorf("job %s: has not ended in %v; it goes on; last error: %v", id, timeout, last)
}

// listen follows over one subscription, until the job has ended, nothing is heard or the connection is lost.
func (f *follower) listen() (*result, error) {
	conn, err := f.dial()
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	live, err := f.dial()
	if err != nil {
		return nil, err
	}
	defer live.Close()
	subscription := redis.PubSubConn{Conn: live}
	if err := subscription.Subscribe(f.key("ch")); err != nil {
		return nil, err
	}
	for {
		switch heard := subscription.ReceiveWithTimeout(silence).(type) {
		case redis.Subscription: // confirmed: from here on nothing is missed, and what was before is in the log
			if ended, err := f.catchUp(conn); ended != nil || err != nil {
				return ended, err
			}
		case redis.Message:
			var said frame
			if err := msgpack.Unmarshal(heard.Data, &said); err != nil {
				return nil, err
			}
			if !f.take(said) || said.Event == "end" { // something before it is missing, or all is there
				if ended, err := f.catchUp(conn); ended != nil || err != nil {
					return ended, err
				}
				f.take(said)
			}
		case error: // with redigo a silence costs the connection; the next one catches up
			return nil, nil
		}
	}
}

// catchUp reads the log, from its start: after a failover it may be another than the one we knew.
func (f *follower) catchUp(conn redis.Conn) (*result, error) {
	stored, err := redis.Bytes(conn.Do("GET", f.key("res"))) // before the log, which is whole once there is a result
	if err != nil && err != redis.ErrNil {
		return nil, err
	}
	for start := "-"; ; {
		entries, err := redis.Values(conn.Do("XRANGE", f.key("tok"), start, "+", "COUNT", page))
		if err != nil {
			return nil, err
		}
		for _, entry := range entries {
			var id string
			var fields []any
			if _, err := redis.Scan(entry.([]any), &id, &fields); err != nil {
				return nil, err
			}
			var logged frame
			if err := msgpack.Unmarshal(fields[1].([]byte), &logged); err != nil { // its one field is m
				return nil, err
			}
			f.take(logged)
			start = "(" + id
		}
		if len(entries) < page {
			return f.ended(stored)
		}
	}
}

// ended decodes the result, if there is one, and gives what it has beyond the frames: all of it when nothing was streamed.
func (f *follower) ended(stored []byte) (*result, error) {
	if stored == nil {
		return nil, nil
	}
	var told result
	if err := msgpack.Unmarshal(stored, &told); err != nil {
		return nil, err
	}
	for _, choice := range told.Choices {
		f.add(choice.Index, frame{IDs: choice.TokenIDs, Text: choice.Text})
	}
	return &told, nil
}

// take gives what is new in a frame; false when something before it is missing.
func (f *follower) take(said frame) bool {
	if said.Event != "" && said.Event != "restart" {
		return true
	}
	at := f.at(said.Choice)
	switch {
	case said.Attempt < at.restartedBy: // void
	case said.Index > at.tokens || said.Offset > at.runes:
		return false
	case said.Event == "":
		f.add(said.Choice, said)
	case said.Attempt > at.restartedBy: // told for the first time
		at.restartedBy = said.Attempt
		if said.Index < at.tokens || said.Offset < at.runes {
			at.tokens, at.runes = said.Index, said.Offset
			f.give(delta{said.Choice, said.Offset, "", true})
		}
	}
	return true
}

func (f *follower) add(choice int, said frame) {
	at, text := f.at(choice), []rune(said.Text) // offsets count code points, not bytes
	if end := said.Index + len(said.IDs); end > at.tokens {
		at.tokens = end
	}
	if skip := at.runes - said.Offset; skip < len(text) {
		f.give(delta{choice, at.runes, string(text[skip:]), false})
		at.runes = said.Offset + len(text)
	}
}

func (f *follower) at(choice int) *progress {
	if f.choices[choice] == nil {
		f.choices[choice] = &progress{}
	}
	return f.choices[choice]
}

func setting(name, otherwise string) string {
	if value := os.Getenv(name); value != "" {
		return value
	}
	return otherwise
}

func run(prompt string) error {
	queue := setting("SLOTMILL_QUEUE", "default")
	dial := func() (redis.Conn, error) {
		return redis.DialURL(setting("SLOTMILL_REDIS_URL", "redis://127.0.0.1:6379"))
	}
	conn, err := dial()
	if err != nil {
		return err
	}
	defer conn.Close()
	random := make([]byte, 16)
	if _, err := rand.Read(random); err != nil {
		return err
	}
	id := hex.EncodeToString(random)
	if err := enqueue(conn, queue, id, map[string]any{"prompt": prompt, "max_tokens": 64, "temperature": 0}); err != nil {
		return err
	}
	var text []rune // of the one choice that was asked for
	ended, err := follow(dial, queue, id, 10*time.Minute, func(new delta) {
		text = append(text[:new.offset], []rune(new.text)...)
		if new.isRestart {
			fmt.Print("\n[anew]" + string(text))
		}
		fmt.Print(new.text)
	})
	if err != nil {
		return err
	}
	line, err := json.Marshal(map[string]any{"id": ended.ID, "state": ended.State, "code": ended.Code, "text": string(text)})
	fmt.Printf("\n%s\n", line)
	return err
}

func main() {
	if len(os.Args) != 2 {
		log.Fatal("usage: go run . PROMPT")
	}
	if err := run(os.Args[1]); err != nil {
		log.Fatal(err)
	}
}
