"""Lines of batch files, and what answers them, for tests."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from worker.batch.fields import CHAT
from worker.batch.lines import BatchLine
from worker.frames import Choice, Result


def request(custom_id: object = "a", **changes: Any) -> dict[str, Any]:
    """A line as a map; `changes` are of its body."""
    body = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]} | changes
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}


def write_input(path: Path, custom_ids: Iterable[object]) -> Path:
    """A file with a good line for each id."""
    path.write_text("".join(json.dumps(request(custom_id)) + "\n" for custom_id in custom_ids))
    return path


def result_of(line: BatchLine, text: str = "Hi", **changes: Any) -> Result:
    """What a worker would answer a line with."""
    found: dict[str, Any] = {"state": "succeeded", "choices": (Choice(0, text, (1,), "stop"),), "model": "m"}
    return Result(id=f"b-{line.number}", metadata=line.body["metadata"], **(found | changes))


def custom_ids(*paths: Path) -> list[Any]:
    """Of all lines of output files, in order; a line that is torn is an error."""
    return [json.loads(line)["custom_id"] for path in paths if path.exists() for line in path.read_bytes().splitlines()]
