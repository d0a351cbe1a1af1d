"""Grammars through the whole engine: what comes out matches, and nobody waits or fails for it."""

import re
import threading
from typing import Any

import pytest

from engine.core import Engine
from engine.grammar import GrammarCompiler
from engine.model_runner import ModelRunner
from engine.request import FinishReason, Grammar, GrammarKind, Request
from tests.support import tiny_models, toy_tokenizers
from tests.support.parity import Configured, Run, load, request, run

PATTERN = "(ab|cd|[e-h]{2}){3,6}"
GRAMMAR = Grammar(GrammarKind.REGEX, PATTERN)
TOKENIZER = toy_tokenizers.byte_fallback()


@pytest.fixture(scope="module")
def guided(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    directory = tmp_path_factory.mktemp("guided")
    vocab_size = TOKENIZER.get_vocab_size() + 9
    tiny_models.save("llama", tiny_models.SUPPORTED["llama"] | {"vocab_size": vocab_size}, directory)
    toy_tokenizers.save(TOKENIZER, directory)
    return load(directory)


def matching(name: object, **options: Any) -> Request:
    defaults: dict[str, Any] = {"temperature": 1.0, "ignore_eos": False, "max_tokens": 40, "grammar": GRAMMAR}
    return request(name, (5, 6, 7, 8, 9), **(defaults | options))


def text_of(token_ids: tuple[int, ...]) -> str:
    return TOKENIZER.decode([token_id for token_id in token_ids if token_id != 2], skip_special_tokens=False)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"run_ahead": True},
        {"num_blocks": 9, "preemption": "swap", "num_host_blocks": 4, "run_ahead": True},
        {"num_blocks": 9},
    ],
    ids=str,
)
def test_choices_differ_and_each_matches_and_stops(guided: ModelRunner, changes: dict[str, Any]) -> None:
    jobs = [
        matching("a", n=4, seed=1),
        request("plain", (9,) * 20, max_tokens=40),
        matching("b", n=2, seed=2, presence_penalty=0.5),
    ]
    expected = run(guided, jobs[:1]).tokens

    done = run(guided, jobs, **changes)

    found = {key: outcome for key, outcome in done.outcomes.items() if key[0] != "plain"}
    assert {outcome.reason for outcome in found.values()} == {FinishReason.STOP}
    assert all(re.fullmatch(PATTERN, text_of(outcome.token_ids)) for outcome in found.values())
    assert len({done.tokens["a", choice] for choice in range(4)}) > 1
    assert {key: done.tokens[key] for key in expected} == expected


def test_a_grammar_goes_on_where_an_earlier_attempt_left_it(guided: ModelRunner) -> None:
    whole = run(guided, [matching("a", seed=3)]).tokens["a", 0]

    for cut in range(len(whole)):
        done = run(guided, [matching("a", seed=3, output_token_ids=whole[:cut])])
        assert whole[:cut] + done.tokens["a", 0] == whole


def test_a_grammar_that_cannot_be_compiled_is_rejected_with_the_reason_and_the_others_finish(guided: ModelRunner) -> None:
    done = Run(
        Engine(Configured(guided)), [matching("bad", grammar=Grammar(GrammarKind.REGEX, "(")), matching("good")]
    ).to_end()

    assert [(one.request_id, one.field) for one in done.rejected] == [("bad", "response_format")]
    assert "unclosed" in done.rejected[0].limit
    assert list(done.outcomes) == [("good", 0)]


@pytest.mark.parametrize("is_aborted", [False, True])
def test_nobody_waits_while_a_grammar_is_compiled(
    guided: ModelRunner, monkeypatch: pytest.MonkeyPatch, is_aborted: bool
) -> None:
    gate = threading.Event()
    compile_now = GrammarCompiler._compile
    monkeypatch.setattr(GrammarCompiler, "_compile", lambda self, grammar: gate.wait(60) and compile_now(self, grammar))
    done = Run(Engine(Configured(guided)), [matching("slow"), request("plain", (9, 9), max_tokens=9)])

    done.until(lambda run: run.outcomes["plain", 0].reason is not None)
    assert ("slow", 0) not in done.outcomes
    if is_aborted:
        done.engine.abort("slow")
    gate.set()
    done.to_end()

    assert (("slow", 0) in done.outcomes) != is_aborted
