"""What the engine is asked for a job: its sampling parameters, and after an earlier attempt what is left of each choice.

Relies on `wire` for checked jobs, on `frames` for the log, on `output` for taking it in again. Leaves to the consumer what
needs a server, and to the engine whether a log already meets an end in tokens.

A job that starts is one request. One that goes on is a request for each choice that has not ended, under one id; the prompt's
log probabilities, which no log holds, come from one more, that computes the prompt alone.
"""

from collections.abc import Iterable
from dataclasses import replace

from engine.messages import TokenLogprobs
from engine.request import FinishReason, Request, SamplingParams
from worker.attempt import Attempt
from worker.errors import InvalidJob
from worker.frames import TokenFrame, decode_frame
from worker.keys import LANES
from worker.output import Output
from worker.text import Detokenizer, StopMatcher, Tokenizer
from worker.wire import Job, check_logprobs

RANK = {lane: rank for rank, lane in enumerate(LANES)}
_ENDS = (FinishReason.STOP.value, FinishReason.LENGTH.value)
"""Reasons in a log after which a choice does not go on."""


def check_fit(job: Job, num_prompt_tokens: int, max_slots: int) -> None:
    """`InvalidJob` for more choices than the worker has slots, or more log probabilities than a result should hold."""
    for name in ("n", "beam_width"):
        if getattr(job, name) > max_slots:
            raise InvalidJob(name, getattr(job, name), f"at most {max_slots}, the slots of this worker; ask for fewer")
    check_logprobs("prompt_logprobs", job.prompt_logprobs, num_prompt_tokens)


def replay(attempt: Attempt, job: Job, tokenizer: Tokenizer, frames: Iterable[bytes] = ()) -> None:
    """Give the attempt outputs that stand where the log ends."""
    logged = _Logged(attempt, job.num_choices)
    for frame in frames:
        logged.add(frame)
    outputs = []
    for token_ids, logprobs, reason in zip(logged.token_ids, logged.logprobs, logged.reasons, strict=True):
        detokenizer = Detokenizer(tokenizer, attempt.prompt_token_ids)
        output = Output(detokenizer, StopMatcher(job.stop, job.include_stop), job.min_tokens)
        output.replay(token_ids, logprobs, reason)
        outputs.append(output)
    attempt.outputs = tuple(outputs)
    assert attempt.num_tokens == attempt.delivery.num_logged, "the log holds another number of tokens than it says"


class _Logged:
    """The choices as a log has them; a frame counts from its own index on, whatever stood there before."""

    def __init__(self, attempt: Attempt, num_choices: int) -> None:
        self._order = attempt.expect(num_choices)
        self.token_ids: list[list[int]] = [[] for _ in range(num_choices)]
        self.logprobs: list[list[TokenLogprobs]] = [[] for _ in range(num_choices)]
        self.reasons: list[str | None] = [None] * num_choices

    def add(self, data: bytes) -> None:
        frame = decode_frame(data)
        if not isinstance(frame, TokenFrame) and frame.event != "restart":
            return
        choice = frame.choice
        if frame.index < len(self.token_ids[choice]):
            del self.token_ids[choice][frame.index :], self.logprobs[choice][frame.index :]
            self._order.cut(choice, frame.index)
            self.reasons[choice] = None
        if isinstance(frame, TokenFrame):
            assert frame.index == len(self.token_ids[choice]), "the log has a gap"
            self.token_ids[choice] += frame.token_ids
            self.logprobs[choice] += frame.logprobs
            self._order.add(choice, len(self.token_ids[choice]))
            self.reasons[choice] = frame.finish_reason if frame.finish_reason in _ENDS else None


def requests_for(
    attempt: Attempt, job: Job, *, tenant: int = 0, weight: float = 1.0, cache_salt: bytes = b"", isolated_steps: int = 0
) -> list[Request]:
    """What to send for an attempt whose outputs stand where its log ends; nothing when its choices have all ended.

    Notes in the attempt whether the prompt is computed by a request of its own.
    """
    whole = Request(
        request_id=attempt.request_id,
        prompt_token_ids=attempt.prompt_token_ids,
        params=_params(job, attempt.delivery.seed if job.seed is None else job.seed),
        priority=RANK[job.priority],
        tenant=tenant,
        weight=weight,
        cache_salt=cache_salt,
        isolated_steps=isolated_steps,
    )
    if not attempt.num_tokens:
        return [whole]
    params = replace(whole.params, n=1, prompt_logprobs=None)
    requests = [
        replace(whole, params=params, output_token_ids=tuple(output.token_ids), choice=choice)
        for choice, output in enumerate(attempt.outputs)
        if not output.finish_reason
    ]
    if job.prompt_logprobs is not None:
        attempt.is_prompt_pending = True
        prompt_only = SamplingParams(max_tokens=0, prompt_logprobs=job.prompt_logprobs)
        requests.append(replace(whole, params=prompt_only, choice=len(attempt.outputs)))
    return requests


def _params(job: Job, seed: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=job.max_tokens,
        min_tokens=job.min_tokens,
        temperature=job.temperature,
        top_k=job.top_k,
        top_p=job.top_p,
        min_p=job.min_p,
        seed=seed,
        presence_penalty=job.presence_penalty,
        frequency_penalty=job.frequency_penalty,
        repetition_penalty=job.repetition_penalty,
        logit_bias=tuple(job.logit_bias.items()),
        banned_token_ids=job.banned_token_ids,
        allowed_token_ids=job.allowed_token_ids,
        stop_token_ids=job.stop_token_ids,
        ignore_eos=job.ignore_eos,
        n=job.n,
        beam_width=job.beam_width,
        logprobs=job.logprobs,
        prompt_logprobs=job.prompt_logprobs,
        grammar=job.response_format,
    )
