"""An input file that was read once from start to end: what is wrong with it, and which of its lines are done.

Memory does not grow with the file: ids stand in an index on disk (sqlite in a private temporary directory), and one byte for
each line says whether it is done.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

from worker.batch.lines import BadLine, BatchLine, Rules


def _ignore(_done: int, _total: int) -> None: ...


class Plan:
    """Use as a context manager; leaving removes the index."""

    num_lines: int
    """Lines that hold something."""
    num_good: int
    fingerprint: str
    """SHA-256 of the file's bytes, in hex."""

    def __init__(self, path: Path, rules: Rules, on_progress: Callable[[int, int], None] = _ignore) -> None:
        """Reads the file; `on_progress` gets bytes. Duplicate custom_ids make bad lines of all but the first."""
        raise NotImplementedError

    def bad(self) -> Iterator[BadLine]:
        """In the order of the file."""
        raise NotImplementedError

    def number_of(self, custom_id: str) -> int | None:
        """The good line of this id."""
        raise NotImplementedError

    def mark_done(self, number: int) -> bool:
        """Whether it was not done before."""
        raise NotImplementedError

    def todo(self) -> Iterator[BatchLine]:
        """The good lines that are not done, in order; reads the file again as it goes."""
        raise NotImplementedError
