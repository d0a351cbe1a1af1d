"""The registry: names, closed label sets, and gauges that are true when nothing runs."""

import dataclasses
import uuid

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.messages import EngineReady
from engine.stats import KVCounts, SlotCounts, StepStats, StepTimes
from worker.attempt import Attempt, Ending
from worker.claims import Delivery
from worker.metrics import OUTCOMES, WORKER_STATES, Metrics, Watched

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
    memory_table="",
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
    times=StepTimes(),
    num_tokens=0,
    num_prefill_tokens=0,
    num_generated_tokens=0,
    num_running=0,
    num_slots_taken=0,
    num_waiting=0,
    num_preemptions=0,
    num_preempted_tokens=0,
)


def samples(metrics: Metrics) -> dict[tuple[str, str], float]:
    return {
        (sample.name.removeprefix("slotmill_"), ",".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
        if not sample.name.endswith("_created")
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
    gauges = ("slots", "slots_active", "requests_running", "requests_waiting", "kv_usage_ratio", "kv_tokens_allocated")
    assert {name: samples(metrics)[name, ""] for name in gauges} == dict.fromkeys(gauges, 0)


def test_the_state_is_one_hot_and_read_at_the_scrape(metrics: Metrics) -> None:
    state = "loading"
    metrics.watch(Watched(lambda: state, lambda: True, lambda: 3.5, lambda: 7))
    state = "serving"
    found = samples(metrics)
    assert {name: found["worker_state", name] for name in WORKER_STATES} == {
        name: float(name == "serving") for name in WORKER_STATES
    }
    assert (found["redis_connected", ""], found["lease_age_max_seconds", ""], found["publish_buffer_tokens", ""]) == (1, 3.5, 7)


def test_every_series_exists_from_the_start_and_jobs_add_none(metrics: Metrics) -> None:
    metrics.engine_ready(READY, "m")
    before = set(samples(metrics))
    for number in range(500):
        state, reason = OUTCOMES[number % len(OUTCOMES)]
        code = {"failed": "invalid", "dead": "dead_letter"}.get(state, "")
        lane = ("high", "normal", "low")[number % 3]
        delivery = Delivery(uuid.uuid4().hex, f"{number}-1", lane, {}, 0, 1, 1, "l:1", 0, 0, 0, "new")
        metrics.job_ended(Attempt(delivery), Ending(state, reason, code))  # type: ignore[arg-type]
    metrics.step(BUSY)
    assert set(samples(metrics)) == before


def test_a_refusal_counts_as_refused_and_as_failed(metrics: Metrics) -> None:
    delivery = Delivery("a", "1-1", "normal", {}, 0, 1, 1, "l:1", 0, 0, 0, "new")
    metrics.job_ended(Attempt(delivery), Ending("failed", "error", "invalid"))
    found = samples(metrics)
    assert (found["refused_total", "invalid"], found["jobs_finished_total", "error,failed"]) == (1, 1)


def test_names_carry_the_prefix_and_no_colon(metrics: Metrics) -> None:
    names = {family.name for family in text_string_to_metric_families(metrics.render().decode())}
    assert all(name.startswith("slotmill_") and ":" not in name for name in names)
    assert {"slotmill_build_info", "slotmill_slots", "slotmill_slot_steps", "slotmill_kv_blocks"} <= names


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
