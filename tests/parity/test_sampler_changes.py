"""Bias, bans, penalties and grammars: against the same written out token by token, and each by what users see of it."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request import Grammar, GrammarKind, SamplingParams
from engine.sampler import sample
from tests.support.sampling import changed, distribution, row_of, sampling_of, tied_logits

VOCAB = 40
GREEDY = SamplingParams(temperature=0.0)
ids = st.integers(0, VOCAB - 1)
# Steps of 1/4 are exact in float32, so that the reference rounds nothing else than the sampler does.
quarters = st.integers(-8, 8).map(lambda n: n / 4)
params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.25, 1.0, 3.0]),
    top_k=st.just(0) | st.integers(1, VOCAB),
    top_p=st.just(1.0) | st.floats(0.1, 1.0),
    min_p=st.sampled_from([0.0, 1.0]) | st.floats(0.0, 1.0),
    min_tokens=st.sampled_from([0, 3, 9]),
    stop_token_ids=st.lists(ids, max_size=3).map(tuple),
    presence_penalty=st.just(0.0) | quarters,
    frequency_penalty=st.just(0.0) | quarters,
    repetition_penalty=st.sampled_from([1.0, 0.5, 2.0]),
    logit_bias=st.dictionaries(ids, quarters.map(lambda n: n * 4), max_size=4).map(lambda bias: tuple(bias.items())),
    banned_token_ids=st.lists(ids, max_size=4).map(tuple),
    allowed_token_ids=st.just(()) | st.lists(ids, min_size=5).map(tuple),
    seed=st.integers(0, 2**64),
)
rows = st.builds(
    row_of,
    params,
    st.lists(ids, max_size=6),
    prompt=st.lists(ids, min_size=1, max_size=6).map(tuple),
    grammar=st.none() | st.sets(ids, min_size=10),
)


@settings(max_examples=100, deadline=None)
@given(batch=st.lists(rows, min_size=1, max_size=5), seed=st.integers(0, 99))
def test_every_row_is_drawn_from_what_its_parameters_leave(batch, seed):
    logits = (torch.randn(len(batch), VOCAB, generator=torch.Generator().manual_seed(seed)) * 12).round() / 4
    output = sample(logits, sampling_of(batch, VOCAB))
    for number, row in enumerate(batch):
        if np.isneginf(changed(logits[number].numpy(), row)).all():
            assert number in output.failed
        else:
            shares = distribution(logits[number].numpy(), row)
            assert shares[output.token_ids[number]] > 0


@settings(max_examples=100, deadline=None)
@given(row=rows, seed=st.integers(0, 99))
def test_logits_are_changed_as_written_out_token_by_token(row, seed):
    logits = (torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 12).round() / 4
    expected = changed(logits[0].numpy(), row)
    values = logits.clone()
    for group in sampling_of([row], VOCAB).groups:
        if group.changes:
            group.changes.apply(values)
    assert np.array_equal(values[0].numpy(), expected)


def chosen(logits: list[float], *rows) -> list[int]:
    return sample(torch.tensor([logits] * len(rows)), sampling_of(rows, len(logits))).token_ids


def greedy(**changes) -> SamplingParams:
    return dataclasses.replace(GREEDY, **changes)


def test_stop_ids_are_banned_below_min_tokens_and_free_from_there_on():
    rows = [row_of(greedy(min_tokens=2), range(n)) for n in (0, 1, 2)]
    assert chosen([0.0, 1.0, 9.0, 5.0], *rows) == [3, 3, 2]  # 2 is EOS


def test_prompt_tokens_count_for_repetition_alone():
    penalties = ({"repetition_penalty": 2.0}, {"presence_penalty": 2.0}, {"frequency_penalty": 2.0})
    rows = [row_of(greedy(**penalty), outputs=(), prompt=(1,)) for penalty in penalties]
    assert chosen([0.0, 3.0, 2.0], *rows) == [2, 1, 1]


def test_presence_counts_once_and_frequency_each_time():
    rows = [row_of(greedy(**penalty), outputs=(1, 1, 1)) for penalty in ({"presence_penalty": 1.0}, {"frequency_penalty": 1.0})]
    assert chosen([0.0, 3.0, 1.5], *rows) == [1, 2]


def test_repetition_makes_negative_logits_smaller():
    assert chosen([-3.0, -1.0, -1.5], row_of(greedy(repetition_penalty=2.0), outputs=(1,), prompt=(0,))) == [2]


def test_penalties_of_an_earlier_attempt_s_output_are_those_of_an_undisturbed_run():
    undisturbed = row_of(SamplingParams(frequency_penalty=1.0, seed=3), outputs=())
    undisturbed.sequence.token_ids += [4, 4, 7]
    resumed = row_of(SamplingParams(frequency_penalty=1.0, seed=3), outputs=(4, 4, 7))
    one, other = (sampling_of([row]).groups[0].changes.penalties for row in (undisturbed._replace(index=3), resumed))
    assert [column.tolist() for column in one.columns] == [column.tolist() for column in other.columns]


def test_a_bias_of_100_forces_a_token():
    logits = tied_logits(50, VOCAB)
    rows = [row_of(SamplingParams(seed=seed, temperature=2.0, logit_bias=((11, 100.0),))) for seed in range(50)]
    assert set(sample(logits, sampling_of(rows)).token_ids) == {11}


def test_only_allowed_ids_are_drawn():
    rows = [row_of(SamplingParams(seed=seed, temperature=100.0, allowed_token_ids=(3, 8))) for seed in range(50)]
    assert set(sample(tied_logits(50, VOCAB), sampling_of(rows)).token_ids) == {3, 8}


@pytest.mark.parametrize("vocab", [31, 32, 33, 64, 100])
def test_only_what_the_grammar_allows_is_drawn(vocab):
    rows = [row_of(SamplingParams(seed=seed, temperature=100.0), grammar=(0, 7, vocab - 1)) for seed in range(50)]
    assert set(sample(tied_logits(50, vocab), sampling_of(rows, vocab)).token_ids) == {0, 7, vocab - 1}


@pytest.mark.parametrize(
    ("changes", "grammar", "names"),
    [
        ({"min_tokens": 9, "allowed_token_ids": (2,)}, None, ("min_tokens", "allowed_token_ids")),
        ({"banned_token_ids": tuple(range(VOCAB))}, None, ("banned_token_ids",)),
        ({"allowed_token_ids": (10**9, -4)}, None, ("allowed_token_ids",)),
        ({"grammar": Grammar(GrammarKind.REGEX, "a")}, (), ("response_format",)),
        ({"repetition_penalty": 1e-300}, None, ("repetition_penalty",)),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_left_no_token_fails_alone_and_names_the_cause(changes, grammar, names, temperature):
    params = SamplingParams(temperature=temperature, **changes)
    rows = [row_of(GREEDY), row_of(params, grammar=grammar), row_of(SamplingParams(min_tokens=9))]
    output = sample(tied_logits(3, VOCAB).abs() + 4, sampling_of(rows, VOCAB))
    assert [token_id < 0 for token_id in output.token_ids] == [False, True, False]
    assert all(name in output.failed[1] for name in names)
    assert "\n" not in output.failed[1]


@pytest.mark.parametrize(
    "changes",
    [
        {"min_tokens": 9, "stop_token_ids": (10**30, 4, -4)},
        {"banned_token_ids": (10**30, 4, -4)},
        {"logit_bias": ((10**30, 9.0), (4, 9.0), (-4, 9.0))},
        {"allowed_token_ids": (10**30, 3, 4, -4)},
    ],
)
def test_ids_outside_the_vocabulary_are_no_concern(changes):
    assert chosen([0.0, 0.0, 0.0, 1.0], row_of(greedy(**changes))) == [3]


@pytest.mark.parametrize(
    ("params", "reads_tokens"),
    [
        (SamplingParams(min_tokens=3, logit_bias=((1, 1.0),), logprobs=2, top_p=0.5), False),
        (SamplingParams(presence_penalty=0.5), True),
        (SamplingParams(grammar=Grammar(GrammarKind.JSON_OBJECT)), True),
        (SamplingParams(beam_width=2), True),
    ],
)
def test_only_what_looks_at_earlier_tokens_keeps_a_row_from_running_ahead(params, reads_tokens):
    assert row_of(params).sequence.reads_tokens is reads_tokens
