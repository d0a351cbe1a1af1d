"""Commands around single jobs: `worker enqueue` and `worker job show/tail/cancel/result`.

Relies on the client library for everything that is said to the server. stdout carries ids, text or JSON and nothing else, so
that it can be piped; what went wrong is on stderr.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import IO, Any

import click

from worker.broker import Broker, connect
from worker.client import Client
from worker.command import CANCELLED, FAILED, SECONDS, Command, Group, fail, option, queue_options
from worker.errors import InvalidOption
from worker.frames import Result
from worker.keys import LANES
from worker.wire import encode_body, parse_body

SAMPLING = ("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "seed", "ignore_eos", "include_stop", "model")
"""Options that are fields of the job body under the same name."""


@click.command(cls=Command)
@click.argument("prompts", metavar="[PROMPT]...", nargs=-1)
@queue_options
@click.option("-f", "--file", type=click.File("rb"), help="One prompt on each line; - is standard input.")
@option("--follow", is_flag=True, help="Stream each answer, in order.")
@option("--wait", is_flag=True, help="Print each answer when it is complete, in order.")
@option("--json", "as_json", is_flag=True, help="Print JSON lines: ids, or deltas and results.")
@option("--timeout-s", type=SECONDS, default=None, help="Seconds to wait for an answer. Default: no limit.")
@option("--chat", is_flag=True, help="Send each prompt as a user's message, through the model's chat template.")
@option("--system", default=None, help="System message; implies --chat.")
@click.option("--model", default=None, help="Name of the model that must answer.")
@option("--priority", type=click.Choice(LANES), default="normal", help="Lane of the queue.")
@option("--max-tokens", type=int, default=256, help="Most tokens of an answer.")
@option("--min-tokens", type=int, default=0, help="Tokens before an answer may end by itself.")
@option("--temperature", type=float, default=1.0, help="0 takes the likeliest token.")
@option("--top-k", type=int, default=0, help="Draw from the k likeliest tokens; 0 from all.")
@option("--top-p", type=float, default=1.0, help="Draw from the likeliest tokens that make up this probability.")
@option("--seed", type=int, default=None, help="The same seed draws the same answer. Default: a new one for each job.")
@click.option("--stop", multiple=True, help="Text that ends an answer; may be given several times.")
@option("--ignore-eos", is_flag=True, help="Go on after the model's end-of-text token.")
@option("--include-stop", is_flag=True, help="Keep the stop text in the answer.")
@option("--deadline-s", type=SECONDS, default=None, help="Seconds from now after which a job expires.")
@click.option("--id", "job_id", default=None, help="Id of the job, for one prompt; the same id again adds nothing.")
def enqueue(prompts: tuple[str, ...], *, redis_url: str, queue: str, **options: Any) -> None:
    """Add one job for each PROMPT and print its id, or its answer."""
    texts = [*prompts, *_lines(options["file"])]
    if not texts:
        raise InvalidOption("enqueue: no prompt; give one as an argument, or a file with -f")
    if options["job_id"] and len(texts) > 1:
        raise InvalidOption(f"--id: {options['job_id']}: {len(texts)} prompts; an id is for one")
    bodies = [_body(text, options) for text in texts]
    for body in bodies:  # all before the first is added
        parse_body(body)
        encode_body(body)
    with Client(redis_url, queue) as client:
        job_ids = [_added(client, body, options) for body in bodies]
        if options["follow"] or options["wait"]:
            _show_answers(client, job_ids, options["timeout_s"], follow=options["follow"], as_json=options["as_json"])


def _added(client: Client, body: dict[str, Any], options: dict[str, Any]) -> str:
    """Add a job. Its id is printed at once, unless its answer will be: what follows may fail."""
    job_id = client.enqueue(**body)
    if not options["follow"] and not options["wait"]:
        click.echo(json.dumps({"id": job_id}) if options["as_json"] else job_id)
    return job_id


@click.group(cls=Group)
def job() -> None:
    """Look at one job, follow it, end it."""


@job.command()
@click.argument("job_id", metavar="ID")
@queue_options
@option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(job_id: str, *, redis_url: str, queue: str, as_json: bool) -> None:
    """Print what the server knows of a job."""
    with connect(redis_url) as server, Client(server, queue) as client:
        known = {"id": job_id, "state": client.state(job_id)} | Broker(server, queue, "client").job(job_id)
    if as_json:
        click.echo(json.dumps(known))
    else:
        width = max(map(len, known))
        click.echo("\n".join(f"{name:{width}}  {value}" for name, value in known.items()))


@job.command()
@click.argument("job_id", metavar="ID")
@queue_options
@option("--json", "as_json", is_flag=True, help="Print JSON lines.")
@option("--timeout-s", type=SECONDS, default=None, help="Seconds to wait for the end. Default: no limit.")
def tail(job_id: str, *, redis_url: str, queue: str, as_json: bool, timeout_s: float | None) -> None:
    """Stream a job's answer from its first token to its end."""
    with Client(redis_url, queue) as client:
        _show_answers(client, [job_id], timeout_s, follow=True, as_json=as_json)


