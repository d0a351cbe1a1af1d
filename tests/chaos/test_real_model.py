"""SmolLM2-135M behind real workers and a real server: what comes out of the queue equals transformers' `generate`.

The prompts are real ones (MT-bench, and MGSM in eleven languages). The reference, each prompt alone, greedy and in fp32, is
computed once.
"""

import json
import random
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from pathlib import Path

import pytest
import redis
from tokenizers import Tokenizer

from engine.model import resolve
from tests.support.chaos import SCALE, Run
from tests.support.greedy import generate_greedy
from tests.support.jobs import Producer
from tests.support.load import Asked
from tests.support.wait import wait_until
from tests.support.worker import WorkerUnderTest
from worker.client import Client, Delta
from worker.frames import Result

MODEL = "smollm2-135m-instruct"
NUM_TOKENS = 48
LOAD_S = 120.0
RUN_S = 240.0

pytestmark = pytest.mark.timeout(600 * max(1, SCALE))


@pytest.fixture(scope="module")
def model_dir() -> Path:
    return resolve(MODEL)


@pytest.fixture(scope="module")
def prompts(model_dir: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    lines = (Path(__file__).parents[1] / "data" / "prompts_24.jsonl").read_text().splitlines()
    return [tokenizer.encode(json.loads(line)["prompt"]).ids for line in lines]


@pytest.fixture(scope="module")
def greedy(model_dir: Path, prompts: list[list[int]]) -> list[list[int]]:
    return generate_greedy(model_dir, prompts, NUM_TOKENS)


def start_real_worker(url: str, queue: str, *options: str) -> WorkerUnderTest:
    """A worker on SmolLM2 in fp32."""
    engine = ("--engine-command", shlex.join((sys.executable, "-m", "engine.serve")))
    return WorkerUnderTest("--redis-url", url, "--queue", queue, "--model", MODEL, "--dtype", "float32", *engine, *options)


@contextmanager
def real_worker(url: str, queue: str, *options: str) -> Iterator[WorkerUnderTest]:
    """The same, ready."""
    worker = start_real_worker(url, queue, *options)
    try:
        wait_until(lambda: worker.get("/readyz")[0] == 200, LOAD_S, "a ready worker")
        yield worker
    finally:
        worker.close()


def enqueue(client: Client, prompt: Sequence[int]) -> str:
    return client.enqueue(prompt_token_ids=list(prompt), max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)


def ids_of(result: Result) -> list[int]:
    return list(result.choices[0].token_ids)


def test_24_real_prompts_in_16_slots_and_120_blocks_are_preempted_and_equal_generate(
    redis_url: str, queue: str, prompts: list[list[int]], greedy: list[list[int]]
) -> None:
    with real_worker(redis_url, queue, "--max-slots", "16", "--kv-blocks", "120") as worker, Client(redis_url, queue) as client:
        jobs = [enqueue(client, prompt) for prompt in prompts]
        results = [client.result(job_id, RUN_S) for job_id in jobs]
        samples = worker.samples()

    assert [ids_of(result) for result in results] == greedy
    assert samples["preemptions_total", "recompute"] > 0
    assert samples["kv_blocks_capacity", ""] == 120
    assert sum(value for (name, _), value in samples.items() if name == "jobs_finished_total") == len(prompts)


def test_a_worker_killed_in_the_middle_of_8_streams_leaves_no_gap_no_repeat_and_one_end(
    redis_url: str, queue: str, redis_client: redis.Redis, prompts: list[list[int]], greedy: list[list[int]]
) -> None:
    lease = ("--lease-s", "3", "--max-slots", "8")
    with (
        real_worker(redis_url, queue, *lease) as survivor,
        real_worker(redis_url, queue, *lease) as victim,
        Client(redis_url, queue) as client,
        ThreadPoolExecutor(8) as threads,
    ):
        survivor.process.suspend()  # so that the other one takes all jobs
        jobs = [enqueue(client, prompt) for prompt in prompts[:8]]
        deltas: list[list[Delta]] = [[] for _ in jobs]

        def follow(i: int) -> Result:
            stream = client.stream(jobs[i], RUN_S)
            deltas[i].extend(stream)
            assert stream.result is not None
            return stream.result

        streams = [threads.submit(follow, i) for i in range(8)]
        wait_until(lambda: min(map(num_tokens, deltas)) >= 4, RUN_S, "all 8 streaming")
        seen_before_death = [num_tokens(of_one) for of_one in deltas]
        survivor.process.resume()
        victim.stop(signal.SIGKILL)
        results = [stream.result(RUN_S) for stream in streams]

    assert max(seen_before_death) < NUM_TOKENS, "one stream was over before the kill: it proves nothing"
    for of_one, result, expected in zip(deltas, results, greedy, strict=False):
        assert [token_id for delta in of_one for token_id in delta.token_ids] == expected
        assert [delta.index for delta in of_one] == [sum(len(d.token_ids) for d in of_one[:i]) for i in range(len(of_one))]
        assert [delta.finish_reason for delta in of_one if delta.finish_reason] == ["length"]
        assert "".join(delta.text for delta in of_one) == result.choices[0].text
        assert (result.state, ids_of(result), result.attempts) == ("succeeded", expected, 2)
    ends = redis_client.xrange(f"slotmill:{{{queue}}}:done")
    assert sorted(fields[b"id"].decode() for _, fields in ends) == sorted(jobs)


def test_workers_killed_at_random_leave_every_stream_equal_to_generate(
    redis_url: str, queue: str, prompts: list[list[int]], greedy: list[list[int]]
) -> None:
    """Two workers, one killed whenever both serve; short jobs until the last kill, each of twelve prompts at least once."""
    shortest = sorted(range(24), key=lambda i: len(prompts[i]))[:12]

    def jobs(_: random.Random) -> Iterator[Asked]:
        for i in cycle(shortest):
            body = {"prompt_token_ids": prompts[i], "max_tokens": 24, "temperature": 0, "ignore_eos": True}
            yield Asked("real", body, [greedy[i][:24]])

    start = partial(start_real_worker, redis_url, queue, "--lease-s", "2", "--max-slots", "4")
    # More clients than one worker has slots: else the other one may be idle whenever it is killed.
    with Run(redis_url, queue, start, jobs, num_workers=2, num_clients=8, lease_s=2, enough=2) as run:
        run.disturb([run.chaos.kill_worker] * int(4 * SCALE), mean_pause_s=0.5)
        run.until_ended(int(12 * SCALE), RUN_S * SCALE)
        told = run.check()

    assert sum(of_one.result.attempts - 1 for of_one in told if of_one.result) >= 2 * SCALE


def num_tokens(deltas: list[Delta]) -> int:
    return sum(len(delta.token_ids) for delta in list(deltas))


def test_a_bare_xadd_from_redis_cli_is_answered(redis_url: str, queue: str, redis_client: redis.Redis) -> None:
    with real_worker(redis_url, queue, "--max-slots", "2") as worker:
        job_id = Producer(redis_client, queue).add_json(prompt="Hello")
        with Client(redis_url, queue) as client:
            result = client.result(job_id, RUN_S)
        assert worker.process.is_running()

    assert (result.state, result.choices[0].finish_reason in ("stop", "length")) == ("succeeded", True)
    assert result.choices[0].text


def test_every_kind_of_answer_comes_out_of_one_queue(redis_url: str, queue: str, prompts: list[list[int]]) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
    prompt = {"prompt_token_ids": prompts[0][:40], "max_tokens": 8, "ignore_eos": True}
    asked = {
        "choices": {**prompt, "n": 3, "seed": 7},
        "first": {**prompt, "seed": 7},
        "beams": {**prompt, "beam_width": 3},
        "scored": {**prompt, "temperature": 0, "logprobs": 2, "prompt_logprobs": 1},
        "penalized": {**prompt, "temperature": 0, "presence_penalty": 2.0, "repetition_penalty": 1.5},
        "biased": {**prompt, "temperature": 0, "logit_bias": {"28": 100.0}},
        "json": {
            "messages": [{"role": "user", "content": "Name a city. Answer in JSON."}],
            "max_tokens": 40,
            "temperature": 0,
            "response_format": {"type": "json_schema", "schema": schema},
        },
    }
    with real_worker(redis_url, queue, "--max-slots", "16") as worker, Client(redis_url, queue) as client:
        jobs = {name: client.enqueue(**fields) for name, fields in asked.items()}  # type: ignore[arg-type]
        results = {name: client.result(job_id, RUN_S) for name, job_id in jobs.items()}
        samples = worker.samples()

    assert {result.state for result in results.values()} == {"succeeded"}
    choices = [choice.token_ids for choice in results["choices"].choices]
    assert (len(set(choices)), choices[0]) == (3, results["first"].choices[0].token_ids)
    scores = [choice.score for choice in results["beams"].choices]
    assert len(scores) == 3
    assert scores == sorted(scores, reverse=True)  # type: ignore[type-var]
    scored = results["scored"]
    assert [len(one.top) for one in scored.choices[0].logprobs or ()] == [2] * 8
    assert len(scored.prompt_logprobs or ()) == 39
    assert results["penalized"].choices[0].token_ids != scored.choices[0].token_ids
    assert results["biased"].choices[0].token_ids == (28,) * 8
    assert set(json.loads(results["json"].choices[0].text)) == {"city"}
    assert samples["copied_blocks_total", ""] > 0
