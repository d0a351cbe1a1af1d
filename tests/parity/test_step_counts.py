"""What the reports of a real engine make of the metrics, where memory is so short that sequences are preempted."""

from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from engine.core import Engine
from engine.model_runner import ModelRunner
from engine.serve import ready_message
from tests.support.parity import HOST_BLOCKS, Configured, load, request
from tests.support.tiny import random_prompts, save_tiny_llama
from worker.metrics import Metrics

PROMPTS = random_prompts(count=8, longest=30)
NUM_TOKENS = 12
Samples = dict[tuple[str, str], float]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return load(save_tiny_llama(tmp_path_factory.mktemp("tiny")))


def measured(runner: ModelRunner, **changes: Any) -> tuple[Samples, int]:
    """The samples after every request has ended, and how many tokens they were told."""
    metrics = Metrics()
    metrics.engine_ready(ready_message(runner, 1.0), "m")
    engine = Engine(Configured(runner, **({"num_blocks": 12, "max_num_batched_tokens": 16} | changes)))
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(request(number, prompt, max_tokens=NUM_TOKENS))
    num_told = 0
    while engine.has_work:
        report = engine.step()
        metrics.step(report.stats)
        num_told += sum(len(event.token_ids) for event in report.events)
    text = generate_latest(metrics.registry).decode()
    found = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {
        (sample.name.removeprefix("slotmill_"), ",".join(sample.labels.values())): sample.value for sample in found
    }, num_told


def sum_of(found: Samples, name: str) -> float:
    return sum(value for (each, _), value in found.items() if each == name)


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_what_is_swapped_out_comes_back_and_each_move_is_timed(runner: ModelRunner, *, runs_ahead: bool) -> None:
    found, _ = measured(runner, preemption="swap", num_host_blocks=HOST_BLOCKS, prefix_caching=False, run_ahead=runs_ahead)
    assert found["preemptions_total", "swap"] > 0
    assert found["swap_bytes_total", "out"] == found["swap_bytes_total", "in"] > 0
    assert found["swap_bytes_total", "out"] % runner.kv_bytes_per_token == 0
    assert 0 < found["swap_duration_seconds_count", "out"] <= found["preemptions_total", "swap"]
    assert found["swap_duration_seconds_count", "in"] > 0
    assert 0 < found["swap_duration_seconds_sum", "out"] < sum_of(found, "engine_time_seconds_total")


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_every_token_that_is_told_is_counted_and_nothing_is_left_in_the_gauges(
    runner: ModelRunner, *, runs_ahead: bool
) -> None:
    found, num_told = measured(runner, preemption="recompute", run_ahead=runs_ahead)
    assert found["preemptions_total", "recompute"] > 0
    assert found["preempted_tokens_total", "recompute"] == found["wasted_tokens_total", "preempted"] > 0
    assert found["generated_tokens_total", ""] == num_told == len(PROMPTS) * NUM_TOKENS
    assert sum_of(found, "slot_steps_total") == sum_of(found, "engine_steps_total") * runner.scheduler_config.max_slots
    at_rest = ("slots_active", "requests_running", "requests_waiting", "kv_usage_ratio", "kv_tokens_filled")
    assert [found[name, ""] for name in at_rest] == [0] * len(at_rest)


def test_the_time_of_steps_is_the_sum_of_its_parts(runner: ModelRunner) -> None:
    found, _ = measured(runner)
    assert sum_of(found, "engine_time_seconds_total") == pytest.approx(
        sum_of(found, "engine_step_duration_seconds_sum"), rel=0.01
    )
    assert min(found["engine_time_seconds_total", part] for part in ("schedule", "prepare", "forward", "sample", "update")) > 0


def test_a_cpu_has_no_memory_of_a_gpu(runner: ModelRunner) -> None:
    found, _ = measured(runner)
    assert sum_of(found, "gpu_memory_bytes") == 0
