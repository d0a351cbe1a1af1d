"""`worker top` with made-up looks: everything is there, nothing is wider than the terminal, nothing is cut in a number."""

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from tests.support.looks import engine, look, request, snapshot, worker
from worker.metrics import SLOT_STATES, WORKER_STATES
from worker.snapshot import PHASES, Buckets, EngineView, RequestView, Snapshot
from worker.top.cells import CELLS, KV_MARKS, cell_rows, seat
from worker.top.lines import duration, percent, portions, rate
from worker.top.screen import ESCAPES, Screen, split
from worker.top.view import ViewState, render
from worker.top.watch import Look
from worker.top.worker_view import STATES

SIZES = [(80, 24), (100, 30), (200, 60), (60, 16), (40, 10)]
REQUESTS = [
    request("a"),
    request("b", lane="high", phase="prefill", tokens=0, width=2),
    request("c" * 64, lane="low", phase="waiting", tokens=190),
]
BUSY = worker(
    snapshot(
        REQUESTS,
        up_s=110.0,
        claimed=2,
        engines=(engine(REQUESTS, slots=6, step={"no_memory": 1.0}),),
        counters={
            "generated_tokens": 2000.0,
            "slot_steps.decode": 690.0,
            "slot_steps.no_memory": 10.0,
            "preemptions.swap": 3.0,
        },
        latencies={"between_tokens": Buckets(bounds=(0.1, 0.2), counts=(10, 10, 0))},
    ),
    snapshot([request("a", tokens=30, age_s=1.0)]),
)
SILENT = worker(None, beat={"id": "host-2", "seen_s": "6.5", "state": "serving", "active": "3", "slots": "8", "model": "m"})


def shown(seen: Look, width: int = 80, height: int | None = 24, state: ViewState | None = None) -> list[str]:
    return [line.plain for line in render(seen, state or ViewState(), width, height, "`worker start`")]


def line_with(lines: list[str], text: str) -> str:
    [found] = [line for line in lines if text in line]
    return found


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("workers", [(), (BUSY,), (SILENT,), (BUSY, SILENT), (BUSY,) * 30])
def test_no_line_is_wider_than_the_terminal(workers: tuple[object, ...], width: int, height: int) -> None:
    lines = Screen(look(*workers, dead=3, due_in_s=70.0), "", "start").lines(width, height)  # type: ignore[arg-type]
    assert len(lines) == height
    assert max(line.cell_len for line in lines) <= width


def test_a_terminal_of_80_columns_shows_all_that_matters() -> None:
    lines = shown(look(BUSY))
    assert lines[0] == " queue q   open, no limit   1 worker" + " " * 34 + "00:00:00Z"
    assert lines[1].split() == ["tokens/s", "100", "jobs/s", "0.0", "slots", "3/6", "occupancy", "90", "%", "last", "10", "s"]
    assert line_with(lines, "p50 / p95").split("   ")[2] == "next 100 ms / 190 ms"
    assert line_with(lines, " normal        4").split() == ["normal", "4", "8", "0", "0", "5", "s", "done", "120"]
    assert line_with(lines, "delayed").endswith("delayed 3")
    assert line_with(lines, "slots   ").split() == ["slots", "███", "▓▓▓", "▓▓▓", "MMM", "···", "···"]
    assert line_with(lines, "claimed").split("  ")[-5:] == [
        "▓ prefill 2",
        "M no_memory 1",
        "· no_work 2",
        "waiting 1",
        "claimed 2",
    ]
    assert line_with(lines, "idle").split("   ")[1:3] == [" 10 %", "no_memory 10 %"]
    assert "preempted 3" in line_with(lines, "idle")


def test_requests_stand_in_the_order_of_their_cells_with_their_own_rate() -> None:
    table = [line.split() for line in shown(look(BUSY))[-3:]]
    assert table[0][:4] == ["1", "a", "normal", "decode"]
    assert table[0][-4:] == ["50/200", "2.0", "5", "s"]
    assert table[1][:5] == ["2", "b", "high", "prefill", "x2"]
    assert table[2][0] == "-"
    assert re.fullmatch("c+…c+", table[2][1])
    assert table[2][2:4] == ["low", "waiting"]


