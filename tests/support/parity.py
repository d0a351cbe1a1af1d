"""One loaded model behind many engines, and what came out of a run, held to the contract of its events.

A runner is built once a module; each engine on it takes a scheduler configuration of its own and finds every block, on the
device and in host memory, full of NaN.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.batch import ModelInput
from engine.config import EngineConfig, SchedulerConfig
from engine.core import Engine
from engine.decision import Moves
from engine.messages import RequestRejected, StepReport, TokenEvent, TokenLogprobs
from engine.model_runner import ModelRunner
from engine.request import FinishReason, Request, SamplingParams
from engine.stats import SwapTimes

BLOCK = 8
HOST_BLOCKS = 64
Key = tuple[str, int]
"""(request id, choice)."""


def load(directory: Path, **options: Any) -> ModelRunner:
    """A runner in fp32 with blocks of 8 tokens, 200 on the device and 64 in host memory."""
    defaults: dict[str, Any] = {"dtype": "float32", "block_size": BLOCK, "kv_blocks": 200, "swap_blocks": HOST_BLOCKS}
    return ModelRunner(EngineConfig(model=str(directory), **(defaults | {"max_slots": 16, "num_threads": 1} | options)))


class Configured:
    """A loaded model under another scheduler configuration; its cache is poisoned."""

    def __init__(self, runner: ModelRunner, **changes: Any) -> None:
        """`changes` are fields of `SchedulerConfig`; without them no block can be swapped."""
        self._runner = runner
        self.scheduler_config: SchedulerConfig = replace(
            runner.scheduler_config, **({"num_host_blocks": 0, "watermark_blocks": 0} | changes)
        )
        assert self.scheduler_config.num_blocks <= runner.scheduler_config.num_blocks
        assert self.scheduler_config.num_host_blocks <= runner.scheduler_config.num_host_blocks
        runner._kv_cache.blocks.fill_(-1)
        runner._kv_cache.host_pool.blocks.fill_(-1)
        self.geometry, self.device, self.tokenizer_dir = runner.geometry, runner.device, runner.tokenizer_dir
        self.swap_s_per_block, self.decode_sizes = runner.swap_s_per_block, runner.decode_sizes

    def move(self, swapped_out: Moves, copied: Moves, swapped_in: Moves) -> None:
        self._runner.move(swapped_out, copied, swapped_in)

    def swap_times(self) -> SwapTimes:
        return self._runner.swap_times()

    def forward(self, model_input: ModelInput) -> Tensor:
        return self._runner.forward(model_input)


@dataclass
class Outcome:
    """What one choice came to."""

    token_ids: tuple[int, ...] = ()
    reason: FinishReason | None = None
    detail: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    score: float | None = None
    num_cached_tokens: int = 0
    events: list[TokenEvent] = field(default_factory=list, repr=False)

    def add(self, event: TokenEvent, start: int) -> None:
        """The next event, which must follow the one before; the first token has the index `start`."""
        assert self.reason is None, f"an event after the end: {event}"
        assert event.start == start + len(self.token_ids), f"a gap or a repeat: {event} after {self.token_ids}"
        if event.prompt_logprobs is not None:
            assert self.prompt_logprobs is None, "prompt_logprobs are told twice"
            assert not self.events, "prompt_logprobs are not in the first event"
            self.prompt_logprobs = event.prompt_logprobs
        self.token_ids += event.token_ids
        self.logprobs += event.logprobs
        self.reason, self.detail = event.finish_reason, event.detail
        self.score, self.num_cached_tokens = event.score, event.num_cached_tokens
        self.events.append(event)


class Run:
    """An engine on its way, its events sorted by choice; counts what its steps did."""

    def __init__(self, engine: Engine, requests: Iterable[Request] = ()) -> None:
        self.engine = engine
        self.outcomes: defaultdict[Key, Outcome] = defaultdict(Outcome)
        self.rejected: list[RequestRejected] = []
        self.counts: Counter[str] = Counter()
        self._starts: dict[Key, int] = {}
        for request in requests:
            self.add(request)

    def add(self, request: Request) -> None:
        self.engine.add_request(request)
        width = max(request.params.n, request.params.beam_width)
        for choice in range(request.choice, request.choice + width):
            self._starts[request.request_id, choice] = len(request.output_token_ids)

    def step(self) -> StepReport:
        """One step and the audit of the accounting."""
        report = self.engine.step()
        self.engine.scheduler.check()
        stats = report.stats
        assert stats.slots.total == self.engine._config.max_slots
        assert min(getattr(stats.slots, name) for name in stats.slots.__slots__) >= 0, stats.slots
        self.counts.update({name: value for name in stats.__slots__ if type(value := getattr(stats, name)) is int})
        self.counts["steps"] += 1
        for event in report.events:
            key = event.request_id, event.choice
            self.outcomes[key].add(event, self._starts[key])
        self.rejected += report.rejected
        return report

    def until(self, is_reached: Callable[["Run"], bool], limit: int = 3000) -> "Run":
        """Step until a condition holds."""
        for _ in range(limit):
            if is_reached(self):
                return self
            assert self.engine.has_work, "the work ended before the condition was reached"
            self.step()
        raise AssertionError(f"not reached in {limit} steps: {self.engine.scheduler.kv_counts()}")

    def to_end(self, limit: int = 3000) -> "Run":
        """Step until nothing is left; then all blocks are free or cached and every choice has one end."""
        self.until(lambda run: not run.engine.has_work, limit)
        assert self.engine.idle_report().stats.kv.used_blocks == 0
        assert self.engine.scheduler.num_running == self.engine.scheduler.num_waiting == 0
        return self

    @property
    def tokens(self) -> dict[Key, tuple[int, ...]]:
        return {key: outcome.token_ids for key, outcome in self.outcomes.items()}

    def assert_all_ended(self) -> None:
        """Every choice that was asked for has come to an end."""
        assert {key for key, outcome in self.outcomes.items() if outcome.reason} == set(self._starts)


def run(runner: ModelRunner, requests: Iterable[Request], **changes: Any) -> Run:
    """All requests through a new engine, to the end."""
    done = Run(Engine(Configured(runner, **changes)), requests).to_end()
    done.assert_all_ended()
    return done


def request(name: object, prompt: Iterable[int], **options: Any) -> Request:
    """A request named `name`. Options are fields of `Request` or of `SamplingParams`; greedy and blind to EOS by default."""
    of_request = {key: options.pop(key) for key in tuple(options) if key in Request.__slots__}
    params = SamplingParams(**({"temperature": 0.0, "ignore_eos": True} | options))
    return Request(request_id=str(name), prompt_token_ids=tuple(prompt), params=params, **of_request)


def logits_of(model: Any, token_ids: Iterable[int]) -> Tensor:
    """transformers' own logits `[len(token_ids), vocab]` of one sequence alone."""
    with torch.inference_mode():
        logits: Tensor = model(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits[0].float()
    return logits
