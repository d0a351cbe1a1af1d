"""Expressions: how a metric of the registry is summed up, for the workers that the dashboard's variables choose.

1. Counters and histograms are rates over `$__rate_interval`, or increases over the whole range shown (`in_range`).
2. Every worker of a queue tells the same numbers of it, so the queue's gauges are a `max`, never a sum (`of_queue`). Queues of
   one name in two jobs of Prometheus, as of two environments, are two queues.
   A worker that does not reach the server repeats what it last knew, so it does not count.
3. A ratio whose whole is 0 has no value, and its panel shows a gap (`ratio`); so has a quantile of nothing.
"""

CHOSEN = 'job=~"$job", instance=~"$instance"'
INFO = 'topk by (job, instance) (1, slotmill_worker_info{queue=~"$queue"})'
"""The one metric that names a worker's queue; one for each address, as in ops/prometheus/rules.yml."""


def selected(metric: str, **labels: str) -> str:
    """The series of a metric."""
    matchers = ", ".join([CHOSEN, *(f'{name}="{value}"' for name, value in labels.items())])
    return f"slotmill_{metric}{{{matchers}}}"


def aggregate(how: str, expression: str, *by: str) -> str:
    """`how` over all series, or over those that share the labels `by`."""
    return f"{how} by ({', '.join(by)}) ({expression})" if by else f"{how}({expression})"


def total(metric: str, *by: str, **labels: str) -> str:
    """A gauge summed over workers."""
    return aggregate("sum", selected(metric, **labels), *by)


def rate(metric: str, *by: str, **labels: str) -> str:
    """A counter's growth per second, over workers."""
    return aggregate("sum", f"rate({selected(metric, **labels)}[$__rate_interval])", *by)


def per_minute(metric: str, **labels: str) -> str:
    """The same per minute, for what is rare."""
    return f"60 * {rate(metric, **labels)}"


def in_range(metric: str, *by: str, **labels: str) -> str:
    """A counter's growth over the range shown."""
    return aggregate("sum", f"increase({selected(metric, **labels)}[$__range])", *by)


def mean(metric: str) -> str:
    """A histogram's mean."""
    return ratio(rate(f"{metric}_sum"), rate(f"{metric}_count"))


def quantile(share: float, metric: str, *by: str, **labels: str) -> str:
    """A histogram's quantile over all workers."""
    return f"histogram_quantile({share}, {rate(f'{metric}_bucket', 'le', *by, **labels)}) >= 0"


def quantile_in_range(share: float, metric: str) -> str:
    """A histogram's quantile over the range shown."""
    return f"histogram_quantile({share}, {in_range(f'{metric}_bucket', 'le')}) >= 0"


def mean_in_range(metric: str) -> str:
    """A histogram's mean over the range shown."""
    return ratio(in_range(f"{metric}_sum"), in_range(f"{metric}_count"))


def buckets(metric: str) -> str:
    """A histogram for a heatmap."""
    return rate(f"{metric}_bucket", "le")


def ratio(part: str, whole: str) -> str:
    """Part over whole; nothing where the whole is 0. A part that is a sum of terms comes in parentheses."""
    return f"{part} / ({whole} > 0)"


def of_queue(metric: str, *by: str, **labels: str) -> str:
    """A gauge that all workers of a queue tell alike, by queue and the labels `by`."""
    return _told_by_all(selected(metric, **labels), *by)


def waiting(**labels: str) -> str:
    """Jobs of each queue and lane that nobody has taken."""
    return _told_by_all(f"{selected('queue_entries', **labels)} - {selected('queue_pending', **labels)}", "priority")


def _told_by_all(expression: str, *by: str) -> str:
    is_true = f"and on (job, instance) {selected('redis_connected')} == 1"
    return aggregate("max", f"({expression} {is_true}) * on (job, instance) group_left (queue) {INFO}", "job", "queue", *by)
