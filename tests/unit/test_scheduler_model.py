"""Scheduler and block pool, driven at random, against two naive oracles: what a request yields alone, and what every position
of the KV cache must hold when it is read. Both are kept by tests/support/scheduler_world.py, which audits after every move.

A failing seed is repeated with `play(random.Random(seed))`.
"""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from engine.config import CHOICES, SchedulerConfig
from engine.request import Request, SamplingParams
from engine.scheduler import PreemptionCosts
from tests.support.scheduler_world import GRAMMAR, World, draw_config, draw_request, play

SEEDS = st.integers(0, 2**32)
SCHEDULING, RESERVATION, PREEMPTION = CHOICES["scheduling"], CHOICES["reservation"], CHOICES["preemption"]


def examples(count: int) -> settings:
    return settings(max_examples=count, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@examples(350)
@given(SEEDS)
def test_whatever_happens_every_choice_ends_once_as_it_would_alone(seed: int) -> None:
    play(random.Random(seed))


@pytest.mark.parametrize("reservation", RESERVATION)
@pytest.mark.parametrize("scheduling", SCHEDULING)
@examples(8)
@given(seed=SEEDS)
def test_every_pair_of_policies_yields_the_same_tokens(scheduling: str, reservation: str, seed: int) -> None:
    play(random.Random(seed), scheduling=scheduling, reservation=reservation)


def crowd(seed: int, **options: object) -> World:
    """Six requests, two of which fit together by the time they are long."""
    rng = random.Random(seed)
    world = World(draw_config(rng, **options), PreemptionCosts(swap_s_per_block=0.4, recompute_s_per_token=0.5))
    for name in range(6):
        params = SamplingParams(max_tokens=rng.randint(7, 14), n=rng.choice([1, 1, 2]), ignore_eos=True, seed=name)
        world.add(Request(request_id=str(name), prompt_token_ids=(5, 6, 5)[: rng.randint(1, 3)], params=params))
    return world


@pytest.mark.parametrize("num_host_blocks", [0, 1, 6, 100], ids=["none", "one", "too few", "enough"])
@pytest.mark.parametrize("preemption", PREEMPTION)
def test_a_crowd_that_is_preempted_yields_the_same_tokens(preemption: str, num_host_blocks: int) -> None:
    num_swapped = num_recomputed = 0
    for seed in range(8):
        small = {"max_slots": 6, "num_blocks": 10, "block_size": 2, "max_model_len": 60, "watermark_blocks": 0}
        policies = {"reservation": "paged", "scheduling": "continuous", "sliding_window": None}
        world = crowd(seed, **small, **policies, preemption=preemption, num_host_blocks=num_host_blocks)
        while not world.is_idle:
            output = world.step()
            num_swapped += output.num_swap_preemptions
            num_recomputed += len(output.preempted) - output.num_swap_preemptions
            assert world.num_steps < 1000, "it does not end"
        world.check_outcomes()

    can_swap = preemption != "recompute" and num_host_blocks > 0
    assert (num_swapped > 0) is can_swap
    assert (num_recomputed > 0) is (not can_swap or num_host_blocks < 100)


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("sliding_window", [3, 4])
def test_a_crowd_that_is_swapped_out_of_its_windows_yields_the_same_tokens(sliding_window: int, run_ahead: bool) -> None:
    num_swapped = num_released = 0
    for seed in range(12):
        small = {"max_slots": 6, "num_blocks": 9, "block_size": 2, "max_model_len": 60, "watermark_blocks": 0}
        policies = {"reservation": "paged", "scheduling": "continuous", "prefix_caching": True, "preemption": "swap"}
        options = {"sliding_window": sliding_window, "run_ahead": run_ahead, "num_host_blocks": 20}
        world = crowd(seed, **small, **policies, **options)
        while not world.is_idle:
            output = world.step()
            num_swapped += output.num_swap_preemptions
            num_released += sum(sequence.num_released_blocks for sequence in output.preempted)
            assert world.num_steps < 1000, "it does not end"
        world.check_outcomes()

    assert num_swapped > 0
    assert num_released > 0


@examples(60)
@given(SEEDS)
def test_running_ahead_yields_what_the_plain_loop_yields(seed: int) -> None:
    outcomes = []
    for run_ahead in (False, True):
        rng = random.Random(seed)
        config = draw_config(rng, run_ahead=run_ahead)
        world = World(config, PreemptionCosts(0.1, 0.1))
        drawn: list[Request] = []
        for name in range(6):
            drawn.append(draw_request(rng, name, drawn, config))
            if world.accepts(drawn[-1]):
                world.add(drawn[-1])
        while not world.is_idle:
            world.step()
        outcomes.append((world.outcomes, world.beams))

    assert outcomes[0] == outcomes[1]


CONFIG = st.builds(
    SchedulerConfig,
    max_slots=st.integers(1, 5),
    max_num_batched_tokens=st.sampled_from([5, 8, 40]),
    block_size=st.sampled_from([2, 4]),
    num_blocks=st.integers(3, 16),
    max_model_len=st.sampled_from([20, 60]),
    watermark_blocks=st.integers(0, 2),
    num_host_blocks=st.sampled_from([0, 1, 4, 40]),
    chunked_prefill=st.booleans(),
    prefill_first=st.booleans(),
    scheduling=st.sampled_from(SCHEDULING),
    reservation=st.sampled_from(RESERVATION),
    prefix_caching=st.booleans(),
    preemption=st.sampled_from(PREEMPTION),
    sliding_window=st.sampled_from([None, 1, 5]),
    max_scored_tokens=st.sampled_from([2, 512]),
    aging=st.integers(1, 5),
    run_ahead=st.booleans(),
)
PROMPT = st.lists(st.sampled_from([5, 6]), min_size=1, max_size=12).map(tuple)
PARAMS = st.one_of(
    st.builds(
        SamplingParams,
        max_tokens=st.integers(0, 16),
        n=st.integers(1, 3),
        ignore_eos=st.booleans(),
        prompt_logprobs=st.sampled_from([None, None, 0]),
        presence_penalty=st.sampled_from([0.0, 1.0]),
        grammar=st.sampled_from([None, GRAMMAR]),
    ),
    st.builds(SamplingParams, max_tokens=st.integers(1, 12), beam_width=st.integers(2, 4), ignore_eos=st.booleans()),
)


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, steps, half steps and aborts in any order; hypothesis shrinks what fails."""

    @initialize(config=CONFIG)
    def start(self, config: SchedulerConfig) -> None:
        self.world = World(config, PreemptionCosts(0.1, 0.05))

    @rule(
        prompt=PROMPT,
        outputs=st.lists(st.sampled_from([5, 8]), max_size=3).map(tuple),
        params=PARAMS,
        priority=st.integers(0, 2),
        tenant=st.integers(0, 1),
        salt=st.sampled_from([b"", b"a"]),
        isolated_steps=st.sampled_from([0, 0, 0, 1, 4]),
    )
    def add(
        self,
        prompt: tuple[int, ...],
        outputs: tuple[int, ...],
        params: SamplingParams,
        priority: int,
        tenant: int,
        salt: bytes,
        isolated_steps: int,
    ) -> None:
        request = Request(
            request_id=str(len(self.world.requests)),
            prompt_token_ids=prompt,
            params=params,
            output_token_ids=() if params.beam_width or params.n > 1 else outputs,
            priority=priority,
            tenant=tenant,
            cache_salt=salt,
            isolated_steps=isolated_steps,
        )
        if max(params.n, params.beam_width) <= self.world.config.max_slots and self.world.accepts(request):
            self.world.add(request)

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.world.step()

    @precondition(lambda self: self.world.requests)
    @rule(at=st.integers(0, 30), between=st.booleans())
    def abort(self, at: int, between: bool) -> None:
        if between:
            self.world.decide()
        self.world.abort(self.world.requests[at % len(self.world.requests)].request_id)
        self.world.record_due()

    def teardown(self) -> None:
        """Whatever happened, what is left ends, and the pool is whole."""
        if not hasattr(self, "world"):
            return
        last = self.world.num_steps + 1000
        while not self.world.is_idle:
            self.world.step()
            assert self.world.num_steps < last, "the rest does not end"
        self.world.check_outcomes()


SchedulerMachine.TestCase.settings = settings(examples(100), stateful_step_count=25)
TestSchedulerMachine = SchedulerMachine.TestCase
