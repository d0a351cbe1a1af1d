"""What is measured and under which name: one registry, every series created at start, label values from closed sets.

Relies on prometheus_client and on the engine's `StepStats`. Leaves when to observe to those who know; the gauges that describe
a present state are read at the scrape (`watch`), so that they are true when idle too. docs/operations.md lists the names.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from importlib.metadata import version
from itertools import product
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest
from prometheus_client.metrics import MetricWrapperBase

from engine.messages import EngineReady
from engine.stats import KVCounts, SlotCounts, StepStats
from worker.attempt import Attempt, Ending
from worker.keys import LANES

M = TypeVar("M", bound=MetricWrapperBase)

PREFIX = "slotmill"
WORKER_STATES = ("loading", "serving", "stalled", "draining")
SLOT_STATES = tuple(item.name for item in fields(SlotCounts))
SCRIPTS = (
    "fetch",
    "reclaim",
    "adopt",
    "read_log",
    "renew",
    "emit",
    "finish",
    "release",
    "retry",
    "acquit",
    "clean_up",
    "heartbeat",
    "queue_counts",
    "ensure_group",
)
ERROR_KINDS = ("connection", "timeout", "auth", "loading", "readonly", "out_of_memory", "response")
REFUSALS = ("invalid", "unknown_version")
OUTCOMES = (
    ("succeeded", "stop"),
    ("succeeded", "length"),
    ("failed", "error"),
    ("cancelled", "cancelled"),
    ("expired", "expired"),
    ("dead", "error"),
)
"""State and finish reason of jobs that ended; the pairs that occur."""

_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
_BETWEEN_TOKENS_S = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10)
_STEP_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_SCRIPT_S = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 5)
_TOKENS = tuple(2**power for power in range(18))
_SLOTS = tuple(2**power for power in range(12))


@dataclass(frozen=True, slots=True)
class Watched:
    """What is looked up at each scrape instead of being kept up to date."""

    state: Callable[[], str]
    redis_connected: Callable[[], bool]
    lease_age_max_s: Callable[[], float]
    buffered_tokens: Callable[[], int]


@dataclass(frozen=True, slots=True)
class _EngineState:
    """What an engine last said of itself; nothing while there is none."""

    running: int = 0
    slots: int = 0
    waiting: int = 0
    kv: KVCounts = field(default_factory=KVCounts)


class Metrics:
    """All metrics of one worker process. Attributes are named as the metrics are, without prefix and unit of the count.

    What several engines have is added up; where one of them differs, the metrics with the label `engine` show it.
    """

    def __init__(self, num_engines: int = 1) -> None:
        self.registry = CollectorRegistry()
        self._lock = threading.Lock()
        self._states = [_EngineState()] * num_engines
        self._slots = [0] * num_engines
        self._block_bytes = [0] * num_engines
        self._add_info()
        self._add_engine()
        self._add_jobs()
        self._add_queue()
        for engine in range(num_engines):
            self.engine_down(engine)

    def render(self) -> bytes:
        """The registry in Prometheus' text format."""
        return generate_latest(self.registry)

    def watch(self, watched: Watched) -> None:
        """Read these values at every scrape from now on."""
        for state in WORKER_STATES:
            self.worker_state.labels(state).set_function(partial(_equals, watched.state, state))
        self.redis_connected.set_function(lambda: float(watched.redis_connected()))
        self.lease_age_max_seconds.set_function(watched.lease_age_max_s)
        self.publish_buffer_tokens.set_function(watched.buffered_tokens)

    def engine_ready(self, ready: EngineReady, model: str, engine: int = 0) -> None:
        """The numbers that an engine resolved when it loaded."""
        self.model_info.info(
            {
                "model": model,
                "dtype": ready.dtype,
                "block_size": str(ready.block_size),
                "kv_blocks": str(ready.num_blocks),
                "max_slots": str(ready.max_slots),
            }
        )
        self.model_load_seconds.set(ready.load_s)
        self._block_bytes[engine] = ready.block_bytes
        self.engine_up.labels(str(engine)).set(1)
        kv = KVCounts(capacity_blocks=ready.num_blocks, free_blocks=ready.num_blocks)
        self._set_slots(engine, ready.max_slots)
        self._set_state(engine, _EngineState(kv=kv))

    def engine_down(self, engine: int = 0) -> None:
        """Nothing runs and no block exists while there is no engine."""
        self.engine_up.labels(str(engine)).set(0)
        self._set_slots(engine, 0)
        self._set_state(engine, _EngineState())

    def step(self, stats: StepStats, engine: int = 0) -> None:
        """Record one step; gauges only when the report is not about a step."""
        self._set_state(engine, _EngineState(stats.num_running, stats.num_slots_taken, stats.num_waiting, stats.kv))
        if stats.num_preemptions:
            self._count_preemptions(stats)
        if stats.num_leaked_blocks:
            self.leaked_blocks.inc(stats.num_leaked_blocks)
        if stats.num_wasted_tokens:
            self.wasted_tokens.labels("run_ahead").inc(stats.num_wasted_tokens)
        if not stats.num_tokens:
            return
        self._count_sharing(stats, engine)
        for state in SLOT_STATES:
            if num_slots := getattr(stats.slots, state):
                self.slot_steps.labels(state).inc(num_slots)
        phase = "mixed" if stats.slots.prefill and stats.slots.decode else "prefill" if stats.slots.prefill else "decode"
        self.engine_steps.labels(phase).inc()
        self.engine_step_duration_seconds.labels(phase).observe(stats.times.total_s)
        self.batch_size.observe(stats.slots.prefill + stats.slots.decode)
        self.batch_tokens.observe(stats.num_tokens)
        self.generated_tokens.inc(stats.num_generated_tokens)
        self.last_step_timestamp_seconds.set(time.time())

    def _count_preemptions(self, stats: StepStats) -> None:
        self.preemptions.labels("recompute").inc(stats.num_preemptions - stats.num_swap_preemptions)
        self.preemptions.labels("swap").inc(stats.num_swap_preemptions)
        self.preempted_tokens.labels("recompute").inc(stats.num_preempted_tokens)
        self.preempted_tokens.labels("swap").inc(stats.num_swapped_tokens)
        self.wasted_tokens.labels("preempted").inc(stats.num_preempted_tokens)

    def _count_sharing(self, stats: StepStats, engine: int) -> None:
        for counter, count in (
            (self.swap_bytes.labels("out"), stats.num_swapped_out_blocks * self._block_bytes[engine]),
            (self.swap_bytes.labels("in"), stats.num_swapped_in_blocks * self._block_bytes[engine]),
            (self.copied_blocks, stats.num_copied_blocks),
            (self.prefix_cache_queried_tokens, stats.num_prefix_queries),
            (self.prefix_cache_hit_tokens, stats.num_prefix_hits),
        ):
            if count:
                counter.inc(count)

    def job_ended(self, attempt: Attempt, ending: Ending) -> None:
        """Count a job whose end is stored."""
        self.jobs_finished.labels(ending.state, ending.finish_reason).inc()
        self.job_duration_seconds.labels(attempt.priority).observe(max(0.0, time.time() - attempt.delivery.enqueued_ms / 1000))
        if ending.code in REFUSALS:
            self.refused.labels(ending.code).inc()
        if ending.state == "dead":
            self.jobs_dead.labels(ending.code).inc()
        if attempt.outputs:
            self.job_prompt_tokens.observe(len(attempt.prompt_token_ids))
            self.job_generated_tokens.observe(attempt.num_tokens)

    def _set_slots(self, engine: int, slots: int) -> None:
        with self._lock:
            self._slots[engine] = slots
            self.slots.set(sum(self._slots))

    def _set_state(self, engine: int, state: _EngineState) -> None:
        """Take in what one engine says and show the sums; each engine has a thread that calls this."""
        self.engine_slots_active.labels(str(engine)).set(state.slots)
        with self._lock:
            self._states[engine] = state
            self.slots_active.set(sum(each.slots for each in self._states))
            self.requests_running.set(sum(each.running for each in self._states))
            self.requests_waiting.set(sum(each.waiting for each in self._states))
            counts = [each.kv for each in self._states]
            self._set_kv(KVCounts(**{item.name: sum(getattr(kv, item.name) for kv in counts) for item in fields(KVCounts)}))

    def _set_kv(self, kv: KVCounts) -> None:
        self.kv_blocks.labels("used").set(kv.used_blocks)
        self.kv_blocks.labels("cached").set(kv.cached_blocks)
        self.kv_blocks.labels("free").set(kv.free_blocks)
        self.kv_blocks_capacity.set(kv.capacity_blocks)
        self.kv_usage_ratio.set(kv.used_blocks / kv.capacity_blocks if kv.capacity_blocks else 0)
        self.kv_tokens_allocated.set(kv.allocated_tokens)
        self.kv_tokens_filled.set(kv.filled_tokens)

    def _add_info(self) -> None:
        self.build_info = self._info("build", "Version of the worker")
        self.build_info.info({"version": version("slotmill")})
        self.model_info = self._info("model", "The model being served and the numbers resolved for it")
        self.worker_info = self._info("worker", "Where this worker runs and what it serves")
        self.worker_state = self._gauge("worker_state", "1 for the state the worker is in", state=WORKER_STATES)
        self.model_load_seconds = self._gauge("model_load_seconds", "Seconds the engine took to become ready")

    def _add_engine(self) -> None:
        phases = ("prefill", "decode", "mixed")
        engines = tuple(str(engine) for engine in range(len(self._states)))
        self.engine_up = self._gauge("engine_up", "1 while this engine serves", engine=engines)
        self.engine_slots_active = self._gauge(
            "engine_slots_active", "Places held in this engine after its last step", engine=engines
        )
        self.slots = self._gauge("slots", "Places in the batch")
        self.slots_active = self._gauge("slots_active", "Places held by a request after the last step")
        self.slot_steps = self._counter("slot_steps_total", "Slots of all steps by what they did", state=SLOT_STATES)
        self.engine_steps = self._counter("engine_steps_total", "Engine steps by what they held", phase=phases)
        self.engine_step_duration_seconds = self._histogram(
            "engine_step_duration_seconds", "Seconds of one engine step", _STEP_S, phase=phases
        )
        self.batch_size = self._histogram("batch_size", "Requests computed in one step", _SLOTS)
        self.batch_tokens = self._histogram("batch_tokens", "Tokens computed in one step", _TOKENS)
        self.last_step_timestamp_seconds = self._gauge(
            "last_step_timestamp_seconds", "Unix time of the last step, 0 before any"
        )
        self.kv_blocks = self._gauge("kv_blocks", "KV blocks by state", state=("used", "cached", "free"))
        self.kv_blocks_capacity = self._gauge("kv_blocks_capacity", "KV blocks in all")
        self.kv_usage_ratio = self._gauge("kv_usage_ratio", "Used blocks over all blocks, 0 to 1")
        self.kv_tokens_allocated = self._gauge("kv_tokens_allocated", "Token positions in used blocks and in blocks set aside")
        self.kv_tokens_filled = self._gauge("kv_tokens_filled", "Token positions that hold a computed token")
        modes = ("recompute", "swap")
        self.preemptions = self._counter("preemptions_total", "Running requests that gave up their blocks", mode=modes)
        self.preempted_tokens = self._counter("preempted_tokens_total", "Computed positions given up by preemption", mode=modes)
        self.swap_bytes = self._counter(
            "swap_bytes_total", "Bytes of KV blocks copied to or from host memory", direction=("out", "in")
        )
        self.copied_blocks = self._counter("copied_blocks_total", "KV blocks copied because a fork wrote to a shared one")
        self.leaked_blocks = self._counter("leaked_blocks_total", "KV blocks that a fault had lost, taken back when idle")
        self.prefix_cache_queried_tokens = self._counter(
            "prefix_cache_queried_tokens_total", "Tokens of starting requests that were looked up in the prefix cache"
        )
        self.prefix_cache_hit_tokens = self._counter("prefix_cache_hit_tokens_total", "Of those, tokens found there")
        self.requests_running = self._gauge("requests_running", "Requests that hold a slot")
        self.requests_waiting = self._gauge("requests_waiting", "Requests inside the engine without a slot")

    def _add_jobs(self) -> None:
        self.prompt_tokens = self._counter("prompt_tokens_total", "Prompt tokens of the jobs given to the engine")
        self.generated_tokens = self._counter("generated_tokens_total", "Tokens sampled")
        self.resumed_tokens = self._counter("resumed_tokens_total", "Tokens taken over from earlier attempts")
        reasons = ("preempted", "fenced", "aborted", "run_ahead")
        self.wasted_tokens = self._counter("wasted_tokens_total", "Tokens computed in vain", reason=reasons)
        self.jobs_finished = Counter(
            "jobs_finished_total", "Jobs that ended here", ("state", "finish_reason"), namespace=PREFIX, registry=self.registry
        )
        for outcome in OUTCOMES:
            self.jobs_finished.labels(*outcome)
        self.queue_time_seconds = self._by_priority("queue_time_seconds", "Seconds from enqueue to the first claim", _LATENCY_S)
        self.time_to_first_token_seconds = self._by_priority(
            "time_to_first_token_seconds", "Seconds from enqueue to the first token", _LATENCY_S
        )
        self.inter_token_latency_seconds = self._by_priority(
            "inter_token_latency_seconds", "Seconds between two tokens of a job", _BETWEEN_TOKENS_S
        )
        self.job_duration_seconds = self._by_priority("job_duration_seconds", "Seconds from enqueue to the result", _LATENCY_S)
        self.job_prompt_tokens = self._histogram("job_prompt_tokens", "Prompt tokens of a job that ended", _TOKENS)
        self.job_generated_tokens = self._histogram("job_generated_tokens", "Output tokens of a job that ended", _TOKENS)

    def _add_queue(self) -> None:
        self.queue_entries = self._gauge("queue_entries", "Entries in a lane, taken ones included", priority=LANES)
        self.queue_pending = self._gauge("queue_pending", "Entries of a lane that a worker holds", priority=LANES)
        self.queue_oldest_age_seconds = self._gauge(
            "queue_oldest_age_seconds", "Age of a lane's oldest entry that nobody has taken", priority=LANES
        )
        self.queue_delayed = self._gauge("queue_delayed", "Jobs that are not due yet")
        self.dead_entries = self._gauge("dead_entries", "Jobs set aside for people")
        claims = ("new", "released", "reclaimed")
        self.jobs_claimed = self._counter("jobs_claimed_total", "Jobs taken, by where they came from", source=claims)
        fences = ("renew", "emit", "finish", "retry", "unwritable")
        self.jobs_fenced = self._counter(
            "jobs_fenced_total", "Jobs dropped: another worker has them, or a fault of ours", reason=fences
        )
        self.jobs_released = self._counter("jobs_released_total", "Jobs given back", reason=("drain", "engine", "fault"))
        self.jobs_dead = self._counter(
            "jobs_dead_total", "Jobs set aside for people", reason=("dead_letter", "unknown_version")
        )
        self.leases_lost = self._counter("leases_lost_total", "Leases found lost at a renewal", reason=("taken",))
        self.refused = self._counter("refused_total", "Jobs refused", reason=REFUSALS)
        self.lease_age_max_seconds = self._gauge("lease_age_max_seconds", "Seconds since the last renewal while jobs are held")
        self.lease_renew_duration_seconds = self._histogram("lease_renew_duration_seconds", "Seconds of one renewal", _SCRIPT_S)
        self.publish_flush_duration_seconds = self._histogram(
            "publish_flush_duration_seconds", "Seconds of one flush", _SCRIPT_S
        )
        self.publish_buffer_tokens = self._gauge("publish_buffer_tokens", "Tokens made and not yet in the log")
        self.published_frames = self._counter("published_frames_total", "Frames written to log and channel")
        self.redis_connected = self._gauge("redis_connected", "1 when every connection of the worker works")
        self.redis_errors = self._counter(
            "redis_errors_total", "Calls that the server refused or did not answer", kind=ERROR_KINDS
        )
        self.redis_script_duration_seconds = self._histogram(
            "redis_script_duration_seconds", "Seconds of one call as the worker sees it", _SCRIPT_S, script=SCRIPTS
        )

    def _counter(self, name: str, text: str, **labels: tuple[str, ...]) -> Counter:
        return _with_series(Counter(name, text, tuple(labels), namespace=PREFIX, registry=self.registry), labels)

    def _gauge(self, name: str, text: str, **labels: tuple[str, ...]) -> Gauge:
        return _with_series(Gauge(name, text, tuple(labels), namespace=PREFIX, registry=self.registry), labels)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], **labels: tuple[str, ...]) -> Histogram:
        metric = Histogram(name, text, tuple(labels), namespace=PREFIX, registry=self.registry, buckets=buckets)
        return _with_series(metric, labels)

    def _by_priority(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return self._histogram(name, text, buckets, priority=LANES)

    def _info(self, name: str, text: str) -> Info:
        return Info(name, text, namespace=PREFIX, registry=self.registry)


def _with_series(metric: M, labels: dict[str, tuple[str, ...]]) -> M:
    """Create every series now: a counter that appears with its first event has lost that event for `rate()`."""
    if labels:
        for values in product(*labels.values()):
            metric.labels(*values)
    return metric


def _equals(look_up: Callable[[], str], value: str) -> float:
    return float(look_up() == value)
