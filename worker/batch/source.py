"""The records of an input file, one at a time: JSONL, CSV or Parquet, by the name's suffix.

Tolerates a byte-order mark, CRLF, blank lines and a missing last newline. Memory holds one line, or one batch of rows.
pyarrow is imported for Parquet alone.
"""

import codecs
import csv
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TextIO

from worker.errors import InvalidOption
from worker.wire import MAX_BODY_BYTES

Record = bytes | Mapping[str, Any]

BATCH_ROWS = 256
"""Rows of a Parquet file that are in memory at once."""
TELL_BYTES = 1 << 20
_CSV = {".csv": ",", ".tsv": "\t"}
_PARQUET = (".parquet", ".pq")
_BOM = b"\xef\xbb\xbf"


def _ignore(_done: int) -> None: ...


def check_input(path: Path) -> None:
    """`InvalidOption` for what is no file that can be read, and read again: a directory, a pipe, standard input."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISREG(mode):
            path.open("rb").close()
            return
    except OSError as error:
        shown = "-: standard input" if str(path) == "-" else f"{path}: {error.strerror}"
        raise InvalidOption(f"--input: {shown}; give a file that can be read") from None
    kind = "a directory" if stat.S_ISDIR(mode) else "no regular file"
    raise InvalidOption(f"--input: {path}: {kind}; a batch is read more than once, so write it to a file first")


def columns(path: Path) -> tuple[str, ...] | None:
    """Of a table, as its file writes them; None for JSONL. `InvalidOption` for a file that is no table."""
    if path.suffix.lower() in _PARQUET:
        with _parquet(path) as file:
            return tuple(file.schema_arrow.names)
    if path.suffix.lower() not in _CSV:
        return None
    with path.open("rb") as file:
        if file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            raise InvalidOption(f"--input: {path}: is UTF-16; save it as UTF-8")
    with _csv_text(path) as text:
        return tuple(next((row for row in _csv_rows(path, text, _ignore) if row), ()))


def records(
    path: Path, only: Sequence[str] | None = None, on_progress: Callable[[int], None] = _ignore
) -> Iterator[tuple[int, Record]]:
    """(number from 1, line or row); blank lines keep their number and are left out. `InvalidOption` for a file that is none.

    A line that is too long comes cut, but longer than `MAX_BODY_BYTES`. `only` names the columns that are wanted of a table.
    `on_progress` gets the bytes read, now and then.
    """
    check_input(path)
    if path.suffix.lower() in _PARQUET:
        yield from _parquet_records(path, only, on_progress)
    elif path.suffix.lower() in _CSV:
        yield from _csv_records(path, on_progress)
    else:
        yield from _lines(path, on_progress)


def _lines(path: Path, on_progress: Callable[[int], None]) -> Iterator[tuple[int, bytes]]:
    with path.open("rb", buffering=TELL_BYTES) as file:
        if file.read(len(_BOM)) != _BOM:
            file.seek(0)
        done = told = number = 0
        while line := file.readline(MAX_BODY_BYTES + 2):
            number += 1
            done += len(line) if line.endswith(b"\n") else len(line) + _skip_line(file)
            if done - told >= TELL_BYTES:
                on_progress(told := done)
            if line := line.strip(b" \t\r\n"):
                yield number, line


def _skip_line(file: IO[bytes]) -> int:
    skipped = 0
    while rest := file.readline(TELL_BYTES):
        skipped += len(rest)
        if rest.endswith(b"\n"):
            break
    return skipped


def _csv_records(path: Path, on_progress: Callable[[int], None]) -> Iterator[tuple[int, Record]]:
    """Rows count from the header on. Text that is not UTF-8 comes with lone surrogates, a row too long without cells."""
    with _csv_text(path) as text:
        rows = _csv_rows(path, text, on_progress)
        header = next((row for row in rows if row), [])
        for number, row in enumerate(rows, 1):
            if row:
                yield number, {} if len(row) > len(header) else dict(zip(header, row, strict=False))


def _csv_text(path: Path) -> TextIO:
    return path.open(encoding="utf-8-sig", errors="surrogateescape", newline="")


def _csv_rows(path: Path, text: TextIO, on_progress: Callable[[int], None]) -> Iterator[list[str]]:
    csv.field_size_limit(MAX_BODY_BYTES)
    reader = csv.reader(_bounded(text, on_progress), delimiter=_CSV[path.suffix.lower()], strict=True)
    try:
        yield from reader
    except csv.Error as error:
        remedy = f"close its quotes, and keep cells below {MAX_BODY_BYTES} characters"
        raise InvalidOption(f"--input: {path}, line {reader.line_num}: {error}; {remedy}") from None


def _bounded(text: TextIO, on_progress: Callable[[int], None]) -> Iterator[str]:
    told = 0
    while line := text.readline(2 * MAX_BODY_BYTES):
        if len(line) == 2 * MAX_BODY_BYTES:
            raise csv.Error(f"a line of {len(line)} characters or more")
        if (done := os.lseek(text.fileno(), 0, os.SEEK_CUR)) - told >= TELL_BYTES:
            on_progress(told := done)
        yield line


def _parquet(path: Path) -> Any:
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError:
        raise InvalidOption(
            f"--input: {path}: Parquet is read with pyarrow, which is not here; `pip install 'slotmill[parquet]'`"
        ) from None
    try:
        return parquet.ParquetFile(path, buffer_size=TELL_BYTES, pre_buffer=False)
    except (arrow.ArrowException, OSError) as error:
        raise InvalidOption(f"--input: {path}: not readable as Parquet: {_first_line(error)}") from None


def _parquet_records(
    path: Path, only: Sequence[str] | None, on_progress: Callable[[int], None]
) -> Iterator[tuple[int, Record]]:
    import pyarrow as arrow

    with _parquet(path) as file:
        number, num_rows, size = 0, file.metadata.num_rows, path.stat().st_size
        try:
            for batch in file.iter_batches(BATCH_ROWS, columns=None if only is None else list(only)):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
                on_progress(size * number // num_rows)
        except (arrow.ArrowException, OSError) as error:
            raise InvalidOption(f"--input: {path}, after row {number}: {_first_line(error)}; write the file anew") from None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
