"""The kernels on a GPU: each against its twin, and each as a share of the bandwidth that a plain copy reaches.

Relies on kernels/dispatch.py for what a GPU gets; without one the twin stands in, and each row says which it was. Times are
those of captured graphs, so that no launch from Python is in them.
"""

import platform
import statistics
import time
from collections.abc import Callable, Iterator
from importlib import metadata, util
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu import Case
from bench.record import machine
from kernels import blocks, dispatch, layers, sampling
from kernels.dispatch import AttentionKernels, BlockKernels, LayerKernels, SamplingKernels
from kernels.reference import HostLengths
from tests.support import paged_case

GIB = 1 << 30
L2_BYTES = 50 << 20
"""Of an H100 and an H200: what is measured must be larger, or it is the cache that answers."""
KV_DTYPES = {"bf16": torch.bfloat16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCE = {"fp32": 2e-5, "bf16": 2e-2}
"""Largest |ours - exact| / (1 + |exact|). A product in TF32 is at 1e-3."""


def environment(device: str, is_dry: bool) -> Iterator[Case]:
    """The machine, its libraries, and the bandwidth of a copy."""
    yield "machine", lambda: machine() | _versions()
    if device != "cpu":
        yield "gpu", lambda: _gpu(device)
    yield "copy", lambda: {"gb_per_s": copy_bandwidth(device, is_dry) / 1e9}


def _versions() -> dict[str, Any]:
    found = {name: metadata.version(name) for name in ("torch", "triton", "transformers", "numpy") if util.find_spec(name)}
    return found | {"system": platform.platform(), "cuda": str(torch.version.cuda)}


def _gpu(device: str) -> dict[str, Any]:
    found = torch.cuda.get_device_properties(device)
    return {
        "gpu": found.name,
        "memory_gib": found.total_memory / GIB,
        "multiprocessors": found.multi_processor_count,
        "capability": f"{found.major}.{found.minor}",
        "l2_mib": getattr(found, "L2_cache_size", 0) >> 20,
    }


def copy_bandwidth(device: str, is_dry: bool) -> float:
    """Bytes a second of a large copy on the device, read and written."""
    size = 1 << 20 if is_dry else 2 * GIB
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / seconds(lambda: target.copy_(source), device)


def seconds(function: Callable[[], object], device: str, repeats: int = 10) -> float:
    """Seconds of one call: the median of replays of a graph that holds several; on a CPU, of calls."""
    function()
    if device == "cpu":
        return statistics.median(_clocked(function) for _ in range(3))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            function()
    graph.replay()
    times = []
    for _ in range(7):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3 / repeats)
    return statistics.median(times)