def test_the_kv_bar_is_in_proportion_with_what_is_filled_inside_what_is_used() -> None:
    line = line_with(shown(look(BUSY)), "KV")
    bar = "".join(line.split()[1:2])
    counts = {name: bar.count(mark) for name, (mark, _) in KV_MARKS.items()}
    assert counts["filled"] + counts["used"] == pytest.approx(len(bar) * 0.5, abs=1)
    assert counts["filled"] == pytest.approx(len(bar) * 0.375, abs=1)
    assert counts["cached"] == pytest.approx(len(bar) * 0.2, abs=1)
    assert line.endswith("used 50 %  filled 75 %  cached 20 %  blocks 100")


def test_what_does_not_fit_is_left_out_whole_and_requests_are_counted() -> None:
    requests = [request(f"job-{i}") for i in range(40)]
    lines = shown(look(worker(snapshot(requests, engines=(engine(requests, slots=64),), left_out=5))))
    assert len(lines) <= 24
    rows = [line for line in lines if "job-" in line]
    assert lines[-1] == f" and {45 - len(rows)} more"


def test_a_queue_without_workers_says_how_to_start_one() -> None:
    assert shown(look())[-2:] == [" no worker serves this queue", " start one: `worker start`"]


def test_a_silent_worker_is_shown_with_its_heartbeat() -> None:
    lines = shown(look(BUSY, SILENT))
    assert "1 silent" in lines[0]
    assert line_with(lines, "  2 host-2").split(maxsplit=3)[2:] == ["silent", "heartbeat 6.5 s ago: serving, 3 of 8 slots"]


def test_the_chosen_worker_is_in_detail() -> None:
    lines = shown(look(BUSY, SILENT), state=ViewState(chosen="host-2"))
    assert lines.index(line_with(lines, "silent: it does not answer")) < lines.index(line_with(lines, " host-1   serving"))


def test_many_workers_are_listed_around_the_chosen_one() -> None:
    workers = [worker(snapshot(id=f"host-{i:02}")) for i in range(30)]
    lines = shown(look(*workers), state=ViewState(chosen="host-20"))
    assert line_with(lines, "▸").split()[:3] == ["▸", "21", "host-20"]
    assert " 20 to 22 of 30 workers" in lines


@pytest.mark.parametrize(
    ("changes", "words"), [({"is_paused": True}, "paused, no limit"), ({"is_closed": True, "max_queued": 5}, "closed, limit 5")]
)
def test_the_condition_of_the_queue_stands_at_the_top(changes: dict[str, object], words: str) -> None:
    assert words in shown(look(BUSY, **changes))[0]


def test_an_engine_that_is_not_there_is_said_to_be_missing() -> None:
    loading = worker(snapshot(state="loading", engines=(EngineView(device="cpu"),)))
    assert " no engine: it loads, or has died and starts again" in shown(look(loading))


def test_several_engines_have_a_line_each() -> None:
    many = worker(snapshot(engines=(engine([], device="cuda:0"), engine([], device="cuda:1"), EngineView(device="cuda:2"))))
    lines = shown(look(many))
    assert [line.split()[:2] for line in lines if re.match(r"  \d cuda", line)] == [[str(i), f"cuda:{i}"] for i in range(3)]


def test_more_slots_than_cells_are_shown_in_proportion() -> None:
    requests = [request(str(i), width=2000) for i in range(2)]
    lines = shown(look(worker(snapshot(requests, engines=(engine(requests, slots=8000),)))))
    bar = line_with(lines, "slots   ").split()[1]
    assert bar == "█" * 35 + "·" * 35


def test_the_view_is_readable_without_colour() -> None:
    assert len({mark for mark, _ in CELLS.values()}) == len(CELLS)
    assert len({mark for mark, _ in KV_MARKS.values()}) == len(KV_MARKS)


