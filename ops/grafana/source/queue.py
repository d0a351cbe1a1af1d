"""Queue and delivery: how much waits, does it flow, what goes wrong with jobs, and do tokens reach the clients?"""

from collections.abc import Callable

from grafana_foundation_sdk.models import dashboard as models

from source.board import Row, board
from source.palette import AGES, BLUE, CLAIMS, ENDS, ERRORS, FENCES, GREEN, LANES, ORANGE, PURPLE, SKY, VERMILLION
from source.panels import (
    COUNT,
    PER_MIN,
    PER_S,
    RATIO,
    SECONDS,
    TOKENS,
    Query,
    by_state,
    heat,
    lines,
    stack,
    stats,
    timeline,
)
from source.promql import aggregate, buckets, of_queue, per_minute, quantile, rate, ratio, selected, total, waiting

WAITING = aggregate("sum", waiting())


def dashboard() -> models.Dashboard:
    """The dashboard."""
    about = "Depth and age of lanes, claims and ends of jobs, what was fenced, lost or refused, and how tokens reach the log."
    rows = [GLANCE, FLOW, TROUBLE, DELIVERY, LEASES, SERVER, DETAILS]
    return board("slotmill-queue", "slotmill / Queue and delivery", about, rows)


def _by_lane(expression: Callable[[str], str]) -> list[Query]:
    return [Query(expression(lane.value), f"{{{{queue}}}}: {lane.value}", lane.colour) for lane in LANES]


def _quantiles(metric: str) -> list[Query]:
    return [
        Query(quantile(0.5, metric), "Median", SKY),
        Query(quantile(0.95, metric), "p95", BLUE),
        Query(quantile(0.99, metric), "p99", ORANGE),
    ]


GLANCE = Row(
    "How much waits, and for how long?",
    [
        stats(
            "Jobs waiting",
            "Jobs in the lanes that no worker has taken. A backlog is the purpose of a bulk queue: look at its age and at"
            " the time to clear it, not at its size.",
            COUNT,
            WAITING,
            limits=[(None, BLUE)],
        ),
        stats(
            "Jobs held by workers",
            "Jobs that some worker has taken and not ended. It should be a little above the slots of all workers while"
            " jobs wait; far below, workers do not take: look whether the queue is paused, as told beside.",
            COUNT,
            aggregate("sum", of_queue("queue_pending", "priority")),
            limits=[(None, GREEN)],
        ),
        stats(
            "Oldest job waits",
            "Age of the oldest job that nobody has taken, over all lanes. It is what a client notices; when it only"
            " grows, workers are too few, or the queue is paused.",
            SECONDS,
            aggregate("max", of_queue("queue_oldest_age_seconds", "priority")),
            limits=AGES,
        ),
        stats(
            "Time to clear",
            "Jobs waiting over jobs ended each second: when the backlog would be gone if nothing more came. No data while"
            " no job ends. More workers shorten it.",
            SECONDS,
            ratio(WAITING, rate("jobs_finished_total")),
            limits=[(None, BLUE)],
        ),
        stats(
            "Queues paused",
            "Queues from which nothing is taken, because somebody paused them: `worker queue resume` ends that. Held jobs"
            " go on to their end.",
            COUNT,
            aggregate("sum", of_queue("queue_paused")),
            limits=[(None, GREEN), (1, ORANGE)],
        ),
        stats(
            "Dead jobs",
            "Jobs set aside for people: they crashed an engine twice, used up their attempts, or have an unknown version."
            " `worker dead list` says why; mend the cause, then `worker dead replay`.",
            COUNT,
            aggregate("sum", of_queue("dead_entries")),
            limits=[(None, GREEN), (1, PURPLE)],
        ),
        stack(
            "Jobs waiting, by lane",
            "What nobody has taken. The high lane should be near zero; a low lane that never shrinks wants more workers"
            " or a smaller --aging.",
            COUNT,
            _by_lane(lambda lane: waiting(priority=lane)),
        ),
        lines(
            "Age of the oldest waiting job, by lane",
            "Seconds since the oldest job of a lane that nobody has taken was enqueued. Level lines mean that the fleet"
            " keeps up; lines that rise as fast as time passes mean that nothing is taken from that lane.",
            SECONDS,
            _by_lane(lambda lane: of_queue("queue_oldest_age_seconds", "priority", priority=lane)),
        ),
        stack(
            "Jobs held by workers, by lane",
            "What workers have taken and not ended. It follows the slots of the fleet; entries that stay after their"
            " worker died are taken over within the lease.",
            COUNT,
            _by_lane(lambda lane: of_queue("queue_pending", "priority", priority=lane)),
        ),
        stack(
            "Jobs not due yet, by lane",
            "Delayed jobs, and jobs that are tried again after a fault. A step up without producers that delay is a fault"
            " that repeats: look for job_released with why=fault in the logs.",
            COUNT,
            _by_lane(lambda lane: of_queue("queue_delayed", "priority", priority=lane)),
        ),
    ],
)


