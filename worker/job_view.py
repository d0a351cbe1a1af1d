"""What `worker job show` shows of a job: its hash on the server, and what its result adds, for people and as data for JSON.

Relies on nothing but what it is given. Text that others wrote cannot steer a terminal: `command.plain`.
"""

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from worker.command import plain
from worker.frames import Result, Timings
from worker.queue_view import span

_NUMBERS = ("attempt", "released", "crashes", "n", "enqueued_ms", "started_ms", "finished_ms", "deadline_ms")
"""Fields of the hash that are numbers; the server keeps all as text."""


def job_data(job_id: str, state: str, known: Mapping[str, str], result: Result | None) -> dict[str, Any]:
    """The hash as it is, numbers as such, and why the job did not succeed."""
    numbers = {name: int(known[name]) for name in _NUMBERS if known.get(name, "").isdecimal()}
    why = {"error": result.error} if result and result.error else {}
    return {"id": job_id, "state": state, **known, **numbers, **why}


def job_text(data: Mapping[str, Any], result: Result | None, now_ms: float) -> str:
    """A line for each thing that is known, always in this order. What only the server's scripts need is left out."""
    rows = [(name, plain(str(value))) for name, value in _rows(data, result, now_ms) if value not in (None, "")]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:{width}}  {value}" for name, value in rows)


def _rows(data: Mapping[str, Any], result: Result | None, now_ms: float) -> Iterator[tuple[str, object]]:
    code = data.get("code")
    yield "id", data["id"]
    yield "state", f"{data['state']} ({code})" if code and code != data["state"] else data["state"]
    yield "error", data.get("error")
    yield "cancel", "asked for" if data.get("cancel") and result is None else None
    yield "lane", data.get("stream")
    for name in ("enqueued", "started", "finished"):
        yield name, _when(data.get(f"{name}_ms"), now_ms, is_past=True)
    yield "deadline", _when(data.get("deadline_ms"), now_ms, is_past=False)
    yield "took", _took(result.timings) if result else None
    yield "attempts", _attempts(data)
    yield "worker", data.get("owner")
    yield "model", result.model if result else None
    yield "tokens", _tokens(data, result)
    yield "tenant", data.get("tenant")
    yield "batch", data.get("batch")
    yield "trace", result.traceparent if result else None


def _when(unix_ms: object, now_ms: float, *, is_past: bool) -> str | None:
    """A time here, and how far away it is. What has happened is never to come, whatever the clocks say."""
    if not isinstance(unix_ms, int):
        return None
    age_s = (now_ms - unix_ms) / 1000
    away = f"{span(max(0.0, age_s))} ago" if is_past or age_s >= 0 else f"in {span(-age_s)}"
    try:
        here = datetime.fromtimestamp(unix_ms / 1000).astimezone().isoformat(sep=" ", timespec="seconds")
    except (ValueError, OverflowError, OSError):  # a deadline beyond the calendar
        return away
    return f"{here} ({away})"


def _took(timings: Timings) -> str:
    first = "" if timings.ttft_s is None else f", {timings.ttft_s:.3g} s to the first token"
    return f"{timings.e2e_s:.3g} s: {timings.queued_s:.3g} s in the queue{first}"


def _attempts(data: Mapping[str, Any]) -> str | None:
    if not data.get("attempt"):
        return None
    told = (("given back", data.get("released")), ("with a crash", data.get("crashes")))
    return ", ".join([str(data["attempt"]), *(f"{number} {what}" for what, number in told if number)])


def _tokens(data: Mapping[str, Any], result: Result | None) -> str | None:
    if result is None:
        return f"{data['n']} so far" if data.get("n") else None
    choices = f" in {len(result.choices)} choices" if len(result.choices) > 1 else ""
    return f"{result.usage.completion_tokens} after {result.usage.prompt_tokens} of the prompt{choices}"
