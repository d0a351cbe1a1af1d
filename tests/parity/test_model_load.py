"""Loading: what is served, with the numbers the engine reckons with, and what is refused with the reason."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from engine import model
from engine.errors import ConfigError, ModelUnsupported
from engine.geometry import ModelGeometry
from tests.support import tiny_models

CPU = torch.device("cpu")
LLAMA = tiny_models.SUPPORTED["llama"]


def tiny(directory: Path, model_type: str, **settings: Any) -> Path:
    return tiny_models.save(model_type, tiny_models.SUPPORTED.get(model_type, LLAMA) | settings, directory)


def load(directory: Path) -> Any:
    return model.load(directory, CPU, torch.float32)


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def split_weights(directory: Path) -> Path:
    """Write the weights again in several shards; the last one."""
    load(directory).save_pretrained(directory, max_shard_size="40KB")
    (directory / "model.safetensors").unlink(missing_ok=True)
    return sorted(directory.glob("*.safetensors"))[-1]


def test_a_loaded_model_is_for_inference_in_the_asked_dtype_with_our_attention(tmp_path):
    loaded = model.load(tiny(tmp_path, "llama"), CPU, torch.bfloat16)
    assert not loaded.training
    assert {(p.requires_grad, p.dtype) for p in loaded.parameters()} == {(False, torch.bfloat16)}
    assert loaded.config._attn_implementation == "slotmill"


@pytest.mark.parametrize(
    ("model_type", "settings", "expected"),
    [
        ("llama", {"hidden_size": 32}, (3, 2, 8)),
        ("gpt2", {"n_embd": 32}, (3, 4, 8)),
        ("opt", {"hidden_size": 32, "word_embed_proj_dim": 32}, (3, 4, 8)),
        ("gemma3_text", {"head_dim": 20}, (4, 2, 20)),
        ("gpt_oss", {"head_dim": 24}, (4, 2, 24)),
    ],
)
def test_geometry_is_read_whatever_a_family_calls_it(model_type, settings, expected, tmp_path):
    found = model.geometry(load(tiny(tmp_path, model_type, **settings)))
    assert (found.num_layers, found.num_kv_heads, found.head_dim) == expected
    assert (found.vocab_size, found.max_model_len) == (tiny_models.VOCAB_SIZE, 256)


class Configured:
    """As much of a model as its geometry needs."""

    def __init__(self, model_type: str, generation_eos: int | list[int] | None = None, **settings: Any) -> None:
        self.config = AutoConfig.for_model(model_type, **LLAMA | settings)
        self.generation_config = type("Generation", (), {"eos_token_id": generation_eos})


def geometry(*arguments: Any, **settings: Any) -> ModelGeometry:
    return model.geometry(Configured(*arguments, **settings))


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [(None, 2, (2,)), (7, 2, (7, 2)), ([7, 2, 8], 2, (7, 2, 8)), (None, [4, 5], (4, 5)), (None, None, ())],
)
def test_end_ids_are_those_of_both_configs_generation_first(generation, config, expected):
    assert geometry("llama", generation, eos_token_id=config).eos_token_ids == expected


def test_rope_that_depends_on_the_longest_of_the_batch_is_cut_to_where_it_does_not():
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    sizes = {"hidden_size": 32, "max_position_embeddings": 256, "original_max_position_embeddings": 64}
    found = geometry("phi3", rope_parameters=rope, **sizes)
    assert found.max_model_len == 64


def test_rope_scaled_for_good_keeps_its_length():
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    assert geometry("llama", max_position_embeddings=256, rope_parameters=rope).max_model_len == 256


def test_a_model_without_a_length_is_refused():
    with pytest.raises(ModelUnsupported, match="max_position_embeddings: 0"):
        geometry("llama", max_position_embeddings=0)


def test_a_cache_of_two_shapes_is_refused():
    with pytest.raises(ModelUnsupported, match="v_head_dim: 128"):
        geometry("deepseek_v3", kv_lora_rank=8, num_key_value_heads=4)


@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        ("t5", {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 1, "num_heads": 4, "vocab_size": 97}, "encoder-decoder"),
        ("bert", LLAMA | {"num_hidden_layers": 1}, "lets tokens see later ones"),
        ("mamba", {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 97}, "recurrent state"),
    ],
)
def test_what_is_no_decoder_only_model_is_refused_with_the_reason(model_type, settings, reason, tmp_path):
    tiny_models.save(model_type, settings, tmp_path)
    with pytest.raises(ModelUnsupported, match=reason):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": None}, "names no architectures"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "no causal language model"),
        ({"architectures": ["LlamaModel"]}, "no causal language model"),
        ({"model_type": "clip"}, "no causal language model"),
        ({"model_type": "newest_thing"}, "does not know"),
        ({"model_type": "newest_thing", "auto_map": {"AutoConfig": "a.B"}}, "does not know"),
    ],
)
def test_a_config_that_names_another_kind_of_model_is_refused(changes, reason, tmp_path):
    edit_json(tiny(tmp_path, "llama") / "config.json", **changes)
    with pytest.raises(ModelUnsupported, match=reason) as refusal:
        load(tmp_path)
    assert "\n" not in str(refusal.value)


def harm_nothing_left(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


def harm_truncated(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def harm_missing_shard(directory: Path) -> None:
    split_weights(directory).unlink()


def harm_truncated_shard(directory: Path) -> None:
    shard = split_weights(directory)
    shard.write_bytes(shard.read_bytes()[:-100])


def harm_no_longer_listed(directory: Path) -> None:
    """A directory whose index was lost: transformers would fill the tensors of the other shards with random numbers."""
    shard = split_weights(directory)
    (directory / "model.safetensors.index.json").unlink()
    shard.rename(directory / "model.safetensors")


def harm_more_layers(directory: Path) -> None:
    edit_json(directory / "config.json", num_hidden_layers=4)


def harm_other_shapes(directory: Path) -> None:
    edit_json(directory / "config.json", intermediate_size=100)


@pytest.mark.parametrize(
    "harm",
    [
        harm_nothing_left,
        harm_truncated,
        harm_missing_shard,
        harm_truncated_shard,
        harm_no_longer_listed,
        harm_more_layers,
        harm_other_shapes,
    ],
)
def test_incomplete_weights_are_one_clear_error_and_never_random_numbers(harm, tmp_path):
    harm(tiny(tmp_path, "llama"))
    with pytest.raises(ConfigError, match="incomplete or do not fit") as refusal:
        load(tmp_path)
    assert "\n" not in str(refusal.value)


def test_weights_in_shards_load_as_the_same_model(tmp_path):
    directory = tiny(tmp_path, "llama")
    whole = load(directory).state_dict()
    split_weights(directory)
    shards = load(directory).state_dict()
    assert all(torch.equal(shards[name], tensor) for name, tensor in whole.items())


def test_loading_says_nothing(tmp_path, capfd):
    load(tiny(tmp_path, "llama"))
    capfd.readouterr()
    load(tmp_path)
    assert capfd.readouterr() == ("", "")


def test_a_tokenizer_in_files_of_old_is_exported_once_into_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SLOTMILL_CACHE_DIR", str(tmp_path / "cache"))
    directory = tmp_path / "gpt2"
    tiny(directory, "gpt2")
    (directory / "tokenizer.json").unlink()
    (directory / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}))
    (directory / "merges.txt").write_text("#version: 0.2\na b\n")
    exported = model.tokenizer_dir(directory)
    assert exported == model.tokenizer_dir(directory)
    assert exported.parent == tmp_path / "cache" / "models"
    assert json.loads((exported / "tokenizer.json").read_text())["model"]["vocab"]["ab"] == 2


def test_a_directory_with_a_fast_tokenizer_serves_it_from_there(tmp_path):
    assert model.tokenizer_dir(tiny(tmp_path, "llama")) == tmp_path


def test_a_directory_without_any_tokenizer_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("SLOTMILL_CACHE_DIR", str(tmp_path / "cache"))
    (tiny(tmp_path / "llama", "llama") / "tokenizer.json").unlink()
    with pytest.raises(ModelUnsupported, match="tokenizer"):
        model.tokenizer_dir(tmp_path / "llama")
