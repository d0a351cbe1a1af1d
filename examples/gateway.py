"""An example of a gateway, not a part of the product: `POST /generate` answers with tokens as server-sent events.

Who hangs up cancels the job, and who waits holds no thread. Callers choose what they are given here and no more: no id, no
tenant, no priority; put your own authentication and limits in front. Needs `pip install starlette uvicorn`; then

    uvicorn --app-dir examples gateway:app
    curl -N localhost:8000/generate -d '{"prompt": "Why is the sky blue?", "max_tokens": 64}'
"""

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator
from dataclasses import asdict

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from worker.client import AsyncClient
from worker.errors import InvalidJob, QueueFull, ServerUnavailable, SlotmillError, WaitTimeout

FIELDS = {"prompt", "messages", "max_tokens", "temperature", "top_p", "stop", "seed"}
MAX_QUEUED = 1000
"""Jobs that may wait before callers are told to come again later."""
TIMEOUT_S = 300.0
AWAY = "the queue cannot be reached; come again later"
"""What callers are told instead of an error that has our addresses in it."""

client = AsyncClient.from_env()


async def generate(request: Request) -> Response:
    try:
        body = await request.json()
        if not isinstance(body, dict) or body.keys() - FIELDS:
            return refusal(400, f"body: a map of {', '.join(sorted(FIELDS))}")
        job_id = await client.enqueue(**body, max_queued=MAX_QUEUED)
    except (InvalidJob, ValueError) as error:
        return refusal(400, str(error))
    except QueueFull as full:
        return refusal(429, "too many are waiting; come again later", {"Retry-After": str(math.ceil(full.retry_after_s))})
    except ServerUnavailable:
        return refusal(503, AWAY)
    return StreamingResponse(events(job_id), headers={"X-Job-Id": job_id}, media_type="text/event-stream")


def refusal(status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": message}, status, headers)


async def events(job_id: str) -> AsyncIterator[str]:
    stream = client.stream(job_id, TIMEOUT_S)
    try:
        async for delta in stream:
            yield event("delta", choice=delta.choice, offset=delta.offset, text=delta.text)
        assert stream.result is not None
        yield event("end", state=stream.result.state, code=stream.result.code, usage=asdict(stream.result.usage))
    except WaitTimeout:
        yield event("error", message=f"the answer was not whole in {TIMEOUT_S:g} s")
    except ServerUnavailable:
        yield event("error", message=AWAY)
    except SlotmillError as error:
        yield event("error", message=str(error))
    finally:  # whoever has gone reads no more; shielded, since this task may be cancelled once more
        if stream.result is None:
            with contextlib.suppress(SlotmillError):
                await asyncio.shield(client.cancel(job_id))


def event(name: str, **data: object) -> str:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"


app = Starlette(routes=[Route("/generate", generate, methods=["POST"])])
