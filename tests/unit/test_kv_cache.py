"""How large the KV cache is and how many blocks of it fit."""

from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import OutOfMemory
from engine.geometry import ModelGeometry
from engine.kv_cache import GIB, MIB, KVCache, Memory, kv_bytes_per_token


def geometry(num_layers: int, num_kv_heads: int, head_dim: int) -> ModelGeometry:
    return ModelGeometry(
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=100,
        max_model_len=4096,
        eos_token_ids=(2,),
    )


def memory(**options: Any) -> Memory:
    """A machine on which a block takes 16 KiB."""
    settings: dict[str, Any] = {
        "device": "cpu",
        "total_bytes": 8 * GIB,
        "free_bytes": 2 * GIB,
        "weights_bytes": GIB,
        "activation_bytes": GIB // 2,
        "token_bytes": 1024,
        "block_size": 16,
        "max_model_len": 4096,
    }
    return Memory(**(settings | options))


def config(**options: Any) -> EngineConfig:
    return EngineConfig(model="any", **options)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [("OPT-13B", (40, 40, 128), 819_200), ("Llama-3.1-8B", (32, 8, 128), 131_072), ("SmolLM2-135M", (30, 3, 64), 23_040)],
)
def test_bytes_per_token_of_known_models(name: str, shape: tuple[int, int, int], expected: int) -> None:
    assert kv_bytes_per_token(geometry(*shape), torch.bfloat16) == expected


def test_a_block_is_one_piece_and_layers_are_views_of_it() -> None:
    cache = KVCache(geometry(3, 2, 4), num_blocks=5, block_size=8, dtype=torch.float32, device=torch.device("cpu"))

    cache.layers[1][5, 1, 7, 1] = torch.full((4,), 3.0)

    assert cache.tensor.shape == (6, 3, 2, 8, 2, 4)
    assert cache.tensor[5].is_contiguous()
    assert torch.equal(cache.tensor[5, 1, 1, 7, 1], torch.full((4,), 3.0))


def test_the_default_on_a_cpu_is_a_quarter_of_what_is_free() -> None:
    assert memory().num_blocks(config(), max_slots=1024) == GIB // 2 // (16 * 1024) - 1


def test_the_default_on_a_cpu_is_at_most_4_gib() -> None:
    assert memory(free_bytes=64 * GIB).num_blocks(config(), max_slots=2048) == 4 * GIB // (16 * 1024) - 1


def test_the_default_on_a_cpu_is_no_more_than_the_slots_can_use() -> None:
    assert memory().num_blocks(config(), max_slots=2) == 2 * 4096 // 16


def test_the_default_on_a_gpu_is_nine_tenths_of_what_is_free_less_activations() -> None:
    blocks = memory(device="cuda:0").num_blocks(config(), max_slots=1)

    assert blocks == int(0.9 * 2 * GIB - GIB // 2) // (16 * 1024) - 1


def test_kv_memory_up_to_1_is_a_fraction_and_leaves_room_for_activations() -> None:
    assert memory().num_blocks(config(kv_memory=0.5), max_slots=1) == GIB // (16 * 1024) - 1
    assert memory().num_blocks(config(kv_memory=1.0), max_slots=1) == 3 * GIB // 2 // (16 * 1024) - 1


def test_kv_memory_above_1_is_bytes() -> None:
    assert memory().num_blocks(config(kv_memory=32 * MIB), max_slots=1) == 2047


def test_kv_blocks_are_taken_as_asked() -> None:
    assert memory().num_blocks(config(kv_blocks=120), max_slots=64) == 120


def test_more_than_fits_is_refused_with_what_would_fit() -> None:
    most = 3 * GIB // 2 // (16 * 1024) - 1

    with pytest.raises(OutOfMemory, match=rf"kv_blocks: {most + 1}: .* at most {most} fit; lower it.*{4096}\n"):
        memory().num_blocks(config(kv_blocks=most + 1), max_slots=64)
    assert memory().num_blocks(config(kv_blocks=most), max_slots=64) == most


def test_no_room_at_all_is_refused_with_the_table_and_what_to_lower() -> None:
    with pytest.raises(OutOfMemory, match=r"no KV block fits.*lower token_budget") as caught:
        memory(free_bytes=GIB // 2).num_blocks(config(), max_slots=64)
    assert "peak activations" in str(caught.value)


def test_too_little_asked_is_refused_with_advice_to_raise() -> None:
    with pytest.raises(OutOfMemory, match=rf"kv_memory: 100.*raise it to at least {2 * 16 * 1024} bytes"):
        memory().num_blocks(config(kv_memory=100), max_slots=64)


def test_an_explicit_length_that_the_cache_cannot_hold_is_refused_with_the_largest_that_works() -> None:
    with pytest.raises(OutOfMemory, match=r"2000 tokens need 125 KV blocks and there are 120; .* that works is 1920"):
        memory().num_blocks(config(kv_blocks=120, max_model_len=2000), max_slots=64)
    assert memory().num_blocks(config(kv_blocks=120, max_model_len=1920), max_slots=64) == 120


def test_the_table_says_where_memory_goes_and_what_the_cache_holds() -> None:
    table = memory().table(120)

    assert [line.split("  ")[0] for line in table.splitlines()] == [
        "total",
        "weights",
        "free after loading",
        "peak activations",
        "KV cache",
        "per token",
    ]
    assert "120 blocks of 16 = 1920 tokens" in table
    assert "longest sequence 1920 tokens" in table
