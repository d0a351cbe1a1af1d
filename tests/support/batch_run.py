"""`worker batch run` as a process with the fake engine behind it, and the files that it reads and leaves."""

import json
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.support import fake_engine


def request(number: int, max_tokens: int = 4, prompt: str = "", **body: Any) -> dict[str, Any]:
    """A completion of two words that the fake tokenizer knows whole; `c<number>`."""
    words = prompt or f"w{20 + number % 40} w{20 + number // 40 % 40}"
    body = {"prompt": words, "max_tokens": max_tokens} | body
    return {"custom_id": f"c{number}", "method": "POST", "url": "/v1/completions", "body": body}


class BatchRun:
    """One batch: its files, and runs of the command over them; without a model with the real engine and its default one."""

    def __init__(self, folder: Path, model: Path | None, lines: Sequence[dict[str, Any]]) -> None:
        self.source, self.out = folder / "in.jsonl", folder / "out.jsonl"
        self.errors = folder / "out.errors.jsonl"
        self.source.write_text("".join(json.dumps(line) + "\n" for line in lines))
        self.files = ["-i", str(self.source), "-o", str(self.out)]
        self._model = model

    def command(self, *options: str, delay_s: float = 0.0, engine: Sequence[str] = ()) -> list[str]:
        """The command line."""
        started_by = shlex.join(engine or fake_engine.command(delay_s))
        of_engine = ["--model", str(self._model), "--served-name", "fake", "--engine-command", started_by]
        return [
            *(sys.executable, "-m", "worker.cli", "batch", "run", "--cpu", *self.files),
            *(of_engine if self._model else ()),
            *options,
        ]

    def start(self, *options: str, **more: Any) -> psutil.Popen:
        """Start the command; what it says is text."""
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return psutil.Popen(self.command(*options, **more), **pipes)

    def run(self, *options: str, code: int = 0, **more: Any) -> tuple[str, str]:
        """Run it to its end; stdout and stderr."""
        with self.start(*options, **more) as process:
            said, told = process.communicate(timeout=60)
        assert process.returncode == code, told
        return said, told

    def answers(self) -> list[dict[str, Any]]:
        return _records(self.out)

    def refusals(self) -> list[dict[str, Any]]:
        return _records(self.errors)

    def times_told(self) -> Counter[str]:
        """How often each custom_id is in the files."""
        return Counter(record["custom_id"] for record in self.answers() + self.refusals())


def _records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []
