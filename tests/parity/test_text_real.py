"""The queue side's text against transformers' own, on the demo model's tokenizer."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from engine import model
from tests.support.toy_tokenizers import TRICKY, questions
from worker.text import HALF, Detokenizer, Tokenizer
from worker.wire import Job

PROMPTS = [
    json.loads(line)["prompt"] for line in (Path(__file__).parent.parent / "data/prompts_24.jsonl").read_text().splitlines()
]


@pytest.fixture(scope="module")
def directory() -> Path:
    return model.resolve("smollm2-135m-instruct")


@pytest.fixture(scope="module")
def ours(directory: Path) -> Tokenizer:
    return Tokenizer(directory)


@pytest.fixture(scope="module")
def theirs(directory: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(directory)


def test_raw_prompts_have_the_same_ids(ours: Tokenizer, theirs: PreTrainedTokenizerBase) -> None:
    for prompt in (*PROMPTS, *questions(), *TRICKY):
        assert ours.encode_prompt(Job(prompt=prompt)) == theirs(prompt)["input_ids"]


def test_conversations_have_the_same_ids(ours: Tokenizer, theirs: PreTrainedTokenizerBase) -> None:
    for prompt, question in zip(PROMPTS, questions(), strict=False):
        messages = (
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": prompt},
            {"role": "assistant", "content": " Sure.\n"},
            {"role": "user", "content": question},
        )
        for turns in (messages, messages[1:], messages[1:2]):
            expected = theirs.apply_chat_template(list(turns), add_generation_prompt=True, return_dict=False)
            assert ours.encode_prompt(Job(messages=turns)) == expected


def test_streamed_text_equals_the_full_decode(ours: Tokenizer, theirs: PreTrainedTokenizerBase) -> None:
    for text in (*questions(), *TRICKY):
        ids = theirs(text)["input_ids"]
        detokenizer = Detokenizer(ours)
        pieces = [*(detokenizer.push([token_id]) for token_id in ids), detokenizer.flush()]
        assert "".join(pieces) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert HALF in text or HALF not in "".join(pieces)