def _clocked(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def attention_on(device: str) -> AttentionKernels:
    """What a GPU attends with; the reference on a CPU, whose own kernels keep blocks in another order than cases have them."""
    return dispatch.attention_kernels(torch.device(device), is_reference=device == "cpu")


def layers_on(device: str) -> LayerKernels:
    """What a GPU's layers are made of; the twins on a CPU, whose own kernels know float32 alone."""
    return dispatch.REFERENCE_LAYERS if device == "cpu" else dispatch.layer_kernels(torch.device(device))


def sampling_on(device: str) -> SamplingKernels:
    """What chooses tokens there."""
    return dispatch.sampling_kernels(torch.device(device))


def blocks_on(device: str) -> BlockKernels:
    """What moves blocks there."""
    return dispatch.block_kernels(torch.device(device))


# Against twins

ATTENTION: dict[str, dict[str, Any]] = {
    "mixed": paged_case.MIXED,
    "decode": {"contexts": [1, 23, 40, 17, 130, 16, 15, 33], "new": [1] * 8},
    "prefill": {"contexts": [300, 77, 5], "new": [300, 61, 5], "block_size": 16},
    "long decode": {"contexts": [9000, 17, 4097], "new": [1, 1, 1], "block_size": 16, "num_blocks": 1200},
    "blocks of 64": {"contexts": [200, 64, 65], "new": [1, 64, 3], "block_size": 64},
    "one head of 128": {"contexts": [40, 9], "new": [1, 9], "num_heads": 1, "num_kv_heads": 1, "head_dim": 128},
    "heads of 80": {"contexts": [19, 11], "new": [1, 6], "num_heads": 9, "num_kv_heads": 3, "head_dim": 80},
    "heads of 96": {"contexts": [19, 11], "new": [1, 6], "num_heads": 8, "num_kv_heads": 8, "head_dim": 96},
    "8 to 1": {"contexts": [70, 33], "new": [1, 20], "num_heads": 8, "num_kv_heads": 1, "head_dim": 64},
    "int8": {**paged_case.MIXED, "is_int8": True},
    "fp8": {**paged_case.MIXED, "is_fp8": True},
    "long decode in int8": {"contexts": [9000, 17], "new": [1, 1], "block_size": 16, "num_blocks": 700, "is_int8": True},
    "long decode in fp8": {"contexts": [9000, 17], "new": [1, 1], "block_size": 16, "num_blocks": 700, "is_fp8": True},
    "prefill in fp8": {"contexts": [300, 77], "new": [300, 61], "block_size": 16, "head_dim": 128, "is_fp8": True},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "window": {"sliding_window": 6},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "all": {"sinks": True, "softcap": 2.0, "sliding_window": 9},
}


def against_twins(device: str, is_dry: bool) -> Iterator[Case]:
    """Every kernel on the device, held to its twin on the CPU."""
    torch.set_float32_matmul_precision("highest")
    for name, dtype in product(CHECKS, DTYPES):
        yield f"{name} {dtype}", lambda name=name, dtype=dtype: CHECKS[name](device, dtype)
    for form in ("int8", "fp8"):
        yield f"rotate_and_write_kv {form}", lambda form=form: _rotary_one_byte(device, form)
    yield "draws", lambda: _draws(device)
    yield "block copies", lambda: _copies(device)
    for name in list(ATTENTION)[:2] if is_dry else ATTENTION:
        options = OPTIONS if name in ("mixed", "decode", "int8", "fp8") else [""]
        for option, dtype in product(options, DTYPES):
            yield f"attention {name} {option} {dtype}", _attention_case(device, name, option, dtype)


def _attention_case(device: str, name: str, option: str, dtype: str) -> Callable[[], dict[str, Any]]:
    def compute() -> dict[str, Any]:
        case = paged_case.Case(**ATTENTION[name], dtype=DTYPES[dtype])
        options = OPTIONS[option] | ({"sinks": torch.linspace(-1, 3, case.num_heads)} if "sinks" in OPTIONS[option] else {})
        exact = case.written_out(**options)
        lengths = HostLengths(case.query_start.numpy(), case.context_lens.numpy())
        slots = torch.cat([case.slots(row)[-new:] for row, new in enumerate(case.new)]).to(device)
        _move(case, device)
        kernels = attention_on(device)
        tables = case.block_tables, case.query_start, case.context_lens
        plan = kernels.plan(*tables, slots, lengths)
        written = _written(case, kernels.write_kv, slots, plan)
        options = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in options.items()}
        options |= {"scale": case.head_dim**-0.5, "kv_scales": case.scales, "plan": plan}
        ours = kernels.paged_attention(case.query, case.layer, *tables, **options)
        return _verdict(ours, exact, dtype, kernels.name) | {"kv_equal": written}

    return compute


def _move(case: paged_case.Case, device: str) -> None:
    """All tensors of a case to the device; the layer keeps its strides inside a larger pool."""
    for name, value in vars(case).items():
        if isinstance(value, Tensor):
            setattr(case, name, value.to(device))
    case.keys, case.values = ([tensor.to(device) for tensor in part] for part in (case.keys, case.values))


def _written(case: paged_case.Case, write_kv: Any, slots: Tensor, plan: Any) -> bool:
    """Whether writing the new keys once more changes nothing: the case was filled by the twin."""
    if case.scales is not None:
        return True  # the case holds what the cache gave back, which rounds anew
    before = case.layer.clone()
    key, value = (torch.cat([part[row][-new:] for row, new in enumerate(case.new)]) for part in (case.keys, case.values))
    write_kv(key, value, case.layer, slots, plan)
    return bool(torch.equal(before.nan_to_num(7.0), case.layer.nan_to_num(7.0)))


