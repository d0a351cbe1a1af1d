"""Records of input files."""

import builtins
import os
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from worker.batch.source import BATCH_ROWS, columns, records
from worker.errors import InvalidOption
from worker.wire import MAX_BODY_BYTES


def read(path: Path, content: bytes | None = None) -> list[tuple[int, Any]]:
    if content is not None:
        path.write_bytes(content)
    return list(records(path))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", []),
        (b"a", [(1, b"a")]),
        (b"a\nb\n", [(1, b"a"), (2, b"b")]),
        (b"\xef\xbb\xbfa\r\n\r\n  \nb", [(1, b"a"), (4, b"b")]),
        (b"\n\n", []),
        (b"\xef\xbb\xbf", []),
        (b"\xff\x00\n", [(1, b"\xff\x00")]),
    ],
)
def test_lines_keep_their_number_whatever_stands_around_them(tmp_path: Path, content: bytes, expected: object) -> None:
    assert read(tmp_path / "in.jsonl", content) == expected


@pytest.mark.parametrize("size", [MAX_BODY_BYTES, MAX_BODY_BYTES + 1, 3 * MAX_BODY_BYTES])
def test_a_line_that_is_too_long_comes_cut_and_the_next_one_whole(tmp_path: Path, size: int) -> None:
    (number, line), *rest = read(tmp_path / "in.jsonl", b"x" * size + b"\nb\n")
    assert (number, len(line)) == (1, min(size, MAX_BODY_BYTES + 2))
    assert rest == [(2, b"b")]


def test_bytes_read_are_told_now_and_then(tmp_path: Path) -> None:
    path, told = tmp_path / "in.jsonl", []
    path.write_bytes((b"x" * 1023 + b"\n") * 4096)
    assert len(list(records(path, on_progress=told.append))) == 4096
    assert told == [1 << 20, 2 << 20, 3 << 20, 4 << 20]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"p,q\na,b\n", [(1, {"p": "a", "q": "b"})]),
        (b'\xef\xbb\xbfp,q\r\n"a\r\nb","c""d"\r\n\r\ne,f', [(1, {"p": "a\r\nb", "q": 'c"d'}), (3, {"p": "e", "q": "f"})]),
        (b"p,q\na\n", [(1, {"p": "a"})]),
        (b"p,q\na,b,c\n", [(1, {})]),
        (b"p\n\xff\n", [(1, {"p": "\udcff"})]),
        (b"p\na\x00\n", [(1, {"p": "a\x00"})]),
        (b"", []),
        (b"p,q\n", []),
    ],
)
def test_rows_of_csv(tmp_path: Path, content: bytes, expected: object) -> None:
    assert read(tmp_path / "in.csv", content) == expected


def test_columns_of_tsv_are_parted_by_tabs(tmp_path: Path) -> None:
    assert read(tmp_path / "in.TSV", b"p\tq\na,b\tc\n") == [(1, {"p": "a,b", "q": "c"})]
    assert columns(tmp_path / "in.TSV") == ("p", "q")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'p\na\n"b\nc\n', "line 4: unexpected end of data; close its quotes"),
        (b'p\n"a"b\n', "line 2: ',' expected"),
        (b"p\n" + b"x" * (MAX_BODY_BYTES + 1), "line 2: field larger than field limit"),
        (b"p\n" + b"x" * (3 * MAX_BODY_BYTES), "a line of 16777216 characters or more"),
    ],
    ids=["open quote", "text after a quote", "cell too large", "line too large"],
)
def test_csv_that_cannot_be_parted_into_rows_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    with pytest.raises(InvalidOption, match="--input: ") as refused:
        read(tmp_path / "in.csv", content)
    assert words in str(refused.value)


def test_rows_of_parquet(tmp_path: Path) -> None:
    path, num_rows = tmp_path / "in.parquet", BATCH_ROWS + 3
    table = pyarrow.table({"p": ["a", None] + ["x"] * (num_rows - 2), "n": range(num_rows), "l": [[1]] * num_rows})
    parquet.write_table(table, path)
    rows = list(records(path, ("p", "n")))
    assert rows[:2] == [(1, {"p": "a", "n": 0}), (2, {"p": None, "n": 1})]
    assert [number for number, _ in rows] == list(range(1, num_rows + 1))
    assert columns(path) == ("p", "n", "l")


@pytest.mark.parametrize("read_it", [columns, read])
def test_a_file_that_is_no_parquet_is_refused(tmp_path: Path, read_it: Any) -> None:
    (tmp_path / "in.parquet").write_bytes(b"PAR1 but no more")
    with pytest.raises(InvalidOption, match="not readable as Parquet"):
        read_it(tmp_path / "in.parquet")


def test_a_parquet_file_that_is_damaged_inside_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    parquet.write_table(pyarrow.table({"p": [os.urandom(9).hex() for _ in range(1000)]}), path, compression="gzip")
    content = bytearray(path.read_bytes())
    content[200:400] = bytes(200)
    with pytest.raises(InvalidOption, match="after row 0: ") as refused:
        read(path, bytes(content))
    assert "\n" not in str(refused.value)


def test_without_pyarrow_parquet_is_refused_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    (tmp_path / "in.parquet").touch()
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InvalidOption, match=r"pip install 'slotmill\[parquet\]'"):
        columns(tmp_path / "in.parquet")


def test_what_cannot_be_read_twice_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, words in (
        (tmp_path, "a directory"),
        (tmp_path / "pipe", "no regular file"),
        (tmp_path / "none", "No such file"),
        (Path("-"), "standard input; give a file"),
    ):
        with pytest.raises(InvalidOption, match=words):
            read(path)


def test_a_file_that_may_not_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_options: object) -> None:
        raise PermissionError(13, "Permission denied")

    path = tmp_path / "in.jsonl"
    path.touch()
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(InvalidOption, match="Permission denied"):
        read(path)
