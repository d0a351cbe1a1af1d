"""What each runner does: load an engine, then generate what it is told, again and again, and say how long that took.

A runner is a program that runs in its peer's own environment, so nothing but the standard library is imported here and nothing
of this project. Its argument is a JSON map of settings. On standard input it is given one JSON line a run, a list of
`{"prompt": ids, "output": tokens}`; on standard output it says one line when it has loaded and one after each run. What the
libraries print goes to standard error. Only the generation is timed.
"""

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from importlib.metadata import version

WARM_UP = 8
"""Requests before the first run, of at most 64 prompt tokens and 16 more, so that what compiles or grows has done so."""


def settings():
    """The map that this program was started with."""
    return json.loads(sys.argv[1])


def serve(load, *packages):
    """`load()` gives `generate(requests)`, which gives a list of lists of ids, in order. `packages` name what is compared."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a stopped process does not see that its input has ended
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    started = time.perf_counter()
    generate = load()
    load_s = time.perf_counter() - started
    _say(replies, load_s=load_s, versions={name: version(name) for name in packages})
    is_warm = False
    for line in sys.stdin:
        requests = json.loads(line)
        if not is_warm:
            generate([{"prompt": request["prompt"][:64], "output": 16} for request in requests[:WARM_UP]])
            is_warm = True
        started = time.perf_counter()
        tokens = generate(requests)
        _say(replies, wall_s=time.perf_counter() - started, tokens=tokens)


def _say(replies, **what):
    replies.write(json.dumps(what) + "\n")
    replies.flush()
