"""A whole engine over the road of a GPU's steps: page-locked buffers in turn, one copy, tensors that hold nothing before it."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from engine import core, staging
from engine.model_runner import ModelRunner
from engine.staging import PinnedStaging
from tests.support.parity import request, run
from tests.support.tiny import random_prompts

PROMPTS = random_prompts(count=8, longest=30)
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 1.2, "top_k": 20, "min_tokens": 5, "ignore_eos": False, "stop_token_ids": tuple(range(40, 60))},
    {"temperature": 1.0, "presence_penalty": 0.7, "repetition_penalty": 1.1, "logit_bias": ((7, 2.0),)},
    {"logprobs": 2, "prompt_logprobs": 1},
    {"n": 3, "temperature": 1.0, "allowed_token_ids": tuple(range(3, 150))},
    {"beam_width": 3},
)
JOBS = [request(i, PROMPTS[i], max_tokens=10, seed=i, **kind) for i, kind in enumerate(KINDS)]


@pytest.fixture
def num_copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A road of small buffers for each engine; the number of copies that each step took."""
    copies: list[int] = []
    copy_to, opened = staging._Buffer.copy_to, PinnedStaging._open

    def counted(buffer: staging._Buffer, device: Tensor, size: int) -> None:
        copies.append(size)
        copy_to(buffer, device, size)

    def poisoned(road: PinnedStaging, size: int) -> None:
        opened(road, size)
        assert road._device is not None
        road._device.fill_(0xFE)  # no id, no position, no number

    monkeypatch.setattr(staging, "_page_locked", lambda shape, dtype: torch.empty(shape, dtype=dtype))
    monkeypatch.setattr(staging, "_event", Mock)
    monkeypatch.setattr(staging._Buffer, "copy_to", counted)
    monkeypatch.setattr(PinnedStaging, "_open", poisoned)
    monkeypatch.setattr(core, "staging_for", PinnedStaging)
    return copies


@pytest.mark.parametrize("run_ahead", [False, True])
def test_steps_that_are_staged_give_the_same_tokens_with_one_copy_each(
    tiny: ModelRunner, num_copies: list[int], run_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = _unstaged(tiny, monkeypatch)
    num_copies.clear()

    done = run(tiny, JOBS, run_ahead=run_ahead)

    assert done.tokens == expected
    assert 0 < len(num_copies) <= done.counts["steps"]


def test_steps_that_outgrow_their_buffer_give_the_same_tokens(
    tiny: ModelRunner, num_copies: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = _unstaged(tiny, monkeypatch)
    monkeypatch.setattr(staging, "_FIRST_BYTES", 64)
    num_copies.clear()

    done = run(tiny, JOBS, num_blocks=40, run_ahead=True)

    assert done.tokens == expected


def _unstaged(tiny: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> Any:
    with monkeypatch.context() as patched:
        patched.setattr(core, "staging_for", staging.staging_for)
        return run(tiny, JOBS).tokens
