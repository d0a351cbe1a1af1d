"""What the engine's events make of an attempt of one or several choices."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Histogram

from engine.messages import Abort, RequestRejected, StepReport, TokenEvent, TokenLogprobs
from engine.request import FinishReason, Request
from tests.support import fake_engine
from worker.attempt import Attempt
from worker.claims import Delivery
from worker.inflight import InFlight
from worker.metrics import Metrics
from worker.reader import Reader
from worker.requests import replay, requests_for
from worker.text import Tokenizer
from worker.wire import parse_body

LENGTH, STOP, ERROR = FinishReason.LENGTH, FinishReason.STOP, FinishReason.ERROR


class Bench:
    """A reader, and the messages that the engine gets."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.sent: list[Request | Abort] = []
        self.metrics = Metrics()
        self.inflight = InFlight(self.metrics, self.sent.append)
        self.reader = Reader(self.inflight, self.metrics, "m", lambda: None)
        self._tokenizer = tokenizer

    def start(self, job_id: str = "a", *, attempts: int = 1, is_suspect: bool = False, **body: object) -> Attempt:
        job = parse_body({"prompt": "w5"} | body)
        claim = (job_id, "1-1", "normal", {}, 0, attempts, attempts, f"l:{attempts}", 7, 0, 0, "new")
        attempt = Attempt(Delivery(*claim, is_suspect=is_suspect), job, (5,))
        replay(attempt, job, self._tokenizer)
        self.inflight.add(attempt)
        self.inflight.enter(attempt, *requests_for(attempt, job))
        return attempt

    def report(self, *events: TokenEvent, rejected: tuple[RequestRejected, ...] = (), cleared: tuple[str, ...] = ()) -> None:
        stats = fake_engine.FakeEngine(4, 0.0).idle_report().stats
        self.reader.on_report(StepReport(events, stats, rejected, cleared))

    @property
    def aborts(self) -> list[Abort]:
        return [message for message in self.sent if isinstance(message, Abort)]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory: Path = tmp_path_factory.mktemp("words")
    return Tokenizer(fake_engine.save_model(directory))


@pytest.fixture
def bench(tokenizer: Tokenizer) -> Bench:
    return Bench(tokenizer)


def event(attempt: Attempt, choice: int, start: int, *ids: int, reason: FinishReason | None = None, **more: Any) -> TokenEvent:
    return TokenEvent(attempt.request_id, start, ids, reason, choice=choice, **more)


def test_tokens_go_to_their_choice(bench: Bench) -> None:
    attempt = bench.start(n=2)
    bench.report(event(attempt, 1, 0, 8), event(attempt, 0, 0, 9), event(attempt, 1, 1, 7))
    assert [output.token_ids for output in attempt.outputs] == [[9], [8, 7]]


def test_a_job_ends_when_its_last_choice_does(bench: Bench) -> None:
    attempt = bench.start(n=2)
    bench.report(event(attempt, 1, 0, 8, reason=LENGTH))
    assert attempt.ending is None
    bench.report(event(attempt, 0, 0, 9, reason=STOP))
    assert attempt.ending
    assert (attempt.ending.state, bench.aborts) == ("succeeded", [])
    assert [output.finish_reason for output in attempt.outputs] == ["stop", "length"]


def test_a_stop_string_ends_its_choice_alone(bench: Bench) -> None:
    attempt = bench.start(n=3, stop="w8")
    bench.report(event(attempt, 1, 0, 8), event(attempt, 0, 0, 9))
    assert (bench.aborts, attempt.ending) == ([Abort(attempt.request_id, 1)], None)


def test_what_the_engine_makes_before_it_hears_of_a_stop_string_is_late(bench: Bench) -> None:
    attempt = bench.start(n=2, stop="w8")
    bench.report(event(attempt, 1, 0, 8))
    bench.report(event(attempt, 1, 1, 9), event(attempt, 1, 2, 9, reason=LENGTH))
    assert attempt.outputs[1].token_ids == [8]
    assert len(bench.aborts) == 1
    assert bench.metrics.wasted_tokens.labels("aborted")._value.get() == 2


def test_a_stop_string_in_the_last_choice_frees_the_whole_request(bench: Bench) -> None:
    attempt = bench.start(n=2, stop="w8")
    bench.report(event(attempt, 0, 0, 9, reason=LENGTH))
    bench.report(event(attempt, 1, 0, 8))
    assert bench.aborts == [Abort(attempt.request_id)]
    assert attempt.ending


