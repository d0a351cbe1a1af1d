"""An input file that was read once from start to end: what is wrong with it, and which of its lines are done.

Memory does not grow with the file: ids and refusals stand in an index on disk (sqlite's private temporary database, which has
no name and so goes with its process), and one byte for each line says how it stands. One thread at a time.
"""

import hashlib
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from worker.batch.lines import BadLine, BatchLine, Rules, parse_line
from worker.batch.source import Record, check_input, columns, records
from worker.errors import InvalidOption

BLANK, TODO, DONE, BAD, BAD_DONE = range(5)
"""How a line stands: `BAD` ones are done when their refusal is written."""
_SCHEMA = """
PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA temp_store = FILE; PRAGMA cache_size = -8192;
CREATE TABLE ids (custom_id TEXT PRIMARY KEY, number INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE bad (number INTEGER PRIMARY KEY, code TEXT, message TEXT, param TEXT, custom_id TEXT);
BEGIN;
"""
_BAD = "SELECT number, code, message, param, custom_id FROM bad"


def _ignore(_done: int, _total: int) -> None: ...


class Plan:
    """Use as a context manager; leaving removes the index."""

    num_lines: int
    """Lines that hold something."""
    num_good: int
    num_done: int
    """Of `num_lines`, refused ones included."""
    last: int
    """Number of the last line that holds something."""
    fingerprint: str
    """SHA-256 of the file's bytes, in hex."""

    def __init__(self, path: Path, rules: Rules, on_progress: Callable[[int, int], None] = _ignore) -> None:
        """Reads the file; `on_progress` gets bytes. Duplicate custom_ids make bad lines of all but the first."""
        check_input(path)
        self.path = path
        self._rules = rules
        self._only = _check_columns(path, rules)
        self._stamp = _stamp(path)
        with path.open("rb") as file:
            self.fingerprint = hashlib.file_digest(file, "sha256").hexdigest()
        self._states = bytearray(1)
        self._index = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._index.executescript(_SCHEMA)
        self.num_lines = self.num_good = self.num_done = 0
        try:
            self._read(on_progress)
        except sqlite3.Error as error:
            raise InvalidOption(f"--input: {path}: its index: {error}; point TMPDIR to a directory with room") from None
        self.last = len(self._states) - 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._index.close()

    def bad(self) -> Iterator[BadLine]:
        """In the order of the file."""
        last = 0
        rows: list[tuple[Any, ...]] = [()]
        while rows:  # in portions, so that no cursor is left open by who does not take them all
            rows = self._index.execute(f"{_BAD} WHERE number > ? ORDER BY number LIMIT 256", (last,)).fetchall()
            for row in rows:
                yield BadLine(*row)
                last = row[0]

    def bad_line(self, number: int) -> BadLine:
        """What is wrong with a line that is bad."""
        return BadLine(*self._index.execute(f"{_BAD} WHERE number = ?", (number,)).fetchone())

    def number_of(self, custom_id: str) -> int | None:
        """The line of this id, good or bad."""
        row = self._index.execute("SELECT number FROM ids WHERE custom_id = ?", (custom_id,)).fetchone()
        return None if row is None else row[0]

    def state_of(self, number: int) -> int:
        """`BLANK` for a line that the file does not have, too."""
        return self._states[number] if 0 < number < len(self._states) else BLANK

    def mark_done(self, number: int) -> bool:
        """Whether it was not done before."""
        state = self.state_of(number)
        if state not in (TODO, BAD):
            return False
        self._states[number] = DONE if state == TODO else BAD_DONE
        self.num_done += 1
        return True

    def todo(self) -> Iterator[BatchLine]:
        """The good lines that are not done, in order; reads the file again as it goes."""
        for number, record in self._records():
            if self.state_of(number) == TODO:
                line = parse_line(number, record, self._rules)
                if isinstance(line, BadLine):
                    raise self._changed()
                yield line

    def _read(self, on_progress: Callable[[int, int], None]) -> None:
        size = self.path.stat().st_size
        for number, record in self._records(lambda done: on_progress(done, size)):
            self._add(parse_line(number, record, self._rules))
        on_progress(size, size)

    def _records(self, on_progress: Callable[[int], None] = lambda _done: None) -> Iterator[tuple[int, Record]]:
        """Those of the file that was checked, and of no other that has its name by now."""
        self._check_unchanged()
        yield from records(self.path, self._only, on_progress)
        self._check_unchanged()

    def _add(self, line: BatchLine | BadLine) -> None:
        if line.custom_id is not None:
            added = self._index.execute("INSERT OR IGNORE INTO ids VALUES (?, ?)", (line.custom_id, line.number))
            if not added.rowcount:
                line = self._duplicate(line.number, line.custom_id)
        if isinstance(line, BadLine):
            row = (line.number, line.code, line.message, line.param, line.custom_id)
            self._index.execute("INSERT INTO bad VALUES (?, ?, ?, ?, ?)", row)
        self._states.extend(bytes(line.number - len(self._states)))
        self._states.append(BAD if isinstance(line, BadLine) else TODO)
        self.num_lines += 1
        self.num_good += isinstance(line, BatchLine)

    def _duplicate(self, number: int, custom_id: str) -> BadLine:
        """Without the id, which is the first line's."""
        shown = repr(custom_id[:64])[1:-1]
        message = f"custom_id: {shown} stands in line {self.number_of(custom_id)} too; give each line one of its own"
        return BadLine(number, "duplicate_custom_id", message, "custom_id")

    def _check_unchanged(self) -> None:
        if _stamp(self.path) != self._stamp:
            raise self._changed()

    def _changed(self) -> InvalidOption:
        return InvalidOption(f"--input: {self.path}: changed while it was in use; keep it as it was, and start again")


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _check_columns(path: Path, rules: Rules) -> tuple[str, ...] | None:
    """The columns that are read; None for a file without any. `InvalidOption` where rules and file do not go together."""
    wanted = {"--prompt-column": rules.prompt_column, "--id-column": rules.id_column}
    known = columns(path)
    if known is None:
        for option, name in wanted.items():
            if name is not None:
                raise InvalidOption(f"{option}: {name}: {path} is read as JSONL; name a CSV or Parquet file .csv or .parquet")
        return None
    shown = ", ".join(repr(name)[1:-1] for name in known[:20]) or "none"
    if rules.prompt_column is None:
        raise InvalidOption(f"--prompt-column: missing; of {path} it is one of {shown}")
    for option, name in wanted.items():
        if name is not None and known.count(name) != 1:
            problem = "stands there twice" if name in known else "is not there"
            raise InvalidOption(f"{option}: {name}: {problem}; columns of {path} are {shown}")
    return tuple(dict.fromkeys(name for name in wanted.values() if name is not None))
