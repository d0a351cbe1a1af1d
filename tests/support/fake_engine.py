"""A stand-in for the engine process that speaks `engine.messages` and computes nothing; runs as a script.

Its tokens depend on prompt, seed and index only (`next_token`): a test knows every answer, and an attempt that goes on from a
log must continue it. `save_model` writes the word-level tokenizer that it pretends to have.
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
from engine.messages import Abort, EngineFailed, EngineLoading, EngineReady, RequestRejected, Shutdown, StepReport, TokenEvent
from engine.request import FinishReason, Request
from engine.stats import KVCounts, SlotCounts, StepStats, StepTimes

VOCAB_SIZE = 200
EOS_ID = 1
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

    def __init__(self, max_slots: int) -> None:
        self._max_slots = max_slots
        self._requests: dict[str, tuple[Request, list[int]]] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def add(self, request: Request) -> RequestRejected | None:
        length = len(request.prompt_token_ids)
        if length >= MAX_MODEL_LEN:
            limit = f"at most {MAX_MODEL_LEN - 1} tokens"
            return RequestRejected(request.request_id, "prompt", f"{length} tokens", limit, "shorten the prompt")
        self._requests[request.request_id] = (request, list(request.output_token_ids))
        return None

    def abort(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def step(self, elapsed_s: float) -> StepReport:
        running = list(self._requests.items())[: self._max_slots]
        events = tuple(self._advance(request_id, request, output) for request_id, (request, output) in running)
        return StepReport(events, self.stats(len(running), elapsed_s))

    def stats(self, num_stepped: int, elapsed_s: float) -> StepStats:
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
            num_generated_tokens=num_stepped,
            num_running=len(running),
            num_waiting=len(self._requests) - len(running),
            num_preemptions=0,
            num_preempted_tokens=0,
        )

    def _advance(self, request_id: str, request: Request, output: list[int]) -> TokenEvent:
        index = len(output)
        new = () if request.params.max_tokens == 0 else (next_token(request, index),)
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


def serve(conn: Connection, delay_s: float) -> None:
    """The loop of the real engine process, with a sleep where the forward pass would be."""
    config: EngineConfig = conn.recv()
    conn.send(EngineLoading("pretending"))
    if not (Path(config.model) / "tokenizer.json").exists():
        conn.send(EngineFailed(f"model: {config.model} is not a directory with a tokenizer.json; give one"))
        return
    engine = FakeEngine(config.max_slots or 8)
    conn.send(_ready(config))
    while True:
        stale = False
        while conn.poll(0 if engine.has_work or stale else None):
            match conn.recv():
                case Shutdown():
                    return
                case Request() as request:
                    if refusal := engine.add(request):
                        conn.send(refusal)
                case Abort(request_id):
                    engine.abort(request_id)
                    stale = True
        if engine.has_work:
            time.sleep(delay_s)
            conn.send(engine.step(delay_s))
        elif stale:
            conn.send(StepReport((), engine.stats(0, 0.0)))


def _ready(config: EngineConfig) -> EngineReady:
    return EngineReady(
        model_dir=config.model,
        dtype="float32",
        device=config.device,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS_ID,),
        max_model_len=MAX_MODEL_LEN,
        max_slots=config.max_slots or 8,
        token_budget=config.token_budget or 2048,
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        kv_bytes_per_token=1,
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
        serve(Connection(options.fd), options.delay_s)


if __name__ == "__main__":
    main()
