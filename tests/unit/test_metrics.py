"""The registry: names, closed label sets, and gauges that are true when nothing runs."""

import dataclasses
import re
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from engine.messages import EngineReady
from engine.stats import KVCounts, MemoryCounts, SlotCounts, StepStats, StepTimes, SwapTimes
from worker.attempt import Attempt, Ending
from worker.claims import Delivery
from worker.inflight import InFlight
from worker.metrics import MEMORY_KINDS, OUTCOMES, SCRIPTS, WORKER_STATES, Metrics, Watched
from worker.wire import Job

READY = EngineReady(
    model_dir="",
    dtype="float32",
    device="cpu",
    eos_token_ids=(1,),
    max_model_len=512,
    max_slots=4,
    token_budget=64,
    block_size=16,
    num_blocks=10,
    load_s=2.5,
    memory_rows=(),
)
BUSY = StepStats(
    slots=SlotCounts(decode=2, prefill=1, no_memory=1),
    kv=KVCounts(capacity_blocks=10, used_blocks=6, cached_blocks=1, free_blocks=3, allocated_tokens=96, filled_tokens=80),
    times=StepTimes(forward_s=0.02),
    num_tokens=40,
    num_prefill_tokens=38,
    num_generated_tokens=3,
    num_running=2,
    num_slots_taken=3,
    num_waiting=1,
    num_preemptions=1,
    num_preempted_tokens=17,
)
IDLE = StepStats(
    slots=SlotCounts(no_work=4),
    kv=KVCounts(capacity_blocks=10, free_blocks=10),
)


GAUGES_OF_ENGINE = (
    *((name, "") for name in ("slots", "slots_active", "requests_running", "requests_waiting", "kv_blocks_capacity")),
    *((name, "") for name in ("kv_usage_ratio", "kv_tokens_allocated", "kv_tokens_filled")),
    *(("kv_blocks", state) for state in ("used", "cached", "free")),
    ("engine_slots_active", "0"),
)
"""What an engine that has never run, or is gone, has none of."""


