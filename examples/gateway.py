"""An example of a gateway, not a part of the product: `POST /generate` answers with tokens as server-sent events.

Who hangs up cancels the job. Callers choose what they are given here and no more: no id, no tenant, no priority; put your own
authentication and limits in front. Needs `pip install starlette uvicorn`; then

    uvicorn --app-dir examples gateway:app
    curl -N localhost:8000/generate -d '{"prompt": "Why is the sky blue?", "max_tokens": 64}'
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterable
from dataclasses import asdict
from typing import TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from worker.client import Client
from worker.errors import InvalidJob, QueueFull, ServerUnavailable, SlotmillError

FIELDS = {"prompt", "messages", "max_tokens", "temperature", "top_p", "stop", "seed"}
MAX_QUEUED = 1000
"""Jobs that may wait before callers are told to come again later."""
TIMEOUT_S = 300.0

T = TypeVar("T")
client = Client(os.environ.get("SLOTMILL_REDIS_URL", "redis://127.0.0.1:6379"), os.environ.get("SLOTMILL_QUEUE", "default"))


async def generate(request: Request) -> Response:
    try:
        body = await request.json()
        if not isinstance(body, dict) or body.keys() - FIELDS:
            return refusal(400, f"body: a map of {', '.join(sorted(FIELDS))}")
        job_id = await asyncio.to_thread(client.enqueue, **body, max_queued=MAX_QUEUED)
    except (InvalidJob, ValueError) as error:
        return refusal(400, str(error))
    except QueueFull as full:
        return refusal(429, str(full), {"Retry-After": f"{full.retry_after_s:.0f}"})
    except ServerUnavailable:
        return refusal(503, "the queue cannot be reached; come again later")
    return StreamingResponse(events(job_id), headers={"X-Job-Id": job_id}, media_type="text/event-stream")


def refusal(status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": message}, status, headers)


async def events(job_id: str) -> AsyncIterator[str]:
    stream = client.stream(job_id, TIMEOUT_S)
    try:
        async for delta in in_threads(stream):
            yield event("delta", choice=delta.choice, offset=delta.offset, text=delta.text)
        assert stream.result is not None
        yield event("end", state=stream.result.state, code=stream.result.code, usage=asdict(stream.result.usage))
    except SlotmillError as error:
        yield event("error", message=str(error))
    finally:  # whoever has gone reads no more; of a job that has ended this changes nothing
        asyncio.get_running_loop().run_in_executor(None, client.cancel, job_id)


async def in_threads(iterable: Iterable[T]) -> AsyncIterator[T]:
    """One thread of asyncio's pool for each stream that waits: some tens at a time."""
    iterator = iter(iterable)
    while (item := await asyncio.to_thread(next, iterator, None)) is not None:
        yield item


def event(name: str, **data: object) -> str:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"


app = Starlette(routes=[Route("/generate", generate, methods=["POST"])])
