"""Latency: how long do jobs wait, when does the first token come, how fast do the others, and when is the job done?"""

from grafana_foundation_sdk.models import dashboard as models

from source.board import Row, board
from source.palette import BLUE, GREEN, LANES, SKY
from source.panels import COUNT, DASHED, RATIO, SECONDS, TOKENS, TOKENS_PER_S, Query, heat, lines, stack, stats
from source.promql import buckets, in_range, mean, mean_in_range, quantile, quantile_in_range, rate, ratio

SHARES = ((0.5, (2, 4)), (0.95, ()), (0.99, DASHED))
"""Quantiles and how they are drawn: median dotted, p95 solid, p99 dashed."""
QUEUE_S, FIRST_S, WHOLE_S = map(mean, ("queue_time_seconds", "time_to_first_token_seconds", "job_duration_seconds"))


def dashboard() -> models.Dashboard:
    """The dashboard."""
    about = "Time in the queue, to the first token, between tokens, and to the result, by lane; and how long jobs are."
    rows = [GLANCE, QUEUE_TIME, FIRST_TOKEN, BETWEEN, WHOLE, SIZE, DETAILS]
    return board("slotmill-latency", "slotmill / Latency", about, rows)


def _stat(title: str, metric: str, description: str) -> object:
    return stats(title, description, SECONDS, quantile_in_range(0.95, metric), limits=[(None, BLUE)], is_over_range=True)


def _by_lane(title: str, metric: str, description: str) -> object:
    queries = [
        Query(quantile(share, metric, "priority"), f"{{{{priority}}}} p{share * 100:.0f}", None, dash) for share, dash in SHARES
    ]
    return lines(title, description, SECONDS, queries, states=LANES, height=9)


GLANCE = Row(
    "How long does a job take, and where?",
    [
        _stat(
            "Queue time, p95",
            "queue_time_seconds",
            "In the range shown, 95 of 100 jobs were taken sooner than this after they were enqueued. It is set by the"
            " number of workers, not by their speed on one job.",
        ),
        _stat(
            "First token, p95",
            "time_to_first_token_seconds",
            "In the range shown, 95 of 100 jobs had their first token sooner than this, time in the queue included. Much"
            " more than the queue time means that prompts wait inside the engine.",
        ),
        _stat(
            "Between tokens, p95",
            "inter_token_latency_seconds",
            "In the range shown, 95 of 100 tokens came sooner than this after the one before. It is about one step: fewer"
            " --max-slots or a lower --token-budget shorten it, at the price of throughput.",
        ),
        _stat(
            "Whole job, p95",
            "job_duration_seconds",
            "In the range shown, 95 of 100 jobs were done sooner than this after they were enqueued. It is the sum of the"
            " other three over the job's tokens.",
        ),
        stats(
            "Share of time in the queue",
            "In the range shown, mean time in the queue over mean time to the result. Above one half, more workers help"
            " more than faster ones; a bulk queue may well live there.",
            RATIO,
            ratio(mean_in_range("queue_time_seconds"), mean_in_range("job_duration_seconds")),
            limits=[(None, BLUE)],
            is_over_range=True,
        ),
        stats(
            "Tokens each second, one job",
            "The inverse of the mean time between two tokens: how fast text appears to one client. People read 5 to 10"
            " tokens a second.",
            TOKENS_PER_S,
            ratio(in_range("inter_token_latency_seconds_count"), in_range("inter_token_latency_seconds_sum")),
            limits=[(None, GREEN)],
            is_over_range=True,
            decimals=1,
        ),
        stack(
            "A job's life on average",
            "Mean time in the queue, from the claim to the first token, and from there to the result. The tallest layer"
            " is what to work on: workers, then --token-budget and prefix cache, then step duration. Means of jobs that"
            " start, and of others that end, so short ranges are rough.",
            SECONDS,
            [
                Query(QUEUE_S, "In the queue", BLUE),
                Query(f"clamp_min({FIRST_S} - {QUEUE_S}, 0)", "From the claim to the first token", SKY),
                Query(f"clamp_min({WHOLE_S} - {FIRST_S}, 0)", "From the first token to the result", GREEN),
            ],
            width=24,
        ),
    ],
)


