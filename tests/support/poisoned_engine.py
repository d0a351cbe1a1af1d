"""The real engine with one prompt that kills it: `python poisoned_engine.py --poison ID --fd N`.

A request whose prompt holds the token id `--poison` kills the process with SIGKILL, between the forward pass and the recording
of the step in which it is to get the token of output index `TROUBLE_INDEX` (those of earlier attempts count).
Everything else is `engine.serve`. For `--engine-command` of a worker; see `command`.
"""

import argparse
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine import serve

if TYPE_CHECKING:
    from engine.core import Engine
    from engine.decision import ScheduledSequence

TROUBLE_INDEX = 3


def command(token_id: int) -> tuple[str, ...]:
    """What starts this engine in place of the plain one."""
    return (sys.executable, "-P", str(Path(__file__).resolve()), "--poison", str(token_id))


def is_poisoned(items: "Iterable[ScheduledSequence]", token_id: int) -> bool:
    """Whether a step computes the logits of `TROUBLE_INDEX` for a prompt that holds the id."""
    return any(
        item.num_samples
        and token_id in item.sequence.request.prompt_token_ids
        and item.sequence.num_computed_tokens == item.sequence.num_prompt_tokens + TROUBLE_INDEX
        for item in items
    )


def poison(token_id: int) -> None:
    """Let engines of this process die of such a prompt. Imports torch."""
    from engine.core import Engine

    compute = Engine._compute

    def deadly(engine: "Engine", items: Any, clock: Any) -> Any:
        logits = compute(engine, items, clock)
        if is_poisoned(items, token_id):
            os.kill(os.getpid(), signal.SIGKILL)
        return logits

    Engine._compute = deadly  # type: ignore[method-assign]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--poison", type=int, required=True)
    options, sys.argv[1:] = parser.parse_known_args()
    make_runner = serve._runner

    def poisoned_runner(*arguments: Any) -> Any:  # not before: `serve` has things to do before torch loads
        poison(options.poison)
        return make_runner(*arguments)

    serve._runner = poisoned_runner
    return serve.main()


if __name__ == "__main__":
    raise SystemExit(main())
