"""The engine on a GPU: its tokens against transformers' `generate`, and its steps against what the memory's bandwidth allows.

Weights are random, so that nothing has to be fetched. A model of real size is made on the device and handed to the runner in
place of one that is loaded. The steps of a roofline read all weights but the input embedding once, and each sequence's keys and
values once; what that takes is reckoned from the bandwidth of a copy, measured beside it.
"""

import gc
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from bench.gpu import Case
from bench.gpu_kernels import copy_bandwidth
from engine import fusion, model, model_runner
from engine.attention import probe_ids
from engine.config import EngineConfig
from engine.core import Engine
from engine.model_runner import ModelRunner
from engine.request import Request, SamplingParams
from engine.stats import memory_line
from tests.support import parity as support
from tests.support.tiny_models import SUPPORTED, VOCAB_SIZE, save

FAMILIES = ("llama", "qwen3", "gemma2", "gpt_oss", "mistral", "gemma3_text", "phi3", "gpt2", "mixtral")
"""Grouped heads, norms of queries and keys, softcap and windows, sinks, windows alone, no rotary positions, experts."""
NUM_TOKENS = 12
LENGTHS = (5, 1, 40, 17, 33, 8, 9, 23, 16)
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "recompute": {"num_blocks": 14},
    "swap": {"num_blocks": 14, "preemption": "swap", "num_host_blocks": 60},
    "chunks": {"max_num_batched_tokens": 7},
}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"kind": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"num_key_value_heads": 2, "vocab_size": 211, "max_position_embeddings": 512},
    "Qwen3-0.6B": {"kind": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
    | {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936}
    | {"max_position_embeddings": 40_960, "tie_word_embeddings": True},
    "Llama-8B": {"kind": "llama", "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32}
    | {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256, "max_position_embeddings": 8192},
}
MODES = {"graphs": True, "eager": False}
VARIANTS: dict[str, dict[str, Any]] = {"unfused": {"is_fused": False}, "fp8": {"kv_dtype": "fp8"}, "int8": {"kv_dtype": "int8"}}
"""What is tried beside the defaults: transformers' own layers, and keys and values in one byte."""


# The same tokens


def parity(device: str, is_dry: bool) -> Iterator[Case]:
    """Greedy tokens in float32 against transformers, with and without graphs and running ahead, preempted or not."""
    torch.set_float32_matmul_precision("highest")
    for family in FAMILIES[:1] if is_dry else FAMILIES:
        yield f"tokens of {family}", lambda family=family: _tokens(family, device, ["swap"] if is_dry else list(SETTINGS))
    for kv_dtype in ("int8", "fp8"):
        yield f"log probabilities over {kv_dtype}", lambda kv_dtype=kv_dtype: _one_byte(device, kv_dtype)
    yield "a step without hidden waits", lambda: _no_waits(device)


def _tokens(family: str, device: str, settings: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        save(family, SUPPORTED[family], Path(directory))
        runner = support.load(Path(directory), device=device)
        jobs = _jobs()
        expected = _generated(Path(directory), [job.prompt_token_ids for job in jobs], device)
        figures: dict[str, Any] = {"ok": True, "graphs": len(runner.decode_sizes), "kernels": runner._kernels.name}
        for mode, is_ahead, setting in product(_modes(runner), (True, False), settings):
            with _graphs(runner, MODES[mode]):
                done = support.run(runner, jobs, run_ahead=is_ahead, **SETTINGS[setting])
            wrong = [job.request_id for job, ids in zip(jobs, expected, strict=True) if done.tokens[job.request_id, 0] != ids]
            if wrong:
                figures["ok"] = False
                figures[f"{mode} {setting} ahead={is_ahead}"] = f"prompts {','.join(wrong)} differ"
            if setting in ("recompute", "swap") and not done.counts["num_preemptions"]:
                figures |= {"ok": False, f"{mode} {setting}": "nothing was preempted"}
        return figures


def _one_byte(device: str, kv_dtype: str) -> dict[str, Any]:
    """How far the log probabilities of first tokens are from those over keys and values in float32."""
    with tempfile.TemporaryDirectory() as directory:
        save("qwen3", SUPPORTED["qwen3"], Path(directory))
        found = []
        for dtype in ("auto", kv_dtype):
            jobs = [replace(job, params=replace(job.params, max_tokens=1)) for job in _jobs(logprobs=VOCAB_SIZE)]
            outcomes = support.run(support.load(Path(directory), device=device, kv_dtype=dtype), jobs).outcomes
            found.append([dict(outcomes[job.request_id, 0].logprobs[0].top) for job in jobs])
    pairs = zip(*found, strict=True)
    largest = max(abs(ours[token] - exact[token]) for exact, ours in pairs for token in exact)
    return {"ok": 0 < largest < 0.5, "largest_difference": largest}


def _jobs(**options: Any) -> list[Request]:
    prompts = [probe_ids(row, length, VOCAB_SIZE) for row, length in enumerate(LENGTHS)]
    return [support.request(row, ids, max_tokens=NUM_TOKENS, **options) for row, ids in enumerate(prompts)]


def _modes(runner: ModelRunner) -> list[str]:
    return list(MODES) if runner.decode_sizes else ["eager"]


class _graphs:  # noqa: N801 - used as a function
    """A runner with its graphs, or without them for a while."""

    def __init__(self, runner: ModelRunner, is_on: bool) -> None:
        self._runner, self._kept = runner, (runner._graphs, runner.decode_sizes)
        self._is_on = is_on

    def __enter__(self) -> None:
        if not self._is_on:
            self._runner._graphs, self._runner.decode_sizes = None, ()

    def __exit__(self, *_: object) -> None:
        self._runner._graphs, self._runner.decode_sizes = self._kept


@torch.inference_mode()
def _generated(directory: Path, prompts: list[tuple[int, ...]], device: str) -> list[tuple[int, ...]]:
    """What transformers generates for each prompt alone."""
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").to(device)
    theirs.generation_config.eos_token_id = None
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=device)
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NUM_TOKENS, "do_sample": False, "pad_token_id": 0}
        answers.append(tuple(theirs.generate(ids, **options)[0, len(prompt) :].tolist()))
    return answers


