"""The two standard offline workloads: every request there at the start, exact output lengths, prompts cut from English prose.

Lengths are log-normal, clipped to 4..1024, with the location solved so that the sample mean meets the published means of
ShareGPT (161 in, 338 out) and Alpaca (19, 58) [Kwon et al., SOSP 2023, figure 11]. The prose is Python's own help texts, so
nothing is fetched. The digest is recorded with every result: figures compare only when digests agree.
"""

import hashlib
import json
import math
import random
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

from tokenizers import Tokenizer

SHORTEST, LONGEST = 4, 1024


@dataclass(frozen=True, slots=True)
class Shape:
    """Mean lengths in tokens and the spread (sigma of the logarithm) of one workload."""

    num_requests: int
    mean_prompt: float
    mean_output: float
    sigma_prompt: float
    sigma_output: float


SHAPES = {
    "sharegpt": Shape(64, 161.0, 338.0, 1.0, 0.9),
    "alpaca": Shape(256, 19.0, 58.0, 0.6, 0.9),
}
DIGESTS = {"sharegpt": "a727f0ed1000", "alpaca": "77ddbf60316d"}
"""With SmolLM2's tokenizer and the help texts of Python 3.11.7. (8d5f25e690aa and 7f02ae18dd04, same lengths, are what a GGUF
tokenizer gives that does not split numbers into digits.)"""


@dataclass(frozen=True, slots=True)
class WorkItem:
    """Prompt token ids and the exact number of tokens to generate."""

    prompt: tuple[int, ...]
    output: int


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    digest: str
    items: tuple[WorkItem, ...]


def make_workload(name: str, model_dir: Path) -> Workload:
    """The workload `name` in tokens of the model in `model_dir`."""
    shape, rng = SHAPES[name], random.Random(f"{name}-0")
    prompts = _lengths(rng, shape.num_requests, shape.mean_prompt, shape.sigma_prompt)
    outputs = _lengths(rng, shape.num_requests, shape.mean_output, shape.sigma_output)
    prose = "\n".join(text for _, text in sorted(topics.items()))
    ids = Tokenizer.from_file(str(model_dir / "tokenizer.json")).encode(prose, add_special_tokens=False).ids
    starts = [rng.randrange(len(ids) - prompt) for prompt in prompts]
    plain = [
        {"prompt": ids[start : start + prompt], "output": output}
        for start, prompt, output in zip(starts, prompts, outputs, strict=True)
    ]
    digest = hashlib.sha256(json.dumps(plain).encode()).hexdigest()[:12]
    return Workload(name, digest, tuple(WorkItem(tuple(item["prompt"]), item["output"]) for item in plain))


def _lengths(rng: random.Random, count: int, mean: float, sigma: float) -> list[int]:
    """Clipped log-normal lengths with the wanted mean: the draws are fixed, the location is found by bisection."""
    normals = [rng.gauss(0.0, 1.0) for _ in range(count)]
    low, high = 0.0, math.log(LONGEST) + 3.0
    for _ in range(60):
        location = (low + high) / 2
        if sum(_clip(location + sigma * normal) for normal in normals) < mean * count:
            low = location
        else:
            high = location
    return [_clip(high + sigma * normal) for normal in normals]


def _clip(logarithm: float) -> int:
    return min(LONGEST, max(SHORTEST, round(math.exp(logarithm))))
