"""Try again, set apart, or give up? What becomes of a job that something went wrong with.

Pure: relies on the counters that the scripts keep (`Delivery`) and on what the job allows. Leaves carrying it out to the
publisher and the scripts.

1. In a continuous batch one crash blames every job in it. Each of them is a suspect: it runs alone next time, through its
   prefill and `ISOLATED_STEPS` more, and is cleared when that goes well.
2. A crash in that window, which begins when the engine says so, is the job's own; after `MAX_CRASHES` of them it is set aside
   for people. The others, held meanwhile, are not charged for it.
3. Every attempt that did not end its job counts, but for those given back in order; `max_attempts` bounds them.
4. A fault of the engine in one job ends no process and blames nobody else: the job is tried again later. What a job itself is
   to blame for is final.
"""

import random
import time
from collections.abc import Iterable, Iterator

from worker.attempt import DEAD_LETTER, Attempt, Ending
from worker.claims import Blame

ISOLATED_STEPS = 8
MAX_CRASHES = 2
FIRST_RETRY_S = 1.0
MAX_RETRY_S = 60.0
DEAD_REMEDY = "; `worker dead show` has it, `worker dead replay` tries it again"
"""Ends the error of a job that is set aside on a server."""


def dead_letter(attempt: Attempt) -> Ending | None:
    """The end of a job that is not to be tried again, before an attempt that has just been claimed; None when it is."""
    delivery = attempt.delivery
    tried, limit = delivery.counted_attempts - 1, _max_attempts(attempt)
    if delivery.num_crashes >= MAX_CRASHES:
        why = f"crashes: {delivery.num_crashes} times a worker or engine died while it ran alone: at most {MAX_CRASHES - 1}"
    elif tried >= limit:
        why = f"max_attempts: {tried} attempts came to no end: at most {limit}"
    else:
        return None
    return Ending("dead", "error", DEAD_LETTER, f"{why}{DEAD_REMEDY}")


def after_fault(attempt: Attempt, error: str) -> Ending:
    """What becomes of a job in which the engine failed: another attempt after a pause, or its end when it has had them all."""
    tried, limit = attempt.delivery.counted_attempts, _max_attempts(attempt)
    if tried >= limit:
        return Ending("failed", "error", "internal", error)
    pause_s = min(MAX_RETRY_S, FIRST_RETRY_S * 2.0 ** (tried - 1)) * random.uniform(0.5, 1.0)
    if attempt.job and attempt.job.deadline_ms is not None:
        pause_s = max(0.0, min(pause_s, attempt.job.deadline_ms / 1000 - time.time()))
    return Ending("delayed", why="fault", error=error, delay_s=pause_s)


def after_crash(inside: Iterable[Attempt]) -> Iterator[tuple[Attempt, Ending]]:
    """How each of the attempts ends that an engine had inside when it died."""
    attempts = list(inside)
    alone = [attempt for attempt in attempts if attempt.is_alone and attempt.has_begun_alone]
    for attempt in attempts:
        blame: Blame = "solo" if attempt in alone else "bystander" if alone else "batch"
        yield attempt, Ending("released", why="engine", blame=blame)


def _max_attempts(attempt: Attempt) -> int:
    return attempt.job.max_attempts if attempt.job else 1
