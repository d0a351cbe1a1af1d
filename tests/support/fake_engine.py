"""A stand-in for the engine process that computes nothing: the real loop of engine/serve.py around it; runs as a script.

Its tokens depend on prompt, grammar, seed, choice and index only (`next_token`): a test knows every answer, and an attempt that
goes on from a log must continue it. Choice k ends by itself, 5 k tokens before the limit; a beam search tells nothing until it
ends. A suspect runs alone for its window. `save_model` writes the tokenizer that it pretends to have.

The first token of a prompt asks for trouble, which comes in the step of output index `TROUBLE_INDEX`, that is after so many
tokens, those of earlier attempts included:

    POISON_ID        the process is killed
    HANG_ID          the step never ends; the process dies with the worker that started it, and otherwise when it is killed
    RAISE_ID         the step raises a RuntimeError, which ends the process as it ends the real one
    FAULT_ID         the choice ends as an error that may be tried again, unless it goes on from an earlier attempt's output
    ALWAYS_FAULT_ID  the same, whatever the attempt
"""

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.errors import RequestRefused
from engine.messages import EngineFailed, EngineLoading, EngineReady, StepReport, TokenEvent, TokenLogprobs
from engine.request import FinishReason, Request
from engine.serve import inherited, serve
from engine.stats import KVCounts, SlotCounts, StepStats, StepTimes

VOCAB_SIZE = 200
EOS_ID = 1
POISON_ID, HANG_ID, RAISE_ID, FAULT_ID, ALWAYS_FAULT_ID = range(66, 71)
TROUBLE_INDEX = 3
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


def next_token(request: Request, index: int, choice: int = 0) -> int:
    """The token at output `index`: no two neighbours are equal, and the end-of-text id comes 5 tokens early in choice 1."""
    params = request.params
    if choice and index == params.max_tokens - 1 - 5 * choice and not params.ignore_eos:
        return EOS_ID
    start = sum(request.prompt_token_ids) * 31 + choice * 13
    if params.temperature > 0:
        start += params.seed % 1009
    if params.grammar:
        start += sum(params.grammar.source.encode())
    return 2 + (start + index * 7) % (VOCAB_SIZE - 2)


def logprobs_of(token_ids: Iterable[int], num_top: int | None) -> tuple[TokenLogprobs, ...]:
    """What this engine says of tokens when it is asked."""
    if num_top is None:
        return ()
    return tuple(TokenLogprobs(-i / 8, tuple((i + k, -(i + k) / 8) for k in range(num_top))) for i in token_ids)


class Sequence:
    """One choice, or one beam search, that takes a slot."""

    def __init__(self, request: Request, choice: int) -> None:
        self.request = request
        self.choice = choice
        self.output = list(request.output_token_ids)
        self.is_new = True

    def next(self) -> list[TokenEvent]:
        """What a step makes of it; the last of the events carries a reason when it has ended."""
        if len(self.output) == TROUBLE_INDEX and self._meets_trouble():
            return [self._event(len(self.output), (), FinishReason.ERROR, choice=self.choice, detail="trouble", may_retry=True)]
        if self.request.params.beam_width:
            return self._search()
        index, params = len(self.output), self.request.params
        new = () if self._reason() else (next_token(self.request, index, self.choice),)  # a resumed one may be complete
        self.output.extend(new)
        told = None
        if self.is_new and self.choice == self.request.choice and params.prompt_logprobs is not None:
            told = logprobs_of(self.request.prompt_token_ids[1:], params.prompt_logprobs)
        self.is_new = False
        logprobs = logprobs_of(new, params.logprobs)
        return [self._event(index, new, self._reason(), logprobs=logprobs, choice=self.choice, prompt_logprobs=told)]

    def _search(self) -> list[TokenEvent]:
        self.output.append(0)
        if len(self.output) < self.request.params.max_tokens:
            return []
        beams = [
            [next_token(self.request, i, k) for i in range(len(self.output))] for k in range(self.request.params.beam_width)
        ]
        return [self._event(0, tuple(ids), FinishReason.LENGTH, choice=k, score=-k / 8) for k, ids in enumerate(beams)]

    def _meets_trouble(self) -> bool:
        """Do what the prompt asks for; whether it is to end the choice as an error."""
        first = self.request.prompt_token_ids[0]
        if first == POISON_ID:
            os.kill(os.getpid(), signal.SIGKILL)
        while first == HANG_ID:
            time.sleep(3600)
        if first == RAISE_ID:
            raise RuntimeError("trouble")
        return first == ALWAYS_FAULT_ID or (first == FAULT_ID and not self.request.output_token_ids)

    def _event(self, start: int, ids: tuple[int, ...], reason: FinishReason | None, **more: Any) -> TokenEvent:
        return TokenEvent(self.request.request_id, start, ids, reason, **more)

    def _reason(self) -> FinishReason | None:
        params = self.request.params
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS_ID})
        if self.output and self.output[-1] in stops and len(self.output) >= params.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.output) >= params.max_tokens else None


