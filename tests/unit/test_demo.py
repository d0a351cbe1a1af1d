"""The demo's arithmetic and what it shows, from made-up answers and figures."""

import io
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest
from rich.console import Console
from rich.text import Text

from engine.config import EngineConfig
from engine.stats import KVCounts, SlotCounts, StepStats
from tests.support.fake_engine import ready
from worker import demo_view as view
from worker.demo import PROMPTS, figures_of, parse_counts
from worker.demo_view import Answer, Figures, RequestLevel, request_level
from worker.metrics import Metrics

FIGURES = Figures(
    num_slots=2,
    lengths=(2, 8, 3, 5),
    num_prompt_tokens=40,
    elapsed_s=9.0,
    slot_steps={"decode": 14, "prefill": 4, "no_work": 2},
    kv_blocks=120,
    peak_kv_blocks=7,
    kv_filled_ratio=0.75,
    num_preemptions=1,
    ttfts_s=(0.5, 0.7, 3.0),
)
PROGRESS = Text("2/12 answers")


def answer(**changes: object) -> Answer:
    fields: dict[str, object] = {
        "prompt": "What is the capital of France?",
        "max_tokens": 24,
        "job_id": "demo-01",
        "text": "The capital of France is Paris.",
        "num_tokens": 8,
        "first_s": 1.5,
        "sent_s": 1.0,
        "state": "succeeded",
    }
    return Answer(**(fields | changes))  # type: ignore[arg-type]


def rendered(draw: Callable[[Console], object], width: int = 80, height: int = 24) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=False, highlight=False)
    console.print(draw(console))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_request_level_batches_of_the_hand_example_idle_eight_of_twenty_six() -> None:
    assert request_level([2, 8, 3, 5], 2) == RequestLevel(steps=13, slot_steps=26, held=8, empty=0)


def test_slots_that_get_no_request_idle_too() -> None:
    assert request_level([4, 4, 5], 2) == RequestLevel(steps=9, slot_steps=18, held=0, empty=5)


def test_no_answers_take_no_steps() -> None:
    assert request_level([], 4) == RequestLevel(0, 0, 0, 0)


@given(lengths=st.lists(st.integers(0, 50), max_size=30), num_slots=st.integers(1, 8))
def test_tokens_and_idle_slots_make_up_all_request_level_slot_steps(lengths: list[int], num_slots: int) -> None:
    level = request_level(lengths, num_slots)
    assert sum(lengths) + level.idle == level.slot_steps == level.steps * num_slots


def test_a_finished_line_tells_id_question_and_answer_on_one_line() -> None:
    line = view.finished_line(answer(text="It is\nParis.\n"), 1, 12)
    assert line == "[ 1/12] demo-01 (8 tokens, first after 0.5 s) What is the capital of France? -> It is Paris."


def test_a_long_answer_is_shortened() -> None:
    line = view.finished_line(answer(text="word " * 200), 1, 12)
    assert line.endswith("word wo...")
    assert len(line) < 220


def test_a_failed_answer_tells_why() -> None:
    line = view.finished_line(answer(state="failed", text="", error="server gone", first_s=None), 1, 12)
    assert line == "[ 1/12] demo-01 (8 tokens) What is the capital of France? -> failed: server gone"


def test_terminal_escapes_of_a_model_are_not_shown() -> None:
    shown = view.finished_line(answer(text="a\x1b[31mb\x07"), 1, 1) + view.printable("\x1b]0;title\x07\nnext")
    assert "\x1b" not in shown
    assert "\x07" not in shown


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_live_view_fits_the_terminal(width: int) -> None:
    growing = [answer(state="", text="so many words " * 40, prompt="long " * 40) for _ in range(6)]
    lines = rendered(lambda console: view.live_view(growing, PROGRESS, console), width)
    assert max(map(len, lines)) <= width
    assert len(lines) <= 24


def test_several_answers_stand_side_by_side_in_eighty_columns() -> None:
    growing = [answer(state="", text=f"answer{number}") for number in range(4)]
    lines = rendered(lambda console: view.live_view(growing, PROGRESS, console))
    assert any("answer0" in line and "answer1" in line for line in lines)
    assert any("answer2" in line and "answer3" in line for line in lines)


def test_the_live_view_shows_the_end_of_a_long_answer() -> None:
    growing = [answer(state="", text="beginning " + "middle " * 200 + "end")]
    shown = "\n".join(rendered(lambda console: view.live_view(growing, PROGRESS, console)))
    assert "end" in shown
    assert "beginning" not in shown


