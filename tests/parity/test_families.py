"""Families of models, tiny and random, through the paged path: their own eager attention and `generate` are the reference."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from engine.batch import build
from engine.config import EngineConfig
from engine.core import Engine
from engine.decision import ScheduledSequence
from engine.errors import ModelUnsupported
from engine.model_runner import ModelRunner
from engine.request import Request, SamplingParams
from engine.sequence import Sequence
from engine.staging import Staging
from tests.support.greedy import generate_greedy
from tests.support.tiny import run_to_end, tokens_of
from tests.support.tiny_models import SUPPORTED, UNSUPPORTED, VOCAB_SIZE, save

BLOCK_SIZE = 8
NUM_BLOCKS = 30
# Tokens of four sequences in each step: chunks that end inside blocks, prefill and decode together, a sequence left out.
STEPS = ((20, 5, 0, 1), (1, 12, 7, 0), (17, 3, 1, 1), (1, 1, 1, 1), (1, 1, 0, 1), (1, 1, 0, 0))
LENGTHS = [sum(counts) for counts in zip(*STEPS, strict=True)]
# Largest difference of a logit, over the largest logit.
TOLERANCE = 1e-5


def run(directory: Path, token_budget: int = 64) -> ModelRunner:
    """A runner on a small pool that holds nothing but NaN."""
    runner = ModelRunner(
        EngineConfig(
            model=str(directory),
            dtype="float32",
            block_size=BLOCK_SIZE,
            kv_blocks=NUM_BLOCKS,
            token_budget=token_budget,
            num_threads=1,
        )
    )
    runner._kv_cache.tensor.fill_(torch.nan)
    return runner


def random_prompts() -> list[tuple[int, ...]]:
    draw = random.Random(0)
    return [tuple(draw.randrange(3, VOCAB_SIZE) for _ in range(length)) for length in LENGTHS]


def sequences_on_shuffled_blocks() -> list[Sequence]:
    blocks = random.Random(1).sample(range(1, NUM_BLOCKS + 1), NUM_BLOCKS)
    sequences = []
    for row, prompt in enumerate(random_prompts()):
        sequence = Sequence(Request(request_id=str(row), prompt_token_ids=prompt), (0, row, 0), frozenset())
        sequence.block_table = [blocks.pop() for _ in range(-(-len(prompt) // BLOCK_SIZE))]
        sequences.append(sequence)
    return sequences


def paged_logits(runner: ModelRunner) -> list[torch.Tensor]:
    """Logits of every position of every sequence, computed in STEPS; the order of the batch turns from step to step."""
    sequences = sequences_on_shuffled_blocks()
    rows: list[list[torch.Tensor]] = [[] for _ in sequences]
    for step, counts in enumerate(STEPS):
        items = [ScheduledSequence(s, count, 1) for s, count in zip(sequences, counts, strict=True) if count]
        items = items[step % len(items) :] + items[: step % len(items)]
        for item in items:
            item.sequence.num_computed_tokens += item.num_tokens
        batch = build(items, BLOCK_SIZE, Staging(runner.device))
        logits = runner.forward(replace(batch, logits_indices=torch.arange(sum(counts))))
        for item, part in zip(items, logits.split([item.num_tokens for item in items]), strict=True):
            rows[int(item.sequence.request.request_id)].append(part)
    return [torch.cat(parts) for parts in rows]


@pytest.mark.parametrize("family", SUPPORTED)
def test_paged_logits_equal_eager_attention_of_each_sequence_alone(family: str, tmp_path: Path) -> None:
    directory = save(family, SUPPORTED[family], tmp_path)
    ours = paged_logits(run(directory))

    eager = transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32)
    with torch.inference_mode():
        theirs = [eager(input_ids=torch.tensor([prompt]), use_cache=False).logits[0] for prompt in random_prompts()]
    largest = max(logits.abs().max().item() for logits in theirs)
    difference = max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))
    assert difference <= TOLERANCE * largest


@pytest.mark.parametrize("family", SUPPORTED)
def test_greedy_tokens_equal_generate(family: str, tmp_path: Path) -> None:
    directory = save(family, SUPPORTED[family], tmp_path)
    prompts = random_prompts()
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)

    events = run_to_end(
        Engine(run(directory, token_budget=13)),
        [Request(request_id=str(row), prompt_token_ids=prompt, params=params) for row, prompt in enumerate(prompts)],
    )

    assert [tokens_of(events[str(row)]) for row in range(len(prompts))] == generate_greedy(directory, prompts, 6)


@pytest.mark.parametrize("family", UNSUPPORTED)
def test_a_model_that_would_answer_wrongly_is_refused_with_the_reason(family: str, tmp_path: Path) -> None:
    settings, reason = UNSUPPORTED[family]
    directory = save(family, settings, tmp_path)

    with pytest.raises(ModelUnsupported, match=reason):
        run(directory)