def _no_waits(device: str) -> dict[str, Any]:
    """Prefills and decodes, greedy and drawn, while torch makes an error of whatever waits."""
    with tempfile.TemporaryDirectory() as directory:
        save("llama", SUPPORTED["llama"], Path(directory))
        runner = support.load(Path(directory), device=device)
    figures: dict[str, Any] = {}
    kinds = {"greedy": {}, "drawn": {"temperature": 1.0}, "penalised": {"repetition_penalty": 1.2}, "logprobs": {"logprobs": 2}}
    for mode in _modes(runner):
        for name, options in kinds.items():
            with _graphs(runner, MODES[mode]):
                support.run(runner, _jobs(**options), run_ahead=True)  # compiles
                try:
                    _watch_for_waits(device, "error")
                    support.run(runner, _jobs(**options), run_ahead=True)
                except RuntimeError as error:
                    figures[f"{mode} {name}"] = " ".join(str(error).split())[:200]
                finally:
                    _watch_for_waits(device, "default")
    return {"ok": not figures, **figures}


def _watch_for_waits(device: str, mode: str) -> None:
    if device != "cpu":
        torch.cuda.set_sync_debug_mode(mode)


# Steps a second


def small(device: str, is_dry: bool) -> Iterator[Case]:
    """A small model, where launches decide."""
    yield from _steps("tiny" if is_dry else "Qwen3-0.6B", device, is_dry)


def large(device: str, is_dry: bool) -> Iterator[Case]:
    """A large one, where bytes do."""
    yield from _steps("tiny" if is_dry else "Llama-8B", device, is_dry)


def _steps(shape: str, device: str, is_dry: bool) -> Iterator[Case]:
    made: Any = cache(lambda: _runner(shape, device, is_dry))
    reached = cache(lambda: copy_bandwidth(device, is_dry))
    yield f"start of {shape}", lambda: {"start_s": made()[1], "memory": " | ".join(map(memory_line, made()[0].memory_rows()))}
    for batch in (2,) if is_dry else (256, 64, 1):
        for is_ahead in (True, False):
            name = f"{shape} x {batch} {'ahead' if is_ahead else 'in turn'}"
            yield name, lambda b=batch, a=is_ahead: _measure(made()[0], b, a, reached(), is_dry)
    batch = 2 if is_dry else 256
    for name, options in VARIANTS.items():
        yield f"{shape} x {batch} {name}", lambda o=options: _variant(shape, device, is_dry, batch, o, made, reached())


def _variant(
    shape: str, device: str, is_dry: bool, batch: int, options: dict[str, Any], made: Any, reached: float
) -> dict[str, Any]:
    """The same steps on another runner, in place of the one before, with a graph of this size alone."""
    made.cache_clear()
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()
    options = dict(options)
    is_fused = options.pop("is_fused", True)
    with ExitStack() as changed:
        changed.enter_context(patch.object(model_runner, "decode_sizes", lambda max_slots: (max_slots,)))
        if not is_fused:
            changed.enter_context(patch.object(fusion, "fits", lambda *_: False))
        runner, _ = _runner(shape, device, is_dry, max_slots=batch, **options)
    return _measure(runner, batch, True, reached, is_dry)


def _runner(shape: str, device: str, is_dry: bool, **options: Any) -> tuple[ModelRunner, float]:
    """A runner on random weights, and how long it took without making them."""
    built = built_model(shape, device, is_dry)
    with tempfile.TemporaryDirectory() as directory, patch.object(model, "load", lambda *_, **__: built):
        built.config.architectures = [type(built).__name__]
        built.config.save_pretrained(directory)
        (Path(directory) / "tokenizer.json").write_text("{}")
        started = time.perf_counter()
        limits = {"max_slots": 4, "kv_blocks": 64, "num_threads": 1} if is_dry else {"max_slots": 256}
        config = EngineConfig(model=directory, device=device, max_model_len=128 if is_dry else 2048, **(limits | options))
        return ModelRunner(config), time.perf_counter() - started


