"""The CPU kernels beside torch's own operations: matrix products of a step, and attention over blocks. Run after run in turns.

    python -m bench.kernels [--dtypes float32,bfloat16] [--rows 1,16,32,64,128] [--repeats K] [--json OUT]

Products: every weight of the model's layers and its head, each of its own memory as in a real step, by rows; GFLOP/s and the
share of what a large product reaches here. Attention: 64 sequences of 100 to 600 tokens that decode, and one prompt, layer by
layer over scattered blocks; beside it torch's attention over keys and values that lie in one piece, sequence by sequence, the
least that is to be read. Weights and vectors are random: only their shapes matter.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

os.environ.setdefault("GOMP_SPINCOUNT", "100000")  # as engine/serve.py; OpenMP reads it when torch loads
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.figures import spread
from bench.record import json_option, record, save
from engine.geometry import ModelGeometry
from engine.kv_cache import KVCache
from engine.model import resolve
from kernels import dispatch

CPU = torch.device("cpu")
BLOCK_SIZE = 16
CONTEXTS = tuple(100 + 500 * place // 63 for place in range(64))
PROMPT = 512
LAYERS = 4
"""Of attention, each with its own cache, so that none is found in the processor's cache."""
LARGE = 2048
COPIED_BYTES = 1 << 28

TWINS = ("reference", "invariant")
"""Implementations in plain torch compute in the dtype of the weights; the others in float32, whatever the weights are."""

Work = Callable[[], object]


@click.command(help=__doc__)
@click.option("--model", default="smollm2-135m-instruct", show_default=True)
@click.option("--dtypes", default="float32,bfloat16", show_default=True)
@click.option("--rows", default="1,16,32,64,128", show_default=True)
@click.option("--repeats", type=int, default=7, show_default=True)
@json_option
def main(model: str, dtypes: str, rows: str, repeats: int, json_path: Path | None) -> None:
    config = json.loads((resolve(model) / "config.json").read_text())
    copy = copy_gb_per_s(repeats)
    click.echo(f"copy {copy:.1f} GB/s, {torch.get_num_threads()} threads")
    figures: dict[str, Any] = {"copy_gb_per_s": copy, "dtypes": {}}
    with torch.inference_mode():
        for name in dtypes.split(","):
            dtype = getattr(torch, name)
            made = {
                "peak_gflop_per_s": peak_gflop_per_s(dtype, repeats),
                "products": products(config, dtype, [int(count) for count in rows.split(",")], repeats),
                "attention": attention(config, dtype, repeats),
            }
            figures["dtypes"][name] = made
            show(name, made)
    save(record("kernels", model=model, threads=torch.get_num_threads(), **figures), json_path)


def in_turns(sides: Mapping[str, Work], repeats: int) -> dict[str, dict[str, float]]:
    """Seconds of each side: median, least and most; one run of each beforehand warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(repeats + 1):
        for name, work in sides.items():
            started = time.perf_counter()
            work()
            if turn:
                seconds[name].append(time.perf_counter() - started)
    return {name: spread(found) for name, found in seconds.items()}


def copy_gb_per_s(repeats: int) -> float:
    """Bytes read and written by a copy that no cache holds, at its best."""
    source = torch.ones(COPIED_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * COPIED_BYTES / in_turns({"copy": lambda: target.copy_(source)}, repeats)["copy"]["min"] / 1e9


def peak_gflop_per_s(dtype: torch.dtype, repeats: int) -> float:
    """Of a large square product in torch, at its best: in the dtype, or where that is slow in float32."""
    sides = {str(kind): _large(kind) for kind in {dtype, torch.float32}}
    return 2 * LARGE**3 / min(found["min"] for found in in_turns(sides, min(repeats, 3)).values()) / 1e9


def _large(dtype: torch.dtype) -> Work:
    a, b = torch.rand(LARGE, LARGE).to(dtype), torch.rand(LARGE, LARGE).to(dtype)
    return lambda: a @ b


def products(config: dict[str, Any], dtype: torch.dtype, rows: list[int], repeats: int) -> list[dict[str, Any]]:
    """Every linear layer of a step, fused as the engine fuses them: by rows and side."""
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    width = (heads + 2 * config["num_key_value_heads"]) * config.get("head_dim", hidden // heads)
    shapes = [(width, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner)] * config["num_hidden_layers"]
    weights = [(torch.rand(shape) - 0.5).to(dtype) for shape in [*shapes, (config["vocab_size"], hidden)]]
    num_parameters = sum(weight.numel() for weight in weights)
    layer_kernels = getattr(dispatch, "layer_kernels", lambda _: dispatch.REFERENCE_LAYERS)(CPU)
    ours = [(layer_kernels.linear(weight), weight.shape[1]) for weight in weights]
    found = []
    for count in rows:
        inputs = {size: torch.rand(count, size).to(dtype) for size in (hidden, inner)}
        own = {size: x.to(computed_in(layer_kernels.name, dtype)) for size, x in inputs.items()}
        sides: dict[str, Work] = {
            layer_kernels.name: lambda x=own: [linear(x[size]) for linear, size in ours],  # type: ignore[misc]
            "torch F.linear": lambda x=inputs: [F.linear(x[weight.shape[1]], weight) for weight in weights],  # type: ignore[misc]
        }
        for side, seconds in in_turns(sides, repeats).items():
            speed = 2 * count * num_parameters / seconds["median"] / 1e9
            found.append({"rows": count, "side": side, "seconds": seconds, "gflop_per_s": speed})
    return found


def computed_in(kernels: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of activations beside weights in `dtype`."""
    return dtype if kernels in TWINS else torch.float32


