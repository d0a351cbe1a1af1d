"""What a check of `worker doctor` answers, and how a list of checks becomes rows.

A check is a pure function from facts that were gathered before to a `Finding`; its name is the check's. Facts that nobody could
tell (a user without the right, a server that has no such field) raise `Unknown` where they are used. Gathering is left to
`server_facts`, `queue_checks` and `machine_checks`, printing to `command`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

Verdict = Literal["ok", "warn", "fail", "unknown"]
GIB: Final = 1 << 30

F = TypeVar("F")


class Unknown(Exception):
    """Why a check cannot be decided, and who can mend that."""

    def __init__(self, why: str, remedy: str = "") -> None:
        super().__init__(why)
        self.remedy = remedy


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found. The remedy is a command to type or a line of configuration; there is none for what is ok."""

    verdict: Verdict
    found: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """A finding with the name of its check, as it is printed; every text is one line."""

    section: str
    check: str
    verdict: Verdict
    found: str
    remedy: str


def ok(found: str) -> Finding:
    """As it should be."""
    return Finding("ok", found)


def warn(found: str, remedy: str) -> Finding:
    """Works, and may hurt."""
    return Finding("warn", found, remedy)


def fail(found: str, remedy: str) -> Finding:
    """Jobs would be lost, or not be served."""
    return Finding("fail", found, remedy)


def name_of(check: Callable[[F], Finding]) -> str:
    """What a check is called in the table."""
    return check.__name__.replace("_", "-")


def run_checks(section: str, checks: Iterable[Callable[[F], Finding]], facts: F) -> list[Row]:
    """A row for each check, in order."""
    rows = []
    for check in checks:
        try:
            finding = check(facts)
        except Unknown as reason:
            finding = Finding("unknown", str(reason), reason.remedy)
        texts = (" ".join(text.split()) for text in (finding.found, finding.remedy))
        rows.append(Row(section, name_of(check), finding.verdict, *texts))
    return rows


def size(num_bytes: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} GiB"
