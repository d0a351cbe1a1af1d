"""What int8 keys and values cost on real text and a real model."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from bench.kv_accuracy import SONNETS, perplexity, with_kv_in
from engine import model


@pytest.fixture(scope="module")
def directory() -> Path:
    return model.resolve("smollm2-135m-instruct")


def test_the_perplexity_of_a_text_is_within_1_percent_of_that_with_keys_and_values_in_bfloat16(directory: Path) -> None:
    loaded = model.load(directory, torch.device("cpu"), torch.float32)
    tokenizer = Tokenizer.from_file(str(model.tokenizer_dir(directory) / "tokenizer.json"))
    token_ids = tokenizer.encode(SONNETS.read_text()).ids[:512]

    in_int8, in_bfloat16 = (perplexity(with_kv_in(dtype, loaded), token_ids, 512) for dtype in (torch.int8, torch.bfloat16))

    assert in_int8 != in_bfloat16
    assert abs(in_int8 / in_bfloat16 - 1) < 0.01
