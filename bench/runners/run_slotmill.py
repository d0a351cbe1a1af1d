"""The engine of this project, told as its peers are. Settings are fields of `EngineConfig`."""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "100000")  # as engine/serve.py; OpenMP reads it when torch loads

from talk import serve, settings  # a runner's own folder is the first that Python looks in

from bench.engine import generate, requests_of
from bench.workload import WorkItem
from engine.config import EngineConfig
from engine.core import Engine
from engine.model_runner import ModelRunner


def load():
    runner = ModelRunner(EngineConfig(**settings()))

    def run(requests):
        tokens = [[] for _ in requests]
        engine = Engine(runner)
        for report in generate(engine, requests_of([WorkItem(tuple(item["prompt"]), item["output"]) for item in requests])):
            for event in report.events:
                tokens[int(event.request_id)].extend(event.token_ids)
        return tokens

    return run


if __name__ == "__main__":
    serve(load, "torch", "transformers")
