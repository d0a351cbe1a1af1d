"""A scheduler between a make-believe model and a make-believe KV cache, both naive: the oracles of the scheduler's tests.

The model: a token is a function of all tokens before it, the seed, the choice and the index, so that what a request must yield
is known without a scheduler (`undisturbed`, `naive_beam_search`). The cache: every position holds a fingerprint of the salt and
of all tokens up to it. Moves and writes are applied as a step says, and whatever a step may read must be what its own sequence
would have written: a wrongly shared, stale, uncopied or wrongly moved block shows in the step that would read it.
"""

import random
from collections import deque
from collections.abc import Sequence as Items
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

from engine.beam import num_candidates
from engine.block_pool import NULL_BLOCK, BlockPool, extend_hashes
from engine.config import SchedulerConfig
from engine.decision import Ended, Sampled, ScheduledSequence, SchedulerOutput
from engine.isolation import is_alone
from engine.request import FinishReason, Grammar, GrammarKind, Request, SamplingParams
from engine.reservation import max_tokens_held
from engine.scheduler import PreemptionCosts, Scheduler
from engine.sequence import Sequence
from engine.stopping import check_stop
from tests.support.scheduling import make_config

EOS = 2
VOCABULARY = range(2, 34)
MAX_STEPS = 1500
"""12 requests of 20 tokens that never share a step and are preempted now and then need fewer."""
GARBAGE = 10**9
"""What is sampled where it must be dropped."""
GRAMMAR = Grammar(GrammarKind.REGEX, "")

Outcome = tuple[tuple[int, ...], FinishReason, str]
Key = tuple[str, int]


def fingerprints(salt: bytes, token_ids: Items[int]) -> list[int]:
    """What the cache holds at each position: a function of the salt and of all tokens up to it."""
    found, last = [], hash(tuple(salt))
    for token_id in token_ids:
        last = hash((last, token_id))
        found.append(last)
    return found


def token_after(token_ids: Items[int], seed: int, choice: int, index: int) -> int:
    """Few different tokens, EOS now and then: prefixes of different requests coincide."""
    return EOS + hash((fingerprints(b"", token_ids)[-1], seed, choice, index)) % 11 % 9


def candidates_after(token_ids: Items[int], count: int) -> list[tuple[int, float]]:
    """The likeliest tokens of a beam and their log probabilities, best first."""
    rng = random.Random(fingerprints(b"", token_ids)[-1])
    logprobs = [-0.01 - 4 * rng.random() for _ in VOCABULARY]
    ranked = sorted(zip(VOCABULARY, logprobs, strict=True), key=lambda pair: -pair[1])
    return ranked[:count]


def _stop_ids(params: SamplingParams) -> frozenset[int]:
    return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else {EOS})


def undisturbed(request: Request, config: SchedulerConfig) -> dict[Key, Outcome]:
    """What a sampled request yields, from the definition."""
    params, limit = request.params, max_tokens_held(request, config)
    why = "model_length" if limit >= config.max_model_len else "kv_capacity"
    outcomes = {}
    for choice in range(request.choice, request.choice + params.n):
        outputs = list(request.output_token_ids)
        reason, detail = FinishReason.LENGTH, ""
        while len(outputs) < params.max_tokens:
            if len(request.prompt_token_ids) + len(outputs) >= limit:
                detail = why
                break
            outputs.append(token_after([*request.prompt_token_ids, *outputs], params.seed, choice, len(outputs)))
            if len(outputs) >= params.min_tokens and outputs[-1] in _stop_ids(params):
                reason = FinishReason.STOP
                break
        outcomes[request.request_id, choice] = tuple(outputs), reason, detail
        if not params.max_tokens:
            break  # it never forks
    return outcomes


class Tied(Exception):
    """Two continuations have the same score: which is better is anybody's choice."""


