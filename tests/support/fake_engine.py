"""A stand-in for the engine process that computes nothing: the real loop of engine/serve.py around it; runs as a script.

Its tokens depend on prompt, seed and index only (`next_token`): a test knows every answer, and an attempt that goes on from a
log must continue it. A prompt that begins with `POISON_ID` kills it in the middle. `save_model` writes the word-level tokenizer
that it pretends to have.
"""

import argparse
import contextlib
import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

from engine.config import EngineConfig
from engine.errors import RequestRefused
from engine.messages import EngineFailed, EngineLoading, EngineReady, StepReport, TokenEvent
from engine.request import FinishReason, Request
from engine.serve import serve
from engine.stats import KVCounts, SlotCounts, StepStats, StepTimes

VOCAB_SIZE = 200
EOS_ID = 1
POISON_ID = 66
POISON_INDEX = 3
"""Output index at which a poisonous request ends the process."""
MAX_MODEL_LEN = 512
BLOCK_SIZE = 16
NUM_BLOCKS = 1024


def command(delay_s: float = 0.002) -> tuple[str, ...]:
    """What starts this engine in place of the real one."""
    return (sys.executable, str(Path(__file__).resolve()), "--delay-s", str(delay_s))


def save_model(directory: Path) -> Path:
    """A tokenizer of words `w0` ... `w199`, parted by blanks; `w1` ends a text and is not shown."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB_SIZE)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(f"w{EOS_ID}", special=True)])
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def next_token(request: Request, index: int) -> int:
    """The token at output `index`: no two neighbours are equal, and the end-of-text id never comes by itself."""
    start = sum(request.prompt_token_ids) * 31
    if request.params.temperature > 0:
        start += request.params.seed % 1009
    return 2 + (start + index * 7) % (VOCAB_SIZE - 2)


class FakeEngine:
    """Requests wait for a slot in order of arrival; a step adds one token to each that has one."""

    def __init__(self, max_slots: int, delay_s: float) -> None:
        self._max_slots = max_slots
        self._delay_s = delay_s
        self._requests: dict[str, tuple[Request, list[int]]] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def add_request(self, request: Request) -> None:
        length = len(request.prompt_token_ids)
        if length >= MAX_MODEL_LEN:
            raise RequestRefused("prompt", f"{length} tokens", f"at most {MAX_MODEL_LEN - 1} tokens", "shorten the prompt")
        self._requests[request.request_id] = (request, list(request.output_token_ids))

    def abort(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def step(self) -> StepReport:
        time.sleep(self._delay_s)  # where the forward pass would be
        running = list(self._requests.items())[: self._max_slots]
        events = tuple(self._advance(request_id, request, output) for request_id, (request, output) in running)
        num_generated = sum(len(event.token_ids) for event in events)
        return StepReport(events, self._stats(len(running), self._delay_s, num_generated))

    def idle_report(self) -> StepReport:
        return StepReport((), self._stats(0, 0.0, 0))

    def _stats(self, num_stepped: int, elapsed_s: float, num_generated: int) -> StepStats:
        running = list(self._requests.values())[: self._max_slots]
        filled = [len(request.prompt_token_ids) + len(output) for request, output in running]
        used = sum(-(-tokens // BLOCK_SIZE) for tokens in filled)
        return StepStats(
            slots=SlotCounts(decode=num_stepped, no_work=self._max_slots - num_stepped),
            kv=KVCounts(
                capacity_blocks=NUM_BLOCKS,
                used_blocks=used,
                free_blocks=NUM_BLOCKS - used,
                allocated_tokens=used * BLOCK_SIZE,
                filled_tokens=sum(filled),
            ),
            times=StepTimes(forward_s=elapsed_s),
            num_tokens=num_stepped,
            num_prefill_tokens=0,
            num_generated_tokens=num_generated,
            num_running=len(running),
            num_waiting=len(self._requests) - len(running),
            num_preemptions=0,
            num_preempted_tokens=0,
        )

    def _advance(self, request_id: str, request: Request, output: list[int]) -> TokenEvent:
        index = len(output)
        if request.prompt_token_ids[0] == POISON_ID and index == POISON_INDEX:
            os.kill(os.getpid(), signal.SIGKILL)
        new = () if self._finish_reason(request, output) else (next_token(request, index),)  # a resumed one may be complete
        output.extend(new)
        reason = self._finish_reason(request, output)
        if reason:
            del self._requests[request_id]
        return TokenEvent(request_id=request_id, index=index, token_ids=new, finish_reason=reason)

    @staticmethod
    def _finish_reason(request: Request, output: list[int]) -> FinishReason | None:
        stops = set(request.params.stop_token_ids) | (set() if request.params.ignore_eos else {EOS_ID})
        if output and output[-1] in stops and len(output) >= request.params.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(output) >= request.params.max_tokens else None


def load_and_serve(conn: Connection, delay_s: float) -> None:
    config: EngineConfig = conn.recv()
    conn.send(EngineLoading("pretending"))
    if not (Path(config.model) / "tokenizer.json").exists():
        conn.send(EngineFailed(f"model: {config.model} is not a directory with a tokenizer.json; give one"))
        return
    conn.send(ready(config))
    serve(FakeEngine(config.max_slots or 8, delay_s), conn)


def ready(config: EngineConfig) -> EngineReady:
    """What this engine says of itself when it has been told `config`."""
    return EngineReady(
        model_dir=config.model,
        dtype="float32",
        device=config.device,
        eos_token_ids=(EOS_ID,),
        max_model_len=MAX_MODEL_LEN,
        max_slots=config.max_slots or 8,
        token_budget=config.token_budget or 2048,
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        load_s=0.0,
        memory_table="",
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--delay-s", type=float, default=0.002)
    options = parser.parse_args()
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    os.set_inheritable(options.fd, False)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        load_and_serve(Connection(options.fd), options.delay_s)


if __name__ == "__main__":
    main()
