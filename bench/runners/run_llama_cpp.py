"""llama.cpp's server with continuous batching, in this process. Settings: model (a GGUF file), slots, max_len, threads."""

import json
from concurrent.futures import ThreadPoolExecutor
from urllib.request import Request, urlopen

from talk import serve, settings

MAX_CALLERS = 256
"""Requests under way at once, each with a thread here and one of the server's."""


def load():
    import xllamacpp

    chosen = settings()
    params = xllamacpp.CommonParams()
    params.model.path = chosen["model"]
    params.n_parallel = chosen["slots"]
    params.n_ctx = chosen["slots"] * chosen["max_len"]
    params.kv_unified = False  # each slot has its share, or long requests would wait for each other's
    params.cont_batching = True
    params.cache_ram_mib = 0  # a repeated run would find its prompts
    params.verbosity = 0
    params.timeout_read = params.timeout_write = 1 << 20  # a whole workload may wait for its turn
    params.n_threads_http = MAX_CALLERS
    for threads in (params.cpuparams, params.cpuparams_batch):
        threads.n_threads = chosen["threads"]
    server = xllamacpp.Server(params)

    def one(item):
        wanted = {
            "prompt": item["prompt"],
            "n_predict": item["output"],
            "temperature": 0.0,
            "samplers": ["top_k"],
            "top_k": 1,
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,  # only its own endpoint does
        }
        request = Request(f"{server.listening_address}/completion", json.dumps(wanted).encode())
        request.add_header("Content-Type", "application/json")
        with urlopen(request) as answer:
            return json.load(answer)["tokens"]

    def run(requests):
        with ThreadPoolExecutor(min(MAX_CALLERS, len(requests))) as callers:
            return list(callers.map(one, requests))

    return run


if __name__ == "__main__":
    serve(load, "xllamacpp")