def naive_beam_search(
    prompt: Items[int], width: int, stops: frozenset[int], max_new: int
) -> list[tuple[float, tuple[int, ...]]]:
    """transformers' `_beam_search` (length penalty 1, early_stopping False) on lists: (score, output), best first."""
    count = max(2, 1 + len(stops)) * width
    running: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    done: list[tuple[float, tuple[int, ...]]] = []
    for length in range(1, max_new + 1):
        found = [
            (score + logprob, (*output, token))
            for score, output in running
            for token, logprob in candidates_after([*prompt, *output], count)
        ]
        found = sorted(found, key=lambda pair: -pair[0])[: count + 1]
        if any(a[0] == b[0] for a, b in pairwise(found)):
            raise Tied
        over = [output[-1] in stops or length == max_new for _, output in found[:count]]
        done += [(s / length, o) for (s, o), is_over in zip(found[:width], over, strict=False) if is_over]
        done = sorted(done, key=lambda pair: -pair[0])[:width]
        running = [pair for pair, is_over in zip(found[:count], over, strict=True) if not is_over][:width]
        if not running or (len(done) == width and float(running[0][0]) / length <= done[-1][0]):
            break
    return done


class RecordingMatcher:
    """In the place of a grammar: remembers what it was told."""

    failure = None
    must_end = False

    def __init__(self, accepted: Items[int] = ()) -> None:
        self.accepted = list(accepted)

    def accept(self, token_id: int) -> None:
        self.accepted.append(token_id)

    def fork(self) -> "RecordingMatcher":
        return RecordingMatcher(self.accepted)


class Launched(NamedTuple):
    """A step that is computed and not recorded."""

    output: SchedulerOutput
    sampled: list[Sampled]
    scored: dict[Sequence, range]