@job.command()
@click.argument("job_id", metavar="ID")
@queue_options
def cancel(job_id: str, *, redis_url: str, queue: str) -> None:
    """Ask for a job's end, and print the state that it was in."""
    with Client(redis_url, queue) as client:
        click.echo(client.cancel(job_id))


@job.command()
@click.argument("job_id", metavar="ID")
@queue_options
@option("--json", "as_json", is_flag=True, help="Print JSON.")
@option("--timeout-s", type=SECONDS, default=None, help="Seconds to wait for the end. Default: no limit.")
def result(job_id: str, *, redis_url: str, queue: str, as_json: bool, timeout_s: float | None) -> None:
    """Wait for a job's end and print its answer."""
    with Client(redis_url, queue) as client:
        _show_answers(client, [job_id], timeout_s, follow=False, as_json=as_json)


def _lines(file: IO[bytes] | None) -> Iterator[str]:
    """The lines of a file that hold something; a byte-order mark is not text."""
    for number, line in enumerate(file or (), 1):
        try:
            text = line.decode()
        except UnicodeDecodeError:
            raise InvalidOption(f"--file: {getattr(file, 'name', '-')}, line {number}: not UTF-8; convert the file") from None
        if prompt := text.lstrip("\ufeff").rstrip("\r\n"):
            yield prompt


def _body(text: str, options: dict[str, Any]) -> dict[str, Any]:
    """The client's arguments for one prompt."""
    body = {name: options[name] for name in SAMPLING if options[name] is not None}
    body |= {"stop": list(options["stop"]), "priority": options["priority"], "id": options["job_id"]}
    if options["deadline_s"] is not None:
        body["deadline_ms"] = int((time.time() + options["deadline_s"]) * 1000)
    if not options["chat"] and not options["system"]:
        return body | {"prompt": text}
    system = [{"role": "system", "content": options["system"]}] if options["system"] else []
    return body | {"messages": [*system, {"role": "user", "content": text}]}


def _show_answers(client: Client, job_ids: list[str], timeout_s: float | None, *, follow: bool, as_json: bool) -> None:
    """Print the answers in order. Leaves with 1 when a job did not succeed, with 3 at Ctrl-C; the jobs themselves go on."""
    num_failed = 0
    try:
        for job_id in job_ids:
            show_one = _follow if follow else _wait
            num_failed += show_one(client, job_id, timeout_s, as_json=as_json).state != "succeeded"
    except KeyboardInterrupt:
        click.echo()
        fail(f"left; the jobs go on: end one with `worker job cancel {job_ids[0]}`", CANCELLED)
    if num_failed:
        raise click.exceptions.Exit(FAILED)


def _follow(client: Client, job_id: str, timeout_s: float | None, *, as_json: bool) -> Result:
    stream = client.stream(job_id, timeout_s)
    for delta in stream:
        if as_json:
            click.echo(json.dumps({"id": job_id} | asdict(delta)))
        elif delta.is_restart:
            click.echo(f"\nworker: job {job_id}: starts again at character {delta.offset}", err=True)
        else:
            click.echo(delta.text, nl=False)
    assert stream.result is not None
    if as_json:
        click.echo(json.dumps(stream.result.to_dict()))
    else:
        click.echo()
        _explain(stream.result)
    return stream.result


def _wait(client: Client, job_id: str, timeout_s: float | None, *, as_json: bool) -> Result:
    ended = client.result(job_id, timeout_s)
    if as_json:
        click.echo(json.dumps(ended.to_dict()))
    else:
        click.echo("\n".join(choice.text for choice in ended.choices))
        _explain(ended)
    return ended


def _explain(ended: Result) -> None:
    """Why a job did not succeed, on stderr."""
    if ended.state != "succeeded":
        why = ": ".join(filter(None, (ended.state, ended.code if ended.code != ended.state else None, ended.error)))
        click.echo(f"worker: job {ended.id}: {why}", err=True)
