"""The whole engine on a tiny random model, held against transformers' `generate`."""

from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.core import MAX_STALLED_STEPS, Engine
from engine.errors import RequestRefused
from engine.messages import StepReport
from engine.model_runner import ModelRunner
from engine.request import FinishReason, Request, SamplingParams
from engine.reservation import Fit
from tests.support.greedy import generate_greedy
from tests.support.tiny import VOCAB_SIZE, random_prompts, run_to_end, save_tiny_llama, tokens_of

NUM_TOKENS = 24
PROMPTS = random_prompts(count=10, longest=40)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def greedy(model_dir: Path) -> list[list[int]]:
    """What transformers generates for each prompt alone."""
    return generate_greedy(model_dir, PROMPTS, NUM_TOKENS)


def make_engine(model_dir: Path, **options: object) -> Engine:
    defaults: dict[str, object] = {"dtype": "float32", "block_size": 8, "kv_blocks": 200, "max_slots": 16, "num_threads": 2}
    engine = Engine(ModelRunner(EngineConfig(model=str(model_dir), **(defaults | options))))  # type: ignore[arg-type]
    engine._runner._kv_cache.tensor.fill_(float("nan"))  # type: ignore[attr-defined]  # unwritten positions must never matter
    return engine


def greedy_request(i: int, **options: object) -> Request:
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=NUM_TOKENS)
    return Request(**({"request_id": str(i), "prompt_token_ids": PROMPTS[i], "params": params} | options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"token_budget": 7},
        {"max_slots": 3},
        {"chunked_prefill": False, "token_budget": 16},
        {"kv_blocks": 12, "block_size": 8},
        {"kv_blocks": 9, "token_budget": 5, "max_slots": 6},
        {"block_size": 64, "kv_blocks": 5},
    ],
    ids=lambda options: "-".join(f"{key}={value}" for key, value in options.items()) or "roomy",
)
def test_greedy_tokens_equal_generate(model_dir: Path, greedy: list[list[int]], options: dict[str, object]) -> None:
    engine = make_engine(model_dir, **options)

    events = run_to_end(engine, [greedy_request(i) for i in range(len(PROMPTS))])

    assert [tokens_of(events[str(i)]) for i in range(len(PROMPTS))] == greedy


def test_a_small_pool_preempts_and_loses_no_token(model_dir: Path, greedy: list[list[int]]) -> None:
    preemptions: list[int] = []
    engine = make_engine(model_dir, kv_blocks=12)

    events = run_to_end(
        engine,
        [greedy_request(i) for i in range(len(PROMPTS))],
        lambda report: preemptions.append(report.stats.num_preemptions),
    )

    assert sum(preemptions) > 0
    assert [tokens_of(events[str(i)]) for i in range(len(PROMPTS))] == greedy


def test_events_are_contiguous_and_end_once(model_dir: Path) -> None:
    events = run_to_end(make_engine(model_dir, kv_blocks=12), [greedy_request(i) for i in range(len(PROMPTS))])

    for of_one in events.values():
        assert [event.start for event in of_one] == list(range(NUM_TOKENS))
        assert [event.finish_reason for event in of_one] == [None] * (NUM_TOKENS - 1) + [FinishReason.LENGTH]


def test_a_resumed_request_continues_as_if_never_interrupted(model_dir: Path, greedy: list[list[int]]) -> None:
    engine = make_engine(model_dir)

    events = run_to_end(engine, [greedy_request(i, output_token_ids=tuple(greedy[i][: 2 * i])) for i in range(len(PROMPTS))])

    assert [greedy[i][: 2 * i] + tokens_of(events[str(i)]) for i in range(len(PROMPTS))] == greedy
    assert events["3"][0].start == 6


def test_a_resumed_request_that_was_complete_ends_without_a_step(model_dir: Path, greedy: list[list[int]]) -> None:
    engine = make_engine(model_dir)
    engine.add_request(greedy_request(1, output_token_ids=tuple(greedy[1])))

    report = engine.step()

    assert report.stats.num_tokens == 0
    assert [(event.token_ids, event.finish_reason) for event in report.events] == [((), FinishReason.LENGTH)]
    assert not engine.has_work


