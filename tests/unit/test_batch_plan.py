"""Input files, checked once."""

import hashlib
import json
import sqlite3
from pathlib import Path

import psutil
import pytest

from tests.support.batch_files import request, write_input
from worker.batch.lines import Rules
from worker.batch.plan import BAD, BAD_DONE, BLANK, DONE, TODO, Plan
from worker.errors import InvalidOption


def test_a_plan_knows_good_bad_and_blank_lines(tmp_path: Path) -> None:
    path = write_input(tmp_path / "in.jsonl", "ab")
    path.write_text(path.read_text() + "\n\nnonsense\n" + json.dumps(request("c", temperature=-1)) + "\n\n")
    with Plan(path, Rules()) as plan:
        assert (plan.num_lines, plan.num_good, plan.last) == (4, 2, 6)
        assert [plan.state_of(number) for number in range(9)] == [BLANK, TODO, TODO, BLANK, BLANK, BAD, BAD, BLANK, BLANK]
        assert [(bad.number, bad.code, bad.param, bad.custom_id) for bad in plan.bad()] == [
            (5, "invalid_json_line", None, None),
            (6, "invalid_value", "temperature", "c"),
        ]
        assert [plan.number_of(custom_id) for custom_id in ("a", "b", "c", "d")] == [1, 2, 6, None]
        assert plan.fingerprint == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("first", [request("a"), request("a", temperature=-1)], ids=["good", "bad"])
def test_of_lines_with_one_id_the_first_has_it(tmp_path: Path, first: dict[str, object]) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in (first, request("b"), request("a"), request("a"))))
    with Plan(path, Rules()) as plan:
        doubled = [bad for bad in plan.bad() if bad.code == "duplicate_custom_id"]
        assert [(bad.number, bad.custom_id) for bad in doubled] == [(3, None), (4, None)]
        assert doubled[0].message == "custom_id: a stands in line 1 too; give each line one of its own"
        assert plan.number_of("a") == 1


def test_what_is_done_is_not_to_do(tmp_path: Path) -> None:
    path = write_input(tmp_path / "in.jsonl", "abc")
    path.write_text(path.read_text() + "nonsense\n")
    with Plan(path, Rules()) as plan:
        assert [plan.mark_done(number) for number in (2, 2, 4, 4, 5, 0, -1)] == [True, False, True, False, False, False, False]
        assert [line.custom_id for line in plan.todo()] == ["a", "c"]
        assert (plan.state_of(2), plan.state_of(4), plan.num_done) == (DONE, BAD_DONE, 2)


def test_what_is_done_while_lines_are_taken_is_not_taken(tmp_path: Path) -> None:
    with Plan(write_input(tmp_path / "in.jsonl", "abc"), Rules()) as plan:
        lines = plan.todo()
        assert next(lines).custom_id == "a"
        plan.mark_done(2)
        assert [line.custom_id for line in lines] == ["c"]


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_an_input_that_changes_while_it_is_in_use_is_refused(tmp_path: Path, when: str) -> None:
    path = write_input(tmp_path / "in.jsonl", "abc")
    with Plan(path, Rules()) as plan:
        lines = plan.todo()
        if when == "meanwhile":
            next(lines)
        write_input(tmp_path / "other", "xyz").replace(path)
        with pytest.raises(InvalidOption, match="changed while it was in use"):
            list(lines)


def test_an_input_that_is_taken_away_is_refused(tmp_path: Path) -> None:
    with Plan(write_input(tmp_path / "in.jsonl", "a"), Rules()) as plan:
        plan.path.unlink()
        with pytest.raises(InvalidOption, match="changed while"):
            list(plan.todo())


def test_an_empty_file_has_no_lines(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").touch()
    with Plan(tmp_path / "in.jsonl", Rules()) as plan:
        assert (plan.num_lines, plan.last, list(plan.todo()), list(plan.bad())) == (0, 0, [], [])


def test_progress_is_told_in_bytes_to_the_end(tmp_path: Path) -> None:
    path, told = write_input(tmp_path / "in.jsonl", range(3)), []
    Plan(path, Rules(), lambda done, total: told.append((done, total))).__exit__(None, None, None)
    assert told[-1] == (path.stat().st_size, path.stat().st_size)


@pytest.mark.parametrize(
    ("name", "rules", "words"),
    [
        ("in.csv", Rules(), "--prompt-column: missing; of .*in.csv it is one of p, i, i"),
        ("in.csv", Rules(prompt_column="q"), "--prompt-column: q: is not there; columns of .*in.csv are p, i, i"),
        ("in.csv", Rules(prompt_column="p", id_column="i"), "--id-column: i: stands there twice"),
        ("in.jsonl", Rules(prompt_column="p"), "--prompt-column: p: .*in.jsonl is read as JSONL"),
        ("in.jsonl", Rules(id_column="p"), "--id-column: p: .*in.jsonl is read as JSONL"),
    ],
)
def test_columns_and_file_have_to_go_together(tmp_path: Path, name: str, rules: Rules, words: str) -> None:
    (tmp_path / name).write_text("p,i,i\na,b,c\n")
    with pytest.raises(InvalidOption, match=words):
        Plan(tmp_path / name, rules)


def test_a_table_in_utf_16_is_told_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("p\na\n", encoding="utf-16")
    with pytest.raises(InvalidOption, match=r"--input: .*in\.csv: is UTF-16; save it as UTF-8"):
        Plan(tmp_path / "in.csv", Rules(prompt_column="p"))


def test_rows_of_a_table_are_lines(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("p,i\nHello,1\n,2\nYou,1\n")
    with Plan(tmp_path / "in.csv", Rules(prompt_column="p", id_column="i")) as plan:
        assert [(line.number, line.custom_id) for line in plan.todo()] == [(1, "1")]
        assert [(bad.number, bad.code) for bad in plan.bad()] == [(2, "invalid_value"), (3, "duplicate_custom_id")]


def test_an_index_without_room_is_told_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_plan: Plan, _line: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(Plan, "_add", full)
    with pytest.raises(InvalidOption, match="database or disk is full; point TMPDIR to a directory with room"):
        Plan(write_input(tmp_path / "in.jsonl", "a"), Rules())


def test_the_index_has_no_name_and_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    num_lines = 60_000
    path = tmp_path / "in.jsonl"
    with path.open("w") as file:  # bad lines: theirs is the larger index
        file.writelines(f'{{"custom_id": "{number:0100}"}}\n' for number in range(num_lines))
    process = psutil.Process()
    before = process.memory_info().rss
    with Plan(path, Rules()) as plan:
        assert plan.num_lines == num_lines
        assert process.memory_info().rss - before < 40 << 20  # of 24 MB of ids and refusals 8 are cached
        held = {link.readlink() for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}
        assert not [name for name in held if name.exists() and "etilqs" in name.name]