FLOW = Row(
    "Do jobs get through?",
    [
        stack(
            "Jobs taken, by where they came from",
            "Claims each minute. New should be nearly all; released ones come from drains and crashed engines, reclaimed"
            " ones from workers that died or lost the server for longer than their lease.",
            PER_MIN,
            by_state(CLAIMS, lambda source: per_minute("jobs_claimed_total", source=source)),
        ),
        stack(
            "Jobs ended, by state",
            "Ends each minute. Green should dominate; failed jobs carry their reason in the result, dead ones in `worker"
            " dead list`, expired ones wanted more workers or a later deadline.",
            PER_MIN,
            by_state(ENDS, lambda state: per_minute("jobs_finished_total", state=state)),
        ),
    ],
)


TROUBLE = Row(
    "What goes wrong with jobs?",
    [
        lines(
            "Jobs fenced, by who noticed",
            "Jobs that another worker has meanwhile, so that ours stopped; the other one's result counts. Zero is usual;"
            " a burst after a host stood still is right, a steady trickle means that --lease-s is too short.",
            PER_MIN,
            by_state(FENCES, lambda reason: per_minute("jobs_fenced_total", reason=reason)),
            width=8,
        ),
        lines(
            "Leases lost and jobs given back",
            "Leases found lost at a renewal, and jobs given back in a drain, after an engine's crash, or after a fault."
            " Each is resumed elsewhere with the tokens it has; many outside of deployments point at the engine's log.",
            PER_MIN,
            [
                Query(per_minute("leases_lost_total"), "Lease lost", PURPLE),
                Query(per_minute("jobs_released_total", reason="drain"), "Given back: drain", SKY),
                Query(per_minute("jobs_released_total", reason="engine"), "Given back: the engine died", VERMILLION),
                Query(per_minute("jobs_released_total", reason="fault"), "Given back: fault, tried again", ORANGE),
            ],
            width=8,
        ),
        lines(
            "Jobs refused and jobs set aside",
            "Refused jobs are bad input, with the field named in their result: tell the producer. Dead ones wait for"
            " people: `worker dead list`.",
            PER_MIN,
            [
                Query(per_minute("refused_total", reason="invalid"), "Refused: not a valid job", ORANGE),
                Query(per_minute("refused_total", reason="unknown_version"), "Refused: a version unknown to us", SKY),
                Query(
                    per_minute("jobs_dead_total", reason="dead_letter"),
                    "Dead: out of attempts, or it crashes engines",
                    PURPLE,
                ),
                Query(per_minute("jobs_dead_total", reason="unknown_version"), "Dead: a version unknown to us", VERMILLION),
            ],
            width=8,
        ),
    ],
)


