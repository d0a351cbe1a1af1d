"""What delivery costs: claims from short and long queues.

    python -m bench.delivery [--depths 10000,1000000] [--claims N] [--redis-url URL] [--json OUT]

A queue of each depth, of tiny bodies as any producer adds them, on one server; then claims of one job and of 32 jobs are timed
in turns over the queues, so that a wandering clock meets them all alike, and each claim is ended before the next. Without a URL
a server is started for it.
"""

import contextlib
import statistics
import time
from pathlib import Path

import click
import redis

from bench.record import json_option, record, save
from worker.broker import Broker
from worker.claims import Delivery, Finish
from worker.connection import connect
from worker.embedded import EmbeddedServer

BATCH = 1_000
BODY = b"\x81\xa6prompt\xa1w"


@click.command(help=__doc__)
@click.option("--depths", default="10000,1000000", show_default=True, help="entries in each queue")
@click.option("--claims", type=int, default=400, show_default=True, help="timed claims of each kind from each queue")
@click.option("--redis-url", default=None, help="a server to use; it is left as it was")
@json_option
def main(depths: str, claims: int, redis_url: str | None, json_path: Path | None) -> None:
    with contextlib.ExitStack() as stack:
        url = redis_url or stack.enter_context(EmbeddedServer()).url
        client = stack.enter_context(connect(url, timeout_s=60.0))
        queues = {int(depth): filled(client, f"bench-{depth}", int(depth)) for depth in depths.split(",")}
        made = record("delivery", claims={free: measured(queues, free, claims) for free in (1, 32)})
        for broker in queues.values():
            client.unlink(*client.scan_iter(f"{broker.keys.prefix}*", count=10_000))
    for free, medians in made["claims"].items():
        shown = ", ".join(f"{1e3 * seconds:.3f} ms at {depth:,}" for depth, seconds in medians.items())
        ratio = max(medians.values()) / min(medians.values())
        click.echo(f"claims of {free}: {shown}; ratio {ratio:.3f}")
    save(made, json_path)


def filled(client: redis.Redis, queue: str, depth: int) -> Broker:
    """A queue with so many entries."""
    broker = Broker(client, queue, "bench")
    broker.ensure_group()
    lane = broker.keys.lane("normal")
    for start in range(0, depth, BATCH):
        with client.pipeline(transaction=False) as pipe:
            for _ in range(min(BATCH, depth - start)):
                pipe.xadd(lane, {"m": BODY})
            pipe.execute()
    return broker


def measured(queues: dict[int, Broker], free: int, claims: int) -> dict[int, float]:
    """Median seconds of a claim from each queue."""
    seconds: dict[int, list[float]] = {depth: [] for depth in queues}
    for _ in range(claims):
        for depth, broker in queues.items():
            started = time.perf_counter()
            jobs = broker.fetch(free)
            seconds[depth].append(time.perf_counter() - started)
            assert len(jobs) == free, "the queue ran dry: ask for fewer claims or a deeper queue"
            broker.finish([ended(job) for job in jobs])
    return {depth: statistics.median(taken) for depth, taken in seconds.items()}


def ended(job: Delivery) -> Finish:
    """The shortest end a job can have."""
    return Finish(job, "succeeded", "", b"", b"", result_ttl_s=60)


if __name__ == "__main__":
    main()
