"""The parts of benchmarks that decide something: options, searches, what is heard, who agrees."""

import json
import sys
from pathlib import Path

import psutil
import pytest

from bench import meter, record
from bench.accuracy import known
from bench.peers import agreement, completed, in_turns
from bench.service import frames, search
from bench.sides import OURS, RUNNERS, SIDES, Running, Side, python_of
from bench.workload import WorkItem
from tests.support.wait import wait_until
from worker.frames import ControlFrame, TokenFrame, encode_frame

ECHO = """
import sys
sys.path.insert(0, {runners!r})
from talk import serve

def load():
    print("what libraries print is no answer")
    return lambda requests: [item["prompt"][:1] * (item["output"] + {surplus}) for item in requests]

serve(load)
"""


def echo(folder: Path, surplus: int = 0, name: str = "slotmill") -> Side:
    """A side whose engine repeats the first token of each prompt."""
    script = folder / f"run_{surplus}.py"
    script.write_text(ECHO.format(runners=str(RUNNERS), surplus=surplus))
    return Side(name, str(script), lambda _: [{}])


ITEMS = [WorkItem((5, 6), 3), WorkItem((7,), 2)]


def test_options_are_numbers_truths_and_words() -> None:
    found = record.engine_options("dtype=float32,max_slots=64,run_ahead=true,kv_memory=0.5")
    assert found == {"dtype": "float32", "max_slots": 64, "run_ahead": True, "kv_memory": 0.5}


def test_no_options_are_none() -> None:
    assert record.engine_options("") == {}


def test_a_record_says_what_it_is_and_where_it_was_made(tmp_path: Path) -> None:
    record.save(record.record("closed", ratio=1), tmp_path / "new" / "a.json")
    made = json.loads((tmp_path / "new" / "a.json").read_text())
    assert (made["kind"], made["ratio"]) == ("closed", 1)
    assert made["machine"].keys() == {"processor", "memory", "python", "torch", "date", "commit", "command"}


def test_a_version_that_is_not_there_is_none() -> None:
    assert record.installed("no-such-package-at-all") == "none"


def test_a_meter_counts_the_cores_of_this_process() -> None:
    with meter.Meter() as found:
        sum(range(3_000_000))
    assert 0.2 < found.cores["own"] < 1.5
    assert found.wall_s > 0


def test_configurations_that_the_engine_does_not_know_are_left_out() -> None:
    assert known(["dtype=float32", "no_such_option=1", "kv_dtype=int8"]) == ["dtype=float32", "kv_dtype=int8"]


def test_a_search_doubles_until_the_waits_grow_and_halves_the_gap() -> None:
    asked: list[float] = []

    def is_saturated(rate: float) -> bool:
        asked.append(rate)
        return rate > 1.2

    search(is_saturated, most=100)

    assert asked == [0.25, 0.5, 1.0, 2.0, 1.5, 1.25]


def test_a_search_ends_at_a_rate_at_which_all_arrive_at_once() -> None:
    asked: list[float] = []
    search(lambda rate: bool(asked.append(rate)), most=2)
    assert asked == [0.25, 0.5, 1.0, 2.0]


def test_frames_with_tokens_are_heard_and_others_are_not() -> None:
    def token_frame(*ids: int) -> bytes:
        return encode_frame(TokenFrame(attempt=1, choice=0, index=0, token_ids=ids, text="", offset=0))

    messages = [
        (1.0, "a", encode_frame(ControlFrame(1, "start"))),
        (2.0, "a", token_frame(5)),
        (3.0, "b", token_frame(6)),
        (4.0, "a", token_frame(7, 8)),
        (5.0, "a", token_frame()),
    ]

    heard = frames(messages)

    assert (heard["a"].at, heard["a"].num_tokens) == ([2.0, 4.0], [1, 2])
    assert (heard["b"].at, heard["b"].num_tokens) == ([3.0], [1])


def test_outputs_agree_by_their_first_tokens() -> None:
    same = list(range(20))
    assert agreement([same, same], [[*same[:8], 99], [99, *same]]) == 0.5


def test_room_is_made_for_the_longest_request_of_the_workload() -> None:
    items = [WorkItem((1,) * 300, 10), WorkItem((1,), 30)]
    ours = completed(OURS, {"dtype": "float32"}, Path("/model"), Path("/model.gguf"), items)
    theirs = completed(SIDES[0], {"dtype": "float32", "slots": 2}, Path("/model"), Path("/model.gguf"), items)
    assert ours == {"model": "/model", "max_model_len": 512, "dtype": "float32"}
    assert theirs == {"model": "/model", "max_len": 512, "dtype": "float32", "slots": 2}


def test_a_side_without_packages_runs_in_the_projects_environment() -> None:
    assert python_of(OURS) == Path(sys.executable)


def test_sides_take_turns_and_only_the_fastest_peer_goes_on(tmp_path: Path) -> None:
    first, second = echo(tmp_path, name="first"), echo(tmp_path, name="second")

    made = in_turns([(echo(tmp_path), {}), (first, {}), (second, {})], ITEMS, repeats=3)

    turns = sorted(len(made["sides"][name]["runs"]) for name in ("first", "second"))
    assert (len(made["sides"]["slotmill"]["runs"]), turns) == (3, [1, 3])
    assert {side["agreement"] for side in made["sides"].values()} == {1.0}
    assert made["ratios"].keys() == {"first", "second"}


def test_a_runner_is_stopped_but_while_it_generates(tmp_path: Path) -> None:
    others = set(psutil.Process().children())  # a server that other tests share
    with Running(echo(tmp_path), {}) as running:
        running.generate(ITEMS)
        (process,) = set(psutil.Process().children()) - others
        wait_until(lambda: process.status() == psutil.STATUS_STOPPED, 5, "a stopped runner")


def test_a_runner_that_makes_too_many_tokens_is_refused(tmp_path: Path) -> None:
    with Running(echo(tmp_path, surplus=1), {}) as running, pytest.raises(RuntimeError, match="2 of 2 outputs"):
        running.generate(ITEMS)


def test_a_runner_that_cannot_load_tells_its_last_words(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text("raise SystemExit('no such processor')")
    with pytest.raises(RuntimeError, match="no such processor"):
        Running(Side("broken", str(script), lambda _: [{}]), {})
