"""A prompt that kills whatever runs it, among seven that do no harm: seven answers, one dead letter, nobody taken along."""

from tests.support import deadly_engine, fake_engine
from tests.support.chaos import Fleet
from tests.support.jobs import Producer, answer, events, token_ids
from tests.support.worker import ForkedWorker, WorkerMaker, WorkerUnderTest

NUM_TOKENS = 60
POISON = f"w{fake_engine.POISON_ID} w5"


def check_seven_live_and_one_is_dead(producer: Producer) -> None:
    jobs = {producer.add(prompt=f"w{i} w9", max_tokens=NUM_TOKENS, max_attempts=20): f"w{i} w9" for i in range(80, 87)}
    poison = producer.add(prompt=POISON, max_tokens=NUM_TOKENS, max_attempts=20)
    with producer.listening([poison]) as heard:
        dead = producer.result(poison, timeout_s=60)
        results = {job_id: producer.result(job_id, timeout_s=60) for job_id in jobs}
    for job_id, prompt in jobs.items():
        assert token_ids(producer.log(job_id)) == list(results[job_id].choices[0].token_ids) == answer(prompt, NUM_TOKENS)
        assert (results[job_id].state, events(producer.log(job_id)).count("end")) == ("succeeded", 1)
    assert (dead.state, dead.code) == ("dead", "dead_letter")
    assert producer.state(poison)["crashes"] == "2"
    assert events(heard[poison]).count("end") == events(producer.log(poison)).count("end") == 1
    letters = [fields for _, fields in producer.client.xrange(producer.keys.dead)]
    assert [fields[b"id"].decode() for fields in letters] == [poison]
    assert producer.entries() == 0


def test_a_prompt_that_kills_the_engine_is_dead_after_two_crashes_alone_and_seven_others_live(
    make_worker: WorkerMaker, producer: Producer
) -> None:
    worker = make_worker("--max-slots", "8", delay_s=0.01, kind=ForkedWorker)
    check_seven_live_and_one_is_dead(producer)
    assert worker.process.poll() is None


def test_a_prompt_that_kills_the_whole_worker_is_dead_after_two_crashes_alone_and_seven_others_live(
    make_worker: WorkerMaker, producer: Producer
) -> None:
    def start() -> WorkerUnderTest:
        engine = ("--engine-command", deadly_engine.command(delay_s=0.01))
        return make_worker("--max-slots", "8", "--lease-s", "0.5", *engine, is_awaited=False, kind=ForkedWorker)

    fleet = Fleet(start, 2)
    try:
        check_seven_live_and_one_is_dead(producer)
    finally:
        fleet.close()
    assert fleet.num_started == 2 + 3
