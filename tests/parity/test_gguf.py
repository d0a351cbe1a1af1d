"""The demo model, from its GGUF file: converted once into the user's cache, which the demo finds warm after these tests."""

import json
from pathlib import Path

import gguf
import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine import model

ALIAS = "smollm2-135m-instruct"
SAMPLES = ("Hello, world!", "naïve café 👩‍🚀 日本語", "  two  spaces\n\ttab", "def f(x): return x**2")


@pytest.fixture(scope="module")
def directory() -> Path:
    return model.resolve(ALIAS)


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def read_json(path: Path) -> dict[str, object]:
    content: dict[str, object] = json.loads(path.read_text())
    return content


def test_the_config_is_that_of_a_plain_model(directory):
    config, generation = (read_json(directory / f"{name}.json") for name in ("config", "generation_config"))
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert config["eos_token_id"] == generation["eos_token_id"] == 2
    assert not {"quantization_config", "_name_or_path", "_model_name_or_path"} & config.keys()


@pytest.mark.parametrize("text", SAMPLES)
def test_text_survives_the_tokenizer(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_numbers_are_split_into_digits_as_the_model_was_trained(tokenizer):
    assert tokenizer.encode("in 2024, 3.14").tokens == ["in", "Ġ", "2", "0", "2", "4", ",", "Ġ", "3", ".", "1", "4"]


def test_the_turn_marks_of_the_chat_template_are_single_tokens(directory, tokenizer):
    template = (directory / "chat_template.jinja").read_text()
    assert "<|im_end|>" in template
    assert tokenizer.encode("<|im_start|>user<|im_end|>").ids[::2] == [1, 2]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("model.embed_tokens.weight", "token_embd.weight"), ("model.layers.7.mlp.down_proj.weight", "blk.7.ffn_down.weight")],
)
def test_weights_are_the_dequantised_ones_rounded_once(directory, ours, theirs):
    package, file, _ = model.ALIASES[ALIAS]
    source = model._packaged(ALIAS)
    assert (source.parent.name, source.name) == (package, file)
    packed = next(tensor for tensor in gguf.GGUFReader(source).tensors if tensor.name == theirs)
    expected = torch.from_numpy(gguf.dequantize(packed.data, packed.tensor_type)).bfloat16()
    with safe_open(directory / "model.safetensors", "pt") as weights:
        assert torch.equal(weights.get_tensor(ours), expected)


def test_the_converted_model_knows_the_capital_of_france(directory):
    tokenizer = AutoTokenizer.from_pretrained(directory)
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, return_tensors="pt"
    )
    output = reference.generate(**prompt, max_new_tokens=16, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])
