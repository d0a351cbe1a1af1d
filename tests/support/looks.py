"""Made-up looks at a queue, for the view of `worker top`."""

from collections.abc import Mapping, Sequence
from typing import Any

from worker.broker import LaneCounts
from worker.keys import LANES
from worker.queue_admin import QueueStats
from worker.snapshot import Buckets, EngineView, RequestView, Snapshot
from worker.top.watch import Look, WorkerLook

BOUNDS = (0.1, 0.2, 0.4)


def request(job_id: str, **changes: Any) -> RequestView:
    fields = {"lane": "normal", "phase": "decode", "prompt_tokens": 9, "tokens": 50, "max_tokens": 200, "age_s": 5.0}
    return RequestView(id=job_id, **fields | changes)


def engine(requests: Sequence[RequestView] = (), slots: int = 8, **changes: Any) -> EngineView:
    """One whose used blocks are half the pool and filled to three quarters."""
    phases: dict[str, float] = {}
    for each in requests:
        phases[each.phase] = phases.get(each.phase, 0) + each.width
    kv = {"capacity_blocks": 100, "used_blocks": 50, "cached_blocks": 20, "allocated_tokens": 800, "filled_tokens": 600}
    fields = {"device": "cpu", "is_up": True, "phases": phases, "kv": kv}
    return EngineView(slots=slots, **fields | changes)


def snapshot(requests: Sequence[RequestView] = (), **changes: Any) -> Snapshot:
    fields = {
        "id": "host-1",
        "host": "host",
        "pid": 1,
        "gpu": "cpu",
        "model": "smollm2",
        "state": "serving",
        "up_s": 100.0,
        "engines": (engine(requests),),
        "requests": tuple(requests),
        "counters": {"generated_tokens": 1000.0, "slot_steps.decode": 600.0, "slot_steps.no_work": 400.0},
        "latencies": {"between_tokens": Buckets(bounds=BOUNDS, counts=(10.0, 0.0, 0.0, 0.0))},
    }
    return Snapshot(**fields | changes)


def worker(now: Snapshot | None, before: Snapshot | None = None, beat: Mapping[str, str] | None = None) -> WorkerLook:
    return WorkerLook(now.id if now else "host-2", now, before, beat or {})


def queue_stats(**changes: Any) -> QueueStats:
    fields = {
        "queue": "q",
        "is_paused": False,
        "is_closed": False,
        "max_queued": None,
        "lanes": {lane: LaneCounts(12, 8, 5.0) for lane in LANES},
        "purging": (),
        "delayed": 3,
        "due_in_s": None,
        "dead": 0,
        "done": 120,
        "workers": (),
    }
    return QueueStats(**fields | changes)


def look(*workers: WorkerLook, **changes: Any) -> Look:
    return Look(0.0, queue_stats(**changes), workers)