class FakeEngine:
    """Choices wait for a slot in order of arrival; a step adds one token to each that has one, or to those of a suspect."""

    def __init__(self, max_slots: int, delay_s: float) -> None:
        self._max_slots = max_slots
        self._delay_s = delay_s
        self._sequences: dict[tuple[str, int], Sequence] = {}
        self._windows: dict[str, int] = {}
        """Steps that suspects are still to run alone, by request id."""
        self._suspect: str | None = None
        self.on_alone: Callable[[str], None] | None = None

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    def add_request(self, request: Request) -> None:
        length = len(request.prompt_token_ids)
        if length >= MAX_MODEL_LEN:
            raise RequestRefused("prompt", f"{length} tokens", f"at most {MAX_MODEL_LEN - 1} tokens", "shorten the prompt")
        if request.isolated_steps:
            self._windows.setdefault(request.request_id, 1 + request.isolated_steps)  # the first is its prefill
        for choice in range(request.choice, request.choice + request.params.n):
            assert (request.request_id, choice) not in self._sequences, "sent twice"
            self._sequences[request.request_id, choice] = Sequence(request, choice)

    def abort(self, request_id: str, choice: int | None = None) -> None:
        for key in list(self._sequences):
            if key[0] == request_id and choice in (None, key[1]):
                self._forget(key)

    def step(self) -> StepReport:
        suspect = next(iter(self._windows), None)
        if suspect not in (None, self._suspect) and self.on_alone:
            self.on_alone(suspect)
        self._suspect = suspect
        running = [item for item in self._sequences.items() if suspect in (None, item[0][0])][: self._max_slots]
        time.sleep(self._delay_s)  # where the forward pass would be
        events = tuple(event for key, sequence in running for event in self._advance(key, sequence))
        num_generated = sum(len(event.token_ids) for event in events)
        cleared = self._count_alone(suspect)
        return StepReport(events, self._stats(len(running), self._delay_s, num_generated), cleared=cleared)

    def idle_report(self) -> StepReport:
        return StepReport((), self._stats(0, 0.0, 0))

    def _stats(self, num_stepped: int, elapsed_s: float, num_generated: int) -> StepStats:
        running = list(self._sequences.values())[: self._max_slots]
        filled = [len(sequence.request.prompt_token_ids) + len(sequence.output) for sequence in running]
        used = sum(-(-tokens // BLOCK_SIZE) for tokens in filled)
        return StepStats(
            slots=SlotCounts(
                decode=num_stepped,
                no_budget=max(len(running) - num_stepped, 0),
                no_work=self._max_slots - max(len(running), num_stepped),
            ),
            kv=KVCounts(
                capacity_blocks=NUM_BLOCKS,
                used_blocks=used,
                free_blocks=NUM_BLOCKS - used,
                allocated_tokens=used * BLOCK_SIZE,
                filled_tokens=sum(filled),
            ),
            times=StepTimes(forward_s=elapsed_s),
            num_tokens=num_stepped,
            num_generated_tokens=num_generated,
            num_running=len(running),
            num_slots_taken=len(running),
            num_waiting=len(self._sequences) - len(running),
        )

    def _advance(self, key: tuple[str, int], sequence: Sequence) -> list[TokenEvent]:
        events = sequence.next()
        if events and events[-1].finish_reason:
            self._forget(key)
        return events

    def _count_alone(self, suspect: str | None) -> tuple[str, ...]:
        """Count a step of a suspect; its id when it lives and its window is over."""
        if suspect not in self._windows:
            return ()
        self._windows[suspect] -= 1
        if self._windows[suspect]:
            return ()
        del self._windows[suspect]
        return (suspect,)

    def _forget(self, key: tuple[str, int]) -> None:
        del self._sequences[key]
        if all(request_id != key[0] for request_id, _ in self._sequences):
            self._windows.pop(key[0], None)


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
        memory_rows=(),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--delay-s", type=float, default=0.002)
    options = parser.parse_args()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        load_and_serve(inherited(options.fd), options.delay_s)


if __name__ == "__main__":
    main()
