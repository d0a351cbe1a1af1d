"""Small schedulers and sequences, driven without a model."""

from collections.abc import Callable

from engine.block_pool import BlockPool
from engine.config import SchedulerConfig
from engine.decision import Ended, SchedulerOutput
from engine.request import Request, SamplingParams
from engine.scheduler import Scheduler
from engine.sequence import Sequence

EOS = 2
TOKEN = 7
"""What `run_step` samples unless told otherwise; no stop token."""


def make_config(**options: object) -> SchedulerConfig:
    """Room for everything unless an option says otherwise; blocks of 4 tokens, nothing shared."""
    defaults: dict[str, object] = {
        "max_slots": 8,
        "max_num_batched_tokens": 64,
        "block_size": 4,
        "num_blocks": 100,
        "max_model_len": 200,
    }
    defaults |= {"prefix_caching": False}  # prompts of these tests are alike
    return SchedulerConfig(**(defaults | options))  # type: ignore[arg-type]


def make_scheduler(**options: object) -> Scheduler:
    """A scheduler of `make_config`, with its pool."""
    config = make_config(**options)
    return Scheduler(config, BlockPool(config.num_blocks, config.block_size))


def make_sequence(
    name: int,
    num_prompt: int = 1,
    *,
    num_outputs: int = 0,
    priority: int = 0,
    tenant: int = 0,
    limit: int = 200,
    choice: int = 0,
    isolated_steps: int = 0,
    prompt_token_ids: tuple[int, ...] | None = None,
    output_token_ids: tuple[int, ...] | None = None,
    **params: object,
) -> Sequence:
    """Sequence `str(name)` that arrived as number `name`; `num_outputs` tokens are from an earlier attempt."""
    request = Request(
        request_id=str(name),
        prompt_token_ids=(5,) * num_prompt if prompt_token_ids is None else prompt_token_ids,
        params=SamplingParams(**params),  # type: ignore[arg-type]
        output_token_ids=(TOKEN,) * num_outputs if output_token_ids is None else output_token_ids,
        priority=priority,
        tenant=tenant,
        choice=choice,
        isolated_steps=isolated_steps,
    )
    return Sequence(request, (priority, name, choice), frozenset({EOS}), limit)


def run_step(scheduler: Scheduler, token: Callable[[Sequence], int] = lambda _: TOKEN) -> tuple[SchedulerOutput, list[Ended]]:
    """One whole step with the audit after each half."""
    output = scheduler.schedule()
    scheduler.check()
    ended = scheduler.update(output, [token(item.sequence) if item.num_samples else None for item in output.scheduled])
    scheduler.check()
    return output, ended


def parts_of(output: SchedulerOutput) -> list[tuple[str, int]]:
    """Who is scheduled with how many tokens."""
    return [(item.sequence.request.request_id, item.num_tokens) for item in output.scheduled]
