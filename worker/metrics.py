"""What is measured and under which name: one registry, every series created at start, label values from closed sets.

Relies on prometheus_client and on the engine's `StepStats`. Leaves when to observe to those who know; the gauges that describe
a present state are read at the scrape, so that they are true when idle too. docs/metrics.md lists the names.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from importlib.metadata import version
from itertools import product
from operator import attrgetter
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, disable_created_metrics
from prometheus_client.metrics import MetricWrapperBase

from engine.messages import EngineReady
from engine.stats import KVCounts, MemoryCounts, SlotCounts, StepStats, StepTimes
from worker.attempt import DEAD_LETTER, Attempt, Ending
from worker.broker import LaneCounts
from worker.keys import LANES

M = TypeVar("M", bound=MetricWrapperBase)

PREFIX = "slotmill"
WORKER_STATES = ("loading", "serving", "stalled", "draining")
PHASES = ("prefill", "decode", "mixed")
KV_STATES = ("used", "cached", "free")
SLOT_STATES = tuple(item.name for item in fields(SlotCounts))
STEP_PARTS = tuple(item.name.removesuffix("_s") for item in fields(StepTimes))
MEMORY_KINDS = tuple(item.name for item in fields(MemoryCounts))
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
FAULT = ("failed", "error")
"""Where any other pair would be counted: it would be a fault of ours, and no new series."""

# Up to a day: a night's batch waits for hours, and a quantile above the last bound would be told as that bound.
_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 14400, 86400)
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


@dataclass(slots=True)
class EngineState:
    """What an engine last said of itself; zeros while there is none."""

    is_up: bool = False
    max_slots: int = 0
    block_bytes: int = 0
    memory: MemoryCounts = field(default_factory=MemoryCounts)
    last: StepStats = field(default_factory=StepStats)
    """Before its first step all blocks are free."""


class _Histogram(Histogram):
    """One that takes many equal observations at once: all tokens of a step came after the same time.

    It knows how its parent keeps them; a test holds it to as many calls of `observe`.
    """

    def observe_many(self, amount: float, times: int) -> None:
        self._sum.inc(amount * times)
        self._buckets[bisect_left(self._upper_bounds, amount)].inc(times)


class Metrics:
    """All metrics of one worker process. Attributes are named as the metrics are, without prefix and unit of the count.

    What several engines have is added up; where one of them differs, the metrics with the label `engine` show it. What every
    step counts goes to series that were looked up at the start.
    """

    def __init__(self, num_engines: int = 1) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a series more of each counter and histogram
        self.registry = CollectorRegistry()
        self._engines = [EngineState() for _ in range(num_engines)]
        self._hidden: tuple[Gauge, ...] = ()
        self._add_info()
        self._add_engine()
        self._add_memory()
        self._add_jobs()
        self._add_queue()
        self._watch_engines()
        self._bind()

    @property
    def engine_states(self) -> list[EngineState]:
        """What each engine last said of itself."""
        return list(self._engines)

    def watch(self, watched: Watched) -> None:
        """Read these values at every scrape from now on."""
        for state in WORKER_STATES:
            self.worker_state.labels(state).set_function(partial(_equals, watched.state, state))
        self.redis_connected.set_function(lambda: float(watched.redis_connected()))
        self.lease_age_max_seconds.set_function(watched.lease_age_max_s)
        self.publish_buffer_tokens.set_function(watched.buffered_tokens)

    def forget_queue(self) -> None:
        """Tell nothing of the queue before it is read: zeros would say that it is empty."""
        self._hidden = self._of_queue
        for gauge in self._hidden:
            self.registry.unregister(gauge)

    def queue(self, counts: Mapping[str, LaneCounts], *, is_paused: bool, num_dead: int) -> None:
        """What was read of the queue."""
        for priority, lane in counts.items():
            self.queue_entries.labels(priority).set(lane.entries)
            self.queue_pending.labels(priority).set(lane.pending)
            self.queue_oldest_age_seconds.labels(priority).set(lane.oldest_age_s)
            self.queue_delayed.labels(priority).set(lane.delayed)
        self.queue_paused.set(is_paused)
        self.dead_entries.set(num_dead)
        hidden, self._hidden = self._hidden, ()
        for gauge in hidden:
            self.registry.register(gauge)

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
        self.engine_starts.labels(str(engine)).inc()
        blocks = KVCounts(capacity_blocks=ready.num_blocks, free_blocks=ready.num_blocks)
        self._engines[engine] = EngineState(
            is_up=True,
            max_slots=ready.max_slots,
            block_bytes=ready.block_bytes,
            memory=ready.memory,
            last=StepStats(kv=blocks),
        )

    def engine_down(self, engine: int = 0) -> None:
        """Nothing runs and no block exists while there is no engine."""
        self._engines[engine] = EngineState()

    def step(self, stats: StepStats, engine: int = 0) -> None:
        """Record a report. One without a step counts what it tells, such as the last tokens of an engine that ran ahead."""
        state = self._engines[engine]
        state.last = stats
        for counter, name in self._of_stats:
            if count := getattr(stats, name):
                counter.inc(count)
        for counter, name in self._of_times:
            if seconds := getattr(stats.times, name):
                counter.inc(seconds)
        if stats.num_preemptions:
            self._recomputed.inc(stats.num_preemptions - stats.num_swap_preemptions)
        self._count_swaps(stats, state.block_bytes)
        if stats.num_tokens:
            self._count_step(stats)

    def _count_step(self, stats: StepStats) -> None:
        slots = stats.slots
        for counter, name in self._of_slots:
            if num_slots := getattr(slots, name):
                counter.inc(num_slots)
        steps, seconds = self._of_phase["mixed" if slots.prefill and slots.decode else "prefill" if slots.prefill else "decode"]
        steps.inc()
        seconds.observe(stats.times.total_s)
        self.batch_size.observe(slots.prefill + slots.decode)
        self.batch_tokens.observe(stats.num_tokens)
        self.last_step_timestamp_seconds.set(time.time())

    def _count_swaps(self, stats: StepStats, block_bytes: int) -> None:
        moves = (stats.num_swapped_out_blocks, stats.swap_times.out_s), (stats.num_swapped_in_blocks, stats.swap_times.in_s)
        for (num_blocks, times), (swapped, seconds) in zip(moves, self._of_swaps, strict=True):
            if num_blocks:
                swapped.inc(num_blocks * block_bytes)
            for taken_s in times:
                seconds.observe(taken_s)

    def token_gaps(self, gaps: Mapping[tuple[str, float], int]) -> None:
        """Record the tokens of a step but first ones: how many came after how many seconds, by lane."""
        for (lane, seconds), num_tokens in gaps.items():
            self._of_gaps[lane].observe_many(seconds, num_tokens)

    def job_ended(self, attempt: Attempt, ending: Ending) -> None:
        """Count a job whose end is stored."""
        outcome = ending.state, ending.finish_reason
        self.jobs_finished.labels(*(outcome if outcome in OUTCOMES else FAULT)).inc()
        self.job_duration_seconds.labels(attempt.priority).observe(max(0.0, time.time() - attempt.delivery.enqueued_ms / 1000))
        if ending.code in REFUSALS:
            self.refused.labels(ending.code).inc()
        if ending.state == "dead":
            self.jobs_dead.labels("unknown_version" if ending.code == "unknown_version" else DEAD_LETTER).inc()
        if attempt.outputs:
            self.job_prompt_tokens.observe(len(attempt.prompt_token_ids))
            self.job_generated_tokens.observe(attempt.num_tokens)

    def _watch_engines(self) -> None:
        """Gauges of the engines are read at every scrape, from what each said last."""
        every = range(len(self._engines))
        for number in every:
            self._read("is_up", self.engine_up.labels(str(number)), number)
            self._read("last.num_slots_taken", self.engine_slots_active.labels(str(number)), number)
        self._read("max_slots", self.slots, *every)
        self._read("last.num_slots_taken", self.slots_active, *every)
        self._read("last.num_running", self.requests_running, *every)
        self._read("last.num_waiting", self.requests_waiting, *every)
        for state in KV_STATES:
            self._read(f"last.kv.{state}_blocks", self.kv_blocks.labels(state), *every)
        self._read("last.kv.capacity_blocks", self.kv_blocks_capacity, *every)
        self._read("last.kv.allocated_tokens", self.kv_tokens_allocated, *every)
        self._read("last.kv.filled_tokens", self.kv_tokens_filled, *every)
        self.kv_usage_ratio.set_function(self._kv_usage)
        for kind in MEMORY_KINDS:
            self._read(f"memory.{kind}", self.gpu_memory_bytes.labels(kind), *every)

    def _read(self, name: str, gauge: Gauge, *engines: int) -> None:
        """The gauge is the sum of this attribute over these engines."""
        read = attrgetter(name)
        gauge.set_function(lambda: float(sum(read(self._engines[engine]) for engine in engines)))

    def _kv_usage(self) -> float:
        kvs = [engine.last.kv for engine in self._engines]
        capacity = sum(kv.capacity_blocks for kv in kvs)
        return sum(kv.used_blocks for kv in kvs) / capacity if capacity else 0.0

    def _bind(self) -> None:
        """Look up the series of what every step counts."""
        self._of_slots = [(self.slot_steps.labels(state), state) for state in SLOT_STATES]
        self._of_times = [(self.engine_time_seconds.labels(part), f"{part}_s") for part in STEP_PARTS]
        steps, seconds = self.engine_steps, self.engine_step_duration_seconds
        self._of_phase = {phase: (steps.labels(phase), seconds.labels(phase)) for phase in PHASES}
        self._of_swaps = [(self.swap_bytes.labels(way), self.swap_duration_seconds.labels(way)) for way in ("out", "in")]
        self._of_gaps = {lane: self.inter_token_latency_seconds.labels(lane) for lane in LANES}
        self._recomputed = self.preemptions.labels("recompute")
        self._of_stats = (
            (self.generated_tokens, "num_generated_tokens"),
            (self.preemptions.labels("swap"), "num_swap_preemptions"),
            (self.preempted_tokens.labels("swap"), "num_swapped_tokens"),
            (self.preempted_tokens.labels("recompute"), "num_preempted_tokens"),
            (self.wasted_tokens.labels("preempted"), "num_preempted_tokens"),
            (self.wasted_tokens.labels("run_ahead"), "num_wasted_tokens"),
            (self.copied_blocks, "num_copied_blocks"),
            (self.leaked_blocks, "num_leaked_blocks"),
            (self.prefix_cache_queried_tokens, "num_prefix_queries"),
            (self.prefix_cache_hit_tokens, "num_prefix_hits"),
        )

    def _add_info(self) -> None:
        self.build_info = self._info("build", "Version of the worker")
        self.build_info.info({"version": version("slotmill")})
        self.model_info = self._info("model", "The model being served and the numbers resolved for it")
        self.worker_info = self._info("worker", "Where this worker runs and what it serves")
        self.worker_state = self._gauge("worker_state", "1 for the state the worker is in", state=WORKER_STATES)
        self.model_load_seconds = self._gauge("model_load_seconds", "Seconds the engine took to become ready")

    def _add_engine(self) -> None:
        engines = tuple(str(engine) for engine in range(len(self._engines)))
        self.engine_up = self._gauge("engine_up", "1 while this engine serves; numbered in the order of --gpu", engine=engines)
        self.engine_starts = self._counter(
            "engine_starts_total", "Times this engine became ready; each after the first follows a crash", engine=engines
        )
        self.engine_stalled_seconds = self._gauge(
            "engine_stalled_seconds",
            "Seconds for which this engine has had work and made no step; after --stall-s it is killed",
            engine=engines,
        )
        self.engine_slots_active = self._gauge(
            "engine_slots_active", "Places held in this engine after its last step", engine=engines
        )
        self.slots = self._gauge("slots", "Places in the batch")
        self.slots_active = self._gauge("slots_active", "Places held by a request after the last step")
        self.requests_running = self._gauge("requests_running", "Requests that hold a slot")
        self.requests_waiting = self._gauge("requests_waiting", "Requests inside the engine without a slot")
        self.slot_steps = self._counter("slot_steps_total", "Slots of all steps by what they did", state=SLOT_STATES)
        self.engine_steps = self._counter("engine_steps_total", "Engine steps by what they held", phase=PHASES)
        self.engine_step_duration_seconds = self._histogram(
            "engine_step_duration_seconds", "Seconds of one engine step", _STEP_S, phase=PHASES
        )
        self.engine_time_seconds = self._counter(
            "engine_time_seconds_total", "Seconds of all engine steps by what they went into", part=STEP_PARTS
        )
        self.batch_size = self._histogram("batch_size", "Places computed in one step: one for each choice of a request", _SLOTS)
        self.batch_tokens = self._histogram("batch_tokens", "Tokens computed in one step", _TOKENS)
        self.last_step_timestamp_seconds = self._gauge(
            "last_step_timestamp_seconds", "Unix time of the last step, 0 before any"
        )

    def _add_memory(self) -> None:
        self.kv_blocks = self._gauge("kv_blocks", "KV blocks by state", state=KV_STATES)
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
        self.swap_duration_seconds = self._histogram(
            "swap_duration_seconds", "Seconds that the moves of one step took on the device", _SCRIPT_S, direction=("out", "in")
        )
        self.copied_blocks = self._counter("copied_blocks_total", "KV blocks copied because a fork wrote to a shared one")
        self.leaked_blocks = self._counter("leaked_blocks_total", "KV blocks that a fault had lost, taken back when idle")
        self.prefix_cache_queried_tokens = self._counter(
            "prefix_cache_queried_tokens_total", "Tokens of starting requests that were looked up in the prefix cache"
        )
        self.prefix_cache_hit_tokens = self._counter("prefix_cache_hit_tokens_total", "Of those, tokens found there")
        self.gpu_memory_bytes = self._gauge(
            "gpu_memory_bytes", "Bytes of the memory of all GPUs by use, as planned at start; 0 on a CPU", kind=MEMORY_KINDS
        )

    def _add_jobs(self) -> None:
        self.prompt_tokens = self._counter(
            "prompt_tokens_total", "Prompt tokens given to the engine, again at each attempt of a job"
        )
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
        self.queue_delayed = self._gauge("queue_delayed", "Jobs of a lane that are not due yet", priority=LANES)
        self.queue_paused = self._gauge("queue_paused", "1 while the queue is paused: nothing is taken from it")
        self.dead_entries = self._gauge("dead_entries", "Jobs set aside for people")
        self._of_queue: tuple[Gauge, ...] = (
            self.queue_entries,
            self.queue_pending,
            self.queue_oldest_age_seconds,
            self.queue_delayed,
            self.queue_paused,
            self.dead_entries,
        )
        claims = ("new", "released", "reclaimed")
        self.jobs_claimed = self._counter("jobs_claimed_total", "Jobs taken, by where they came from", source=claims)
        fences = ("renew", "emit", "finish", "retry", "unwritable")
        self.jobs_fenced = self._counter(
            "jobs_fenced_total",
            "Jobs dropped: another worker has them, or (unwritable) a fault of ours left them to their lease",
            reason=fences,
        )
        self.jobs_released = self._counter(
            "jobs_released_total",
            "Jobs given back: the worker leaves, its engine died, or (fault) the engine failed in that job",
            reason=("drain", "engine", "fault"),
        )
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
        self.published_frames = self._counter(
            "published_frames_total", "Frames written to the logs of jobs: starts, tokens, ends"
        )
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

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], **labels: tuple[str, ...]) -> _Histogram:
        metric = _Histogram(name, text, tuple(labels), namespace=PREFIX, registry=self.registry, buckets=buckets)
        return _with_series(metric, labels)

    def _by_priority(self, name: str, text: str, buckets: tuple[float, ...]) -> _Histogram:
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
