"""Output files of a batch: whole lines, once each, whatever happened before."""

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.batch_files import custom_ids, request, result_of, write_input
from tests.support.wait import wait_until
from worker.batch import appended
from worker.batch.lines import Outcome, Rules, outcome_of
from worker.batch.output import BatchOutput, record_path
from worker.batch.plan import Plan
from worker.errors import InvalidOption, SlotmillError

IDS = "abcd"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Good lines a to d, between the last two a bad one without an id."""
    path = write_input(tmp_path / "in.jsonl", IDS)
    *first, last = path.read_text().splitlines()
    path.write_text("\n".join([*first, "nonsense", last]))
    return path


@contextmanager
def output_for(source: Path, **how: Any) -> Iterator[tuple[BatchOutput, Plan]]:
    out = how.pop("out", source.with_name("out.jsonl"))
    errors = how.pop("errors", source.with_name("errors.jsonl"))
    parameters = how.pop("parameters", {"model": "m"})
    with Plan(source, Rules()) as plan, BatchOutput(plan, source, out, errors, parameters, **how) as output:
        yield output, plan


def answer(output: BatchOutput, plan: Plan, *only: str, state: str = "succeeded") -> None:
    for line in plan.todo():
        if not only or line.custom_id in only:
            output.write(outcome_of(result_of(line, state=state)))


def run(source: Path, *only: str, **how: Any) -> None:
    with output_for(source, **how) as (output, plan):
        answer(output, plan, *only)


def written(source: Path) -> list[Any]:
    return custom_ids(source.with_name("out.jsonl"), source.with_name("errors.jsonl"))


def test_answers_and_errors_have_their_files_and_bad_lines_are_there_at_once(source: Path) -> None:
    with output_for(source) as (output, plan):
        assert custom_ids(source.with_name("errors.jsonl")) == [None]
        answer(output, plan, "a", state="failed")
        answer(output, plan)
        assert (output.num_answers, output.num_errors, plan.num_done) == (3, 2, 5)
    assert custom_ids(source.with_name("out.jsonl")) == ["b", "c", "d"]
    assert custom_ids(source.with_name("errors.jsonl")) == [None, "a"]


def test_a_line_that_is_done_is_not_written_again(source: Path) -> None:
    with output_for(source) as (output, plan):
        outcome = outcome_of(result_of(next(plan.todo())))
        assert [output.write(outcome), output.write(outcome)] == [True, False]
    assert written(source) == ["a", None]


def test_text_of_any_kind_stays_in_its_line(source: Path) -> None:
    text = 'a\nb\r\u2028\x00\U0001f600"'
    with output_for(source) as (output, plan):
        output.write(outcome_of(result_of(next(plan.todo()), text=text)))
    [line] = source.with_name("out.jsonl").read_bytes().splitlines()
    assert json.loads(line)["response"]["body"]["choices"][0]["message"]["content"] == text


def test_resuming_goes_on_with_what_is_not_there(source: Path) -> None:
    run(source, "b", "d")
    with output_for(source, resume=True) as (output, plan):
        assert (output.num_answers, output.num_errors, output.num_dropped) == (2, 1, 0)
        assert [line.custom_id for line in plan.todo()] == ["a", "c"]
        answer(output, plan)
    assert written(source) == ["b", "d", "a", "c", None]


def test_lines_that_failed_are_done_again_when_told_to_and_refused_ones_stay(source: Path) -> None:
    with output_for(source) as (output, plan):
        for state in ("succeeded", "dead", "expired", "cancelled"):
            answer(output, plan, IDS[output.num_answers + output.num_errors - 1], state=state)
    with output_for(source, resume=True) as (output, plan):
        assert list(plan.todo()) == []
    with output_for(source, resume=True, retry_failed=True) as (output, plan):
        assert [line.custom_id for line in plan.todo()] == ["b", "c", "d"]
        assert (output.num_retried, output.num_dropped, output.num_errors) == (3, 0, 1)
        answer(output, plan)
    assert sorted(written(source), key=str) == [None, "a", "b", "c", "d"]


def test_resuming_what_never_began_begins(source: Path) -> None:
    run(source, resume=True)
    assert written(source) == ["a", "b", "c", "d", None]


@pytest.mark.parametrize(
    ("is_one", "order", "step"), [(True, "done", 1), (True, "input", 7), (False, "done", 7), (False, "input", 7)]
)
def test_cut_anywhere_each_line_is_there_once_after_resuming(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_one: bool, order: str, step: int
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _fd: None)  # nobody pulls the plug here
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join([json.dumps(request("a")), "nonsense", json.dumps(request("b"))]))
    out, errors = source.with_name("out.jsonl"), source.with_name("out.jsonl" if is_one else "errors.jsonl")
    run(source, errors=errors, order=order)
    whole = {path: path.read_bytes() for path in {out, errors}}
    for cut_path, content in whole.items():
        for size in range(0, len(content), step):
            for path, before in whole.items():
                path.write_bytes(before[:size] if path == cut_path else before)
            run(source, errors=errors, order=order, resume=True)
            assert sorted(map(str, custom_ids(*whole))) == ["None", "a", "b"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(
    lines=st.permutations(range(5)),
    torn=st.sets(st.integers(0, 4)),
    junk=st.sampled_from([b"\x00" * 9, b"{", b"[1]", b'{"id": 1}']),
)
def test_lines_that_cannot_be_read_are_done_again_wherever_they_are(
    source: Path, lines: list[int], torn: set[int], junk: bytes
) -> None:
    out = source.with_name("out.jsonl")
    for path in (out, record_path(out)):
        path.unlink(missing_ok=True)
    run(source, errors=out)
    whole = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(junk + b"\n" if line in torn else whole[line] for line in lines))
    with output_for(source, errors=out, resume=True) as (output, plan):
        assert output.num_dropped == len(torn)
        answer(output, plan)
    assert sorted(map(str, custom_ids(out))) == ["None", *IDS]


def test_a_file_that_is_written_anew_keeps_its_mode_its_name_and_its_lock(source: Path, tmp_path: Path) -> None:
    run(source)
    real, out = tmp_path / "real.jsonl", source.with_name("out.jsonl")
    out.rename(real)
    real.write_bytes(b"junk\n" + real.read_bytes())
    real.chmod(0o640)
    out.symlink_to(real)
    with output_for(source, resume=True) as (output, _):
        assert output.num_dropped == 1
        with pytest.raises(InvalidOption, match="another process writes it"):
            run(source, resume=True)
    assert out.is_symlink()
    assert real.stat().st_mode & 0o777 == 0o640
    assert not list(tmp_path.glob(".real*"))


def test_with_order_input_lines_wait_for_those_before_them(source: Path) -> None:
    out = source.with_name("out.jsonl")
    with output_for(source, order="input", errors=out) as (output, plan):
        outcomes = {line.custom_id: outcome_of(result_of(line)) for line in plan.todo()}
        seen = []
        for custom_id in "dbac":
            output.write(outcomes[custom_id])
            seen.append((custom_ids(out), output.sync()))
    assert seen == [([], 1), ([], 2), (["a", "b"], 1), (["a", "b", "c", None, "d"], 0)]


def test_with_order_input_bad_lines_at_the_start_and_end_are_written_too(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("bad\n" + json.dumps(request("a")) + "\nbad\nbad")
    run(path, order="input", errors=tmp_path / "out.jsonl")
    assert [json.loads(line)["id"] for line in (tmp_path / "out.jsonl").read_text().splitlines()] == [
        f"batch_req_{name}" for name in ("line-1", "b-2", "line-3", "line-4")
    ]


def test_with_order_input_what_waited_when_it_ended_is_done_again(source: Path) -> None:
    run(source, "c", "d", order="input")
    assert written(source) == []
    run(source, order="input", resume=True)
    assert written(source) == ["a", "b", "c", "d", None]


def link(kind: str, source: Path, path: Path) -> Path:
    if kind == "itself":
        return source
    (path.symlink_to if kind == "symlink" else path.hardlink_to)(source)
    return path


@pytest.mark.parametrize("kind", ["itself", "symlink", "hardlink"])
@pytest.mark.parametrize("option", ["output", "errors"])
def test_the_input_is_never_written(source: Path, tmp_path: Path, kind: str, option: str) -> None:
    before = source.read_bytes()
    path = link(kind, source, tmp_path / "link.jsonl")
    with pytest.raises(InvalidOption, match=f"--{option}: .*: is the input"):
        run(source, resume=True, force=True, **{"out" if option == "output" else option: path})
    assert source.read_bytes() == before


def other_input(source: Path) -> dict[str, Any]:
    write_input(source, "abx")
    return {}


def damaged_record(source: Path) -> dict[str, Any]:
    record_path(source.with_name("out.jsonl")).write_text("{")
    return {}


def odd_record(source: Path) -> dict[str, Any]:
    record_path(source.with_name("out.jsonl")).write_text('{"v": 1, "fingerprint": "", "errors": {}, "parameters": [1]}')
    return {}


def no_record(source: Path) -> dict[str, Any]:
    record_path(source.with_name("out.jsonl")).unlink()
    return {}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda _source: {"resume": False}, "--output: .*out.jsonl: is there already; go on with --resume"),
        (other_input, "its input was another one, .*in.jsonl; give that one, or go on all the same with --force"),
        (
            lambda _source: {"parameters": {"model": "n", "seed": 1}},
            r"begun with other parameters \(model: \"m\", not \"n\"; seed: null, not 1\)",
        ),
        (lambda source: {"errors": source.with_name("e2.jsonl")}, "its errors are in errors.jsonl; give --errors as before"),
        (damaged_record, "not a record that this version can read"),
        (odd_record, "not a record that this version can read"),
        (no_record, "missing, so that nobody knows what the output belongs to"),
    ],
    ids=["no resume", "input", "parameters", "errors", "damaged record", "odd record", "no record"],
)
def test_files_of_something_else_are_left_alone(source: Path, change: Callable[[Path], dict[str, Any]], words: str) -> None:
    run(source, "a", "b")
    before = written(source)
    how = {"resume": True} | change(source)
    with pytest.raises(InvalidOption, match=words):
        run(source, **how)
    assert written(source) == before


@pytest.mark.parametrize("change", [damaged_record, no_record, lambda _source: {"parameters": {"model": "n"}}])
def test_force_goes_on_all_the_same(source: Path, change: Callable[[Path], dict[str, Any]]) -> None:
    run(source, "a", "b")
    run(source, resume=True, force=True, **change(source))
    assert sorted(map(str, written(source))) == ["None", *IDS]
    assert json.loads(record_path(source.with_name("out.jsonl")).read_text())["v"] == 1


def test_force_with_a_mended_input_serves_what_was_refused(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps(request("a")) + "\n" + json.dumps(request("b", temperature=-1)) + "\nbad\n")
    run(path)
    assert written(path) == ["a", "b", None]
    write_input(path, "abc")
    with output_for(path, resume=True, force=True) as (output, plan):
        assert (output.num_answers, output.num_errors, output.num_dropped) == (1, 0, 2)
        answer(output, plan)
    assert written(path) == ["a", "b", "c"]


def test_two_at_once_are_refused(source: Path, tmp_path: Path) -> None:
    with output_for(source):
        with pytest.raises(InvalidOption, match=r"--output: .*: another process writes it"):
            run(source, resume=True)
        with pytest.raises(InvalidOption, match=r"--errors: .*: another process writes it"):
            run(source, out=tmp_path / "out2.jsonl", resume=True)


@pytest.mark.parametrize("path", ["no/out.jsonl", "/proc/out.jsonl", "."])
def test_what_cannot_be_created_is_refused(source: Path, tmp_path: Path, path: str) -> None:
    with pytest.raises(InvalidOption, match=r"--output: .*; write to another file"):
        run(source, out=tmp_path / path, resume=True)


def test_a_record_that_is_a_directory_is_refused(source: Path) -> None:
    record_path(source.with_name("out.jsonl")).mkdir()
    for is_resumed in (False, True):
        with pytest.raises(InvalidOption, match=r"--output: .*\.batch\.json, is a directory; write to another file"):
            run(source, resume=is_resumed)
    assert not source.with_name("out.jsonl").exists()


def test_what_is_no_regular_file_is_refused(source: Path) -> None:
    with pytest.raises(InvalidOption, match="--output: /dev/null: no regular file"):
        run(source, out=Path("/dev/null"), resume=True)


def test_what_failed_before_its_first_line_is_not_in_the_way_of_the_next_try(tmp_path: Path) -> None:
    path = write_input(tmp_path / "in.jsonl", "ab")
    with pytest.raises(RuntimeError), output_for(path):
        raise RuntimeError
    with pytest.raises(InvalidOption), output_for(path, errors=tmp_path / "no" / "errors.jsonl"):
        pass
    assert [each.name for each in tmp_path.iterdir()] == ["in.jsonl"]
    run(path)
    assert written(path) == ["a", "b"]


def test_facts_are_remembered_and_found_again(source: Path) -> None:
    with output_for(source) as (output, _):
        output.remember(batch_id="b-1")
        on_disk = json.loads(record_path(source.with_name("out.jsonl")).read_text())
        assert (on_disk["batch_id"], on_disk["parameters"], on_disk["errors"]) == ("b-1", {"model": "m"}, "errors.jsonl")
    with output_for(source, resume=True) as (output, _):
        assert output.record["batch_id"] == "b-1"


def test_files_that_are_moved_together_still_belong_together(source: Path, tmp_path: Path) -> None:
    run(source, "a")
    moved = tmp_path / "moved"
    moved.mkdir()
    for path in tmp_path.glob("*.json*"):
        path.rename(moved / path.name)
    run(moved / source.name, resume=True)
    assert sorted(map(str, written(moved / source.name))) == ["None", *IDS]


def test_a_full_disk_is_told_in_one_line_and_takes_nothing_that_was_written(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write

    def fills(fd: int, data: bytes) -> int:
        if b'"custom_id": "c"' not in data:
            return write(fd, data)
        write(fd, data[:7])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", fills)
        with pytest.raises(SlotmillError, match=r"out.jsonl: No space left on device; .* go on with --resume"):
            run(source)
    assert written(source) == ["a", "b", None]
    assert source.with_name("out.jsonl").read_bytes().endswith(b"}\n")
    run(source, resume=True)
    assert written(source) == ["a", "b", "c", "d", None]


def test_a_disk_that_fails_later_is_told_by_the_next_line(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def until_told() -> None:
        with output_for(source) as (output, plan):
            monkeypatch.setattr(os, "fsync", fails)
            for line in plan.todo():
                output.write(outcome_of(result_of(line)))
                wait_until(lambda: output._out._failure)

    monkeypatch.setattr(appended, "SYNC_S", 0.01)
    with pytest.raises(SlotmillError, match="Input/output error"):
        until_told()
    assert written(source) == ["a", None]


def test_a_signal_within_a_line_leaves_whole_lines(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write

    def interrupted(fd: int, data: bytes) -> int:
        write(fd, data[:5])
        raise KeyboardInterrupt

    with output_for(source) as (output, plan):
        answer(output, plan, "a")
        monkeypatch.setattr(os, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            answer(output, plan, "b")
    assert written(source) == ["a", None]


def test_what_is_written_is_put_on_the_disk_though_nobody_calls(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(appended, "SYNC_S", 0.01)
    fsync = os.fsync
    with output_for(source) as (output, plan):
        monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(Path(f"/proc/self/fd/{fd}").readlink().name), fsync(fd)))
        output.write(outcome_of(result_of(next(plan.todo()))))
        wait_until(lambda: "out.jsonl" in synced)


def test_an_outcome_of_no_line_is_not_written(source: Path) -> None:
    with output_for(source) as (output, _):
        assert not output.write(Outcome(99, "z", False, {}))
    shutil.rmtree(source.parent)


@pytest.mark.parametrize("takes_its_place", [lambda _path: None, Path.touch])
def test_an_output_that_is_taken_away_meanwhile_is_told(source: Path, takes_its_place: Callable[[Path], None]) -> None:
    out = source.with_name("out.jsonl")
    kept = source.with_name("moved.jsonl")

    def write() -> None:
        with output_for(source) as (output, plan):
            out.rename(kept)
            takes_its_place(out)
            answer(output, plan)
            output.sync()

    with pytest.raises(SlotmillError, match="put it back, and go on with --resume"):
        write()
    assert custom_ids(kept) == list(IDS)
