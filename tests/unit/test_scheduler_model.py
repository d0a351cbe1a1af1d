"""Scheduler and block pool, driven at random, against a naive model of the same rules.

The model knows no blocks, only how many there are: it keeps plain records and works everything out from scratch at every step.
"""

from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.block_pool import BlockPool
from engine.config import SchedulerConfig
from engine.request import FinishReason, Request, SamplingParams
from engine.scheduler import Ended, Scheduler, SchedulerOutput
from engine.sequence import Sequence

EOS = 1
PROMPT = 0

Wish = tuple[int, int, int, int]
JOB = st.tuples(
    st.sampled_from([2, 4, 1, 3, 5, 2, 9, 16]),  # prompt tokens
    st.sampled_from([0, 0, 3, 6]),  # output tokens of an earlier attempt
    st.sampled_from([12, 20, 8, 14, 16, 10, 40, 3, 1, 0]),  # max_tokens
    st.sampled_from([0, 0, 1, -1]),  # priority
)


def token_of(name: int, index: int) -> int:
    """The output token `index` of a job: no other job or index has it, and none is EOS."""
    return 1000 * (name + 1) + index


@dataclass
class Job:
    """What the model knows of a request."""

    name: int
    priority: int
    num_prompt: int
    max_tokens: int
    outputs: list[int]
    computed: int = 0
    is_running: bool = False
    is_finishing: bool = False
    """Its next sampled token is EOS."""

    @property
    def order(self) -> tuple[int, int]:
        return self.priority, self.name

    @property
    def known(self) -> int:
        return self.num_prompt + len(self.outputs)


@dataclass
class Plan:
    """What a step should be."""

    parts: list[tuple[int, int, bool]] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    num_preempted_tokens: int = 0
    slots: dict[str, int] = field(default_factory=dict)


