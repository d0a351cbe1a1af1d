"""How large the KV cache is and how many blocks of it fit."""

import math
from contextlib import nullcontext
from dataclasses import fields
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import host_pool
from engine.config import EngineConfig
from engine.errors import OutOfMemory
from engine.geometry import ModelGeometry
from engine.kv_cache import GIB, MIB, KVCache, Memory, kv_bytes_per_token
from engine.stats import MemoryCounts, SwapTimes

CPU = torch.device("cpu")
ONE_BYTE = [torch.int8, torch.float8_e4m3fn]


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
        "host_free_bytes": 2 * GIB,
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
    cache = KVCache(geometry(3, 2, 4), num_blocks=5, block_size=8, dtype=torch.float32, device=CPU)

    cache.layers[1][5, 1, 7, 1] = torch.full((4,), 3.0)

    assert cache.tensor.shape == (6, 3, 2, 8, 2, 4)
    assert cache.tensor[5].is_contiguous()
    assert torch.equal(cache.tensor[5, 1, 1, 7, 1], torch.full((4,), 3.0))


@pytest.mark.parametrize(
    ("name", "shape", "expected"), [("Llama-3.1-8B", (32, 8, 128), 67_584), ("SmolLM2-135M", (30, 3, 64), 12_240)]
)
@pytest.mark.parametrize("dtype", ONE_BYTE)
def test_one_byte_takes_a_scale_for_each_token_and_head(
    name: str, shape: tuple[int, int, int], expected: int, dtype: torch.dtype
) -> None:
    assert kv_bytes_per_token(geometry(*shape), dtype) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, *ONE_BYTE])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 2, 5), (2, 3, 64)])