class World:
    """Drives one scheduler as the engine does, and checks everything that can be seen on the way."""

    def __init__(self, config: SchedulerConfig, costs: PreemptionCosts | None = None) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks, config.block_size)
        self.scheduler = Scheduler(config, self.pool)
        self.scheduler.costs = costs or PreemptionCosts()
        self.requests: list[Request] = []
        self.sequences: list[Sequence] = []
        self.outcomes: dict[Key, Outcome] = {}
        self.beams: dict[str, list[tuple[float, tuple[int, ...]]]] = {}
        self.aborted: set[Key] = set()
        self.steps_alone: dict[str, int] = {}
        """Of the suspects that live, in order of arrival: steps that are left."""
        self.cleared: list[str] = []
        self.num_steps = 0
        self.num_preemptions = 0
        self.device = [[0] * config.block_size for _ in range(config.num_blocks + 1)]
        self.host = [[0] * config.block_size for _ in range(config.num_host_blocks)]
        self._launched: deque[Launched] = deque()
        self._meaning: dict[bytes, list[int]] = {}
        """What a block of that hash holds."""

    @property
    def is_idle(self) -> bool:
        return not (self._launched or self.scheduler.num_running or self.scheduler.num_waiting)

    def accepts(self, request: Request) -> bool:
        """Whether `core` would let it wait."""
        room = max_tokens_held(request, self.config) - (request.params.max_tokens > 0)
        if len(request.prompt_token_ids) > room or self.scheduler.holds(request.request_id, request.choice):
            return False
        sequence = Sequence(request, (0, 0, 0), frozenset({EOS}), max_tokens_held(request, self.config))
        return not (request.output_token_ids and check_stop(sequence, self.config.max_model_len))

    def add(self, request: Request) -> Sequence:
        order = self.scheduler.next_order(request)
        sequence = Sequence(request, order, frozenset({EOS}), max_tokens_held(request, self.config))
        if request.params.grammar is not None:
            sequence.matcher = RecordingMatcher(request.output_token_ids)  # type: ignore[assignment]
        self._forget_suspects()
        if request.isolated_steps:
            self.steps_alone.setdefault(request.request_id, request.isolated_steps)
        self.scheduler.add(sequence)
        self.requests.append(request)
        self.sequences.append(sequence)
        self.scheduler.check()
        return sequence

    def abort(self, request_id: str, choice: int | None = None) -> bool:
        live = [s for s in self.scheduler._lineup._live.get(request_id, ()) if choice in (None, s.choice)]
        for sequence in live:
            self.aborted |= {(request_id, sequence.choice + index) for index in range(max(sequence.width, 1))}
            if sequence.beam_search is not None:
                self.aborted |= {(request_id, index) for index in range(sequence.request.params.beam_width)}
        is_known = self.scheduler.abort(request_id, choice)
        assert is_known == bool(live)
        self.scheduler.check()
        self._check_counts()
        return is_known

    def step(self) -> SchedulerOutput:
        """One turn of the engine's loop; running ahead, the step recorded is the one before the step launched."""
        output = self.decide()
        self.record_due()
        return output

    def record_due(self) -> None:
        ahead = 1 if self._launched and self.config.run_ahead and self._launched[-1].output.scheduled else 0
        while len(self._launched) > ahead:
            self.record()

    def decide(self) -> SchedulerOutput:
        """`schedule`, with the moves and the computation."""
        had_work = not (self._launched or self.scheduler._lineup.ended) and not self.is_idle
        waiting = set(self.scheduler._lineup.waiting)
        output = self.scheduler.schedule()
        self.scheduler.check()
        self._check_decision(output, waiting)
        assert output.scheduled or not had_work, "there is work and the step does none of it"
        self._launched.append(self._launch(output))
        self._check_cached()
        self._check_counts()
        self.num_steps += 1
        self.num_preemptions += len(output.preempted)
        return output

    def record(self) -> list[Ended]:
        """`update` with the tokens of the oldest step."""
        launched = self._launched.popleft()
        dropped = self.scheduler.dropped()
        for sequence, positions in launched.scored.items():
            for position in positions:
                assert position <= len(sequence.prompt_logprobs), "a prompt position is left out"
                if position == len(sequence.prompt_logprobs):
                    sequence.prompt_logprobs.append(position)  # type: ignore[arg-type]
        sampled = [
            _garbage(token) if item.sequence in dropped else token
            for item, token in zip(launched.output.scheduled, launched.sampled, strict=True)
        ]
        ended = self.scheduler.update(launched.output, sampled)
        self.scheduler.check()
        self._check_counts()
        self._count_alone(launched.output)
        for end in ended:
            self._keep_outcome(end)
        return ended

    def check_outcomes(self) -> None:
        """Everything has ended as it would have alone, and nothing is held."""
        assert self.is_idle
        assert self.pool.num_used_blocks == 0, "a block is leaked"
        assert self.scheduler._tables._num_reserved == 0, "a reservation is leaked"
        for request in self.requests:
            if request.params.beam_width and request.params.max_tokens:
                self._check_beams(request)
                continue
            for key, outcome in undisturbed(request, self.config).items():
                if key not in self.aborted or key in self.outcomes:
                    assert self.outcomes.get(key) == outcome, f"request {key} yields {self.outcomes.get(key)} and not {outcome}"

    def _check_beams(self, request: Request) -> None:
        if (request.request_id, 0) in self.aborted:
            return
        params, prompt = request.params, request.prompt_token_ids
        max_new = min(params.max_tokens, max_tokens_held(request, self.config) - len(prompt))
        try:
            expected = naive_beam_search(prompt, params.beam_width, _stop_ids(params), max_new)
        except Tied:
            return
        assert self.beams[request.request_id] == expected

    # The cache

    def _launch(self, output: SchedulerOutput) -> Launched:
        self._move(output)
        sampled: list[Sampled] = []
        scored: dict[Sequence, range] = {}
        known = [self._known(item) for item in output.scheduled]
        marks = [fingerprints(i.sequence.request.cache_salt, ids) for i, ids in zip(output.scheduled, known, strict=True)]
        for item, contents in zip(output.scheduled, marks, strict=True):
            self._write(item, contents)
            self._read(item, contents)  # in order: a batch may be computed in two halves
        for item, contents, ids in zip(output.scheduled, marks, known, strict=True):
            self._read(item, contents)
            self._keep_meaning(item.sequence, contents, ids)
            sampled.append(self._sample(item, ids))
            if item.num_scored:
                end = min(item.sequence.num_computed_tokens, item.sequence.num_prompt_tokens - 1)
                scored[item.sequence] = range(end - item.num_scored, end)
                assert end - item.num_scored >= item.sequence.num_computed_tokens - item.num_tokens, "scored and not computed"
        return Launched(output, sampled, scored)

    def _move(self, output: SchedulerOutput) -> None:
        """Out, copies, in; of each kind all are read before one is written, as one gather and one scatter do."""
        out, copied, back = output.moves
        for moves in output.moves:
            targets = [target for _, target in moves]
            assert len(targets) == len(set(targets)), "two moves of a kind have one target"
        assert not {s for s, _ in copied} & {t for _, t in copied}, "a copy's target is the source of another"
        for sources, targets, pairs in (
            (self.device, self.host, out),
            (self.device, self.device, copied),
            (self.host, self.device, back),
        ):
            contents = [list(sources[source]) for source, _ in pairs]
            for (_, target), content in zip(pairs, contents, strict=True):
                targets[target] = content

    def _known(self, item: ScheduledSequence) -> list[int]:
        """All tokens up to the end of the part, the one in flight included."""
        sequence, end = item.sequence, item.sequence.num_computed_tokens
        ids = sequence.token_ids[:end]
        if len(ids) < end:
            assert not sequence.reads_tokens, "decided before its last token is read"
            last = self._launched[-1]
            at = [other.sequence for other in last.output.scheduled].index(sequence)
            assert sequence not in self.scheduler._in_flight[-2][1], "a dropped token is fed"
            token = last.sampled[at]
            assert isinstance(token, int)
            ids = [*ids, token]
        assert len(ids) == end, "a token is computed that is neither known nor in flight"
        return ids

    def _write(self, item: ScheduledSequence, contents: list[int]) -> None:
        block_size, table = self.config.block_size, item.sequence.block_table
        for position in range(item.sequence.num_computed_tokens - item.num_tokens, item.sequence.num_computed_tokens):
            block = table[position // block_size]
            assert block != NULL_BLOCK, "the null block is written"
            self.device[block][position % block_size] = contents[position]

    def _read(self, item: ScheduledSequence, contents: list[int]) -> None:
        """Every position that a layer may look back to holds what this very sequence would have stored there."""
        block_size, sequence = self.config.block_size, item.sequence
        first = 0
        if self.config.sliding_window is not None:
            first = max(0, sequence.num_computed_tokens - item.num_tokens - self.config.sliding_window + 1)
        for position in range(first, sequence.num_computed_tokens):
            block = sequence.block_table[position // block_size]
            found = self.device[block][position % block_size]
            assert block != NULL_BLOCK, f"position {position} has left the window too early"
            assert found == contents[position], f"request {sequence.request.request_id} reads another's position {position}"

    def _keep_meaning(self, sequence: Sequence, contents: list[int], ids: list[int]) -> None:
        block_size = self.config.block_size
        hashes: list[bytes] = []
        extend_hashes(hashes, ids, len(ids) // block_size, block_size, sequence.request.cache_salt)
        count = min(len(hashes), len(sequence.block_hashes))
        assert sequence.block_hashes[:count] == hashes[:count], "a hash is not that of the tokens"
        for index, block_hash in enumerate(sequence.block_hashes):
            content = contents[index * block_size : (index + 1) * block_size]
            if len(content) == block_size:
                assert self._meaning.setdefault(block_hash, content) == content, "one hash stands for two contents"

    def _check_cached(self) -> None:
        """Whatever can be found holds what its hash says."""
        for block_hash, content in self._meaning.items():
            for block in self.pool.find([block_hash]):
                assert self.device[block] == content, f"block {block} is found and holds something else"

    # The model

    def _sample(self, item: ScheduledSequence, ids: list[int]) -> Sampled:
        sequence, params = item.sequence, item.sequence.request.params
        if not item.num_samples:
            return None
        index = len(ids) - sequence.num_prompt_tokens
        assert len(ids) == sequence.num_tokens - sequence.num_in_flight + (len(ids) > len(sequence.token_ids))
        if sequence.beam_search is not None:
            return candidates_after(ids, num_candidates(params.beam_width, len(sequence.stop_token_ids)))
        if sequence.matcher is not None:
            assert sequence.matcher.accepted == ids[sequence.num_prompt_tokens :]  # type: ignore[attr-defined]
        choices = range(sequence.choice, sequence.choice + item.num_samples)
        tokens = [token_after(ids, params.seed, choice, index) for choice in choices]
        return tokens[0] if len(tokens) == 1 else tokens

    def _keep_outcome(self, end: Ended) -> None:
        sequence, request = end.sequence, end.sequence.request
        key = request.request_id, sequence.choice
        if request.params.prompt_logprobs is not None:
            assert sequence.prompt_logprobs == list(range(sequence.num_prompt_tokens - 1)), "a prompt position is not scored"
        if sequence.beam_search is not None and request.params.max_tokens:
            assert request.request_id not in self.beams, "a search ends twice"
            self.beams[request.request_id] = [(found.score, found.token_ids) for found in sequence.beam_search.hypotheses]
            return
        assert key not in self.outcomes, f"request {key} ends twice"
        self.outcomes[key] = tuple(sequence.token_ids[sequence.num_prompt_tokens :]), end.reason, end.detail
        assert not sequence.block_table, "what has ended holds blocks"

    # Suspects

    def _forget_suspects(self) -> None:
        """Those that have ended or were aborted."""
        live = self.scheduler._lineup._live
        self.steps_alone = {name: left for name, left in self.steps_alone.items() if name in live}

    def _check_alone(self, output: SchedulerOutput) -> None:
        """A step runs the first suspect or, with request_level until its batch is over, none."""
        self._forget_suspects()
        names = {item.sequence.request.request_id for item in output.scheduled}
        live = self.scheduler._lineup._live
        alone = [name for name in self.steps_alone if any(map(is_alone, live[name]))]
        is_window = any(is_alone(item.sequence) for item in output.scheduled)
        if is_window or (alone and self.config.scheduling != "request_level"):
            assert names <= {alone[0]}, "a suspect does not run alone"
        assert not names or output.suspect == (alone[0] if is_window else ""), "a step says wrongly whom it runs alone"

    def _count_alone(self, output: SchedulerOutput) -> None:
        self._forget_suspects()
        cleared = []
        for name in {output.suspect} & set(self.steps_alone if output.scheduled else ()):
            live = self.scheduler._lineup._live[name]
            is_whole = all(sequence.block_table for sequence in live if is_alone(sequence))  # not what an earlier window had
            self.steps_alone[name] -= is_whole and not output.num_prefill_tokens
            if not self.steps_alone[name]:
                del self.steps_alone[name]
                cleared.append(name)
        assert list(self.scheduler.take_cleared()) == cleared
        self.cleared += cleared

    # Decisions

    def _check_decision(self, output: SchedulerOutput, waiting: set[Sequence]) -> None:
        slots, config = output.slots, self.config
        scheduled = [item.sequence for item in output.scheduled]
        assert slots.total == config.max_slots
        assert min(getattr(slots, name) for name in slots.__slots__) >= 0, slots
        assert len(scheduled) == len(set(scheduled)), "scheduled twice in a step"
        assert not set(scheduled) & set(output.preempted), "preempted and started again in a step"
        assert all(item.num_tokens > 0 for item in output.scheduled)
        assert output.num_tokens == sum(item.num_tokens for item in output.scheduled)
        if config.scheduling == "continuous" and len(scheduled) > 1:
            assert output.num_tokens <= config.max_num_batched_tokens
        assert sum(item.num_scored for item in output.scheduled) <= config.max_scored_tokens
        self._check_alone(output)
        head = self.scheduler.head
        for sequence in scheduled:
            assert sequence not in waiting or head is None or sequence.order < head.order, "one that waits is overtaken"

    def _check_counts(self) -> None:
        """KV counts, from the tables."""
        counts, block_size = self.scheduler.kv_counts(), self.config.block_size
        held = [*self.scheduler._lineup.running, *(end.sequence for end in self.scheduler._lineup.ended)]
        filled: dict[int, int] = {}
        for sequence in held:
            for index, block in enumerate(sequence.block_table):
                num = min(block_size, sequence.num_computed_tokens - index * block_size)
                if block != NULL_BLOCK:
                    filled[block] = max(num, filled.get(block, 0))
        assert counts.used_blocks == len(filled)
        assert counts.filled_tokens == sum(filled.values())
        assert (
            counts.used_blocks + counts.cached_blocks + counts.free_blocks == counts.capacity_blocks == self.config.num_blocks
        )
        assert counts.used_blocks * block_size <= counts.allocated_tokens <= self.config.num_blocks * block_size


def _garbage(token: Sampled) -> Sampled:
    if isinstance(token, list):
        return [(GARBAGE, 0.0) if isinstance(part, tuple) else GARBAGE for part in token]  # type: ignore[return-value]
    return None if token is None else GARBAGE


def most_blocks(request: Request, config: SchedulerConfig) -> int:
    """What all choices of it can need, when nothing but the full blocks of the prompt is shared."""
    params, num_prompt = request.params, len(request.prompt_token_ids)
    shared = num_prompt // config.block_size
    whole = -(-min(num_prompt + params.max_tokens, max_tokens_held(request, config)) // config.block_size)
    return shared + max(params.n, params.beam_width, 1) * (whole - shared)


# Named worlds


def make_request(name: int, num_prompt: int, **params: object) -> Request:
    """Prompts of different names begin differently, those of `name` and `name + 3` alike."""
    prompt = tuple(5 + (name + index) % 3 for index in range(num_prompt))
    sampling = SamplingParams(**({"ignore_eos": True, "seed": name} | params))  # type: ignore[arg-type]
    return Request(request_id=str(name), prompt_token_ids=prompt, params=sampling)


def run_world(requests: Items[Request], **options: object) -> World:
    """Requests of one moment, to their ends, with every oracle."""
    world = World(make_config(**options), PreemptionCosts(0.1, 0.1))
    for request in requests:
        world.add(request)
    while not world.is_idle:
        world.step()
        assert world.num_steps < MAX_STEPS, "it does not end"
    world.check_outcomes()
    return world


# Random worlds


def draw_config(rng: random.Random, **fixed: Any) -> SchedulerConfig:
    """Small: pools that run dry, every policy."""
    max_slots = fixed.get("max_slots") or rng.randint(1, 6)
    options = {
        "max_slots": max_slots,
        "max_num_batched_tokens": max(max_slots, rng.choice([1, 3, 5, 8, 40])),
        "block_size": rng.choice([2, 4]),
        "num_blocks": rng.choice([3, 5, 8, 12, 20, 40]),
        "max_model_len": rng.choice([8, 20, 60]),
        "watermark_blocks": rng.choice([0, 0, 1, 2]),
        "num_host_blocks": rng.choice([0, 1, 5, 40]),
        "chunked_prefill": rng.random() < 0.7,
        "prefill_first": rng.random() < 0.2,
        "scheduling": rng.choice(["continuous", "continuous", "continuous", "iteration_level", "request_level"]),
        "reservation": rng.choice(["paged", "paged", "paged", "declared", "ratio", "max", "pow2", "oracle"]),
        "prefix_caching": rng.random() < 0.7,
        "preemption": rng.choice(["auto", "recompute", "swap"]),
        "sliding_window": rng.choice([None, None, None, 1, 3, 8]),
        "max_scored_tokens": rng.choice([1, 3, 512]),
        "aging": rng.randint(1, 5),
        "run_ahead": rng.random() < 0.4,
    }
    return SchedulerConfig(**(options | fixed))


def draw_request(rng: random.Random, name: int, earlier: list[Request], config: SchedulerConfig) -> Request:
    """A prompt that often begins like an earlier one, and one of the ways of going on."""
    prompt = tuple(rng.choice([5, 6]) for _ in range(rng.choice([1, 2, 3, 5, 8, 13])))
    if earlier and rng.random() < 0.6:
        prompt = (rng.choice(earlier).prompt_token_ids + prompt)[:20]
    kind = rng.choice(["one", "one", "one", "forks", "beams", "scored", "resumed"])
    params: dict[str, Any] = {
        "max_tokens": rng.choice([0, 1, 2, 5, 9, 15, 20]),
        "min_tokens": rng.choice([0, 0, 0, 4]),
        "seed": rng.choice([name, 0]),
        "stop_token_ids": rng.choice([(), (7,)]),
        "ignore_eos": rng.random() < 0.5,
        "presence_penalty": rng.choice([0.0, 0.0, 0.5]),
        "grammar": rng.choice([None, None, None, GRAMMAR]),
    }
    outputs: tuple[int, ...] = ()
    if kind == "forks":
        params["n"] = rng.randint(1, config.max_slots)
    elif kind == "beams" and config.max_slots > 1:
        params |= {"beam_width": rng.randint(2, config.max_slots), "min_tokens": 0, "grammar": None, "presence_penalty": 0.0}
    elif kind == "scored":
        params["prompt_logprobs"] = 1
        params["n"] = rng.choice([1, config.max_slots])
    elif kind == "resumed":
        outputs = tuple(rng.choice([5, 6, 8]) for _ in range(rng.randint(1, 6)))
    return Request(
        request_id=str(name),
        prompt_token_ids=prompt,
        params=SamplingParams(**params),
        output_token_ids=outputs,
        choice=rng.randint(0, 2) if outputs else 0,
        priority=rng.randint(0, 2),
        tenant=rng.randint(0, 2),
        weight=rng.choice([1.0, 0.5, 3.0]),
        cache_salt=rng.choice([b"", b"", b"", b"a"]),
        isolated_steps=rng.choice([0, 0, 0, 0, 0, 1, 3, 8]),
    )


def play(rng: random.Random, **fixed: Any) -> World:
    """A random life of a world, to its end; returns it for more checks."""
    config = draw_config(rng, **fixed)
    world = World(config, PreemptionCosts(rng.choice([0.1, 1.0]), rng.choice([0.05, 1.0])))
    names = list(range(rng.choice([1, 3, 6, 12])))
    drawn: list[Request] = []
    late: list[Request] = []
    while names or late or not world.is_idle:
        while names and rng.random() < 0.4:
            request = draw_request(rng, names.pop(0), drawn, config)
            drawn.append(request)
            others = range(request.choice + 1, request.choice + rng.choice([1, 1, 3])) if request.output_token_ids else ()
            late += [replace(request, choice=choice) for choice in others]  # resumed choice by choice
            if world.accepts(request):
                world.add(request)
        while late and rng.random() < 0.5:
            if world.accepts(late[0]):
                world.add(late[0])
            late.pop(0)
        may_abort = world.requests and world.num_steps < 60  # an abort must not hide that something never ends
        if may_abort and rng.random() < 0.05:
            _abort_one(rng, world)
        world.decide()
        if may_abort and rng.random() < 0.03:
            _abort_one(rng, world)
        world.record_due()
        assert world.num_steps < MAX_STEPS, "it does not end"
    world.check_outcomes()
    if config.reservation in ("declared", "max", "pow2", "oracle"):
        can_fit = all(most_blocks(request, config) <= config.num_blocks for request in world.requests)
        can_fit &= not any(request.isolated_steps for request in world.requests)
        assert not (can_fit and world.num_preemptions), "preempted although everything was set aside"
    return world


def _abort_one(rng: random.Random, world: World) -> None:
    request = rng.choice(world.requests)
    is_whole = request.params.beam_width > 0 or rng.random() < 0.6
    world.abort(request.request_id, None if is_whole else request.choice + rng.randrange(request.params.n))
