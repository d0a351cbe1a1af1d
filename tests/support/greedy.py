"""The reference: what transformers' own `generate` makes of a prompt, alone, greedy, in fp32."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


def generate_greedy(model_dir: Path, prompts: Iterable[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
    """`max_new_tokens` ids for each prompt; EOS is an id like any other."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    answers = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=0
        )
        answers.append(out[0, ids.shape[1] :].tolist())
    return answers