def test_without_colour_no_escape_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    console = Console(file=io.StringIO(), force_terminal=True, width=80, _environ={"NO_COLOR": "1", "TERM": "xterm-256color"})
    for line in render(look(BUSY), ViewState(), 80, 24):
        console.print(line)
    assert not re.findall(r"\x1b\[[0-9;]*(?:3[0-7]|9[0-7]|38)[;m]", console.file.getvalue())  # type: ignore[attr-defined]


HOSTILE = "\x1b[2J\u202e東京" * 20


def test_what_others_wrote_cannot_steer_the_terminal() -> None:
    requests = [request(HOSTILE, lane=HOSTILE, phase=HOSTILE, tokens=2**53, max_tokens=2**53, width=2**53)]
    now = snapshot(requests, id=HOSTILE, model=HOSTILE, gpu=HOSTILE, state=HOSTILE, claimed=2**53)
    lines = render(look(worker(now), SILENT), ViewState(trouble=HOSTILE), 80, 24)
    assert all(line.plain.isprintable() for line in lines)
    assert max(line.cell_len for line in lines) <= 80


numbers = st.floats(0, 2.0**53)
texts = st.text(max_size=12) | st.sampled_from(["decode", "waiting", "no_memory"])
requests_of_anybody = st.builds(
    RequestView,
    id=texts,
    lane=texts,
    engine=st.integers(0, 3),
    phase=texts,
    width=st.integers(0, 2**53),
    tokens=st.integers(0, 2**53),
    max_tokens=st.integers(0, 2**53),
    age_s=numbers,
)
counts_of_anybody = st.dictionaries(
    texts | st.sampled_from(["used_blocks", "capacity_blocks", "allocated_tokens"]), numbers, max_size=5
)
engines_of_anybody = st.builds(
    EngineView,
    device=texts,
    is_up=st.booleans(),
    slots=st.integers(0, 2**53),
    phases=counts_of_anybody,
    step=counts_of_anybody,
    kv=counts_of_anybody,
)
snapshots_of_anybody = st.builds(
    Snapshot,
    id=texts,
    up_s=numbers,
    engines=st.lists(engines_of_anybody, max_size=3).map(tuple),
    requests=st.lists(requests_of_anybody, max_size=5).map(tuple),
    left_out=st.integers(0, 2),
    counters=st.dictionaries(texts.map(lambda name: f"slot_steps.{name}"), numbers, max_size=4),
    latencies=st.just({"queue": Buckets(counts=(3.0,))}),
)


@given(st.lists(snapshots_of_anybody, max_size=3), st.integers(1, 120), st.integers(1, 40))
def test_no_snapshot_breaks_the_view(snapshots: list[Snapshot], width: int, height: int) -> None:
    lines = Screen(look(*map(worker, snapshots)), "", "start").lines(width, height)
    assert all(line.plain.isprintable() and line.cell_len <= max(40, width) for line in lines)


def test_of_requests_in_prefill_or_waiting_as_many_have_cells_as_the_engine_says() -> None:
    requests = [request("a"), *(request(f"s{i}", phase="starting") for i in range(3))]
    lines = shown(look(worker(snapshot(requests, engines=(engine(requests, slots=4, taken=2, step={"no_memory": 2}),)))))
    assert line_with(lines, "slots   ").split()[1:] == ["███", "▒▒▒", "MMM", "MMM"]
    assert "waiting 2" in line_with(lines, "no_memory 2")
    assert "slots 2/4" in lines[1]
    assert [line.split()[0] for line in lines if "starting  " in line] == ["-"] * 3


def test_a_request_keeps_its_cell_when_others_leave() -> None:
    a, b, c, d = (("a", "x"), ("b", "x"), ("c", "x"), ("d", "x"))
    cells = [None] * 4
    seat(cells, {a: 1, b: 2})
    seat(cells, {b: 2, c: 1, d: 1})
    assert cells == [c, b, b, d]
    seat(cells, {b: 1})
    assert cells == [None, b, None, None]