def test_seeded_sampling_ignores_batch_order_chunking_preemption_and_resumption(model_dir: Path) -> None:
    def request(i: int, **options: object) -> Request:
        params = SamplingParams(temperature=0.9, top_k=40, top_p=0.9, seed=1000 + i, ignore_eos=True, max_tokens=NUM_TOKENS)
        return greedy_request(i, params=params, **options)

    alone = [tokens_of(run_to_end(make_engine(model_dir), [request(i)])[str(i)]) for i in range(4)]
    crowded = run_to_end(
        make_engine(model_dir, kv_blocks=9, token_budget=6), [request(i) for i in reversed(range(len(PROMPTS)))]
    )
    resumed = run_to_end(make_engine(model_dir), [request(i, output_token_ids=tuple(alone[i][:5])) for i in range(4)])

    assert [tokens_of(crowded[str(i)]) for i in range(4)] == alone
    assert [alone[i][:5] + tokens_of(resumed[str(i)]) for i in range(4)] == alone


def test_a_second_batch_through_the_same_engine_has_nothing_of_the_first(model_dir: Path, greedy: list[list[int]]) -> None:
    engine = make_engine(model_dir)
    run_to_end(engine, [greedy_request(i) for i in range(5)])

    events = run_to_end(engine, [greedy_request(i) for i in range(4, 10)])

    assert {key: tokens_of(value) for key, value in events.items()} == {str(i): greedy[i] for i in range(4, 10)}


def test_a_prompt_larger_than_the_pool_is_refused_with_the_numbers_and_the_others_finish(
    model_dir: Path, greedy: list[list[int]]
) -> None:
    engine = make_engine(model_dir, kv_blocks=9)
    engine.add_request(greedy_request(0))

    with pytest.raises(RequestRefused, match=r"prompt: 72 tokens .* at most 71: the whole KV cache holds 72"):
        engine.add_request(Request(request_id="big", prompt_token_ids=(3,) * 72))

    assert tokens_of(run_to_end(engine)["0"]) == greedy[0]


@pytest.mark.parametrize(("length", "generated"), [(62, 2), (63, 1)])
def test_a_prompt_just_below_the_models_length_is_served_to_that_length(model_dir: Path, length: int, generated: int) -> None:
    engine = make_engine(model_dir, max_model_len=64)
    params = SamplingParams(temperature=0.0, ignore_eos=True)

    events = run_to_end(engine, [Request(request_id="a", prompt_token_ids=(5,) * length, params=params)])["a"]

    assert len(tokens_of(events)) == generated
    assert (events[-1].finish_reason, events[-1].detail) == (FinishReason.LENGTH, "model_length")


def test_a_prompt_of_exactly_the_models_length_is_refused_unless_nothing_is_to_be_generated(model_dir: Path) -> None:
    engine = make_engine(model_dir, max_model_len=64)
    prompt = (5,) * 64

    with pytest.raises(RequestRefused, match="max_model_len is 64 with the output"):
        engine.add_request(Request(request_id="a", prompt_token_ids=prompt))
    events = run_to_end(engine, [Request(request_id="b", prompt_token_ids=prompt, params=SamplingParams(max_tokens=0))])

    assert [(event.token_ids, event.finish_reason) for event in events["b"]] == [((), FinishReason.LENGTH)]


def test_a_lone_request_that_outgrows_the_pool_ends_with_length_and_says_why(model_dir: Path) -> None:
    engine = make_engine(model_dir, kv_blocks=4)
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=400)

    events = run_to_end(engine, [Request(request_id="a", prompt_token_ids=(7, 8, 9), params=params)])["a"]

    assert len(tokens_of(events)) == 4 * 8 - 3
    assert (events[-1].finish_reason, events[-1].detail) == (FinishReason.LENGTH, "kv_capacity")


