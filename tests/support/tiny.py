"""Tiny random models in Hugging Face layout, and a loop that runs an engine to its end."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from engine.core import Engine
from engine.messages import StepReport, TokenEvent
from engine.request import Request

VOCAB_SIZE = 211
EOS_ID = 2


def save_tiny_llama(directory: Path) -> Path:
    """A random 3-layer Llama in fp32 whose greedy output does not fall into a loop at once."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=EOS_ID,
        bos_token_id=1,
        initializer_range=0.6,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB_SIZE)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def random_prompts(count: int, longest: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Prompts of 1 to `longest` random token ids."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, size: int) -> list[int]:
        return torch.randint(low, high, (size,), generator=generator).tolist()

    return [tuple(draw(3, VOCAB_SIZE, draw(1, longest + 1, 1)[0])) for _ in range(count)]


def run_to_end(
    engine: Engine, requests: Iterable[Request] = (), on_report: Callable[[StepReport], None] | None = None
) -> dict[str, list[TokenEvent]]:
    """Add `requests`, step until nothing is left, check the accounting after each step; events by request id."""
    events: dict[str, list[TokenEvent]] = defaultdict(list)
    for request in requests:
        engine.add_request(request)
    while engine.has_work:
        report = engine.step()
        engine.scheduler.check()
        assert not report.stats.num_leaked_blocks, "blocks were lost"
        for event in report.events:
            events[event.request_id].append(event)
        if on_report:
            on_report(report)
    return events


def tokens_of(events: Iterable[TokenEvent]) -> list[int]:
    """All ids of one request's events, which must be contiguous."""
    ids: list[int] = []
    for event in events:
        ids.extend(event.token_ids)
    return ids