class Model:
    """The rules of scheduling without data structures."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.jobs: dict[int, Job] = {}

    def running(self) -> list[Job]:
        return sorted((job for job in self.jobs.values() if job.is_running), key=lambda job: job.order)

    def waiting(self) -> list[Job]:
        return sorted((job for job in self.jobs.values() if not job.is_running), key=lambda job: job.order)

    def blocks(self, num_tokens: int) -> int:
        return len(range(0, num_tokens, self.config.block_size))

    def used_blocks(self, plan: Plan) -> int:
        ahead = {name: num_tokens for name, num_tokens, _ in plan.parts}
        return sum(self.blocks(job.computed + ahead.get(job.name, 0)) for job in self.running())

    def plan(self) -> Plan:
        plan = Plan()
        for job in self.running():
            num_tokens = self.chunk(job, plan)
            if not num_tokens:
                break
            while job.is_running and self.used_blocks(plan) + self.growth(job, num_tokens) > self.config.num_blocks:
                self.preempt(self.running()[-1], plan)
            if not job.is_running:
                break
            self.schedule(job, num_tokens, plan)
        idle_state = self.start_waiting(plan)
        self.count_slots(plan, idle_state)
        return plan

    def start_waiting(self, plan: Plan) -> str:
        for job in self.waiting():
            if len(self.running()) == self.config.max_slots:
                break
            num_tokens = self.chunk(job, plan)
            if not num_tokens:
                return "no_budget"
            watermark = self.config.watermark_blocks if self.running() else 0
            if self.used_blocks(plan) + self.blocks(job.known) + watermark > self.config.num_blocks:
                return "no_memory"
            job.is_running = True
            self.schedule(job, num_tokens, plan)
        return "no_work"

    def chunk(self, job: Job, plan: Plan) -> int:
        left = self.config.max_num_batched_tokens - sum(num_tokens for _, num_tokens, _ in plan.parts)
        gap = job.known - job.computed
        if self.config.chunked_prefill:
            return max(0, min(gap, left))
        return gap if gap <= left or not plan.parts else 0

    def growth(self, job: Job, num_tokens: int) -> int:
        return self.blocks(job.computed + num_tokens) - self.blocks(job.computed)

    def preempt(self, job: Job, plan: Plan) -> None:
        plan.preempted.append(job.name)
        plan.num_preempted_tokens += job.computed
        job.is_running, job.computed = False, 0

    def schedule(self, job: Job, num_tokens: int, plan: Plan) -> None:
        closes = job.computed + num_tokens == job.known
        may_grow = len(job.outputs) < job.max_tokens and job.known < self.config.max_sequence_tokens
        plan.parts.append((job.name, num_tokens, closes and may_grow))

    def count_slots(self, plan: Plan, idle_state: str) -> None:
        states = ["idle"] * self.config.max_slots
        ahead = {name for name, _, _ in plan.parts}
        for slot, job in enumerate(self.running()):
            is_decode = job.computed >= job.num_prompt and job.known - job.computed == 1
            states[slot] = ("decode" if is_decode else "prefill") if job.name in ahead else "no_budget"
        for _ in self.waiting():
            if "idle" in states:
                states[states.index("idle")] = idle_state
        plan.slots = {state: states.count(state) for state in ("decode", "prefill", "no_memory", "no_budget")}
        plan.slots["no_work"] = states.count("no_work") + states.count("idle")

    def record(self, plan: Plan, tokens: list[int | None]) -> dict[int, tuple[FinishReason, str]]:
        """Advance by a step; who ends and why."""
        ended: dict[int, tuple[FinishReason, str]] = {}
        for (name, num_tokens, _), token in zip(plan.parts, tokens, strict=True):
            job = self.jobs.get(name)
            if job is None:
                continue
            job.computed += num_tokens
            job.outputs += [] if token is None else [token]
            if token == EOS:
                ended[name] = FinishReason.STOP, ""
            elif job.computed >= job.num_prompt and len(job.outputs) == job.max_tokens:
                ended[name] = FinishReason.LENGTH, ""
            elif job.known == self.config.max_sequence_tokens and (token is not None or job.computed == job.known):
                is_model = job.known == self.config.max_model_len
                ended[name] = FinishReason.LENGTH, "model_length" if is_model else "kv_capacity"
        for name in ended:
            del self.jobs[name]
        return ended


class SchedulerMachine(RuleBasedStateMachine):
    """Add, step, abort (also in the middle of a step) and finish, with few blocks; audited after every move."""

    @initialize(
        jobs=st.lists(JOB, min_size=4, max_size=10),
        max_slots=st.sampled_from([5, 4, 6, 4, 3, 6, 2, 1]),
        budget=st.sampled_from([40, 16, 8, 30, 16, 12, 5, 3, 1]),
        block_size=st.sampled_from([2, 4, 2, 1]),
        num_blocks=st.sampled_from([16, 12, 20, 14, 24, 18, 9, 4, 1]),
        max_model_len=st.sampled_from([32, 24, 48, 20, 9]),
        watermark=st.sampled_from([0, 1, 0, 2]),
        chunked=st.booleans(),
    )
    def start(
        self,
        jobs: list[Wish],
        max_slots: int,
        budget: int,
        block_size: int,
        num_blocks: int,
        max_model_len: int,
        watermark: int,
        chunked: bool,
    ) -> None:
        self.config = SchedulerConfig(
            max_slots=max_slots,
            max_num_batched_tokens=budget,
            block_size=block_size,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            watermark_blocks=watermark,
            chunked_prefill=chunked,
        )
        self.scheduler = Scheduler(self.config, BlockPool(num_blocks, block_size))
        self.model = Model(self.config)
        self.sequences: dict[int, Sequence] = {}
        self.num_added = 0
        self.add(jobs)

    @rule(jobs=st.lists(JOB, min_size=1, max_size=4))
    def add(self, jobs: list[Wish]) -> None:
        limit = self.config.max_sequence_tokens
        for prompt, prior, max_tokens, priority in jobs:
            num_prompt = 1 + (prompt - 1) % limit
            self.add_one(num_prompt, min(prior, max(max_tokens - 1, 0), limit - num_prompt), max_tokens, priority)

    def add_one(self, num_prompt: int, num_outputs: int, max_tokens: int, priority: int) -> None:
        name, self.num_added = self.num_added, self.num_added + 1
        outputs = [token_of(name, index) for index in range(num_outputs)]
        request = Request(
            request_id=str(name),
            prompt_token_ids=(PROMPT,) * num_prompt,
            output_token_ids=tuple(outputs),
            params=SamplingParams(max_tokens=max_tokens),
            priority=priority,
        )
        self.sequences[name] = Sequence(request, name, frozenset({EOS}))
        self.scheduler.add(self.sequences[name])
        self.model.jobs[name] = Job(name, priority, num_prompt, max_tokens, outputs)

    @precondition(lambda self: self.model.jobs)
    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.step_with_aborts([])

    @precondition(lambda self: self.model.jobs)
    @rule(picks=st.lists(st.integers(0, 99), min_size=1, max_size=3))
    def step_with_aborts(self, picks: list[int]) -> None:
        plan = self.model.plan()
        output = self.scheduler.schedule()
        self.check_decision(output, plan)
        for pick in picks:
            self.abort(pick)
        tokens = [self.sampled(name) if samples else None for name, _, samples in plan.parts]
        expected = self.model.record(plan, tokens)
        self.check_ends(self.scheduler.update(output, tokens), expected)
        self.audit()

    def sampled(self, name: int) -> int:
        job = self.model.jobs.get(name)
        return EOS if job is None or job.is_finishing else token_of(name, len(job.outputs))

    @precondition(lambda self: self.model.jobs)
    @rule(pick=st.integers(0, 99))
    def abort(self, pick: int) -> None:
        names = sorted(self.model.jobs)
        name = names[pick % len(names)] if names else 0
        assert self.scheduler.abort(str(name)) is (name in self.model.jobs)
        self.model.jobs.pop(name, None)
        self.scheduler.check()

    @precondition(lambda self: self.model.jobs)
    @rule(pick=st.integers(0, 99))
    def finish(self, pick: int) -> None:
        names = sorted(self.model.jobs)
        self.model.jobs[names[pick % len(names)]].is_finishing = True

    def check_decision(self, output: SchedulerOutput, plan: Plan) -> None:
        parts = [(int(item.sequence.request.request_id), item.num_tokens, item.samples) for item in output.scheduled]
        assert parts == plan.parts
        assert [int(sequence.request.request_id) for sequence in output.preempted] == plan.preempted
        assert output.num_preempted_tokens == plan.num_preempted_tokens
        slots = {state: getattr(output.slots, state) for state in plan.slots}
        assert slots == plan.slots
        assert output.slots.total == self.config.max_slots
        assert output.num_tokens == sum(num_tokens for _, num_tokens, _ in parts)
        assert output.num_tokens <= self.config.max_num_batched_tokens or (not self.config.chunked_prefill and len(parts) == 1)
        assert bool(parts) is bool(self.model.jobs), "there is work, and the step does nothing"
        assert self.scheduler.kv_counts().used_blocks == self.model.used_blocks(plan)
        self.scheduler.check()

    def check_ends(self, ended: list[Ended], expected: dict[int, tuple[FinishReason, str]]) -> None:
        assert {int(end.sequence.request.request_id): (end.reason, end.detail) for end in ended} == expected
        for end in ended:
            name, request = int(end.sequence.request.request_id), end.sequence.request
            outputs = end.sequence.token_ids[len(request.prompt_token_ids) :]
            if end.reason is FinishReason.STOP:
                assert outputs.pop() == EOS
            elif not end.detail:
                assert len(outputs) == request.params.max_tokens
            else:
                assert end.sequence.num_tokens == self.config.max_sequence_tokens
            assert outputs == [token_of(name, index) for index in range(len(outputs))], "a token is lost, doubled or another's"

    @invariant()
    def audit(self) -> None:
        self.scheduler.check()
        running, waiting = self.model.running(), self.model.waiting()
        assert (self.scheduler.num_running, self.scheduler.num_waiting) == (len(running), len(waiting))
        kv = self.scheduler.kv_counts()
        assert kv.used_blocks + kv.free_blocks == kv.capacity_blocks == self.config.num_blocks
        assert kv.used_blocks == self.model.used_blocks(Plan())
        assert kv.filled_tokens == sum(job.computed for job in running)
        assert kv.allocated_tokens - kv.filled_tokens < max(1, self.config.block_size * len(running))
        for job in self.model.jobs.values():
            sequence = self.sequences[job.name]
            assert sequence.token_ids == [PROMPT] * job.num_prompt + job.outputs
            assert sequence.num_computed_tokens == job.computed
        for first in waiting:
            for job in running:
                assert job.priority != first.priority or job.name < first.name, f"{job.name} overtook {first.name}"

    def teardown(self) -> None:
        """Whatever happened, what is left ends, and the pool is whole."""
        if not hasattr(self, "model"):
            return
        for _ in range(5000):
            if not self.model.jobs:
                break
            self.step(1)
        assert not self.model.jobs, "the rest does not end"
        assert self.scheduler.kv_counts().used_blocks == 0


SchedulerMachine.TestCase.settings = settings(
    max_examples=250, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestSchedulerAgainstModel = SchedulerMachine.TestCase
