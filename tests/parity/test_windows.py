"""Sliding windows: blocks that every layer has left behind go back to the pool, and nothing else changes."""

from pathlib import Path
from typing import Any

import pytest

from engine.core import Engine
from engine.model_runner import ModelRunner
from tests.support import tiny_models
from tests.support.greedy import generate_greedy
from tests.support.parity import BLOCK, Configured, Run, load, request, run

WINDOW = tiny_models.WINDOW
NUM_TOKENS = 70
PROMPTS = [tuple(3 + (7919 * (i + 31 * row + 1)) % 90 for i in range(length)) for row, length in enumerate((3, 45, 11, 60))]


@pytest.fixture(scope="module")
def sliding_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save("mistral", tiny_models.SUPPORTED["mistral"], tmp_path_factory.mktemp("sliding"))


@pytest.fixture(scope="module")
def sliding(sliding_dir: Path) -> ModelRunner:
    return load(sliding_dir)


@pytest.fixture(scope="module")
def greedy(sliding_dir: Path) -> dict[tuple[str, int], tuple[int, ...]]:
    answers = generate_greedy(sliding_dir, PROMPTS, NUM_TOKENS)
    return {(str(i), 0): tuple(answer) for i, answer in enumerate(answers)}


def requests(**options: Any) -> list[Any]:
    return [request(i, prompt, max_tokens=NUM_TOKENS, **options) for i, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_num_batched_tokens": 7},
        {"num_blocks": 17, "prefix_caching": False},
        {"num_blocks": 17, "preemption": "swap", "num_host_blocks": 40},
        {"num_blocks": 17, "preemption": "swap", "num_host_blocks": 2},
    ],
    ids=str,
)
def test_tokens_equal_generate(
    sliding: ModelRunner, greedy: dict[tuple[str, int], tuple[int, ...]], changes: dict[str, Any], run_ahead: bool
) -> None:
    done = run(sliding, requests(), run_ahead=run_ahead, **changes)

    assert (done.counts["num_preemptions"] > 0) == ("num_blocks" in changes)
    assert done.tokens == greedy


def test_a_growing_sequence_holds_no_more_blocks_than_its_window_covers(sliding: ModelRunner) -> None:
    done = Run(Engine(Configured(sliding)), requests()[:1])
    most = 0
    while done.engine.has_work:
        most = max(most, done.step().stats.kv.used_blocks)

    assert len(PROMPTS[0]) + NUM_TOKENS > 8 * BLOCK
    assert most <= (WINDOW - 1) // BLOCK + 2


def test_a_prompt_in_chunks_gives_back_what_it_has_left_behind(sliding: ModelRunner) -> None:
    done = Run(Engine(Configured(sliding, max_num_batched_tokens=BLOCK)), [request("a", PROMPTS[3], max_tokens=4)])
    used = []
    while done.engine.has_work:
        used.append(done.step().stats.kv.used_blocks)

    assert max(used) <= (WINDOW - 1) // BLOCK + 2


@pytest.mark.parametrize(("num_blocks", "length"), [(9, 24), (10, 23)])
def test_a_token_dropped_in_flight_at_a_blocks_edge_is_swapped_out_without_its_block(
    sliding: ModelRunner, num_blocks: int, length: int
) -> None:
    lengths = ({9: 3, 10: 2}[num_blocks], length, length - 8, length - 4)
    crowd = [request(i, PROMPTS[3][min(i, 2) :][:size], max_tokens=40 + 10 * (i == 0)) for i, size in enumerate(lengths)]
    expected = run(sliding, crowd).tokens

    done = run(sliding, crowd, run_ahead=True, num_blocks=num_blocks, num_host_blocks=40, preemption="swap")

    assert done.counts["num_swap_preemptions"] > 0
    assert done.tokens == expected


def test_choices_and_beams_leave_blocks_behind_and_stay_the_same(sliding: ModelRunner) -> None:
    mixed = [
        request("n", PROMPTS[1], n=3, temperature=1.0, max_tokens=NUM_TOKENS),
        request("beams", PROMPTS[2], beam_width=3, max_tokens=NUM_TOKENS),
    ]
    single = [request("n", PROMPTS[1], choice=k, temperature=1.0, max_tokens=NUM_TOKENS) for k in range(3)]
    expected = run(sliding, single).tokens | run(sliding, mixed[1:]).tokens

    done = run(sliding, mixed, num_blocks=40, max_num_batched_tokens=11)

    assert done.tokens == expected


def test_hits_of_a_prefix_that_was_left_behind_change_no_token(
    sliding: ModelRunner, greedy: dict[tuple[str, int], tuple[int, ...]]
) -> None:
    done = Run(Engine(Configured(sliding)), requests()).to_end()
    for again in requests():
        done.add(request(f"again{again.request_id}", again.prompt_token_ids, max_tokens=NUM_TOKENS))

    done.to_end()

    assert done.counts["num_prefix_hits"] > 0
    assert {key: done.tokens[f"again{key[0]}", 0] for key in greedy} == greedy


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_a_model_with_layers_that_see_everything_keeps_its_blocks(family: str, tmp_path: Path) -> None:
    directory = tiny_models.save(family, tiny_models.SUPPORTED[family], tmp_path)
    runner = load(directory)
    expected = generate_greedy(directory, PROMPTS[:1], NUM_TOKENS)[0]

    done = Run(Engine(Configured(runner)), requests()[:1])
    most = 0
    while done.engine.has_work:
        most = max(most, done.step().stats.kv.used_blocks)

    assert done.tokens["0", 0] == tuple(expected)
    assert most == -(-(len(PROMPTS[0]) + NUM_TOKENS - 1) // BLOCK)