def test_markup_in_an_answer_is_text() -> None:
    growing = [answer(state="", text="[bold]x[/bold] [/nothing]", prompt="[red]")]
    shown = "\n".join(rendered(lambda console: view.live_view(growing, PROGRESS, console)))
    assert "[bold]x[/bold] [/nothing]" in shown
    assert "[red]" in shown


def test_an_answer_keeps_its_cell_while_others_come_and_go() -> None:
    first, second, third = (answer(state="", num_tokens=1) for _ in range(3))
    waiting = answer(state="", num_tokens=0)
    cells: list[Answer | None] = [None, None]
    view.seat(cells, [first, second, third, waiting])
    first.state = "succeeded"
    view.seat(cells, [first, second, third, waiting])
    assert cells[0] is third
    assert cells[1] is second


def test_the_progress_line_counts_answers_tokens_and_speed() -> None:
    (line,) = rendered(lambda _: view.progress_line([answer(), answer(state="")], 2.0))
    assert line.split("   ") == ["1/2 answers", "16 tokens", "8.0 tokens/s", "2 s"]


def test_the_summary_sets_slot_steps_beside_those_of_request_level_batching() -> None:
    lines = rendered(lambda _: view.summary(FIGURES))
    rows = {line.split()[0]: line.split()[-4:] for line in lines if line.split()[:1] and line.split()[0] in view.SLOT_STATES}
    assert rows["decode"] == ["14", "70.0%", "14", "53.8%"]
    assert rows["prefill"] == ["4", "20.0%", "4", "15.4%"]
    assert rows["finished"] == ["0", "0.0%", "8", "30.8%"]
    assert rows["no_work"] == ["2", "10.0%", "0", "0.0%"]
    assert max(map(len, lines)) <= 80


def test_the_summary_tells_speed_blocks_first_tokens_and_preemptions() -> None:
    shown = " ".join(" ".join(rendered(lambda _: view.summary(FIGURES))).split())
    assert "18 in 9.0 s = 2.0 tokens/s" in shown
    assert "peak 7 of 120, 75.0% of allocated positions filled" in shown
    assert "median 0.70 s, longest 3.00 s" in shown
    assert "preemptions 1" in shown
    assert "idle: 10.0% of the slot-steps" in shown
    assert "30.8%" in shown


def test_a_run_without_a_token_has_a_summary() -> None:
    nothing = Figures(
        num_slots=2,
        lengths=(0, 0),
        num_prompt_tokens=0,
        elapsed_s=1.0,
        slot_steps={},
        kv_blocks=0,
        peak_kv_blocks=0,
        kv_filled_ratio=None,
        num_preemptions=0,
        ttfts_s=(),
    )
    shown = " ".join(rendered(lambda _: view.summary(nothing)))
    assert "idle: -" in shown


def test_figures_are_what_the_worker_counted() -> None:
    metrics = Metrics()
    step = StepStats(
        slots=SlotCounts(decode=3, no_work=1),
        kv=KVCounts(capacity_blocks=10, used_blocks=4, allocated_tokens=64, filled_tokens=48),
        num_tokens=3,
        num_generated_tokens=3,
        num_running=3,
        num_slots_taken=3,
        num_preemptions=2,
        num_preempted_tokens=5,
    )
    metrics.engine_ready(ready(EngineConfig(model="m", max_slots=4)), "m")
    metrics.step(step)
    halfway = parse_counts(generate_latest(metrics.registry).decode())
    metrics.step(step)
    metrics.prompt_tokens.inc(7)
    after = parse_counts(generate_latest(metrics.registry).decode())
    figures = figures_of([answer(ended_s=3.0), answer(ended_s=5.0)], [halfway, after], after)
    assert {state: count for state, count in figures.slot_steps.items() if count} == {"decode": 6, "no_work": 2}
    assert (figures.num_slots, figures.num_preemptions, figures.num_prompt_tokens) == (4, 4, 7)
    assert (figures.kv_blocks, figures.peak_kv_blocks, figures.kv_filled_ratio) == (10, 4, 0.75)
    assert (figures.elapsed_s, figures.lengths, figures.ttfts_s) == (4.0, (8, 8), (0.5, 0.5))


def test_a_dozen_different_prompts_one_of_them_greedy_about_france() -> None:
    assert len({prompt.text for prompt in PROMPTS}) == len(PROMPTS) == 12
    (france,) = [prompt for prompt in PROMPTS if "France" in prompt.text]
    assert france.temperature == 0