def test_a_block_takes_its_tokens_bytes_and_no_more(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    cache = KVCache(geometry(*shape), 3, block_size=8, dtype=dtype, device=CPU)

    assert cache.blocks.nbytes == 4 * 8 * kv_bytes_per_token(geometry(*shape), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_a_cache_filled_with_minus_1_is_nan_all_over(dtype: torch.dtype) -> None:
    cache = KVCache(geometry(2, 2, 5), 3, block_size=8, dtype=dtype, device=CPU)

    cache.blocks.fill_(-1)

    assert cache.tensor.float().isnan().all()


@pytest.mark.parametrize("dtype", ONE_BYTE)
def test_in_one_byte_numbers_and_scales_fill_a_block_without_overlap(dtype: torch.dtype) -> None:
    cache = KVCache(geometry(3, 2, 5), 3, block_size=8, dtype=dtype, device=CPU)
    cache.blocks.fill_(-1)
    assert all(scales is not None and scales.isnan().all() for scales in cache.scales)

    cache.tensor.copy_(torch.full(cache.tensor.shape, 7.0))
    for layer, scales in enumerate(cache.scales):
        assert scales is not None
        assert scales.shape == (4, 2, 8, 2)
        assert scales.isnan().all()
        scales.fill_(layer)

    assert (cache.tensor.float() == 7).all()
    assert [scales.unique().tolist() for scales in cache.scales if scales is not None] == [[0.0], [1.0], [2.0]]


def numbered(num_blocks: int, num_host_blocks: int, dtype: torch.dtype = torch.float32) -> KVCache:
    """A small cache in which each word of device block b is b, and of host block b it is -b - 1."""
    cache = KVCache(geometry(1, 1, 1), num_blocks, 8, dtype, CPU, num_host_blocks)
    cache.blocks.copy_(torch.arange(num_blocks + 1).unsqueeze(1).expand_as(cache.blocks))
    cache.host_pool.blocks.copy_(-1 - torch.arange(num_host_blocks).unsqueeze(1).expand_as(cache.host_pool.blocks))
    return cache


def held(blocks: torch.Tensor) -> list[int]:
    """What the blocks of `numbered` hold; each must be of one piece."""
    assert (blocks == blocks[:, :1]).all()
    return blocks[:, 0].tolist()


def test_blocks_move_out_then_within_then_in() -> None:
    cache = numbered(5, 3)

    cache.move([(1, 2), (4, 0)], [(2, 1)], [(2, 2), (1, 4)])

    assert held(cache.host_pool.blocks) == [4, -2, 1]
    assert held(cache.blocks) == [0, 2, 1, 3, -2, 5]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_move_equals_its_pairs_one_after_the_other(data: st.DataObject) -> None:
    cache = numbered(6, 4)
    device, host = held(cache.blocks), held(cache.host_pool.blocks)
    ids, host_ids = st.permutations(range(1, 7)), st.permutations(range(4))
    size = st.integers(0, 3)
    out = list(zip(data.draw(ids), data.draw(host_ids), strict=False))[: data.draw(size)]
    order, count = data.draw(ids), data.draw(size)
    copied = [(data.draw(st.sampled_from(order[count:])), target) for target in order[:count]]
    swapped_in = list(zip(data.draw(host_ids), data.draw(ids), strict=False))[: data.draw(size)]

    cache.move(out, copied, swapped_in)

    for block, target in out:
        host[target] = device[block]
    for source, target in copied:
        device[target] = device[source]
    for source, target in swapped_in:
        device[target] = host[source]
    assert held(cache.blocks) == device
    assert held(cache.host_pool.blocks) == host


def test_one_block_may_be_copied_to_several_forks() -> None:
    cache = numbered(5, 0)

    cache.move([], [(2, 1), (2, 4), (2, 5)], [])

    assert held(cache.blocks) == [0, 2, 2, 3, 2, 2]


def test_scales_move_with_their_block() -> None:
    cache = KVCache(geometry(3, 2, 5), 4, 8, torch.int8, CPU, num_host_blocks=1)
    cache.blocks.random_()
    numbers = cache.tensor[2].clone()
    scales = [layer[2].clone() for layer in cache.scales if layer is not None]

    cache.move([(2, 0)], [], [])
    cache.blocks.fill_(0)
    cache.move([], [], [(0, 4)])

    assert torch.equal(cache.tensor[4], numbers)
    for layer, expected in zip(cache.scales, scales, strict=True):
        assert layer is not None
        assert torch.equal(layer[4].view(torch.int32), expected.view(torch.int32))


def test_block_ids_above_65536_move() -> None:
    cache = numbered(140_000, 70_000)

    cache.move([(139_999, 69_998)], [(70_000, 139_999)], [(69_998, 65_537), (69_999, 140_000)])

    assert held(cache.host_pool.blocks[69_997:]) == [-69_998, 139_999, -70_000]
    assert held(cache.blocks[[65_537, 65_536, 139_999, 140_000]]) == [139_999, 65_536, 70_000, -70_000]


def test_swapping_is_measured_and_changes_nothing() -> None:
    cache = numbered(20, 3)

    assert 0 < cache.host_pool.swap_s_per_block() < 1
    assert held(cache.blocks) == list(range(21))


class Event:
    """Of a device that works for 2 ms between any two of them, and comes to none before it is told to."""

    num_recorded = num_passed = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: object) -> None:
        Event.num_recorded += 1
        self.number = Event.num_recorded

    def query(self) -> bool:
        return self.number <= Event.num_passed

    def elapsed_time(self, later: "Event") -> float:
        return 2.0 * (later.number - self.number)


@pytest.fixture
def one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that run everything at once, where there is no GPU."""
    monkeypatch.setattr(Event, "num_recorded", 0)
    monkeypatch.setattr(Event, "num_passed", 0)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Mock())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Mock())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())


@pytest.mark.usefixtures("one_stream")
@pytest.mark.parametrize("num_staged", [1, 2, 3, 50])
def test_a_staged_pool_moves_the_same_blocks_in_pieces(num_staged: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = numbered(9, 5)
    monkeypatch.setattr(host_pool, "_STAGING_BYTES", num_staged * cache.blocks[0].nbytes)
    pool = host_pool.StreamedHostPool(cache.blocks, 5)

    pool.swap_out([(1, 4), (2, 0), (9, 2), (5, 1), (7, 3)])
    cache.blocks[1:].fill_(-1)
    pool.swap_in([(2, 1), (4, 2), (0, 3), (3, 9)])

    assert held(cache.blocks) == [0, 9, 1, 2, -1, -1, -1, -1, -1, 7]


@pytest.mark.usefixtures("one_stream")
def test_the_seconds_of_a_staged_swap_are_told_once_when_it_is_done_and_not_waited_for() -> None:
    pool = host_pool.StreamedHostPool(numbered(9, 5).blocks, 5)
    pool.swap_out([(1, 4)])
    pool.swap_out([(2, 3)])
    pool.swap_in([(4, 1)])
    assert pool.take_times() == SwapTimes()
    Event.num_passed = 2
    assert pool.take_times() == SwapTimes(out_s=(0.002,))
    Event.num_passed = 6
    assert pool.take_times() == SwapTimes(out_s=(0.002,), in_s=(0.002,))
    assert pool.take_times() == SwapTimes()


def test_the_seconds_of_a_copy_in_memory_are_told_once() -> None:
    cache = numbered(20, 3)
    cache.host_pool.swap_s_per_block()
    assert cache.host_pool.take_times() == SwapTimes()
    cache.move([(1, 0), (2, 1)], [], [(0, 3)])
    times = cache.host_pool.take_times()
    assert [len(times.out_s), len(times.in_s)] == [1, 1]
    assert 0 < times.out_s[0] < 1
    assert cache.host_pool.take_times() == SwapTimes()


def test_without_host_blocks_swapping_takes_for_ever() -> None:
    cache = numbered(20, 0)

    assert cache.host_pool.swap_s_per_block() == math.inf


def test_the_default_on_a_cpu_is_a_quarter_of_what_is_free() -> None:
    assert memory().num_blocks(config(), max_slots=1024) == GIB // 2 // (16 * 1024) - 1


def test_the_default_on_a_cpu_is_at_most_4_gib() -> None:
    assert memory(free_bytes=64 * GIB).num_blocks(config(), max_slots=2048) == 4 * GIB // (16 * 1024) - 1


def test_the_default_on_a_cpu_is_no_more_than_the_slots_can_use() -> None:
    assert memory().num_blocks(config(), max_slots=2) == 2 * 4096 // 16


def test_the_default_on_a_gpu_is_nine_tenths_of_what_is_free_less_activations() -> None:
    blocks = memory(device="cuda:0").num_blocks(config(), max_slots=1)

    assert blocks == int(0.9 * 2 * GIB - GIB // 2) // (16 * 1024) - 1


def test_graphs_take_from_what_the_cache_would_get() -> None:
    machine = memory(device="cuda:0", graph_bytes=GIB // 4)

    assert machine.num_blocks(config(), max_slots=1) == int(0.9 * 2 * GIB - GIB // 2 - GIB // 4) // (16 * 1024) - 1
    with pytest.raises(OutOfMemory, match=rf"at most {5 * GIB // 4 // (16 * 1024) - 1} fit"):
        machine.num_blocks(config(kv_blocks=10**6), max_slots=1)


def test_the_uses_of_a_gpus_memory_sum_to_all_of_it() -> None:
    machine = memory(device="cuda:0", graph_bytes=GIB // 4)
    counts = machine.counts(120)

    assert sum(getattr(counts, item.name) for item in fields(counts)) == machine.total_bytes
    assert counts.kv_cache == 121 * machine.block_bytes
    assert counts.other == machine.total_bytes - machine.free_bytes - machine.weights_bytes


def test_a_cpus_memory_is_not_counted() -> None:
    assert memory().counts(120) == MemoryCounts()


def test_the_table_has_a_line_for_graphs_where_there_are_some() -> None:
    table = memory(graph_bytes=64 * MIB, graph_note="7 sizes in 2.0 s").table(120)

    assert "decode graphs             64.0 MiB  7 sizes in 2.0 s" in table
    assert "decode graphs" not in memory().table(120)


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"free_bytes": GIB // 4 + 32 * 1024}, "8192 of 16384 tokens would fit, or serve"),
        (
            {"free_bytes": GIB // 2 + GIB // 8, "graph_bytes": GIB // 4},
            "12287 of 16384 .* the graphs, which take 256 MiB",
        ),
        ({"free_bytes": 16 * 1024}, "lower token_budget or max_slots, or serve"),
    ],
    ids=["fewer tokens", "no graphs", "nothing"],
)
def test_where_no_block_fits_the_refusal_names_what_would(options: dict[str, int], remedy: str) -> None:
    with pytest.raises(OutOfMemory, match=remedy):
        memory(device="cuda:0", token_budget=16384, **options).num_blocks(config(kv_blocks=1), max_slots=64)


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


def test_a_cpu_gets_no_host_blocks_unless_asked() -> None:
    assert memory().num_host_blocks(config(), num_blocks=120) == 0
    assert memory().num_host_blocks(config(swap_blocks=77), num_blocks=120) == 77


def test_a_gpu_gets_a_quarter_of_the_free_host_memory_and_at_most_4_gib() -> None:
    assert memory(device="cuda:0").num_host_blocks(config(), num_blocks=120) == GIB // 2 // (16 * 1024)
    assert memory(device="cuda:0", host_free_bytes=64 * GIB).num_host_blocks(config(), 120) == 4 * GIB // (16 * 1024)
    assert memory(device="cuda:0").num_host_blocks(config(swap_blocks=0), num_blocks=120) == 0


@pytest.mark.parametrize(("device", "most"), [("cpu", 3 * GIB // 2 // (16 * 1024) - 121), ("cuda:0", 2 * GIB // (16 * 1024))])
def test_more_host_blocks_than_the_hosts_memory_takes_are_refused_with_what_would_fit(device: str, most: int) -> None:
    machine = memory(device=device)

    with pytest.raises(OutOfMemory, match=rf"swap_blocks: {most + 1} blocks .* has room for {most}; lower it") as caught:
        machine.num_host_blocks(config(swap_blocks=most + 1), num_blocks=120)
    assert "swapped KV" in str(caught.value)
    assert machine.num_host_blocks(config(swap_blocks=most), num_blocks=120) == most


def test_the_table_has_a_line_for_host_blocks() -> None:
    assert "swapped KV, on host       16.0 MiB  1024 blocks, of 2048.0 MiB free on the host" in memory().table(120, 1024)


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
