// Puts one job in as JSON, prints its tokens as they come, and then how it ended.
//
//     npm ci && node producer.mjs "Why is the sky blue?"
//
// SLOTMILL_REDIS_URL and SLOTMILL_QUEUE say where. Ctrl-C cancels the job, a second one leaves at once. `enqueue`, `follow` and
// `cancel` are what a program of your own would take over.

import { randomUUID } from "node:crypto";
import { setTimeout as pause } from "node:timers/promises";
import { pathToFileURL } from "node:url";
import { decode } from "@msgpack/msgpack";
import { createClient, RESP_TYPES } from "redis";

const CHECK_MS = 1000; // silence after which the log is looked at again
const DAY_S = 86_400;
const PAGE = 512; // entries of the log read at a time

/** Put a job in; its id. `body` has the fields of a job body (docs/protocol.md). */
export async function enqueue(redis, queue, body, lane = "normal") {
  const id = randomUUID();
  await redis.xAdd(`slotmill:{${queue}}:jobs:${lane}`, "*", { v: "1", id, j: JSON.stringify(body) });
  return id;
}

/** Ask for a job's end: it comes soon, or when a worker takes the job, with the text so far. */
export async function cancel(redis, queue, id) {
  const job = `slotmill:{${queue}}:job:${id}`;
  await redis
    .multi()
    .hSet(job, "cancel", "1") // seen when the job is claimed, or its lease renewed
    .expire(job, DAY_S, "NX") // where nothing else would delete it
    .publish(`slotmill:{${queue}}:ctl`, `cancel ${id}`) // who runs it need not wait for that
    .exec();
}

/**
 * What the job has produced and will produce, each token once, in order: {choice, offset, text, isRestart}. The text of a
 * choice is what it was up to `offset`, and then `text`. Returns the result.
 */
export async function* follow(redis, queue, id, { timeoutMs = 600_000 } = {}) {
  const key = (name) => `slotmill:{${queue}}:${name}:${id}`;
  const bytes = redis.withTypeMapping({ [RESP_TYPES.BLOB_STRING]: Buffer });
  const deadline = Date.now() + timeoutMs;
  const progress = new Progress();
  const heard = [];
  let wake = () => {};
  const hear = (frame) => {
    heard.push(frame);
    wake();
  };
  const subscriber = redis.duplicate().on("error", () => {}); // it connects anew by itself, and then
  subscriber.on("ready", () => hear(null)); //                   we do not know what we missed
  await subscriber.connect();
  try {
    // What is confirmed is heard from then on, so the log is read then. Not awaited: a lost connection may leave it unanswered.
    const lookAgain = () => hear(null);
    subscriber.subscribe(key("ch"), (message) => hear(decode(message)), true).then(lookAgain, lookAgain);
    for (;;) {
      const frame = heard.length ? heard.shift() : null;
      let deltas = frame && frame.e !== "end" ? progress.add(frame) : null;
      if (deltas === null) {
        const stored = await bytes.get(key("res")); // before the log, which is whole once there is a result
        for await (const logged of readLog(bytes, key("tok"))) yield* progress.add(logged) ?? [];
        if (stored !== null) {
          const result = decode(stored);
          yield* progress.finish(result);
          return result;
        }
        deltas = (frame && progress.add(frame)) ?? [];
      }
      yield* deltas;
      if (Date.now() > deadline) throw new Error(`job ${id}: has not ended in ${timeoutMs} ms; it goes on`);
      if (!heard.length) await Promise.race([new Promise((resolve) => (wake = resolve)), pause(CHECK_MS, null, { ref: false })]);
    }
  } finally {
    subscriber.destroy();
  }
}

async function* readLog(bytes, key) {
  let start = "-";
  for (;;) {
    const page = await bytes.xRange(key, start, "+", { COUNT: PAGE });
    for (const entry of page) yield decode(entry.message.m);
    if (page.length < PAGE) return;
    start = `(${page.at(-1).id}`;
  }
}

/** How far each choice has been given; cuts frames down to what is new. */
class Progress {
  #choices = new Map();

  /** What is new in a frame, heard or read; null when something before it is missing. */
  add(frame) {
    if (frame.e && frame.e !== "restart") return [];
    const choice = this.#choice(frame.c);
    if (frame.a < choice.restartedBy) return [];
    if (frame.i > choice.tokens || frame.o > choice.characters) return null;
    return frame.e ? this.#restart(choice, frame) : this.#continue(choice, frame);
  }

  /** What the result has beyond the frames: all of it where nothing was streamed. */
  finish(result) {
    return result.choices.flatMap(({ index, token_ids, text }) =>
      this.#continue(this.#choice(index), { c: index, i: 0, o: 0, ids: token_ids, s: text }),
    );
  }

  #choice(index) {
    if (!this.#choices.has(index)) this.#choices.set(index, { tokens: 0, characters: 0, restartedBy: 0 });
    return this.#choices.get(index);
  }

  #continue(choice, frame) {
    const characters = [...frame.s].slice(choice.characters - frame.o); // code points: offsets do not count UTF-16 units
    const offset = choice.characters;
    choice.tokens = Math.max(choice.tokens, frame.i + frame.ids.length);
    choice.characters += characters.length;
    return characters.length ? [{ choice: frame.c, offset, text: characters.join(""), isRestart: false }] : [];
  }

  #restart(choice, frame) {
    if (frame.a === choice.restartedBy) return []; // a replay tells it again
    choice.restartedBy = frame.a;
    if (frame.i === choice.tokens && frame.o === choice.characters) return [];
    choice.tokens = frame.i;
    choice.characters = frame.o;
    return [{ choice: frame.c, offset: frame.o, text: "", isRestart: true }];
  }
}

async function main(prompt) {
  const redis = createClient({ url: process.env.SLOTMILL_REDIS_URL ?? "redis://127.0.0.1:6379", RESP: 2 });
  redis.on("error", (error) => console.error(`server: ${error.message}; trying again`));
  await redis.connect();
  const queue = process.env.SLOTMILL_QUEUE ?? "default";
  const id = await enqueue(redis, queue, { prompt, max_tokens: 64, temperature: 0 });
  process.once("SIGINT", () => cancel(redis, queue, id));
  const deltas = follow(redis, queue, id);
  let text = ""; // of the one choice that was asked for
  let step;
  while (!(step = await deltas.next()).done) {
    const delta = step.value;
    text = delta.isRestart ? [...text].slice(0, delta.offset).join("") : text + delta.text;
    process.stdout.write(delta.isRestart ? `\n[anew]${text}` : delta.text);
  }
  const { state, code } = step.value;
  console.log(`\n${JSON.stringify({ id, state, code, text })}`);
  process.exit(); // a subscriber that was connecting anew when it was destroyed may hold a socket
}

if (import.meta.url === pathToFileURL(process.argv[1]).href) await main(process.argv[2]);
