"""What a step recorded, as events for the queue side.

Relies on what the sampler chose and on what the scheduler says has ended. Decides nothing, and notes in a sequence only that
the log probabilities of its prompt are told.
"""

from collections.abc import Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from functools import partial
from itertools import islice

from engine.decision import Ended, Sampled, ScheduledSequence
from engine.messages import TokenEvent, TokenLogprobs
from engine.request import FinishReason
from engine.sampler import Row, SamplerOutput
from engine.sequence import Sequence


def sampled_by_item(items: Collection[ScheduledSequence], sampled: SamplerOutput) -> list[Sampled]:
    """The sampler's rows as `Scheduler.update` takes them: a token, nothing, a token per choice, or a beam's candidates."""
    tokens = iter(sampled.token_ids)
    found: list[Sampled] = []
    row = 0
    for sequence, _, num_samples, _ in items:
        if sequence.beam_search is not None and num_samples:
            found.append(sampled.logprobs[row].top if row not in sampled.failed else ())
            next(islice(tokens, num_samples - 1, num_samples))
        elif num_samples == 1:
            found.append(next(tokens))
        else:
            found.append(list(islice(tokens, num_samples)) if num_samples else None)
        row += num_samples
    return found


def failures(rows: list[Row], failed: Mapping[int, str], dropped: AbstractSet[Sequence]) -> list[Ended]:
    """The sequences that have a row without a token, each once; of a beam search one beam, which stands for all.

    Why: the grammar that gave up, where there is one.
    """
    found: dict[object, Ended] = {}
    for sequence, why in ((rows[row].sequence, why) for row, why in failed.items()):
        if sequence not in dropped:
            gave_up = sequence.matcher and sequence.matcher.failure
            detail = str(gave_up) if gave_up else f"sampling: {why}"
            found.setdefault(sequence.beam_search or sequence, Ended(sequence, FinishReason.ERROR, detail, not gave_up))
    return list(found.values())


def token_events(
    rows: list[Row], sampled: SamplerOutput, ended: Iterable[Ended], dropped: AbstractSet[Sequence]
) -> list[TokenEvent]:
    """An event for each sampled token that counts, in the order of the batch, then those that end without one.

    `dropped`: sequences that were aborted or preempted before their tokens were read.
    """
    events = []
    ends = {(end.sequence.request.request_id, end.sequence.choice): end for end in ended}
    for row, (sequence, choice, start) in enumerate(rows):
        if sequence.beam_search is not None or (dropped and sequence in dropped):
            continue
        request_id = sequence.request.request_id
        end = ends.pop((request_id, choice), None) if ends else None
        events.append(
            TokenEvent(
                request_id,
                start,
                (sampled.token_ids[row],),
                end.reason if end else None,
                end.detail if end else "",
                sequence.num_cached_tokens,
                choice,
                (sampled.logprobs[row],) if row in sampled.logprobs else (),
                _owed_logprobs(sequence) if sequence.owes_prompt_logprobs else None,
            )
        )
    for end in ends.values():
        events += end_events(end)
    return events


def end_events(end: Ended) -> list[TokenEvent]:
    """The end of a sequence whose last token, if any, has been told: one event for each of its choices.

    Of a beam search nothing has been told before: it ends with its outcome, or fails as a whole.
    """
    sequence, reason, detail, may_retry = end
    params, request_id = sequence.request.params, sequence.request.request_id
    scores = _owed_logprobs(sequence) if sequence.owes_prompt_logprobs else None
    told = partial(TokenEvent, request_id, detail=detail, num_cached_tokens=sequence.num_cached_tokens, may_retry=may_retry)
    if sequence.beam_search is not None and sequence.beam_search.hypotheses and reason is not FinishReason.ERROR:
        return [
            TokenEvent(
                request_id,
                0,
                done.token_ids,
                done.reason,
                detail if done.reason is FinishReason.LENGTH else "",
                sequence.num_cached_tokens,
                choice,
                prompt_logprobs=None if choice else scores,
                score=done.score,
            )
            for choice, done in enumerate(sequence.beam_search.hypotheses)
        ]
    start = 0 if sequence.beam_search is not None else len(sequence.token_ids) - sequence.num_prompt_tokens
    num_choices = 1 if start else max(params.n, params.beam_width)  # it has not forked yet, or is a beam
    first = sequence.choice if start else sequence.request.choice
    return [told(start, (), reason, choice=first + i, prompt_logprobs=None if i else scores) for i in range(num_choices)]


def _owed_logprobs(sequence: Sequence) -> tuple[TokenLogprobs, ...] | None:
    """The log probabilities of the prompt, told once; None where it ends before they are known."""
    sequence.owes_prompt_logprobs = False
    return tuple(sequence.prompt_logprobs) if len(sequence.prompt_logprobs) == sequence.num_prompt_tokens - 1 else None
