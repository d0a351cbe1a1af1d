"""Fleet: is everything well, who works, what do they get done, and on what?"""

from collections.abc import Callable

from grafana_foundation_sdk.models import dashboard as models

from source.board import Row, board
from source.palette import AGES, BLUE, ENDS, GREEN, GREY, MEMORY, ORANGE, PURPLE, SKY, VERMILLION, WORKERS
from source.panels import (
    BYTES,
    COUNT,
    PER_MIN,
    PER_S,
    RATIO,
    SECONDS,
    TOKENS_PER_S,
    Column,
    Query,
    by_state,
    lines,
    rows_of,
    stack,
    stats,
    timeline,
)
from source.promql import CHOSEN, aggregate, in_range, of_queue, per_minute, rate, ratio, selected, total

SLOTS_OF_WORKER = (
    "/d/slotmill-slots?${datasource:queryparam}&${job:queryparam}&${queue:queryparam}"
    "&var-instance=${__value.text}&${__url_time_range}"
)
SUCCEEDED = in_range("jobs_finished_total", state="succeeded")
STEPPED = selected("last_step_timestamp_seconds")
INFO = aggregate("max", selected("worker_info"), "instance", "queue", "gpu")
MODEL = aggregate("max", selected("model_info"), "instance", "model", "dtype")


def _accepted(growth: Callable[..., str]) -> str:
    """Ended jobs without those that clients cancelled and those refused as bad input; `growth` is `rate` or `in_range`."""
    ended, cancelled = growth("jobs_finished_total"), growth("jobs_finished_total", state="cancelled")
    return f"({ended} - {cancelled} - {growth('refused_total')})"


BAD_SHARE = ratio(
    f"({rate('jobs_finished_total', state='failed')} + {rate('jobs_finished_total', state='expired')}"
    f" + {rate('jobs_finished_total', state='dead')} - {rate('refused_total')})",
    _accepted(rate),
)


def dashboard() -> models.Dashboard:
    """The dashboard."""
    about = "Every worker with its state, model and load; what the fleet gets done, and what it has to do it with."
    return board("slotmill-fleet", "slotmill / Fleet", about, [GLANCE, WHO, WORK, HARDWARE, DETAILS])


GLANCE = Row(
    "Is everything well?",
    [
        stats(
            "Alerts firing",
            "Alerts of ops/prometheus/alerts.yml that fire now. Prometheus lists them under /alerts, and ops/runbook.md"
            " has an entry for each.",
            COUNT,
            'count(ALERTS{alertname=~"Slotmill.+", alertstate="firing"}) or vector(0)',
            limits=[(None, GREEN), (1, VERMILLION)],
            width=3,
        ),
        stats(
            "Workers that serve",
            "Workers whose model is loaded and whose engine steps. It should be as many as you started; at 0 Prometheus"
            " scrapes none that serves, and the other figures are the last that were known.",
            COUNT,
            f"{total('worker_state', state='serving')} or vector(0)",
            limits=[(None, VERMILLION), (1, GREEN)],
            width=3,
        ),
        stats(
            "Workers not scraped",
            "Workers seen in the range shown whose last scrape failed. After a scale-down that is right until they leave"
            " the targets; otherwise the process or its host is gone.",
            COUNT,
            f"count(up{{{CHOSEN}}} == 0) or vector(0)",
            limits=[(None, GREEN), (1, VERMILLION)],
            width=3,
        ),
        stats(
            "Slots held",
            "Slots held by a request, over all slots of the fleet. With a backlog above 90 %; less has a reason that"
            " Slots and KV shows.",
            RATIO,
            ratio(total("slots_active"), total("slots")),
            limits=[(None, SKY)],
            width=3,
        ),
        stats(
            "Tokens made",
            "Tokens sampled each second by all workers. Compare it with the same hour yesterday; at full slots a fall is"
            " slower steps.",
            TOKENS_PER_S,
            f"{rate('generated_tokens_total')} or vector(0)",
            limits=[(None, GREEN)],
            width=3,
        ),
        stats(
            "Accepted jobs that succeeded",
            "In the range shown, without those that clients cancelled and those refused as bad input. The rest failed,"
            " expired or died: it is your error budget, and `worker dead list` and the results say why.",
            RATIO,
            f"clamp_max({ratio(SUCCEEDED, _accepted(in_range))}, 1)",
            limits=[(None, VERMILLION), (0.99, ORANGE), (0.999, GREEN)],
            is_over_range=True,
            decimals=2,
            width=3,
        ),
        stats(
            "Oldest job waits",
            "Age of the oldest job that nobody has taken; it turns orange and red where the alerts for the normal and the"
            " low lane do. When it only grows, the fleet is too small or paused; see Queue and delivery.",
            SECONDS,
            aggregate("max", of_queue("queue_oldest_age_seconds", "priority")),
            limits=AGES,
            width=3,
        ),
        stats(
            "Dead jobs",
            "Jobs set aside for people. `worker dead list` says why; mend the cause, then `worker dead replay`.",
            COUNT,
            aggregate("sum", of_queue("dead_entries")),
            limits=[(None, GREEN), (1, PURPLE)],
            width=3,
        ),
    ],
)


