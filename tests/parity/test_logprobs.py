"""Log probabilities out of the whole engine, held against torch.log_softmax of transformers' logits of each sequence alone."""

from typing import Any

import pytest
import torch

from engine.core import Engine
from engine.messages import TokenLogprobs
from engine.model_runner import ModelRunner
from engine.request import FinishReason, Request
from tests.support.parity import BLOCK, Configured, Outcome, Run, logits_of, request, run
from tests.support.tiny import random_prompts

PROMPTS = [prompt for prompt in random_prompts(count=12, longest=40) if len(prompt) >= 5][:6]
NUM_TOKENS = 10
TOP = 3
TOLERANCE = 3e-4
"""The model is wild: transformers' own log probabilities in fp32 are up to 1.0e-4 away from those in fp64."""


def scored(name: int, **options: Any) -> Request:
    defaults: dict[str, Any] = {"max_tokens": NUM_TOKENS, "logprobs": TOP, "prompt_logprobs": TOP}
    return request(name, PROMPTS[name], **(defaults | options))


def assert_equal(found: tuple[TokenLogprobs, ...], log_probs: torch.Tensor, token_ids: tuple[int, ...]) -> None:
    """`log_probs` `[n, vocab]` of the positions before `token_ids`."""
    assert len(found) == len(token_ids) == len(log_probs)
    for row, token_id, one in zip(log_probs, token_ids, found, strict=True):
        assert one.logprob == pytest.approx(row[token_id].item(), abs=TOLERANCE)
        values, ids = row.topk(TOP)
        assert [token for token, _ in one.top] == ids.tolist()
        assert [value for _, value in one.top] == pytest.approx(values.tolist(), abs=TOLERANCE)


def assert_true(model: Any, prompt: tuple[int, ...], outcome: Outcome) -> None:
    """All log probabilities of a choice are those of transformers."""
    token_ids = prompt + outcome.token_ids
    log_probs = logits_of(model, token_ids).log_softmax(1)
    assert outcome.prompt_logprobs is not None
    assert_equal(outcome.prompt_logprobs, log_probs[: len(prompt) - 1], prompt[1:])
    assert_equal(outcome.logprobs, log_probs[len(prompt) - 1 : -1], outcome.token_ids)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_scored_tokens": 1},
        {"max_scored_tokens": 7, "max_num_batched_tokens": 9},
        {"chunked_prefill": False, "max_scored_tokens": 5},
        {"scheduling": "iteration_level", "max_scored_tokens": 5},
        {"scheduling": "request_level", "max_scored_tokens": 5},
        {"num_blocks": 9},
        {"num_blocks": 9, "max_scored_tokens": 11, "preemption": "swap", "num_host_blocks": 20},
    ],
    ids=str,
)
@pytest.mark.parametrize("run_ahead", [False, True])
def test_log_probabilities_are_those_of_the_models_own_logits(
    tiny: ModelRunner, tiny_model: Any, changes: dict[str, Any], run_ahead: bool
) -> None:
    done = run(tiny, [scored(i) for i in range(len(PROMPTS))], run_ahead=run_ahead, **changes)

    assert (done.counts["num_preemptions"] > 0) == ("num_blocks" in changes)
    for i, prompt in enumerate(PROMPTS):
        assert_true(tiny_model, prompt, done.outcomes[str(i), 0])


@pytest.mark.parametrize("max_tokens", [0, NUM_TOKENS])
def test_choices_of_one_prompt_are_told_its_log_probabilities_once(tiny: ModelRunner, tiny_model: Any, max_tokens: int) -> None:
    done = run(tiny, [scored(0, n=3, temperature=1.0, max_tokens=max_tokens)])

    assert [done.outcomes["0", choice].prompt_logprobs is not None for choice in range(3)] == [True, False, False]
    assert_true(tiny_model, PROMPTS[0], done.outcomes["0", 0])
    for choice in (1, 2):
        done.outcomes["0", choice].prompt_logprobs = done.outcomes["0", 0].prompt_logprobs
        assert_true(tiny_model, PROMPTS[0], done.outcomes["0", choice])


def test_a_resumed_request_that_was_complete_tells_no_log_probabilities_it_has_not_computed(tiny: ModelRunner) -> None:
    done = run(tiny, [scored(0, max_tokens=2, output_token_ids=(5, 6))])

    assert (done.outcomes["0", 0].reason, done.outcomes["0", 0].prompt_logprobs) == (FinishReason.LENGTH, None)


@pytest.mark.parametrize("run_ahead", [False, True])
def test_scoring_alone_generates_nothing(tiny: ModelRunner, tiny_model: Any, run_ahead: bool) -> None:
    requests = [scored(i, max_tokens=0) for i in range(len(PROMPTS))]

    done = run(tiny, requests, run_ahead=run_ahead, max_scored_tokens=6)

    for i, prompt in enumerate(PROMPTS):
        outcome = done.outcomes[str(i), 0]
        assert (outcome.token_ids, outcome.reason, len(outcome.events)) == ((), FinishReason.LENGTH, 1)
        assert_true(tiny_model, prompt, outcome)


def test_a_prompt_of_one_token_has_no_log_probabilities_and_says_so(tiny: ModelRunner) -> None:
    assert run(tiny, [request("a", (5,), prompt_logprobs=2, max_tokens=1)]).outcomes["a", 0].prompt_logprobs == ()


def test_a_scored_request_does_not_read_the_prefix_cache_and_fills_it_for_others(tiny: ModelRunner, tiny_model: Any) -> None:
    longest = max(range(len(PROMPTS)), key=lambda i: len(PROMPTS[i]))
    prompt = PROMPTS[longest]
    done = Run(Engine(Configured(tiny)), [request("before", prompt, max_tokens=NUM_TOKENS)]).to_end()

    done.add(scored(longest))
    done.to_end()
    hits_of_scored = done.counts["num_prefix_hits"]
    done.add(request("after", prompt, max_tokens=NUM_TOKENS))
    done.to_end()

    assert hits_of_scored == 0
    assert done.outcomes["after", 0].num_cached_tokens == (len(prompt) - 1) // BLOCK * BLOCK
    assert_true(tiny_model, prompt, done.outcomes[str(longest), 0])
    assert done.tokens["after", 0] == done.tokens["before", 0] == done.tokens[str(longest), 0]


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_prompt_preempted_in_the_middle_of_its_scoring_is_scored_once(
    tiny: ModelRunner, tiny_model: Any, preemption: str, run_ahead: bool
) -> None:
    room = {"num_blocks": 7, "max_scored_tokens": 3, "num_host_blocks": 20, "preemption": preemption, "run_ahead": run_ahead}
    long = max(range(len(PROMPTS)), key=lambda i: len(PROMPTS[i]))
    done = Run(Engine(Configured(tiny, **room)), [request("head", PROMPTS[0], max_tokens=40), scored(long)])

    done.until(lambda run: run.counts["num_preemptions"] > 0)
    (waiting,) = done.engine.scheduler._lineup.waiting
    num_scored = len(waiting.prompt_logprobs)
    done.to_end()

    assert 0 < num_scored < len(PROMPTS[long]) - 1
    assert_true(tiny_model, PROMPTS[long], done.outcomes[str(long), 0])
