"""What a worker says of itself when it can serve."""

import json
from types import SimpleNamespace
from typing import cast

import pytest

from engine.config import EngineConfig
from engine.stats import MemoryRow
from tests.support.fake_engine import BLOCK_SIZE, NUM_BLOCKS, ready
from worker import log, summary
from worker.process import WorkerProcess
from worker.reader import Serving
from worker.settings import Settings

URL = "http://127.0.0.1:9400"
ENGINE = EngineConfig(model="m", max_slots=4)
MEMORY = (MemoryRow("weights", 256 << 20), MemoryRow("KV cache", 64 << 20, "8 blocks"))


def settings(**options: object) -> Settings:
    return Settings(engine=ENGINE, queue="q", redis_url="redis://:secret@h:1/0", metrics_port=0, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("devices", [("cpu",), ("cpu", "cpu")])
def test_people_read_sizes_memory_queue_and_endpoints_without_the_password(devices: tuple[str, ...]) -> None:
    lines = summary.text(summary.facts(settings(devices=devices), ready(ENGINE), URL), MEMORY).splitlines()
    said = dict(line.strip().split(maxsplit=1) for line in lines[:6])
    each = " on each of 2 engines" if len(devices) == 2 else ""
    assert said["model"] == f"m in float32 on {','.join(devices)}"
    assert said["batch"] == f"4 slots, 2048 tokens a step{each}"
    assert f"{NUM_BLOCKS} blocks, which hold {NUM_BLOCKS * BLOCK_SIZE} tokens{each};" in said["KV"]
    assert said["queue"] == "q on redis://:***@h:1/0"
    assert said["listens"] == f"{URL}/metrics {URL}/livez {URL}/readyz"
    assert [line.split() for line in lines[6:]] == [
        ["memory", "weights", "256.0", "MiB"],
        ["KV", "cache", "64.0", "MiB", "8", "blocks"],
    ]


@pytest.mark.parametrize("form", ["json", "text"])
def test_the_first_engine_that_serves_introduces_the_worker_once(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(form=form)  # type: ignore[arg-type]
    worker = WorkerProcess(settings())
    reader = worker._fleet.readers[0]
    reader.serving = cast(Serving, SimpleNamespace(ready=ready(ENGINE)))
    for _ in range(2):
        reader._on_change()
    worker._health.stop()
    said = capsys.readouterr().err
    assert "secret" not in said
    assert said.count("worker_ready") == 1
    if form == "json":
        assert json.loads(said)["kv_tokens"] == NUM_BLOCKS * BLOCK_SIZE
    else:
        assert "\n  batch     4 slots, 2048 tokens a step\n" in said
