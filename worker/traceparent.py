"""The trace that a job belongs to, as W3C Trace Context writes it (https://www.w3.org/TR/trace-context/, `traceparent`).

    version - trace id - parent id - flags        00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01

Pure. One that is not well formed is as good as none, as the recommendation has it: tracing never fails a job. Leaves spans to
worker/tracing.py.
"""

import hashlib
import re
from typing import NamedTuple

_FORM = re.compile("([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
MAX_CHARS = 512


class TraceParent(NamedTuple):
    """A well-formed one, in lower-case hex."""

    trace_id: str
    parent_id: str
    """The span that caused the job."""
    flags: str


def parse(value: object) -> TraceParent | None:
    """What `value` says; None when it says nothing. What a later version adds behind the flags is passed over."""
    if type(value) is not str or len(value) > MAX_CHARS or not (match := _FORM.fullmatch(value)):
        return None
    version, trace_id, parent_id, flags, more = match.groups()
    if version == "ff" or (version == "00" and more) or not int(trace_id, 16) or not int(parent_id, 16):
        return None
    return TraceParent(trace_id, parent_id, flags)


def well_formed(value: object) -> str | None:
    """`value`, or None in place of one that is none."""
    return value if isinstance(value, str) and parse(value) else None


def trace_id_for(job_id: str, enqueued_ms: int) -> str:
    """The trace of a job that names none: the same at every worker that tries it, and another in the job's next life."""
    return hashlib.sha256(f"{job_id} {enqueued_ms}".encode()).hexdigest()[:32]