DELIVERY = Row(
    "Do tokens reach the clients in time?",
    [
        lines(
            "Tokens made and not yet written",
            "Tokens that wait in a worker for the server, a few for each running job. A rising line means that the server"
            " is slower than the engine: look at flush and script durations, then at the server.",
            TOKENS,
            [Query(total("publish_buffer_tokens", "instance"), "{{instance}}")],
            width=8,
        ),
        lines(
            "Duration of a flush",
            "Time to write what all running jobs have new. It bounds how late a token can be; some milliseconds are"
            " usual, above 0.1 s clients see text in lumps.",
            SECONDS,
            _quantiles("publish_flush_duration_seconds"),
            width=8,
        ),
        lines(
            "Tokens in a frame",
            "Tokens sampled over frames written. Near 1 is a stream word by word; it grows by itself when the server is"
            " slow, which keeps the engine going.",
            COUNT,
            [
                Query(ratio(rate("generated_tokens_total"), rate("published_frames_total")), "Tokens in a frame", GREEN),
            ],
            width=8,
        ),
    ],
)


LEASES = Row(
    "Are the leases safe?",
    [
        lines(
            "Time since the last renewal",
            "For each worker that holds jobs. It should stay below a quarter of --lease-s (30 s) and a bit; at the whole"
            " of it the worker stops writing and others take its jobs.",
            SECONDS,
            [Query(aggregate("max", selected("lease_age_max_seconds"), "instance"), "{{instance}}")],
        ),
        lines(
            "Duration of a renewal",
            "One call for all jobs of a worker. Well below a second is usual; when it nears a quarter of the lease, the"
            " server is overloaded or far away.",
            SECONDS,
            _quantiles("lease_renew_duration_seconds"),
        ),
    ],
)


SERVER = Row(
    "Is the server well?",
    [
        timeline(
            "Connection to the server",
            "One bar for each worker: whether all of its connections work. While one is down the worker takes nothing and"
            " keeps what it has; `worker doctor` says what is amiss.",
            Query(aggregate("min", selected("redis_connected"), "instance"), "{{instance}}"),
        ),
        lines(
            "Errors of the server, by kind",
            "Calls that were refused or not answered, each minute; the worker comes again with growing pauses. Lost"
            " connections and silence are the network's or the server's; for the others `worker doctor` names the remedy.",
            PER_MIN,
            by_state(ERRORS, lambda kind: per_minute("redis_errors_total", kind=kind)),
        ),
        lines(
            "Slowest scripts",
            "99th percentile of each call as the worker sees it, network included. emit runs for every flush and should"
            " take a few milliseconds; all of them slow together is the server or the network, one alone is its data.",
            SECONDS,
            [Query(quantile(0.99, "redis_script_duration_seconds", "script"), "{{script}}")],
        ),
        lines(
            "Time in calls to the server",
            "Seconds that workers spend in each call, each second. It shows which call to care about; near 1 for one"
            " worker, its threads do nothing but wait for the server.",
            RATIO,
            [Query(rate("redis_script_duration_seconds_sum", "script"), "{{script}}")],
        ),
    ],
)


DETAILS = Row(
    "Details: distributions and frames",
    [
        heat(
            "Calls to the server",
            "Durations of all calls. A second band far above the first is a server that pauses: its fork for a snapshot,"
            " or its disk with appendfsync always.",
            SECONDS,
            buckets("redis_script_duration_seconds"),
            width=8,
        ),
        heat(
            "Flushes",
            "Durations of all flushes. Most should be at the bottom; those at the top are the lumps that clients see.",
            SECONDS,
            buckets("publish_flush_duration_seconds"),
            width=8,
        ),
        lines(
            "Frames written",
            "Frames put into logs and sent to subscribers, by worker. It is the load that streaming puts on the server;"
            " jobs with stream=false write one.",
            PER_S,
            [Query(rate("published_frames_total", "instance"), "{{instance}}")],
            width=8,
        ),
    ],
    is_closed=True,
)