@pytest.mark.parametrize(
    ("number", "width", "rows"), [(16, 70, 1), (24, 70, 1), (35, 70, 1), (70, 70, 1), (71, 70, 2), (280, 70, 4)]
)
def test_every_slot_has_a_cell(number: int, width: int, rows: int) -> None:
    drawn = cell_rows(["decode"] * number, width)
    assert (len(drawn), max(map(cell_len, (row.plain.rstrip() for row in drawn))) <= width) == (rows, True)
    assert sum(bool(part) for row in drawn for part in (row.plain.split() if " " in row.plain else row.plain)) == number


@pytest.mark.parametrize(
    ("counts", "lengths"),
    [
        ({"a": 1, "b": 1}, {"a": 5, "b": 5}),
        ({"a": 1000, "b": 1}, {"a": 9, "b": 1}),
        ({"a": 0, "b": 2}, {"b": 10}),
        ({}, {}),
        ({str(i): 1 for i in range(12)}, {str(i): 1 for i in range(10)}),
    ],
)
def test_portions_fill_the_width_and_forget_nothing(counts: dict[str, float], lengths: dict[str, int]) -> None:
    assert portions(counts, 10) == lengths


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0004, "0.4 ms"), (0.031, "31 ms"), (0.9994, "999 ms"), (1.24, "1.2 s"), (47.2, "47 s"), (75, "1 m 15 s")],
)
def test_durations_have_two_digits_that_count(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("value", "text"), [(0, "0.0"), (99.94, "99.9"), (132.4, "132"), (12345, "12,345"), (2e6, "2000k")])
def test_rates_have_six_characters_at_most(value: float, text: str) -> None:
    assert rate(value) == text


@pytest.mark.parametrize(
    ("share", "text"), [(None, "-"), (0, "0 %"), (0.004, "<1 %"), (0.5, "50 %"), (0.999, ">99 %"), (1, "100 %")]
)
def test_only_all_is_100_percent_and_only_nothing_is_none(share: float | None, text: str) -> None:
    assert percent(share) == text


# Keys


def test_keys_choose_a_worker_and_pause_the_display() -> None:
    screen = Screen(look(BUSY, SILENT), "", "start")
    for key in ("down", "down", "x"):
        screen.press(key)
    assert screen.state.chosen == "host-2"
    screen.press("1")
    assert screen.state.chosen == "host-1"
    screen.press("p")
    screen.take(look(), "")
    assert "display paused" in screen.lines(80, 24)[0].plain
    screen.press("p")
    screen.take(look(), "")
    assert "0 workers" in screen.lines(80, 24)[0].plain
    screen.press("q")
    assert screen.is_left


def test_a_server_that_went_away_is_told_beside_what_was_last_seen() -> None:
    screen = Screen(look(BUSY), "", "start")
    screen.take(look(BUSY), "the server does not answer: gone")
    assert [line.plain for line in screen.lines(80, 24)][1] == " the server does not answer: gone"


@pytest.mark.parametrize(
    ("typed", "keys"),
    [
        (b"q", ["q"]),
        (b"\x1b[A\x1b[Bp", ["up", "down", "p"]),
        (b"\x1bOA", ["up"]),
        (b"\x1b[5~q", []),
        (b"\x1b", []),
        (b"\xff", ["ÿ"]),
    ],
)
def test_what_is_typed_becomes_keys(typed: bytes, keys: list[str]) -> None:
    assert split(typed) == keys


def test_the_last_line_tells_of_the_keys() -> None:
    assert Screen(look(), "", "start").lines(80, 24)[-1] == Text(
        " q quit   p pause   ↑ ↓ 1-9 choose a worker", "bright_black", end=""
    )
    assert set(ESCAPES.values()) == {"up", "down"}


def test_every_state_of_slots_requests_and_workers_has_a_look_of_its_own() -> None:
    assert set(CELLS) == {*SLOT_STATES, *PHASES} - {"waiting"}
    assert set(STATES) == {*WORKER_STATES, "silent"}