COLUMNS = [
    Column("Worker", "none", INFO, label="instance"),
    Column(
        "State",
        "none",
        aggregate("max", f"{selected('worker_state')} == 1", "instance", "state"),
        label="state",
        mappings=WORKERS,
    ),
    Column("Queue", "none", INFO, label="queue"),
    Column("Device", "none", INFO, label="gpu"),
    Column("Model", "none", MODEL, label="model"),
    Column("Type", "none", MODEL, label="dtype"),
    Column("Version", "none", aggregate("max", selected("build_info"), "instance", "version"), label="version"),
    Column("Slots", COUNT, total("slots", "instance")),
    Column("Held", RATIO, ratio(total("slots_active", "instance"), total("slots", "instance"))),
    Column("KV used", RATIO, aggregate("max", selected("kv_usage_ratio"), "instance")),
    Column("Tokens made", TOKENS_PER_S, rate("generated_tokens_total", "instance")),
    Column("Last step", SECONDS, aggregate("max", f"timestamp({STEPPED}) - ({STEPPED} > 0)", "instance")),
    Column("Loaded in", SECONDS, aggregate("max", selected("model_load_seconds"), "instance")),
]

WHO = Row(
    "Who works, and on what?",
    [
        rows_of(
            "Workers",
            "One row for each worker that is scraped now; its name leads to its slots. Rows of one queue should be alike:"
            " look at those that do not serve, hold few slots beside a backlog, made their last step long ago, took long to"
            " load (keep the models on a volume), or run another version.",
            COLUMNS,
            link=SLOTS_OF_WORKER,
        ),
        stack(
            "Workers by state",
            "Loading lasts as long as the model takes, draining at most --drain-s. Stalled is an engine that makes no"
            " step: the worker kills it and starts it again; when that repeats, its log says why.",
            COUNT,
            by_state(WORKERS, lambda state: total("worker_state", state=state)),
        ),
        timeline(
            "Engines",
            "One bar for each engine: whether it serves. A worker goes on with the engines that are left; gaps that"
            " repeat are crashes, whose reason is in the log, or jobs that kill it, which end up in `worker dead list`.",
            Query(aggregate("min", selected("engine_up"), "instance", "engine"), "{{instance}}, engine {{engine}}"),
        ),
    ],
)


WORK = Row(
    "What do they get done?",
    [
        lines(
            "Tokens in and out",
            "Prompt tokens taken in, tokens sampled, and tokens taken over from earlier attempts instead of being"
            " computed again, each second. Resumed ones appear after crashes and deployments, and save that much work.",
            TOKENS_PER_S,
            [
                Query(rate("generated_tokens_total"), "Sampled", GREEN),
                Query(rate("prompt_tokens_total"), "Prompts", BLUE),
                Query(rate("resumed_tokens_total"), "Resumed", ORANGE),
            ],
        ),
        lines(
            "Tokens made, by worker",
            "Tokens sampled each second by each worker. Equal hardware should lie together while there is a backlog.",
            TOKENS_PER_S,
            [Query(rate("generated_tokens_total", "instance"), "{{instance}}")],
        ),
        stack(
            "Jobs ended, by state",
            "Ends each minute. Green should dominate. Failed: bad input or an engine's fault, named in the result."
            " Expired: too late. Dead: set aside for people.",
            PER_MIN,
            by_state(ENDS, lambda state: per_minute("jobs_finished_total", state=state)),
        ),
        lines(
            "Why answers ended",
            "Reasons each second. Stop: the model or a stop text ended it. Length: max_tokens cut it; when that is most"
            " of them, producers ask for too few tokens.",
            PER_S,
            [
                Query(rate("jobs_finished_total", finish_reason="stop"), "Stop: the model was done", GREEN),
                Query(rate("jobs_finished_total", finish_reason="length"), "Length: max_tokens reached", SKY),
                Query(rate("jobs_finished_total", finish_reason="error"), "Error", VERMILLION),
                Query(rate("jobs_finished_total", finish_reason="cancelled"), "Cancelled", GREY),
                Query(rate("jobs_finished_total", finish_reason="expired"), "Expired", ORANGE),
            ],
        ),
    ],
)


HARDWARE = Row(
    "What do they have to work with?",
    [
        stack(
            "GPU memory by use",
            "All GPUs of all workers; zero on a CPU. Most of it should be weights and KV cache; much that is free at full"
            " KV blocks could be KV cache: raise --kv-memory. Growth of other is a leak.",
            BYTES,
            by_state(MEMORY, lambda kind: total("gpu_memory_bytes", kind=kind)),
            width=24,
        ),
    ],
)


DETAILS = Row(
    "Details: starts and budget",
    [
        lines(
            "Engine starts",
            "Starts of engines in the last few scrapes, marked in every other panel, too. One for each worker at a"
            " deployment; more are crashes.",
            COUNT,
            [
                Query(
                    aggregate("sum", f"increase({selected('engine_starts_total')}[$__rate_interval])", "instance", "engine"),
                    "{{instance}}, engine {{engine}}",
                )
            ],
            width=8,
        ),
        lines(
            "Accepted jobs that did not succeed",
            "Share of the jobs that ended, without cancelled and refused ones. It should be zero; at a hundredth"
            " the budget of 99.9 % is gone in a tenth of its time.",
            RATIO,
            [Query(f"clamp_min({BAD_SHARE}, 0)", "Did not succeed", PURPLE)],
            width=8,
        ),
        lines(
            "Dead jobs over time",
            "Jobs set aside for people, by queue. `worker dead list --queue` says why; a job that was replayed or dropped"
            " leaves it.",
            COUNT,
            [Query(of_queue("dead_entries"), "{{queue}}")],
            width=8,
        ),
    ],
    is_closed=True,
)