def attention(config: dict[str, Any], dtype: torch.dtype, repeats: int) -> list[dict[str, Any]]:
    """One layer of attention: the decode of many sequences, and a prompt."""
    found = []
    for case, contexts, news in (("decode", CONTEXTS, [1] * len(CONTEXTS)), ("prefill", (PROMPT,), [PROMPT])):
        step = _Step(config, dtype, contexts, news)
        sides: dict[str, Work] = {"torch, in one piece": step.in_one_piece}
        for kernels in {kernels.name: kernels for kernels in (dispatch.REFERENCE, dispatch.attention_kernels(CPU))}.values():
            sides[kernels.name] = step.through_blocks(kernels)
        for side, seconds in in_turns(sides, repeats).items():
            per_layer = {name: value / LAYERS for name, value in seconds.items()}
            median = per_layer["median"]
            speeds = {"gb_per_s": step.kv_bytes / median / 1e9, "gflop_per_s": step.num_flops / median / 1e9}
            found.append({"case": case, "side": side, "seconds": per_layer, **speeds})
    return found


class _Step:
    """A step of these sequences: queries, keys and values in blocks, and the same in one piece."""

    def __init__(self, config: dict[str, Any], dtype: torch.dtype, contexts: tuple[int, ...], news: list[int]) -> None:
        num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        head_dim = config.get("head_dim", config["hidden_size"] // num_heads)
        self.contexts, self.news, self.scale = contexts, news, head_dim**-0.5
        self.query = torch.rand(sum(news), num_heads, head_dim).to(dtype)
        pieces = [[torch.rand(2, 1, num_kv_heads, n, head_dim).to(dtype) for n in contexts] for _ in range(LAYERS)]
        self.pieces = pieces
        counts = [-(-n // BLOCK_SIZE) for n in contexts]
        geometry = ModelGeometry(
            num_layers=LAYERS,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            vocab_size=1,
            max_model_len=max(contexts),
            eos_token_ids=(),
        )
        self.cache = KVCache(geometry, sum(counts), BLOCK_SIZE, dtype, CPU)
        self.cache.blocks.zero_()
        blocks = (torch.randperm(sum(counts)) + 1).split(counts)
        self.tables = torch.nn.utils.rnn.pad_sequence(list(blocks), batch_first=True).int()
        self.query_start = torch.tensor([0, *torch.tensor(news).cumsum(0)]).int()
        self.context_lens = torch.tensor(contexts).int()
        self.slots = torch.cat(
            [
                (own[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()[:n]
                for own, n in zip(blocks, contexts, strict=True)
            ]
        )
        self.kv_bytes = 2 * sum(contexts) * num_kv_heads * head_dim * dtype.itemsize
        pairs = sum(new * n - new * (new - 1) // 2 for new, n in zip(news, contexts, strict=True))
        self.num_flops = 4 * pairs * num_heads * head_dim

    def through_blocks(self, kernels: dispatch.AttentionKernels) -> Work:
        """Attention of every layer; keys and values are written once, by the kernels that read them."""
        starts = torch.tensor([0, *torch.tensor(self.contexts).cumsum(0)]).int()
        everything = kernels.plan(self.tables, starts, self.context_lens, self.slots)
        for layer, pieces in zip(self.cache.layers, self.pieces, strict=True):
            keys, values = torch.cat(pieces, dim=3)[:, 0].transpose(1, 2)
            kernels.write_kv(keys.contiguous(), values.contiguous(), layer, self.slots, everything)
        new = torch.cat(
            [
                own[n - count :]
                for own, n, count in zip(self.slots.split(list(self.contexts)), self.contexts, self.news, strict=True)
            ]
        )

        query = self.query.to(computed_in(kernels.name, self.query.dtype))

        def work() -> list[Tensor]:
            plan = kernels.plan(self.tables, self.query_start, self.context_lens, new)
            tables = (self.tables, self.query_start, self.context_lens)
            return [kernels.paged_attention(query, layer, *tables, scale=self.scale, plan=plan) for layer in self.cache.layers]

        return work

    def in_one_piece(self) -> list[Tensor]:
        """Attention in torch, one sequence after another."""
        made = []
        queries = [part.transpose(0, 1).unsqueeze(0) for part in self.query.split(self.news)]
        for pieces in self.pieces:
            for query, (key, value) in zip(queries, pieces, strict=True):
                causal = query.shape[2] > 1
                made.append(
                    F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=self.scale, enable_gqa=True)
                )
        return made


def show(name: str, made: dict[str, Any]) -> None:
    """Lines for people."""
    peak = made["peak_gflop_per_s"]
    click.echo(f"{name}: a large product reaches {peak:.0f} GFLOP/s")
    for row in made["products"]:
        speed, median = row["gflop_per_s"], 1e3 * row["seconds"]["median"]
        speeds = f"{speed:7.1f} GFLOP/s {100 * speed / peak:5.1f} %"
        click.echo(f"  products, {row['rows']:4d} rows  {row['side']:20s} {median:8.2f} ms {speeds}")
    for row in made["attention"]:
        speeds = f"{row['gb_per_s']:6.1f} GB/s {row['gflop_per_s']:6.1f} GFLOP/s"
        click.echo(f"  {row['case']:8s} {row['side']:20s} {1e3 * row['seconds']['median']:8.2f} ms a layer {speeds}")


if __name__ == "__main__":
    main()
