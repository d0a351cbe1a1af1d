"""OpenAI's request as fields of a job: what is renamed, what changes nothing, what cannot be served.

Relies on `wire` for the values of a job's fields. Leaves the line around the request to `lines`.

1. A field is served, or is known to change no answer, or is refused: nothing that was asked for is passed over in silence.
2. null is as if left out.
3. A refusal names the field as the request wrote it.
"""

import difflib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from worker.errors import InvalidJob
from worker.wire import parse_body

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

_SERVED = {
    name: name
    for name in (
        *("model", "temperature", "top_p", "seed", "n", "stop", "presence_penalty", "frequency_penalty", "logit_bias"),
        *("response_format", "max_tokens", "logprobs"),
        *("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids"),  # vLLM's
    )
} | {"include_stop_str_in_output": "include_stop"}
_SERVED_CHAT = _SERVED | {"messages": "messages", "max_completion_tokens": "max_tokens", "top_logprobs": "logprobs"}
_SERVED_COMPLETIONS = _SERVED | {"prompt": "prompt"}
_UNUSED = frozenset(
    ("user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
)
_OFF: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "stream": (False,),
        "stream_options": (),
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "parallel_tool_calls": (True, False),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "reasoning_effort": (),
        "verbosity": (),
        "web_search_options": (),
        "echo": (False,),
        "suffix": ("",),
        "best_of": (),
        "use_beam_search": (False,),
    }
)
"""What is not served, and the values of it that ask for nothing."""
_MESSAGE_UNUSED = ("name",)
_MESSAGE_OFF = ("refusal", "audio", "function_call", "tool_calls", "tool_call_id", "annotations", "reasoning_content")
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class RefusedError(ValueError):
    """A request that cannot be served: OpenAI's `code`, one line, and the field."""

    def __init__(self, code: str, param: str, problem: str) -> None:
        super().__init__(f"{param}: {problem}")
        self.code = code
        self.param = param


def job_fields(endpoint: str, request: Mapping[str, Any], max_tokens: int) -> dict[str, Any]:
    """The fields of a job that asks for the same; `max_tokens` where the request has no limit. `RefusedError`, `InvalidJob`."""
    given = {name: value for name, value in request.items() if value is not None}
    served = _SERVED_CHAT if endpoint == CHAT else _SERVED_COMPLETIONS
    for name, value in given.items():
        if name not in served and name not in _UNUSED:
            _check_unserved(name, value, given, served)
    fields = {served[name]: value for name, value in given.items() if name in served}
    fields.setdefault("max_tokens", max_tokens)
    fields |= _chat(given) if endpoint == CHAT else _completion(given)
    if fields.get("top_k") == -1:  # off, as vLLM writes it
        fields["top_k"] = 0
    return {name: value for name, value in fields.items() if value is not None}


def check_job(fields: Mapping[str, Any], request: Mapping[str, Any]) -> None:
    """`RefusedError` with the request's name of the field that a worker would refuse."""
    try:
        parse_body(fields)
    except InvalidJob as fault:
        names = {name for name, meant in (_SERVED_CHAT | _SERVED_COMPLETIONS).items() if meant == fault.field} & request.keys()
        name = "prompt" if fault.field == "prompt_token_ids" else next(iter(sorted(names, key=len, reverse=True)), fault.field)
        raise RefusedError("invalid_value", name, f"{fault.value}: {fault.limit}") from None


def _check_unserved(name: str, value: Any, given: Mapping[str, Any], served: Mapping[str, str]) -> None:
    if name == "best_of" and value == given.get("n", 1):
        return
    if name in _OFF:
        if any(type(value) is type(off) and value == off for off in _OFF[name]):
            return
        raise RefusedError("unsupported_parameter", name, "not served; leave it out")
    known = (*served, *_UNUSED, *_OFF)
    close = difflib.get_close_matches(name, known, n=1)
    advice = f"did you mean {close[0]}?" if close else f"known are {', '.join(served)}"
    raise RefusedError("unknown_parameter", shown(name), f"unknown parameter; {advice}")


def _chat(given: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {"messages": _messages(given.get("messages")), "logprobs": _chat_logprobs(given)}
    if "max_completion_tokens" in given and "max_tokens" in given:
        raise RefusedError("invalid_value", "max_tokens", "excludes max_completion_tokens; leave one of them out")
    return fields


def _chat_logprobs(given: Mapping[str, Any]) -> Any:
    wanted, num_top = given.get("logprobs", False), given.get("top_logprobs")
    if type(wanted) is not bool:
        raise RefusedError("invalid_type", "logprobs", "must be true or false; how many stands in top_logprobs")
    if num_top and not wanted:
        raise RefusedError("invalid_value", "top_logprobs", "needs logprobs: true")
    return (0 if num_top is None else num_top) if wanted else None


def _completion(given: Mapping[str, Any]) -> dict[str, Any]:
    prompt = given.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        raise RefusedError("invalid_value", "prompt", f"{len(prompt)} prompts in one line; give each a line of its own")
    if prompt is None:
        raise RefusedError("missing_required_parameter", "prompt", "missing; give a text or a list of token ids")
    return {"prompt": None, "prompt_token_ids": prompt} if isinstance(prompt, list) else {"prompt": prompt}


def _messages(messages: Any) -> list[dict[str, str]]:
    if messages is None:
        raise RefusedError("missing_required_parameter", "messages", "missing; give a list of {role, content}")
    if type(messages) is not list or not messages:
        raise RefusedError("invalid_type", "messages", "must be a list of at least one {role, content}")
    return [_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _message(where: str, message: Any) -> dict[str, str]:
    if type(message) is not dict:
        raise RefusedError("invalid_type", where, "must be a map {role, content}")
    for name, value in message.items():
        if name in _MESSAGE_OFF and value:
            raise RefusedError("unsupported_parameter", f"{where}.{name}", "not served; leave it out")
        if name not in ("role", "content", *_MESSAGE_UNUSED, *_MESSAGE_OFF):
            raise RefusedError("unknown_parameter", f"{where}.{shown(name)}", "unknown; known are role, content, name")
    role = message.get("role")
    if type(role) is not str or role not in _ROLES:
        given = f"{shown(role)}: " if type(role) is str else ""
        raise RefusedError("invalid_value", f"{where}.role", f"{given}must be one of {', '.join(_ROLES)}")
    return {"role": _ROLES[role], "content": _content(f"{where}.content", message.get("content"))}


def _content(where: str, content: Any) -> str:
    if type(content) is str:
        return content
    if type(content) is not list or not content:
        raise RefusedError("invalid_type", where, "must be text, or a list of parts of type text")
    return "".join(_part(f"{where}[{index}]", part) for index, part in enumerate(content))


def _part(where: str, part: Any) -> str:
    if type(part) is not dict or part.get("type") != "text":
        raise RefusedError("unsupported_value", where, 'must be {"type": "text", "text": ...}; other parts are not served')
    if type(part.get("text")) is not str or part.keys() - {"type", "text", "cache_control"}:
        raise RefusedError("invalid_value", where, "must have a text, and nothing beside it")
    return str(part["text"])


def shown(word: str) -> str:
    """A word that others wrote, for a message: on one line, and not long."""
    return repr(word[:64])[1:-1]