QUEUE_TIME = Row(
    "How long do jobs wait to be taken?",
    [
        _by_lane(
            "Time in the queue, by lane",
            "queue_time_seconds",
            "From enqueue to the first claim: median dotted, p95 solid, p99 dashed. The high lane should lie far below"
            " the low one; when they meet, --aging has made them equal because the low one waited so long.",
        ),
        heat(
            "Time in the queue",
            "All lanes. Two bands are usual: jobs that find a free slot, and jobs that wait behind a backlog.",
            SECONDS,
            buckets("queue_time_seconds"),
            height=9,
        ),
    ],
)


FIRST_TOKEN = Row(
    "When does the first token come?",
    [
        _by_lane(
            "Time to the first token, by lane",
            "time_to_first_token_seconds",
            "From enqueue to the first token: median dotted, p95 solid, p99 dashed. What it has above the time in the"
            " queue is the prompt being read: long prompts, a small --token-budget, or no free slot or block.",
        ),
        heat(
            "Time to the first token",
            "All lanes. A band that rises while the queue's does not means that requests wait inside the engine: see"
            " Slots and KV.",
            SECONDS,
            buckets("time_to_first_token_seconds"),
            height=9,
        ),
    ],
)


BETWEEN = Row(
    "How fast do the other tokens come?",
    [
        _by_lane(
            "Time between tokens, by lane",
            "inter_token_latency_seconds",
            "Median dotted, p95 solid, p99 dashed. All lanes share the steps, so they lie together; a p99 far above the"
            " median comes from long prompts in the same step (lower --token-budget) or from preemption.",
        ),
        heat(
            "Time between tokens",
            "All lanes. One narrow band is a steady engine; a second one above it are steps that read prompts; single"
            " high cells are preempted requests that came back.",
            SECONDS,
            buckets("inter_token_latency_seconds"),
            height=9,
        ),
    ],
)


WHOLE = Row(
    "When is the job done?",
    [
        _by_lane(
            "Time to the result, by lane",
            "job_duration_seconds",
            "From enqueue to the stored result: median dotted, p95 solid, p99 dashed. It follows the number of tokens"
            " that jobs ask for as much as the load: compare with the tokens of a job below.",
        ),
        heat(
            "Time to the result",
            "All lanes, all ends. A band at your deadline are jobs that expire.",
            SECONDS,
            buckets("job_duration_seconds"),
            height=9,
        ),
    ],
)


SIZE = Row(
    "How long are the jobs?",
    [
        lines(
            "Tokens of a job",
            "Median and p95 of prompts and answers. Latency that grows with them is no fault of the system; a sudden rise"
            " is a producer that changed.",
            TOKENS,
            [
                Query(quantile(0.5, "job_prompt_tokens"), "Prompt, median", BLUE),
                Query(quantile(0.95, "job_prompt_tokens"), "Prompt, p95", BLUE, DASHED),
                Query(quantile(0.5, "job_generated_tokens"), "Answer, median", GREEN),
                Query(quantile(0.95, "job_generated_tokens"), "Answer, p95", GREEN, DASHED),
            ],
            width=8,
        ),
        heat(
            "Tokens of prompts",
            "Prompt tokens of jobs that ended. Prompts near --max-model-len are refused when they are above it.",
            TOKENS,
            buckets("job_prompt_tokens"),
            width=8,
        ),
        heat(
            "Tokens of answers",
            "Output tokens of jobs that ended. A sharp edge at the top are answers cut at max_tokens.",
            TOKENS,
            buckets("job_generated_tokens"),
            width=8,
        ),
    ],
)


DETAILS = Row(
    "Details: by worker",
    [
        lines(
            "First token, p95, by worker",
            "Workers of one queue should lie together. One above the others has fewer free slots or blocks, or slower"
            " hardware.",
            SECONDS,
            [Query(quantile(0.95, "time_to_first_token_seconds", "instance"), "{{instance}}")],
            width=8,
        ),
        lines(
            "Between tokens, p95, by worker",
            "Workers of one kind should lie together. One above the others has more slots held, longer prompts, or a"
            " slower device.",
            SECONDS,
            [Query(quantile(0.95, "inter_token_latency_seconds", "instance"), "{{instance}}")],
            width=8,
        ),
        lines(
            "Jobs measured, by lane",
            "Ended jobs each second behind the figures above. Quantiles of a handful of jobs jump; believe them where"
            " this is above a few.",
            COUNT,
            [Query(rate("job_duration_seconds_count", "priority"), "{{priority}}")],
            states=LANES,
            width=8,
        ),
    ],
    is_closed=True,
)