def test_max_tokens_above_the_models_length_is_refused(model_dir: Path) -> None:
    engine = make_engine(model_dir, max_model_len=300)
    engine.add_request(Request(request_id="a", prompt_token_ids=(3,), params=SamplingParams(max_tokens=300)))

    with pytest.raises(RequestRefused, match=r"max_tokens: 301 .* at most 300: the model's length"):
        engine.add_request(Request(request_id="b", prompt_token_ids=(3,), params=SamplingParams(max_tokens=301)))


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE])
def test_a_token_id_outside_the_vocabulary_is_refused(model_dir: Path, token_id: int) -> None:
    with pytest.raises(RequestRefused, match=f"token id {token_id}"):
        make_engine(model_dir).add_request(Request(request_id="a", prompt_token_ids=(3, token_id)))


def test_an_empty_prompt_and_an_id_in_use_are_refused(model_dir: Path) -> None:
    engine = make_engine(model_dir)
    engine.add_request(greedy_request(0))

    with pytest.raises(RequestRefused, match="request_id"):
        engine.add_request(greedy_request(0))
    with pytest.raises(RequestRefused, match="0 tokens"):
        engine.add_request(Request(request_id="b", prompt_token_ids=()))


def test_a_row_of_nan_fails_alone(model_dir: Path, greedy: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(model_dir)
    forward = engine._runner.forward

    def poisoned(model_input: object) -> torch.Tensor:
        logits = forward(model_input).clone()  # type: ignore[arg-type]
        logits[1] = float("nan")
        return logits

    for i in range(3):
        engine.add_request(greedy_request(i))
    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "forward", poisoned)
        first = engine.step()
    events = run_to_end(engine)

    assert [(event.request_id, event.detail) for event in first.events if event.finish_reason is FinishReason.ERROR] == [
        ("1", first.events[0].detail)
    ]
    assert "1" not in events
    for i in (0, 2):
        head = [event for event in first.events if event.request_id == str(i)]
        assert tokens_of(head + events[str(i)]) == greedy[i]


def test_an_abort_frees_every_block_and_leaves_the_others_alone(model_dir: Path, greedy: list[list[int]]) -> None:
    engine = make_engine(model_dir)
    for i in range(4):
        engine.add_request(greedy_request(i))
    seen = [engine.step() for _ in range(5)]
    engine.abort("1")
    engine.abort("unknown")
    engine.scheduler.check()

    later = run_to_end(engine)

    assert "1" not in later
    before = [event for report in seen for event in report.events if event.request_id == "2"]
    assert tokens_of(before + later["2"]) == greedy[2]
    assert engine.idle_report().stats.kv.used_blocks == 0


def test_every_slot_of_every_step_is_counted_once(model_dir: Path) -> None:
    reports: list[StepReport] = []
    engine = make_engine(model_dir, max_slots=4, kv_blocks=14)

    run_to_end(engine, [greedy_request(i) for i in range(len(PROMPTS))], reports.append)

    assert {report.stats.slots.total for report in reports} == {4}
    sampled = sum(report.stats.num_generated_tokens for report in reports)
    assert sampled == NUM_TOKENS * len(PROMPTS)


def test_waiting_work_that_nothing_schedules_is_failed_with_the_state(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(model_dir)
    monkeypatch.setattr("engine.scheduler.fit", lambda *_: Fit.LATER)
    engine.add_request(greedy_request(0))

    reports = [engine.step() for _ in range(MAX_STALLED_STEPS)]

    assert [event.finish_reason for event in reports[-1].events] == [FinishReason.ERROR]
    assert "not scheduled for" in reports[-1].events[0].detail
    assert not engine.has_work


def test_running_work_that_nothing_schedules_is_failed_too(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(model_dir)
    engine.add_request(greedy_request(0))
    engine.step()
    monkeypatch.setattr("engine.scheduler.Scheduler._continue_decodes", lambda *_: [])

    reports = [engine.step() for _ in range(MAX_STALLED_STEPS)]

    assert [event.finish_reason for event in reports[-1].events] == [FinishReason.ERROR]
    assert not engine.has_work


def test_blocks_that_a_fault_has_lost_are_counted_and_taken_back_when_nothing_is_left(model_dir: Path) -> None:
    engine = make_engine(model_dir)
    engine.add_request(greedy_request(0))
    engine.step()
    engine.scheduler._tables._pool.allocate(3)  # to nobody
    engine.abort("0")

    report = engine.step()

    assert report.stats.num_leaked_blocks == 3
    engine.scheduler.check()
