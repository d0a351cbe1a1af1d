"""How well the KV memory is used on real lengths, by the real scheduler: the figures of papers, and our guarantee."""

import pytest

from bench.memory import PAPER_SAVED, SHARING_SLOTS, draw_lengths, run


def test_at_least_97_per_cent_of_the_allocated_positions_hold_tokens_on_the_lengths_of_sharegpt() -> None:
    assert run(draw_lengths("ShareGPT", 300))["filled"] >= 0.97


def test_orcas_reservations_fill_far_less_and_in_the_papers_order() -> None:
    lengths = draw_lengths("ShareGPT", 200)

    filled = [run(lengths, reservation=name)["filled"] for name in ("max", "pow2", "oracle", "paged")]

    assert filled == sorted(filled)
    assert filled[0] < 0.3 < filled[1] < 0.5 < filled[2] < 0.7


@pytest.mark.parametrize("n", PAPER_SAVED)
def test_samples_of_one_prompt_save_the_blocks_that_the_paper_says_on_the_lengths_of_alpaca(n: int) -> None:
    saved = run(draw_lengths("Alpaca", 600), n=n, max_slots=SHARING_SLOTS)["saved"]

    assert 100 * saved == pytest.approx(PAPER_SAVED[n], abs=1.5)
