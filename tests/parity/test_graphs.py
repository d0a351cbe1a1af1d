"""Steps that only decode, padded to sizes and replayed from static buffers: the same tokens, whatever else happens.

A capture is played here by running the function again; what a real one needs of a GPU is checked by bench/gpu.py.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import model_runner
from engine.batch import ModelInput
from engine.config import EngineConfig
from engine.core import Engine
from engine.errors import ConfigError, OutOfMemory
from engine.model_runner import ModelRunner
from kernels.reference import Plan
from tests.support.greedy import generate_greedy
from tests.support.parity import BLOCK, Configured, Run, load, request, run
from tests.support.tiny import random_prompts

NUM_TOKENS = 12
PROMPTS = random_prompts(count=9, longest=30)
ODD_SIZES = (1, 2, 3, 6, 16)


class Replays:
    """Counts replays; before each the logits of the last one are spoilt."""

    def __init__(self) -> None:
        self.count = 0
        self.captured: list[int] = []

    def __call__(self, compute: Callable[[], Tensor]) -> Callable[[], object]:
        logits = compute()
        self.captured.append(len(logits))

        def replay() -> None:
            self.count += 1
            logits.fill_(torch.nan)
            compute()

        return replay


@pytest.fixture(scope="module")
def generated(tiny_dir: Path) -> list[list[int]]:
    return generate_greedy(tiny_dir, PROMPTS, NUM_TOKENS)


@pytest.fixture
def replays() -> Replays:
    return Replays()


@pytest.fixture
def graphed(tiny_dir: Path, replays: Replays, monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    """A runner on the CPU with graphs that are played; its plan reads lengths from the device, as a graph's kernels do."""
    runner = load(tiny_dir)
    monkeypatch.setattr(model_runner, "CudaCapture", lambda device: replays)
    monkeypatch.setattr(model_runner, "decode_sizes", lambda max_slots: ODD_SIZES)
    monkeypatch.setattr(runner, "_free_bytes", lambda: 0)
    runner._kernels = replace(runner._kernels, plan=lambda *arguments: Plan(*arguments[:4]))
    runner._capture(16, 256)
    return runner


JOBS = [request(i, prompt, max_tokens=NUM_TOKENS) for i, prompt in enumerate(PROMPTS)]
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ahead": {"run_ahead": True},
    "recompute": {"num_blocks": 10, "run_ahead": True},
    "swap": {"num_blocks": 10, "preemption": "swap", "num_host_blocks": 60, "run_ahead": True},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_padded_step_of_decodes_gives_the_same_tokens(
    tiny: ModelRunner, generated: list[list[int]], setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny, "decode_sizes", ODD_SIZES)

    done = run(tiny, JOBS, **SETTINGS[setting])

    assert [list(done.tokens[str(i), 0]) for i in range(len(PROMPTS))] == generated


@pytest.mark.parametrize("setting", SETTINGS)
def test_replayed_steps_give_the_same_tokens(
    graphed: ModelRunner, replays: Replays, generated: list[list[int]], setting: str
) -> None:
    done = run(graphed, JOBS, **SETTINGS[setting])

    assert [list(done.tokens[str(i), 0]) for i in range(len(PROMPTS))] == generated
    assert replays.count >= NUM_TOKENS - 2
    assert setting not in ("recompute", "swap") or done.counts["num_preemptions"] > 0


def test_what_is_read_later_is_no_view_of_logits_that_the_next_replay_overwrites(
    tiny: ModelRunner, graphed: ModelRunner
) -> None:
    kinds: list[dict[str, Any]] = [
        {"logprobs": 3},
        {"beam_width": 2},
        {"n": 2, "temperature": 1.0, "logprobs": 0},
        {"temperature": 0.8, "top_p": 0.9},
        {"prompt_logprobs": 2, "repetition_penalty": 1.2},
    ]
    jobs = [request(i, PROMPTS[i], max_tokens=NUM_TOKENS, **kind) for i, kind in enumerate(kinds)]

    expected, done = run(tiny, jobs), run(graphed, jobs, run_ahead=True)

    assert done.tokens == expected.tokens
    for key, outcome in expected.outcomes.items():
        ours = [value for logprobs in done.outcomes[key].logprobs for value in (logprobs.logprob, *dict(logprobs.top).values())]
        theirs = [value for logprobs in outcome.logprobs for value in (logprobs.logprob, *dict(logprobs.top).values())]
        assert ours == pytest.approx(theirs, abs=1e-4)