def test_an_error_of_one_choice_fails_the_job_and_keeps_what_there_is(bench: Bench) -> None:
    attempt = bench.start(n=3)
    bench.report(event(attempt, 0, 0, 9, reason=LENGTH), event(attempt, 1, 0, 8))
    bench.report(event(attempt, 2, 0, reason=ERROR, detail="sampling: nan"))
    assert attempt.ending
    assert (attempt.ending.state, attempt.ending.error) == ("failed", "engine: sampling: nan")
    assert bench.aborts == [Abort(attempt.request_id)]
    assert [(output.token_ids, output.finish_reason) for output in attempt.outputs] == [
        ([9], "length"),
        ([8], "error"),
        ([], "error"),
    ]


def test_beams_come_all_at_once_with_their_scores(bench: Bench) -> None:
    attempt = bench.start(beam_width=2)
    bench.report(*[event(attempt, k, 0, 5, 6 + k, reason=LENGTH, score=-0.5 - k) for k in range(2)])
    result = attempt.result(attempt.ending, "me", "m")  # type: ignore[arg-type]
    assert [(choice.token_ids, choice.score) for choice in result.choices] == [((5, 6), -0.5), ((5, 7), -1.5)]


def test_log_probabilities_of_prompt_and_tokens_reach_the_result(bench: Bench) -> None:
    attempt = bench.start(logprobs=0, prompt_logprobs=0)
    of_prompt, of_token = (TokenLogprobs(-3.0),), (TokenLogprobs(-1.0),)
    bench.report(event(attempt, 0, 0, 9, reason=LENGTH, logprobs=of_token, prompt_logprobs=of_prompt))
    result = attempt.result(attempt.ending, "me", "m")  # type: ignore[arg-type]
    assert (result.prompt_logprobs, result.choices[0].logprobs) == (of_prompt, of_token)


def test_a_job_waits_for_the_prompt_that_is_computed_beside_it(bench: Bench) -> None:
    attempt = bench.start(n=2)
    attempt.is_prompt_pending = True
    bench.report(event(attempt, 0, 0, 9, reason=LENGTH), event(attempt, 1, 0, 8, reason=LENGTH))
    assert attempt.ending is None
    bench.report(event(attempt, 2, 0, reason=LENGTH, prompt_logprobs=(TokenLogprobs(-3.0),)))
    assert attempt.ending
    assert attempt.prompt_logprobs == (TokenLogprobs(-3.0),)


def test_why_a_choice_ended_is_told_of_that_choice(bench: Bench) -> None:
    attempt = bench.start(n=2)
    bench.report(event(attempt, 0, 0, 9, reason=STOP), event(attempt, 1, 0, 8, reason=LENGTH, detail="kv_capacity"))
    result = attempt.result(attempt.ending, "me", "m")  # type: ignore[arg-type]
    assert [choice.detail for choice in result.choices] == [None, "kv_capacity"]


def test_a_request_that_is_refused_in_a_step_ends_as_invalid(bench: Bench) -> None:
    attempt = bench.start(response_format={"type": "regex", "regex": "("})
    refusal = RequestRejected(attempt.request_id, "response_format", "regex of 1", "a regex that compiles", "mend it")
    bench.report(rejected=(refusal,))
    assert attempt.ending
    assert (attempt.ending.code, attempt.ending.error) == (
        "invalid",
        "response_format: regex of 1: a regex that compiles; mend it",
    )


def test_the_choices_of_one_step_count_once_as_time_between_tokens(bench: Bench) -> None:
    attempt = bench.start(n=4)
    for step in range(3):
        bench.report(*[event(attempt, choice, step, 9) for choice in range(4)])
    assert count_of(bench.metrics.inter_token_latency_seconds, attempt) == 2


def test_each_token_of_an_event_counts_as_one_and_the_first_as_none(bench: Bench) -> None:
    attempt = bench.start()
    for start, num in ((0, 3), (3, 1), (4, 5)):
        bench.report(TokenEvent(attempt.request_id, start, (9,) * num))
    assert count_of(bench.metrics.inter_token_latency_seconds, attempt) == 6
    assert count_of(bench.metrics.time_to_first_token_seconds, attempt) == 1


def test_a_job_that_goes_on_from_a_log_has_had_its_first_token_elsewhere(bench: Bench) -> None:
    attempt = bench.start()
    attempt.delivery = replace(attempt.delivery, num_logged=4)
    bench.report(event(attempt, 0, 0, 9))
    bench.report(event(attempt, 0, 1, 9))
    assert count_of(bench.metrics.time_to_first_token_seconds, attempt) == 0
    assert count_of(bench.metrics.inter_token_latency_seconds, attempt) == 1


