"""Several processes that share a model against one that has it all, and what becomes of an engine that loses one of them."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.config import EngineConfig
from engine.core import Engine
from engine.errors import ModelUnsupported
from engine.messages import EngineFailed, EngineReady, StepReport
from engine.model_runner import ModelRunner
from engine.parallel import TensorParallelRunner
from engine.ranks import Ranks
from engine.request import Request, SamplingParams
from tests.support import tiny_models
from tests.support.tiny import run_to_end, tokens_of
from tests.support.wait import wait_until
from worker.bridge import EngineProcess
from worker.errors import EngineUnavailable
from worker.settings import ENGINE_COMMAND

OPTIONS: dict[str, Any] = {"max_slots": 4, "token_budget": 16, "kv_blocks": 24, "block_size": 8, "num_threads": 1}
LOST = "tensor_parallel: the process of rank 1 was killed by signal 9; the others cannot go on without it"
REQUESTS = [
    Request(
        request_id=f"r{row}",
        prompt_token_ids=tuple((31 * row + 7 * position) % 90 + 3 for position in range(length)),
        params=SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True),
    )
    for row, length in enumerate((5, 23, 40, 11, 3))
]


def config(model: Path, size: int) -> EngineConfig:
    return EngineConfig(model=str(model), tensor_parallel=size, **OPTIONS)


def answers(runner: ModelRunner) -> dict[str, list[int]]:
    return {name: tokens_of(events) for name, events in run_to_end(Engine(runner), REQUESTS).items()}


def never(reason: str) -> None:
    raise AssertionError(reason)


def together(model: Path) -> TensorParallelRunner:
    return TensorParallelRunner(config(model, 2), Ranks(2, never))


def ranks_of(process: psutil.Process) -> list[psutil.Process]:
    """The other processes that share its model."""
    return [child for child in process.children() if "engine.parallel" in child.cmdline()]


def test_two_processes_give_the_tokens_of_one(tmp_path: Path) -> None:
    model = tiny_models.save("qwen3_moe", tiny_models.SUPPORTED["qwen3_moe"] | {"mlp_only_layers": [1]}, tmp_path)
    alone = answers(ModelRunner(config(model, 1)))
    with closing(together(model)) as runner:
        assert answers(runner) == alone
    assert runner.geometry.num_kv_heads == 1
    assert ranks_of(psutil.Process()) == []


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("llama", {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72}, "9 attention heads and 3 key/value"),
        ("gpt2", {}, "no tensor-parallel plan for gpt2"),
    ],
)
def test_a_model_that_does_not_divide_is_refused(family: str, settings: dict[str, Any], reason: str, tmp_path: Path) -> None:
    model = tiny_models.save(family, tiny_models.SUPPORTED[family] | settings, tmp_path)
    with pytest.raises(ModelUnsupported, match=rf"^tensor_parallel: 2: .*{reason}.*; use 1") as refusal:
        together(model)
    assert "\n" not in str(refusal.value)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[EngineProcess]:
    model = tiny_models.save("qwen2", tiny_models.SUPPORTED["qwen2"] | {"max_position_embeddings": 100_000}, tmp_path)
    tokenizer = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"w0": 0}, "unk_token": "w0"}}
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    process = EngineProcess(config(model, 2), ENGINE_COMMAND)
    yield process
    process.stop()


def expect(engine: EngineProcess, kind: type) -> Any:
    """The next message of this kind; others before it are left out."""
    found: list[Any] = []

    def has_come() -> bool:
        message = engine.receive(0.1)
        assert isinstance(message, kind) or not isinstance(message, EngineFailed), message
        found.extend([message] if isinstance(message, kind) else [])
        return bool(found)

    wait_until(has_come, 60.0, f"a message {kind.__name__}")
    return found[0]


def test_an_engine_that_loses_a_process_in_a_step_says_so_and_ends(engine: EngineProcess) -> None:
    expect(engine, EngineReady)
    engine.send(Request(request_id="r", prompt_token_ids=(5,), params=SamplingParams(max_tokens=150, ignore_eos=True)))
    expect(engine, StepReport)
    (other,) = ranks_of(psutil.Process(engine.pid))
    other.kill()
    assert expect(engine, EngineFailed).message == LOST
    with pytest.raises(EngineUnavailable, match="ended with code 1"):
        engine.receive(5.0)
    assert not psutil.pid_exists(other.pid)


def test_a_process_that_is_lost_while_nothing_runs_is_reported() -> None:
    reasons: list[str] = []
    with closing(Ranks(2, reasons.append)):
        (other,) = ranks_of(psutil.Process())
        other.kill()
        wait_until(lambda: reasons, 5.0, "a report")
    assert reasons == [LOST]
