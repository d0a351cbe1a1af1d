"""The files a batch writes: answers, errors, and beside them a record of what they belong to.

1. A line is written whole, to a file that only one process holds (a lock on the record), and is on the disk within a second.
2. The files are the truth of what is done: resuming reads them, cuts off a torn last line, marks their custom_ids in the plan.
3. With order "input" an outcome waits here until all lines before it are written; the caller bounds how many wait.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from worker.batch.lines import Outcome
from worker.batch.plan import Plan

Order = Literal["done", "input"]


class BatchOutput:
    """Use as a context manager; leaving syncs."""

    num_answers: int
    num_errors: int
    """Lines in the files, those of earlier runs included."""
    record: dict[str, Any]
    """What `<out>.batch.json` holds; a road may keep its batch id in it (`remember`)."""

    def __init__(
        self,
        plan: Plan,
        input_path: Path,
        out: Path,
        errors: Path,
        parameters: Mapping[str, Any],
        *,
        order: Order = "done",
        resume: bool = False,
        force: bool = False,
    ) -> None:
        """`errors` may equal `out`. Bad lines of the plan are written as error lines at once.

        `InvalidOption` when out or errors is the input, when a file exists and `resume` is false, when it belongs to another
        input or other parameters and `force` is false, when another process writes it.
        """
        raise NotImplementedError

    def remember(self, **facts: Any) -> None:
        """Add to the record, on disk before this returns."""
        raise NotImplementedError

    def write(self, outcome: Outcome) -> bool:
        """Append its line, or keep it until its turn; False for a line that is done already. Marks it in the plan."""
        raise NotImplementedError

    def sync(self) -> int:
        """Put on the disk what was written; `write` does it each second. How many outcomes wait for their turn."""
        raise NotImplementedError
