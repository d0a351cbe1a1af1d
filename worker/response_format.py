"""What `response_format` of a job may be, and the grammar that it means to the engine.

Relies on `worker/wire.py` having checked that the value is plain data. Leaves to the engine whether it can serve what is asked.
"""

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from engine.request import Grammar, GrammarKind
from worker.codec import MalformedError

MAX_GRAMMAR_BYTES = 64 << 10
"""Of a schema, written as JSON, or of a regex."""


def parse(value: object) -> Grammar | None:
    """The grammar that `value` asks for, None for free text. `MalformedError` with the limit it breaks."""
    wanted: Mapping[str, Any] = value if type(value) is dict else {}
    kind = wanted.get("type")
    if type(kind) is not str or kind not in _FORMATS:
        raise MalformedError(f"a map whose type is one of {', '.join(_FORMATS)}")
    return _FORMATS[kind](wanted)


def _json_schema(value: Mapping[str, Any]) -> Grammar:
    """`schema` beside the type, or as OpenAI writes it: in `json_schema`, with a name that changes nothing."""
    if "json_schema" in value:
        _check_keys(value, "json_schema")
        value = value["json_schema"]
        if type(value) is not dict:
            raise MalformedError("json_schema must be a map with a schema")
        _check_keys(value, "schema", optional=("name", "description", "strict"))
    else:
        _check_keys(value, "schema")
    if type(value["schema"]) is not dict:
        raise MalformedError("schema must be a map")
    return _grammar(GrammarKind.JSON_SCHEMA, "schema", json.dumps(value["schema"], ensure_ascii=False, separators=(",", ":")))


def _regex(value: Mapping[str, Any]) -> Grammar:
    name = "pattern" if "pattern" in value else "regex"
    _check_keys(value, name)
    return _grammar(GrammarKind.REGEX, name, value[name])


def _grammar(kind: GrammarKind, name: str, source: object) -> Grammar:
    if type(source) is not str or not 1 <= len(source.encode()) <= MAX_GRAMMAR_BYTES:
        raise MalformedError(f"{name} must be text of 1 to {MAX_GRAMMAR_BYTES} bytes")
    return Grammar(kind, source)


def _without_source(value: Mapping[str, Any], grammar: Grammar | None) -> Grammar | None:
    _check_keys(value)
    return grammar


def _check_keys(value: Mapping[str, Any], *required: str, optional: tuple[str, ...] = ("type",)) -> None:
    for name in required:
        if name not in value:
            raise MalformedError(f"{name} is missing")
    for name in value:
        if name not in required and name not in optional:
            raise MalformedError(f"unknown key {name[:64]!r}; known are {', '.join((*required, *optional))}")


_FORMATS: Mapping[str, Callable[[Mapping[str, Any]], Grammar | None]] = MappingProxyType(
    {
        "text": lambda value: _without_source(value, None),
        "json_object": lambda value: _without_source(value, Grammar(GrammarKind.JSON_OBJECT)),
        "json_schema": _json_schema,
        "regex": _regex,
    }
)