class Cramped(Configured):
    """A device without memory for more than two sequences in a step."""

    def forward(self, model_input: ModelInput) -> Tensor:
        if len(model_input.context_lens) > 2:
            raise torch.OutOfMemoryError("no memory")
        return super().forward(model_input)


def test_a_step_that_is_computed_in_replayed_parts_keeps_the_logits_of_each(
    graphed: ModelRunner, replays: Replays, generated: list[list[int]]
) -> None:
    done = Run(Engine(Cramped(graphed)), JOBS).to_end()

    assert [list(done.tokens[str(i), 0]) for i in range(len(PROMPTS))] == generated
    assert replays.count > NUM_TOKENS


def test_the_memory_table_says_what_graphs_took_and_how_long_they_took(graphed: ModelRunner) -> None:
    (row,) = [row for row in graphed.memory_rows() if row.name == "decode graphs"]
    assert "5 sizes in" in row.note


@pytest.fixture
def on_gpu(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    """A runner that takes its device for a GPU."""
    runner = load(tiny_dir)
    monkeypatch.setattr(runner, "device", torch.device("cuda:0"))
    return runner


def config(**options: Any) -> EngineConfig:
    return EngineConfig(model="any", device="cuda:0", **options)


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any) -> Any:
        raise error

    return fail


def test_memory_is_set_aside_for_graphs_by_default_and_not_without_them(
    on_gpu: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_gpu, "_graph_bytes", lambda sizes, max_model_len, block_size: len(sizes) * 100)

    assert [on_gpu._try_graphs(config(graphs=asked), 16, 256) for asked in (None, True, False)] == [500, 500, 0]


def test_a_model_that_cannot_be_captured_runs_without_graphs_unless_they_are_asked_for(
    on_gpu: ModelRunner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(on_gpu, "_graph_bytes", raising(RuntimeError("operation not permitted when stream is capturing")))

    assert on_gpu._try_graphs(config(), 16, 256) == 0
    assert "graphs are off: LlamaForCausalLM cannot be captured" in caplog.text
    with pytest.raises(ConfigError, match=r"graphs: LlamaForCausalLM cannot be captured \(.*not permitted.*\); leave it out"):
        on_gpu._try_graphs(config(graphs=True), 16, 256)


def test_graphs_that_do_not_fit_are_refused(on_gpu: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_gpu, "_graph_bytes", raising(torch.OutOfMemoryError("tried to allocate")))

    with pytest.raises(OutOfMemory, match="max_slots: graphs of 16 sequences do not fit"):
        on_gpu._try_graphs(config(), 16, 256)


@pytest.mark.parametrize("options", [{"device": "cpu"}, {"device": "cuda:0", "tensor_parallel": 2}])
def test_graphs_are_refused_where_there_can_be_none(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="graphs: they are captured for one process on a GPU"):
        EngineConfig(model="any", graphs=True, **options)


@pytest.mark.parametrize(
    ("most", "remedy"), [(1100, "1024 tokens and 64 slots do"), (30, "16 tokens and 16 slots do"), (0, "no smaller one does")]
)
def test_a_step_that_does_not_fit_is_refused_with_one_that_does(
    on_gpu: ModelRunner, most: int, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def peak(max_slots: int, token_budget: int, max_scored_tokens: int) -> int:
        assert max(max_slots, max_scored_tokens) <= token_budget
        if token_budget > most:
            raise torch.OutOfMemoryError("tried to allocate")
        return 7

    monkeypatch.setattr(on_gpu, "_peak", peak)

    with pytest.raises(OutOfMemory, match=f"token_budget: a step of 4096 tokens and 64 slots .*{remedy}"):
        on_gpu._profile(64, 4096, 512)


def test_what_graphs_will_take_is_reckoned_from_the_two_largest(
    tiny_dir: Path, replays: Replays, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load(tiny_dir)
    free = iter([1000, 900, 800, 790, 1000])  # before, with buffers, with a graph of 4, with one of 2, given back
    monkeypatch.setattr(model_runner, "CudaCapture", lambda device: replays)
    monkeypatch.setattr(runner, "_free_bytes", lambda: next(free))

    assert runner._graph_bytes((1, 2, 4), 256, BLOCK) == 100 + 100 + 10 + 10
    assert replays.captured == [4, 2]


def test_a_cache_that_leaves_no_room_for_the_graphs_is_refused(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = load(tiny_dir)
    monkeypatch.setattr(model_runner, "CudaCapture", lambda device: raising(torch.OutOfMemoryError("tried to allocate")))
    monkeypatch.setattr(runner, "_free_bytes", lambda: 0)

    with pytest.raises(OutOfMemory, match="kv_memory: the cache leaves too little for the graphs"):
        runner._capture(16, 256)