def built_model(shape: str, device: str, is_dry: bool, attention: str = "slotmill") -> Any:
    """A model of that shape in bfloat16, made on the device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = dict(SHAPES[shape])
    config = AutoConfig.for_model(settings.pop("kind"), **settings, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    torch.manual_seed(0)
    dtype = torch.float32 if is_dry else torch.bfloat16
    with torch.device(device):
        built = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    return built.eval().requires_grad_(False)


def _measure(runner: ModelRunner, batch: int, is_ahead: bool, reached: float, is_dry: bool) -> dict[str, Any]:
    """Milliseconds of a step that decodes `batch` sequences of some 1,000 tokens, with and without graphs."""
    length, steps = (12, 3) if is_dry else (1000, 32)
    runner.scheduler_config = replace(runner.scheduler_config, run_ahead=is_ahead)
    engine = Engine(runner)
    prompts = torch.randint(3, 200, (batch, length), generator=torch.Generator().manual_seed(batch + is_ahead)).tolist()
    for row, ids in enumerate(prompts):
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=2 * steps + 40)
        engine.add_request(Request(request_id=str(row), prompt_token_ids=tuple(ids), params=params))
    figures: dict[str, Any] = {"prefill_tokens_per_s": _prefill(engine, batch * length, runner.device)}
    context = length
    for mode in _modes(runner):
        with _graphs(runner, MODES[mode]):
            for _ in range(3):
                engine.step()
            used, host = _timed_steps(engine, steps, runner.device)
        context += steps + 3
        least = _least_seconds(runner, batch, context, reached)
        figures |= {f"{mode}_ms": 1e3 * used, f"{mode}_tokens_per_s": batch / used, f"{mode}_of_roofline": least / used}
        figures |= {f"{mode}_host_ms": 1e3 * host}
    return figures | {"roofline_ms": 1e3 * _least_seconds(runner, batch, context, reached)}


def _prefill(engine: Engine, num_tokens: int, device: torch.device) -> float:
    """Prompt tokens a second, until every sequence decodes."""
    started = time.perf_counter()
    while engine.step().stats.num_prefill_tokens:
        pass
    _finish(device)
    return num_tokens / (time.perf_counter() - started)


def _timed_steps(engine: Engine, steps: int, device: torch.device) -> tuple[float, float]:
    """Seconds of a step, and of those what the host spends on deciding, preparing, launching and recording it."""
    _finish(device)
    started, host = time.perf_counter(), 0.0
    for _ in range(steps):
        times = engine.step().stats.times
        host += times.total_s - times.sample_s  # where it waits
    _finish(device)
    return (time.perf_counter() - started) / steps, host / steps


def _least_seconds(runner: ModelRunner, batch: int, context: int, reached: float) -> float:
    """What reading the weights and the cache once takes."""
    weights = sum(parameter.nbytes for parameter in runner._model.parameters())
    if not runner._model.config.tie_word_embeddings:
        weights -= runner._model.get_input_embeddings().weight.nbytes
    return (weights + batch * context * runner.kv_bytes_per_token) / reached


def _finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.cuda.synchronize()


def peer(device: str, is_dry: bool) -> Iterator[Case]:
    """Transformers' own continuous batching on the same shapes."""
    cases = [("tiny", 2)] if is_dry else [("Qwen3-0.6B", 64), ("Qwen3-0.6B", 256), ("Llama-8B", 256)]
    for shape, batch in cases:
        yield f"transformers {shape} x {batch}", lambda s=shape, b=batch: _peer(s, b, device, is_dry)


def _peer(shape: str, batch: int, device: str, is_dry: bool) -> dict[str, Any]:
    """Milliseconds between the last tokens of a request, when all of them decode; the median request."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    theirs = built_model(shape, device, is_dry, "sdpa")
    length, steps, last = (12, 4, 2) if is_dry else (1000, 48, 24)
    prompts = torch.randint(3, 200, (batch, length), generator=torch.Generator().manual_seed(0)).tolist()
    limits = {"num_blocks": 8, "page_size": 32, "max_batch_tokens": 64} if is_dry else {}
    started = time.perf_counter()
    answers = theirs.generate_batch(
        prompts,
        generation_config=GenerationConfig(max_new_tokens=steps, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(**limits),
        record_timestamps=True,
    )
    whole = time.perf_counter() - started
    made = sum(len(answer.generated_tokens) for answer in answers.values())
    assert made == batch * steps, f"{made} tokens instead of {batch * steps}"
    between = [(answer.timestamps[-1] - answer.timestamps[-1 - last]) / last for answer in answers.values()]
    used = statistics.median(between)
    return {"step_ms": 1e3 * used, "tokens_per_s": batch / used, "whole_s": whole}
