"""A job's result as the body of OpenAI's response: a chat completion, a completion, or an error.

Pure. Leaves the line around it to `lines`.
"""

import time
from collections.abc import Iterable, Sequence
from typing import Any

from engine.messages import TokenLogprobs
from worker.batch.fields import CHAT
from worker.frames import Choice, Result, Usage

LEAST_LOGPROB = -9999.0
"""What OpenAI writes for a token that cannot come: JSON has no infinity."""
REFUSED = ("invalid", "unknown_version")


def answer_body(result: Result, endpoint: str) -> dict[str, Any]:
    """Of a job that succeeded. Tokens are written as `token_id:N`, as the result holds no other name of them."""
    is_chat = endpoint == CHAT
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{result.id}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": result.model or "",
        "choices": [(_chat_choice if is_chat else _choice)(choice) for choice in result.choices],
        "usage": _usage(result.usage),
        "system_fingerprint": None,
    }


def error_body(message: str, code: str | None, param: str | None, status: int) -> dict[str, Any]:
    """Of a request that was refused or failed."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def status_of(result: Result) -> int:
    """HTTP's."""
    if result.state == "succeeded":
        return 200
    return 400 if result.state == "failed" and result.code in REFUSED else 500


def _chat_choice(choice: Choice) -> dict[str, Any]:
    return {
        "index": choice.index,
        "message": {"role": "assistant", "content": choice.text, "refusal": None},
        "logprobs": None if choice.logprobs is None else {"content": _chat_logprobs(choice), "refusal": None},
        "finish_reason": choice.finish_reason,
    }


def _chat_logprobs(choice: Choice) -> list[dict[str, Any]]:
    assert choice.logprobs is not None
    return [
        _token(token_id, found.logprob) | {"top_logprobs": [_token(*pair) for pair in found.top]}
        for token_id, found in zip(choice.token_ids, choice.logprobs, strict=False)
    ]


def _token(token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": _name(token_id), "logprob": max(logprob, LEAST_LOGPROB), "bytes": None}


def _choice(choice: Choice) -> dict[str, Any]:
    logprobs = None if choice.logprobs is None else _logprobs(choice.token_ids, choice.logprobs)
    return {"index": choice.index, "text": choice.text, "logprobs": logprobs, "finish_reason": choice.finish_reason}


def _logprobs(token_ids: Iterable[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """Without `text_offset`: where a token's text begins is not in a result."""
    return {
        "tokens": [_name(token_id) for token_id in token_ids],
        "token_logprobs": [max(found.logprob, LEAST_LOGPROB) for found in logprobs],
        "top_logprobs": [{_name(token_id): max(value, LEAST_LOGPROB) for token_id, value in found.top} for found in logprobs],
        "text_offset": None,
    }


def _name(token_id: int) -> str:
    return f"token_id:{token_id}"


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
