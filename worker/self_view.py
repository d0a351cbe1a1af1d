"""Makes the snapshot with which a worker answers a look: who is inside its engines, how full they are, what was counted.

Relies on `InFlight` for the attempts, on the readers for the times of steps and on the registry for all numbers: nothing is
counted here. Costs nothing while nobody looks; what is done under a lock is the copy of a list. Leaves the format to `snapshot`
and the answering to `control`.
"""

import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from prometheus_client.metrics import MetricWrapperBase

from engine.config import EngineConfig
from worker.attempt import Attempt
from worker.fleet import Fleet
from worker.inflight import InFlight
from worker.metrics import PREFIX, EngineState, Metrics
from worker.reader import Reader
from worker.settings import Settings
from worker.snapshot import MAX_ID, PHASES, Buckets, EngineView, RequestView, Snapshot, shorten


class SelfView:
    """One worker as it sees itself."""

    def __init__(self, settings: Settings, inflight: InFlight, fleet: Fleet, metrics: Metrics) -> None:
        self._settings = settings
        self._inflight = inflight
        self._fleet = fleet
        self._metrics = metrics
        self._started_at = time.monotonic()
        self._host = socket.gethostname()

    def take(self, state: str) -> Snapshot:
        """The snapshot of now; `state` is one of `metrics.WORKER_STATES`."""
        settings, held = self._settings, self._inflight.held()
        engines, requests = self._engines()
        return Snapshot(
            id=settings.worker_id,
            host=self._host,
            pid=os.getpid(),
            gpu=settings.device_names,
            model=settings.model_name,
            state=state,
            up_s=time.monotonic() - self._started_at,
            engines=tuple(engines),
            requests=tuple(requests),
            claimed=max(0, sum(attempt.ending is None for attempt in held) - len(requests)),
            ending=sum(attempt.ending is not None for attempt in held),
            counters=_counters(self._metrics),
            latencies=_latencies(self._metrics),
        )

    def _engines(self) -> tuple[list[EngineView], list[RequestView]]:
        parts = zip(self._settings.engines, self._fleet.readers, self._metrics.engine_states, strict=True)
        engines, requests = list[EngineView](), list[RequestView]()
        for number, (config, reader, state) in enumerate(parts):
            found = _requests(self._inflight.inside(number), reader, state)
            engines.append(_engine(config, reader, state, found))
            requests += found
        return engines, requests


def _engine(config: EngineConfig, reader: Reader, state: EngineState, requests: Sequence[RequestView]) -> EngineView:
    phases = dict.fromkeys(PHASES, 0.0)
    for request in requests:
        phases[request.phase] += request.width
    return EngineView(
        device=config.device,
        is_up=reader.serving is not None,
        slots=reader.num_slots,
        taken=state.last.num_slots_taken,
        running=state.last.num_running,
        waiting=state.last.num_waiting,
        phases=phases,
        step=asdict(state.last.slots),
        kv=asdict(state.last.kv),
    )


def _requests(attempts: Sequence[Attempt], reader: Reader, state: EngineState) -> list[RequestView]:
    """The attempts inside an engine. Those without a token of the last steps are in prefill if nobody waits, or all wait."""
    now = time.monotonic()
    views = [_request(attempt, reader.step_times[0], now) for attempt in attempts]
    widths = dict.fromkeys(PHASES, 0)
    for view in views:
        widths[view.phase] += view.width
    has_room = sum(widths.values()) - widths["waiting"] <= reader.num_slots
    waiting = state.last.num_waiting - widths["waiting"]
    known = "waiting" if waiting >= widths["starting"] else "prefill" if waiting <= 0 and has_room else "starting"
    return [replace(view, phase=_known(view, known, is_one_alone=widths["alone"] > 0)) for view in views]


def _known(view: RequestView, known: str, *, is_one_alone: bool) -> str:
    if view.phase != "starting":
        return view.phase
    return "held" if is_one_alone and view.tokens > view.resumed else known


def _request(attempt: Attempt, last_but_one_step: float, now: float) -> RequestView:
    job = attempt.job
    return RequestView(
        id=shorten(attempt.delivery.job_id, MAX_ID),
        lane=attempt.priority,
        engine=attempt.engine,
        phase=_phase(attempt, last_but_one_step),
        width=attempt.width,
        prompt_tokens=len(attempt.prompt_token_ids),
        tokens=attempt.num_tokens,
        resumed=attempt.delivery.num_logged,
        max_tokens=job.max_tokens * job.num_choices if job else 0,
        age_s=now - attempt.taken_at,
    )


def _phase(attempt: Attempt, last_but_one_step: float) -> str:
    """One of `snapshot.PHASES`. The last step may be half read, so who had a token in the one before it decodes, too."""
    if attempt.is_alone:
        return "alone" if attempt.has_begun_alone else "waiting"
    if attempt.job and attempt.job.beam_width:
        return "beam"
    return "decode" if attempt.last_token_at and attempt.last_token_at >= last_but_one_step else "starting"


def _counters(metrics: Metrics) -> dict[str, float]:
    counted: tuple[MetricWrapperBase, ...] = (
        metrics.generated_tokens,
        metrics.prompt_tokens,
        metrics.resumed_tokens,
        metrics.wasted_tokens,
        metrics.preemptions,
        metrics.slot_steps,
        metrics.prefix_cache_queried_tokens,
        metrics.prefix_cache_hit_tokens,
        metrics.jobs_claimed,
        metrics.jobs_finished,
    )
    return {
        ".".join([family.name.removeprefix(f"{PREFIX}_"), *sample.labels.values()]): sample.value
        for metric in counted
        for family in metric.collect()
        for sample in family.samples
        if sample.name.endswith("_total")
    }


def _latencies(metrics: Metrics) -> dict[str, Buckets]:
    observed: Mapping[str, MetricWrapperBase] = {
        "first_token": metrics.time_to_first_token_seconds,
        "between_tokens": metrics.inter_token_latency_seconds,
        "queue": metrics.queue_time_seconds,
    }
    return {name: _buckets(metric) for name, metric in observed.items()}


def _buckets(metric: MetricWrapperBase) -> Buckets:
    """The sum over all lanes; the registry's buckets count what is below them as well."""
    upto: dict[float, float] = {}
    for family in metric.collect():
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                bound = float(sample.labels["le"])
                upto[bound] = upto.get(bound, 0.0) + sample.value
    bounds = sorted(upto)
    below = [0.0, *(upto[bound] for bound in bounds)]
    counts = tuple(max(0.0, upto[bound] - before) for bound, before in zip(bounds, below, strict=False))
    return Buckets(bounds=tuple(bounds[:-1]), counts=counts)