def _verdict(ours: Tensor, exact: Tensor, dtype: str, name: str) -> dict[str, Any]:
    exact = exact.double()
    difference = ((ours.cpu().double() - exact).abs() / (1 + exact.abs())).max().item()
    return {"ok": difference <= TOLERANCE[dtype], "difference": difference, "limit": TOLERANCE[dtype], "of": name}


def _random(*shape: int, dtype: str = "fp32", seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DTYPES[dtype])


def _norm(device: str, dtype: str) -> dict[str, Any]:
    ours, name = layers_on(device).rms_norm, layers_on(device).name
    verdicts = []
    for rows, size in ((1, 64), (7, 1000), (33, 4096)):
        hidden, residual, weight = (_random(rows, size, dtype=dtype, seed=seed) for seed in (0, 1, 2))
        for added, offset in ((None, 0.0), (residual, 1.0)):
            found = ours(
                hidden.to(device),
                weight[0].to(device),
                1e-6,
                residual=None if added is None else added.to(device),
                offset=offset,
            )
            twin = layers.rms_norm(hidden.float(), weight[0].float(), 1e-6, residual=added, offset=offset)
            verdicts += [_verdict(mine, exact, dtype, name) for mine, exact in zip(found, twin, strict=True)]
    return _worst(verdicts)


def _activation(device: str, dtype: str) -> dict[str, Any]:
    ours, name = layers_on(device).silu_and_mul, layers_on(device).name
    inputs = [_random(rows, 2 * size, dtype=dtype) for rows, size in ((1, 3), (5, 96), (40, 14336))]
    pairs = [(ours(x.to(device)), layers.silu_and_mul(x.float())) for x in inputs]
    return _worst([_verdict(mine, exact, dtype, name) for mine, exact in pairs])