def count_of(histogram: Histogram, attempt: Attempt) -> float:
    """Observations of the lane of this attempt."""
    [family] = histogram.collect()
    [count] = [
        sample.value
        for sample in family.samples
        if sample.name.endswith("_count") and sample.labels["priority"] == attempt.priority
    ]
    return float(count)


def endings(*attempts: Attempt) -> list[tuple[str, str]]:
    return [(attempt.ending.state, attempt.ending.blame) for attempt in attempts if attempt.ending]


def test_an_engine_that_dies_makes_suspects_of_all_it_had(bench: Bench) -> None:
    attempts = [bench.start(job_id) for job_id in "ab"]
    bench.reader.on_down()
    assert endings(*attempts) == [("released", "batch")] * 2


def test_an_engine_that_dies_while_one_runs_alone_blames_that_one(bench: Bench) -> None:
    attempts = [bench.start("a"), bench.start("b", is_suspect=True), bench.start("c")]
    bench.reader.on_alone(attempts[1].request_id)
    bench.reader.on_down()
    assert endings(*attempts) == [("released", "bystander"), ("released", "solo"), ("released", "bystander")]


def test_a_suspect_that_is_cleared_shares_the_blame_again(bench: Bench) -> None:
    attempts = [bench.start("a"), bench.start("b", is_suspect=True)]
    bench.report(cleared=(attempts[1].request_id,))
    assert attempts[1].owes_acquittal
    bench.reader.on_down()
    assert endings(*attempts) == [("released", "batch")] * 2


def test_a_fault_of_the_engine_is_tried_again_after_a_pause_that_grows(bench: Bench) -> None:
    pauses = []
    for attempts in (1, 2, 3, 4):
        attempt = bench.start(str(attempts), attempts=attempts)
        bench.report(event(attempt, 0, 0, reason=ERROR, detail="sampling: no finite logit", may_retry=True))
        assert attempt.ending
        assert (attempt.ending.state, attempt.outputs[0].finish_reason) == ("delayed", None)
        pauses.append(attempt.ending.delay_s)
    assert [2**k / 2 <= pause <= 2**k for k, pause in enumerate(pauses)] == [True] * 4


def test_a_pause_ends_with_the_deadline_of_the_job(bench: Bench) -> None:
    attempt = bench.start(deadline_ms=5)
    bench.report(event(attempt, 0, 0, reason=ERROR, detail="sampling: no finite logit", may_retry=True))
    assert attempt.ending
    assert attempt.ending.delay_s == 0


def test_a_fault_in_the_last_attempt_that_a_job_allows_is_its_end(bench: Bench) -> None:
    attempt = bench.start(attempts=3, max_attempts=3)
    bench.report(event(attempt, 0, 0, reason=ERROR, detail="sampling: no finite logit", may_retry=True))
    assert attempt.ending
    assert (attempt.ending.state, attempt.ending.code) == ("failed", "internal")


def test_what_a_job_is_to_blame_for_is_not_tried_again(bench: Bench) -> None:
    attempt = bench.start()
    bench.report(event(attempt, 0, 0, reason=ERROR, detail="grammar: too complex"))
    assert attempt.ending
    assert attempt.ending.state == "failed"


def test_an_engine_that_says_it_is_busy_does_not_stand_still(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("worker.reader.time.monotonic", lambda: now)
    bench.start()
    bench.reader.serving = object()  # type: ignore[assignment]
    now += 100.0
    assert bench.reader.stalled_for_s() > 60
    bench.reader.on_loading("compiling")
    assert bench.reader.stalled_for_s() == 0
    bench.report()
    now += 100.0
    assert bench.reader.stalled_for_s() == 100.0


def test_an_engine_that_hangs_in_its_first_step_is_seen_at_a_scrape(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that the engine reports after a step can tell."""
    now = 1000.0
    monkeypatch.setattr("worker.reader.time.monotonic", lambda: now)
    bench.reader.serving = object()  # type: ignore[assignment]
    stalled = partial(bench.metrics.registry.get_sample_value, "slotmill_engine_stalled_seconds", {"engine": "0"})
    assert stalled() == 0
    bench.start()
    now += 45.0
    assert stalled() == 45.0


def test_a_crash_before_a_suspect_runs_alone_blames_the_batch(bench: Bench) -> None:
    suspect, neighbour = bench.start("suspect", is_suspect=True), bench.start("neighbour")
    bench.reader.on_down()
    assert [attempt.ending and attempt.ending.blame for attempt in (suspect, neighbour)] == ["batch", "batch"]