def samples(metrics: Metrics) -> dict[tuple[str, str], float]:
    return {
        (sample.name.removeprefix("slotmill_"), ",".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(generate_latest(metrics.registry).decode())
        for sample in family.samples
    }


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


def test_a_step_says_where_its_slots_went(metrics: Metrics) -> None:
    metrics.step(BUSY)
    found = samples(metrics)
    spent = {state: found["slot_steps_total", state] for state in ("decode", "prefill", "no_memory", "no_work")}
    assert spent == {"decode": 2, "prefill": 1, "no_memory": 1, "no_work": 0}


def test_slot_steps_sum_to_slots_times_steps(metrics: Metrics) -> None:
    for _ in range(5):
        metrics.step(BUSY)
    total = sum(value for (name, _), value in samples(metrics).items() if name == "slot_steps_total")
    assert total == 5 * BUSY.slots.total


@pytest.mark.parametrize(
    ("slots", "phase"), [(SlotCounts(decode=2), "decode"), (SlotCounts(prefill=2), "prefill"), (BUSY.slots, "mixed")]
)
def test_a_step_counts_under_its_phase(metrics: Metrics, slots: SlotCounts, phase: str) -> None:
    metrics.step(dataclasses.replace(BUSY, slots=slots))
    assert samples(metrics)["engine_steps_total", phase] == 1


def test_a_report_without_a_step_moves_gauges_only(metrics: Metrics) -> None:
    metrics.step(BUSY)
    metrics.step(IDLE)
    found = samples(metrics)
    assert sum(value for (name, _), value in found.items() if name == "engine_steps_total") == 1
    assert (found["slots_active", ""], found["kv_usage_ratio", ""], found["requests_waiting", ""]) == (0, 0, 0)


def test_kv_use_is_a_ratio_and_block_states_sum_to_the_capacity(metrics: Metrics) -> None:
    metrics.engine_ready(READY, "m")
    metrics.step(BUSY)
    found = samples(metrics)
    assert found["kv_usage_ratio", ""] == pytest.approx(0.6)
    assert sum(found["kv_blocks", state] for state in ("used", "cached", "free")) == found["kv_blocks_capacity", ""]


def test_preempted_tokens_are_wasted_tokens(metrics: Metrics) -> None:
    metrics.step(BUSY)
    found = samples(metrics)
    assert found["preemptions_total", "recompute"] == 1
    assert found["preempted_tokens_total", "recompute"] == found["wasted_tokens_total", "preempted"] == 17


def test_nothing_is_left_in_the_gauges_of_a_dead_engine(metrics: Metrics) -> None:
    metrics.engine_ready(READY, "m")
    metrics.step(BUSY)
    metrics.engine_down()
    gauges = (*GAUGES_OF_ENGINE, *(("gpu_memory_bytes", kind) for kind in MEMORY_KINDS), ("engine_up", "0"))
    assert {gauge: samples(metrics)[gauge] for gauge in gauges} == dict.fromkeys(gauges, 0)


def test_the_state_is_one_hot_and_read_at_the_scrape(metrics: Metrics) -> None:
    state = "loading"
    metrics.watch(Watched(lambda: state, lambda: True, lambda: 3.5, lambda: 7))
    state = "serving"
    found = samples(metrics)
    assert {name: found["worker_state", name] for name in WORKER_STATES} == {
        name: float(name == "serving") for name in WORKER_STATES
    }
    assert (found["redis_connected", ""], found["lease_age_max_seconds", ""], found["publish_buffer_tokens", ""]) == (1, 3.5, 7)


HOSTILE = ("a" * 512, "x\ny", '"} 1', "\N{GRINNING FACE}", "slotmill_slots", "", "\x00", "{queue}")


def hostile_attempt(number: int) -> Attempt:
    """One of which everything that a producer decides is meant to harm."""
    word = HOSTILE[number % len(HOSTILE)]
    lane = ("high", "normal", "low")[number % 3]
    delivery = Delivery(f"{word}{number}", f"{number}-1", lane, {}, 0, 1, 1, "l:1", 0, 0, 0, "new")
    job = Job(prompt=word, tenant=f"{word}{number}", model=f"{word}{number}", batch_id=f"{word}{number}")
    return Attempt(delivery, job)


def test_every_series_exists_from_the_start_and_thousands_of_hostile_jobs_add_none(metrics: Metrics) -> None:
    metrics.engine_ready(READY, "m")
    inflight = InFlight(metrics, lambda _: None)
    before = set(samples(metrics))
    for number in range(3000):
        attempt, word = hostile_attempt(number), HOSTILE[number % len(HOSTILE)]
        states = ("succeeded", "failed", "cancelled", "expired", "dead")
        ending = Ending(states[number % 5], word or "cancelled", word, word)
        metrics.job_ended(attempt, ending)
        inflight.add(attempt)
        inflight.drop(attempt, "emit")
        metrics.step(BUSY)
        metrics.token_gaps({(attempt.priority, number / 7): number})
    assert set(samples(metrics)) == before


def test_pairs_of_state_and_reason_are_counted_as_what_they_are(metrics: Metrics) -> None:
    for state, reason in OUTCOMES:
        metrics.job_ended(hostile_attempt(1), Ending(state, reason))  # type: ignore[arg-type]
    found = samples(metrics)
    assert {pair: found["jobs_finished_total", f"{pair[1]},{pair[0]}"] for pair in OUTCOMES} == dict.fromkeys(OUTCOMES, 1)


def test_no_series_tells_its_birthday(metrics: Metrics) -> None:
    assert [name for name, _ in samples(metrics) if name.endswith("_created")] == []


def test_the_last_tokens_of_an_engine_that_ran_ahead_count_though_their_report_is_of_no_step(metrics: Metrics) -> None:
    last = dataclasses.replace(IDLE, num_generated_tokens=3, num_wasted_tokens=2, times=StepTimes(sample_s=0.25))
    metrics.step(last)
    found = samples(metrics)
    assert (found["generated_tokens_total", ""], found["wasted_tokens_total", "run_ahead"]) == (3, 2)
    assert found["engine_time_seconds_total", "sample"] == 0.25
    assert found["slot_steps_total", "no_work"] == found["last_step_timestamp_seconds", ""] == 0


def test_the_time_of_steps_is_told_by_part(metrics: Metrics) -> None:
    times = StepTimes(schedule_s=1, prepare_s=2, forward_s=4, sample_s=8, update_s=16)
    for _ in range(2):
        metrics.step(dataclasses.replace(BUSY, times=times))
    found = samples(metrics)
    parts = {part: found["engine_time_seconds_total", part] for part in ("schedule", "prepare", "forward", "sample", "update")}
    assert parts == {"schedule": 2, "prepare": 4, "forward": 8, "sample": 16, "update": 32}
    assert sum(parts.values()) == found["engine_step_duration_seconds_sum", "mixed"]


def test_swaps_are_counted_in_bytes_and_in_seconds_of_those_that_are_done(metrics: Metrics) -> None:
    metrics.engine_ready(dataclasses.replace(READY, block_bytes=1024), "m")
    metrics.step(dataclasses.replace(IDLE, num_swapped_out_blocks=3))
    metrics.step(dataclasses.replace(BUSY, num_swapped_in_blocks=2, swap_times=SwapTimes(out_s=(0.5,), in_s=(0.25, 0.25))))
    found = samples(metrics)
    assert (found["swap_bytes_total", "out"], found["swap_bytes_total", "in"]) == (3072, 2048)
    assert (found["swap_duration_seconds_sum", "out"], found["swap_duration_seconds_sum", "in"]) == (0.5, 0.5)
    assert (found["swap_duration_seconds_count", "out"], found["swap_duration_seconds_count", "in"]) == (1, 2)


def test_memory_is_that_of_all_engines_which_are_up_and_starts_are_counted() -> None:
    metrics = Metrics(num_engines=2)
    memory = MemoryCounts(weights=100, kv_cache=200, activations=30, graphs=4, other=5, free=60)
    for engine in (0, 1, 0):
        metrics.engine_ready(dataclasses.replace(READY, memory=memory), "m", engine)
    assert {kind: samples(metrics)["gpu_memory_bytes", kind] for kind in MEMORY_KINDS} == {
        kind: 2 * value for kind, value in dataclasses.asdict(memory).items()
    }
    metrics.engine_down(1)
    found = samples(metrics)
    assert found["gpu_memory_bytes", "kv_cache"] == 200
    assert (found["engine_starts_total", "0"], found["engine_starts_total", "1"]) == (2, 1)


def test_gauges_of_engines_are_zero_before_one_is_ready(metrics: Metrics) -> None:
    assert {gauge: samples(metrics)[gauge] for gauge in GAUGES_OF_ENGINE} == dict.fromkeys(GAUGES_OF_ENGINE, 0)


@pytest.mark.parametrize("seconds", [0.0, 0.002, 0.0020001, 0.03, 10.0, 11.0, 1e6])
def test_many_observations_at_once_are_as_many_single_ones(seconds: float) -> None:
    at_once, singly = Metrics(), Metrics()
    at_once.token_gaps({("low", seconds): 5})
    for _ in range(5):
        singly.inter_token_latency_seconds.labels("low").observe(seconds)
    assert samples(at_once) == pytest.approx(samples(singly))


def test_the_names_of_scripts_are_those_that_calls_to_the_server_have() -> None:
    root = Path(__file__).parents[2] / "worker"
    called = {name for path in root.glob("*.py") for name in re.findall(r"link[.]call\(\s*\"(\w+)\"", path.read_text())}
    assert called - {"wait", "leave", "listen"} == set(SCRIPTS)


def test_a_refusal_counts_as_refused_and_as_failed(metrics: Metrics) -> None:
    delivery = Delivery("a", "1-1", "normal", {}, 0, 1, 1, "l:1", 0, 0, 0, "new")
    metrics.job_ended(Attempt(delivery), Ending("failed", "error", "invalid"))
    found = samples(metrics)
    assert (found["refused_total", "invalid"], found["jobs_finished_total", "error,failed"]) == (1, 1)


def test_what_several_engines_have_is_added_up_and_told_apart() -> None:
    metrics = Metrics(num_engines=2)
    for engine in (0, 1):
        metrics.engine_ready(READY, "m", engine)
        metrics.step(BUSY, engine)
    metrics.engine_down(0)
    metrics.step(BUSY, 1)
    values = {
        (sample.name, *sample.labels.values()): sample.value for each in metrics.registry.collect() for sample in each.samples
    }
    assert values["slotmill_slots",] == READY.max_slots
    assert values["slotmill_slots_active",] == BUSY.num_slots_taken
    assert values["slotmill_kv_blocks_capacity",] == BUSY.kv.capacity_blocks
    assert [values["slotmill_engine_slots_active", engine] for engine in "01"] == [0, BUSY.num_slots_taken]
    assert [values["slotmill_engine_up", engine] for engine in "01"] == [0, 1]