def _rotary(device: str, dtype: str) -> dict[str, Any]:
    ours, name = layers_on(device).rotate_and_write_kv, layers_on(device).name
    verdicts = []
    for num_heads, num_kv_heads, head_dim, turned in ((4, 2, 16, 16), (9, 3, 80, 32), (32, 8, 128, 128)):
        qkv = _random(11, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
        angles = _random(11, turned // 2).repeat(1, 2)
        cos, sin = angles.cos().to(DTYPES[dtype]), angles.sin().to(DTYPES[dtype])
        slots = torch.tensor([3, 8, -1, 31, 0, 17, 5, 40, 63, 22, 9])
        caches = [torch.zeros(4, 2, 16, num_kv_heads, head_dim, dtype=DTYPES[dtype]) for _ in range(2)]
        caches[0] = caches[0].to(device)
        mine = ours(*(x.to(device) for x in (qkv, cos, sin)), caches[0], slots.to(device))
        exact = layers.rotate_and_write_kv(qkv, cos, sin, caches[1], slots)
        verdicts += [_verdict(mine, exact, dtype, name), _verdict(caches[0], caches[1], dtype, name)]
    return _worst(verdicts)


def _largest(device: str, dtype: str) -> dict[str, Any]:
    ours, name = sampling_on(device).largest, sampling_on(device).name
    logits = (_random(33, 50_257, dtype=dtype).float() * 4).round() / 4  # with ties
    values, ids = ours(logits.to(device))
    expected = sampling.largest(logits)
    return {"ok": bool(torch.equal(values.cpu(), expected[0]) and torch.equal(ids.cpu(), expected[1])), "of": name}


def _norm_heads(device: str, dtype: str) -> dict[str, Any]:
    kernels, verdicts = layers_on(device), []
    for num_heads, num_kv_heads, head_dim in ((4, 2, 16), (9, 3, 80), (16, 8, 128)):
        qkv = _random(11, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
        query, key = (_random(head_dim, dtype=dtype, seed=seed) for seed in (1, 2))
        mine = kernels.norm_heads(*(x.to(device, copy=True) for x in (qkv, query, key)), 1e-6, num_kv_heads)
        exact = layers.norm_heads(qkv.float(), query.float(), key.float(), 1e-6, num_kv_heads)
        verdicts.append(_verdict(mine, exact, dtype, kernels.name))
    return _worst(verdicts)


def _rotary_one_byte(device: str, form: str) -> dict[str, Any]:
    """What the cache gives back, of keys and values in bfloat16; a number may be rounded to its other neighbour."""
    kernels, kv_dtype = layers_on(device), KV_DTYPES[form]
    qkv, angles = _random(11, (32 + 2 * 8) * 128, dtype="bf16"), _random(11, 64).repeat(1, 2)
    slots = torch.tensor([3, 8, -1, 31, 0, 17, 5, 40, 63, 22, 9])
    given_back = []
    for place, rotate in ((device, kernels.rotate_and_write_kv), ("cpu", layers.rotate_and_write_kv)):
        cache, scales = torch.zeros(4, 2, 16, 8, 128).to(place, kv_dtype), torch.zeros(4, 2, 16, 8, device=place)
        rotate(*(x.to(place) for x in (qkv, angles.cos(), angles.sin())), cache, slots.to(place), kv_scales=scales)
        given_back.append((cache.float() * scales.unsqueeze(-1)).cpu())
    difference = (given_back[0] - given_back[1]).abs()
    share = float((difference > 1e-3).float().mean())
    return {"ok": share < 1e-3 and float(difference.max()) < 0.5, "different": share, "of": kernels.name}


CHECKS = {
    "rms_norm": _norm,
    "norm_heads": _norm_heads,
    "silu_and_mul": _activation,
    "rotate_and_write_kv": _rotary,
    "largest": _largest,
}


def _worst(verdicts: list[dict[str, Any]]) -> dict[str, Any]:
    """The worst of several."""
    worst = max(verdicts, key=lambda verdict: verdict["difference"])
    return worst | {"ok": all(verdict["ok"] for verdict in verdicts)}


def _draws(device: str) -> dict[str, Any]:
    """Uniform numbers bit by bit, and draws but for those within rounding of an edge."""
    kernels = sampling_on(device)
    seeds, zeros = torch.arange(500) * 0x9E3779B97F4A7C1 - 2**62, torch.zeros(500, dtype=torch.int64)
    numbers = sampling.uniform(seeds, zeros, zeros + 7)
    logits, temperature = _random(500, 1000), torch.full((500,), 0.8)
    found = kernels.draw(*(x.to(device) for x in (logits, temperature, numbers))).cpu()
    same = float((found == sampling.draw(logits, temperature, numbers)).float().mean())
    bits = bool(torch.equal(kernels.uniform(*(x.to(device) for x in (seeds, zeros, zeros + 7))).cpu(), numbers))
    return {"ok": bits and same > 0.99, "uniform_equal": bits, "draws_equal": same, "of": kernels.name}


def _copies(device: str) -> dict[str, Any]:
    kernels, pool = blocks_on(device), torch.arange(60 * 999).view(60, 999)
    sources, targets = torch.tensor([3, 59, 0, 3]), torch.tensor([7, 11, 55, 9])
    mine, mine_from, mine_to = (tensor.to(device, copy=True) for tensor in (pool, sources, targets))
    staged = mine.new_empty(4, 999)
    kernels.copy(mine, mine_from, mine_to)
    kernels.gather(mine, mine_from, staged)
    kernels.scatter(staged, mine, mine_to + 1)
    blocks.copy_blocks(pool, sources, targets)
    blocks.scatter_blocks(pool.index_select(0, sources), pool, targets + 1)
    return {"ok": bool(torch.equal(mine.cpu(), pool)), "of": kernels.name}


# As a share of the bandwidth


def bandwidth(device: str, is_dry: bool) -> Iterator[Case]:
    """Bytes that must move over the time it takes, as a share of what a copy reaches in this process."""
    reached = copy_bandwidth(device, is_dry)
    yield "copy", lambda: {"gb_per_s": reached / 1e9}
    batches, contexts = ((1, 2), (32,)) if is_dry else ((256, 64, 16, 1), (4096, 1024))
    for context in contexts:
        for batch in batches:
            yield f"decode {batch} x {context}", lambda b=batch, c=context: _decode(device, is_dry, b, c, reached)
    most = batches[0], contexts[0]
    for form in ("fp8", "int8"):
        yield f"decode {most[0]} x {most[1]} {form}", lambda f=form: _decode_one_byte(device, is_dry, *most, f, reached)
    yield "decode 31 x 256 and 1 x 32k", lambda: _uneven(device, is_dry, reached)
    for tokens in (4,) if is_dry else (256, 4096):
        for name, timed in LAYERS.items():
            yield f"{name} {tokens}", lambda timed=timed, tokens=tokens: timed(device, is_dry, tokens, reached)


def _decode(device: str, is_dry: bool, batch: int, context: int, reached: float) -> dict[str, Any]:
    pool = _Pool(device, [context] * batch, is_dry)
    used = pool.seconds()
    figures = _share(pool.num_bytes, used, reached)
    contiguous = pool.contiguous_seconds(context)
    return figures | {"sdpa_us": 1e6 * contiguous, "over_sdpa": used / contiguous - 1, "of": pool.kernels.name}


def _decode_one_byte(device: str, is_dry: bool, batch: int, context: int, form: str, reached: float) -> dict[str, Any]:
    pool = _Pool(device, [context] * batch, is_dry, form)
    return _share(pool.num_bytes, pool.seconds(), reached) | {"of": pool.kernels.name}


def _uneven(device: str, is_dry: bool, reached: float) -> dict[str, Any]:
    pool = _Pool(device, [8] * 3 + [64] if is_dry else [256] * 31 + [32_768], is_dry)
    return _share(pool.num_bytes, pool.seconds(), reached) | {"of": pool.kernels.name}


class _Pool:
    """Layers of a cache with the heads of Llama-8B, so many that the GPU's own cache does not hold them."""

    def __init__(self, device: str, contexts: list[int], is_dry: bool, form: str = "bf16") -> None:
        self.heads, self.kv_heads, self.head_dim = (4, 2, 16) if is_dry else (32, 8, 128)
        self.device, dtype, kv_dtype, size = device, torch.bfloat16, KV_DTYPES[form], 16
        widths = [-(-context // size) for context in contexts]
        vector_bytes = self.head_dim * kv_dtype.itemsize + (4 if form != "bf16" else 0)
        self.num_bytes = sum(contexts) * 2 * self.kv_heads * vector_bytes
        num_layers = 2 if is_dry else max(2, min(32, -(-4 * L2_BYTES // self.num_bytes)))
        shape = (sum(widths) + 1, num_layers, 2, size, self.kv_heads, self.head_dim)
        self.layers = torch.randn(shape, dtype=dtype, device=device).to(kv_dtype).unbind(1)
        self.scales = [None if form == "bf16" else torch.ones(shape[:1] + shape[2:5], device=device) for _ in self.layers]
        ids = (torch.randperm(sum(widths)) + 1).int()
        self.tables = torch.zeros(len(contexts), max(widths), dtype=torch.int32)
        for row, (start, width) in enumerate(zip(np.cumsum([0, *widths[:-1]]), widths, strict=True)):
            self.tables[row, :width] = ids[start : start + width]
        host = HostLengths(np.arange(len(contexts) + 1, dtype=np.int32), np.array(contexts, np.int32))
        lengths = torch.from_numpy(host.query_start), torch.from_numpy(host.context_lens)
        self.places = tuple(tensor.to(device) for tensor in (self.tables, *lengths))
        self.query = torch.randn(len(contexts), self.heads, self.head_dim, dtype=dtype, device=device)
        self.kernels = attention_on(device)
        slots = torch.full((len(contexts),), -1, device=device)
        self.plan = self.kernels.plan(*self.places, slots, host)

    def seconds(self) -> float:
        """Of one layer."""

        def attend() -> None:
            for layer, scales in zip(self.layers, self.scales, strict=True):
                options = {"scale": self.head_dim**-0.5, "plan": self.plan, "kv_scales": scales}
                self.kernels.paged_attention(self.query, layer, *self.places, **options)

        return seconds(attend, self.device, 2) / len(self.layers)

    def contiguous_seconds(self, context: int) -> float:
        """Of torch's attention over keys and values that lie in one piece."""
        shape = (len(self.query), self.kv_heads, context, self.head_dim)
        pairs = [[torch.randn(shape, dtype=self.query.dtype, device=self.device) for _ in "kv"] for _ in self.layers[:8]]
        query = self.query.unsqueeze(2)

        def attend() -> None:
            for key, value in pairs:
                F.scaled_dot_product_attention(query, key, value, enable_gqa=True)

        return seconds(attend, self.device, 2) / len(pairs)


def _share(num_bytes: int, used: float, reached: float) -> dict[str, Any]:
    return {"us": 1e6 * used, "gb_per_s": num_bytes / used / 1e9, "share_of_copy": num_bytes / used / reached}


def _time_norm(device: str, is_dry: bool, tokens: int, reached: float) -> dict[str, Any]:
    ours, name = layers_on(device).rms_norm, layers_on(device).name
    size = 64 if is_dry else 4096
    hidden, residual = (torch.randn(tokens, size, device=device, dtype=torch.bfloat16) for _ in "ab")
    used = seconds(lambda: ours(hidden, hidden[0], 1e-6, residual=residual), device)
    return _share(4 * hidden.nbytes, used, reached) | {"of": name}


def _time_activation(device: str, is_dry: bool, tokens: int, reached: float) -> dict[str, Any]:
    ours, name = layers_on(device).silu_and_mul, layers_on(device).name
    gate_up = torch.randn(tokens, 2 * (96 if is_dry else 14336), device=device, dtype=torch.bfloat16)
    return _share(3 * gate_up.nbytes // 2, seconds(lambda: ours(gate_up), device), reached) | {"of": name}


def _time_rotary(device: str, is_dry: bool, tokens: int, reached: float) -> dict[str, Any]:
    ours, name = layers_on(device).rotate_and_write_kv, layers_on(device).name
    heads, kv_heads, size = (4, 2, 16) if is_dry else (32, 8, 128)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * size, device=device, dtype=torch.bfloat16)
    cos, sin = (torch.rand(tokens, size, device=device, dtype=torch.bfloat16) for _ in "ab")
    cache = torch.zeros(tokens // 16 + 2, 2, 16, kv_heads, size, device=device, dtype=torch.bfloat16)
    slots = torch.arange(tokens, device=device)
    used = seconds(lambda: ours(qkv, cos, sin, cache, slots), device)
    return _share(2 * qkv.nbytes + 2 * cos.nbytes, used, reached) | {"of": name}


def _time_copies(device: str, is_dry: bool, tokens: int, reached: float) -> dict[str, Any]:
    kernels = blocks_on(device)
    count, words = (2, 64) if is_dry else (tokens // 16, 32 * 2 * 16 * 8 * 128 // 4)  # a block of Llama-8B: 2 MiB
    pool = torch.zeros(2 * count + 1, words, dtype=torch.int64, device=device)
    sources = torch.randperm(count).to(device)
    used = seconds(lambda: kernels.copy(pool, sources, sources + count), device)
    return _share(2 * count * words * 8, used, reached) | {"of": kernels.name}


def _time_largest(device: str, is_dry: bool, tokens: int, reached: float) -> dict[str, Any]:
    ours, name = sampling_on(device).largest, sampling_on(device).name
    logits = torch.randn(min(tokens, 512), 997 if is_dry else 128_256, device=device)
    return _share(logits.nbytes, seconds(lambda: ours(logits), device), reached) | {"of": name}


def _time_draw(device: str, is_dry: bool, tokens: int, reached: float) -> dict[str, Any]:
    kernels, rows = sampling_on(device), min(tokens, 512)
    logits = torch.randn(rows, 997 if is_dry else 128_256, device=device)
    temperature, numbers = torch.ones(rows, device=device), torch.rand(rows, device=device, dtype=torch.float64)
    used = seconds(lambda: kernels.draw(logits, temperature, numbers), device)
    return _share(2 * logits.nbytes, used, reached) | {"of": kernels.name}


LAYERS = {
    "rms_norm": _time_norm,
    "silu_and_mul": _time_activation,
    "rotate_and_write_kv": _time_rotary,
    "block copies": _time_copies,
    "largest": _time_largest,
    "draw": _time_draw,
}
