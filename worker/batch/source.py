"""The records of an input file, one at a time: JSONL, CSV or Parquet, by the name's suffix.

Tolerates a byte-order mark, CRLF, blank lines and a missing last newline. pyarrow is imported for Parquet alone.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def records(path: Path) -> Iterator[tuple[int, bytes | Mapping[str, Any]]]:
    """(number from 1, line or row); blank lines keep their number and are left out. `InvalidOption` for a file that is none."""
    raise NotImplementedError
