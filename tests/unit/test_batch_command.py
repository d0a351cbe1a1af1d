"""What the commands for batch files share, and `worker batch verify`."""

import io
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from tests.support.batch_files import custom_ids, request, result_of, write_input
from worker import cli, command, log, progress
from worker.batch import options as shared
from worker.batch.lines import Rules, outcome_of
from worker.batch.output import record_path
from worker.errors import SlotmillError

Go = Callable[..., tuple[int, list[str]]]
Check = Callable[..., tuple[int, str, list[str]]]


@click.group(cls=command.Group)
def toy() -> None: ...


@toy.command()
@shared.input_option
@shared.output_options(required=True)
@shared.line_options
@click.option("--only", default="abcdefgh")
@click.option("--then")
@click.option("--fails", default="")
def answer(*, only: str, fails: str, then: str | None, **given: Any) -> None:
    """A road that knows all answers."""
    files = shared.take_options(given)
    assert given == {}
    with shared.open_plan(files, "m") as plan, shared.open_output(plan, files, {"model": "m"}) as output:
        for line in plan.todo():
            if line.custom_id in only or line.custom_id.startswith("row"):
                failed = {"state": "failed", "error": "model: m: too large"} if line.custom_id in list(fails) else {}
                output.write(outcome_of(result_of(line, text=json.dumps(line.body), **failed)))
        if then == "interrupt":
            raise KeyboardInterrupt
        if then == "terminate":
            os.kill(os.getpid(), signal.SIGTERM)
        if then == "fail":
            raise SlotmillError("engine: gone")
        code = shared.tell_end(output, files)
    raise click.exceptions.Exit(code)


@pytest.fixture
def go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, list[str]]]:
    """Call the toy command on in.jsonl and out.jsonl; its exit code, and what it said on stderr."""
    monkeypatch.chdir(tmp_path)

    def call(*args: str, source: str = "in.jsonl") -> tuple[int, list[str]]:
        code = command.run(toy, ["answer", "-i", source, "-o", "out.jsonl", *args])
        return code, capsys.readouterr().err.splitlines()

    return call


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str]) -> Check:
    """Call `worker batch verify`; exit code, stdout, stderr."""

    def call(*args: str) -> tuple[int, str, list[str]]:
        code = command.run(cli.cli, ["batch", "verify", "-i", "in.jsonl", "-o", "out.jsonl", *args])
        out, err = capsys.readouterr()
        return code, out, err.splitlines()

    return call


def write_lines(*lines: dict[str, Any] | str) -> None:
    Path("in.jsonl").write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))


def test_all_well_is_code_0_and_one_line(go: Go) -> None:
    write_input(Path("in.jsonl"), "ab")
    assert go() == (0, ["worker: batch: 2 answers in out.jsonl"])
    assert custom_ids(Path("out.jsonl")) == ["a", "b"]


def test_bad_lines_are_told_with_their_number_and_do_not_stop_the_rest(go: Go) -> None:
    write_lines(request("a"), "nonsense", request("b", temperature=-1), request("c", model="\x1b[2J"), request("a"))
    code, said = go()
    assert code == 1
    assert said == [
        "worker: in.jsonl, line 2: invalid_json_line: line: not one JSON value: wrong at character 0",
        "worker: in.jsonl, line 3: invalid_value: temperature: -1: a number from 0 to 100",
        "worker: in.jsonl, line 4: model_not_found: model: \\x1b[2J: served is m; give --model or --served-name as the"
        " lines have it, or --ignore-model",
        "worker: in.jsonl, line 5: duplicate_custom_id: custom_id: a stands in line 1 too; give each line one of its own",
        "worker: batch: 1 answers in out.jsonl, 4 errors in out.errors.jsonl",
    ]
    assert custom_ids(Path("out.jsonl"), Path("out.errors.jsonl")) == ["a", None, "b", "c", None]


def test_of_many_bad_lines_the_first_are_told_and_the_others_counted(go: Go) -> None:
    write_lines(request("a"), *["nonsense"] * 30)
    _, said = go()
    assert [line for line in said if "line 21:" in line]
    assert said[20:] == [
        "worker: in.jsonl: 10 more lines are bad",
        "worker: batch: 1 answers in out.jsonl, 30 errors in out.errors.jsonl",
    ]


def test_strict_does_nothing_when_a_line_is_bad(go: Go) -> None:
    write_lines(request("a"), "nonsense")
    code, said = go("--strict")
    assert (code, said[1:]) == (2, ["worker: answer: --strict: 1 of 2 lines are bad; nothing was done"])
    assert sorted(path.name for path in Path().iterdir()) == ["in.jsonl"]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ((), "no line in it; give it one request a line"),
        (("", ""), "no line in it"),
        (
            [request(x, model="other") for x in "abc"],
            "none of its 3 lines can be served: model_not_found: model: other",
        ),
        (
            ["x"] * 3,
            "none of its 3 lines can be served: invalid_json_line: line: not one JSON value: wrong at character 0; each line "
            "is a JSON object with custom_id, method, url and body; bare prompts go into a .csv, with --prompt-column",
        ),
    ],
    ids=["empty", "blank", "one model", "no JSON"],
)
def test_a_file_without_a_good_line_is_code_2_and_its_one_reason(go: Go, lines: Any, said: str) -> None:
    write_lines(*lines)
    code, (line,) = go()
    assert code == 2
    assert line.startswith("worker: answer: --input: in.jsonl: ")
    assert said in line
    assert not Path("out.jsonl").exists()


def test_a_file_without_a_good_line_tells_its_reasons(go: Go) -> None:
    write_lines("x", request("a", temperature=-1))
    code, said = go()
    assert (code, len(said), said[-1]) == (2, 3, "worker: answer: --input: in.jsonl: none of its 2 lines can be served")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--force"], "--force: only goes on with what is there; give --resume too, or write to another file"),
        (["--system", "Be"], "--system: is for prompts of a column"),
        (["--top-p", "0.5"], "--top-p: is for prompts of a column"),
        (["--errors", "in.jsonl"], "--errors: in.jsonl: is the input"),
        (["--errors", "no/x.jsonl"], "--errors: no/x.jsonl: No such file or directory"),
        (["--prompt-column", "p"], "--prompt-column: p: in.jsonl is read as JSONL"),
        (["--max-tokens", "-1"], "none of its 1 lines can be served: invalid_value: max_tokens: -1"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_options_that_cannot_work_are_code_2_in_one_line(go: Go, args: list[str], said: str) -> None:
    write_input(Path("in.jsonl"), "a")
    code, (line,) = go(*args)
    assert code == 2
    assert said in line
    assert not Path("out.jsonl").exists()


@pytest.mark.parametrize("how", ["interrupt", "terminate"])
def test_a_signal_is_code_3_with_the_way_on(go: Go, how: str) -> None:
    before = signal.getsignal(signal.SIGTERM)
    write_input(Path("in.jsonl"), "abc")
    code, said = go("--only", "b", "--then", how)
    assert (code, said) == (3, ["worker: cancelled: 1 of 3 lines are done; the same command with --resume goes on"])
    assert signal.getsignal(signal.SIGTERM) is before
    assert go()[0] == 2
    assert go("--resume") == (0, ["worker: batch: 3 answers in out.jsonl"])


def test_what_fails_before_the_first_answer_can_be_called_again(go: Go) -> None:
    write_input(Path("in.jsonl"), "abc")
    assert go("--only", "-", "--then", "fail") == (1, ["worker: engine: gone"])
    assert go()[0] == 0


def test_resuming_with_another_option_that_changes_answers_is_refused(go: Go) -> None:
    write_input(Path("in.jsonl"), "ab")
    go("--only", "a")
    code, (line,) = go("--resume", "--max-tokens", "7")
    assert code == 2
    assert "begun with other parameters (max_tokens: 1024, not 7); give those, or go on all the same with --force" in line
    assert go("--resume", "--max-tokens", "7", "--force")[0] == 0


def test_a_torn_line_is_told_and_done_again(go: Go) -> None:
    write_input(Path("in.jsonl"), "ab")
    go()
    Path("out.jsonl").write_bytes(Path("out.jsonl").read_bytes()[:-5])
    assert go("--resume")[1][0].startswith("worker: batch: 1 lines of earlier calls were torn")


def test_prompts_of_a_column_take_the_options_that_are_theirs(go: Go) -> None:
    Path("in.csv").write_text("p,i\nHello,\n")
    args = [
        "--prompt-column",
        "p",
        "--system",
        "Be",
        "--temperature",
        "0",
        "--top-p",
        "0.5",
        "--seed",
        "3",
        "--max-tokens",
        "9",
    ]
    assert go(*args, source="in.csv")[0] == 0
    [line] = Path("out.jsonl").read_text().splitlines()
    body = json.loads(json.loads(line)["response"]["body"]["choices"][0]["message"]["content"])
    assert (body["temperature"], body["top_p"], body["seed"], body["max_tokens"]) == (0, 0.5, 3, 9)
    assert [message["role"] for message in body["messages"]] == ["system", "user"]


def test_what_a_command_does_not_share_is_at_rest() -> None:
    taken = shared.take_options({"input_path": Path("x"), "prompt_column": None, "id_column": None})
    assert (taken.output, taken.order, taken.resume, taken.strict, taken.rules) == (None, "done", False, False, Rules())


def test_verify_finds_each_line_once(go: Go, check: Check) -> None:
    write_lines(request("a"), "nonsense", request("b"))
    go()
    assert check() == (0, "3 lines: 2 answers, 1 errors, each line once\n", [])
    code, out, _ = check("--json")
    assert (code, json.loads(out)["is_well"], json.loads(out)["lines"]) == (0, True, 3)


def test_verify_finds_the_errors_and_columns_that_the_record_names(go: Go, check: Check) -> None:
    Path("in.csv").write_text('p\nHello\n""\n')
    go("--prompt-column", "p", "--errors", "e.jsonl", source="in.csv")
    assert check("-i", "in.csv")[:2] == (0, "2 lines: 1 answers, 1 errors, each line once\n")


@pytest.mark.parametrize("errors", ["out.errors.jsonl", "out.jsonl"])
def test_verify_tells_what_is_amiss_by_its_line(go: Go, check: Check, errors: str) -> None:
    write_lines(request("a"), request("b"), "nonsense", request("c"))
    go("--only", "ac", "--errors", errors)
    with Path("out.jsonl").open("a") as out:
        line = {"id": "x", "custom_id": "a", "response": None, "error": None}
        out.writelines([json.dumps(line) + "\n", "{}\n", json.dumps(line | {"custom_id": "z"}) + "\n", '{"id": "tor'])
    code, said, lines = check("--errors", errors)
    first = 4 if errors == "out.jsonl" else 3
    assert code == 1
    assert [line.removeprefix("worker: ") for line in lines] == [
        "in.jsonl, line 2: not answered; --resume goes on with it",
        f"out.jsonl, line {first}: answered more than once",
        f"out.jsonl, line {first + 2}: answers a line that the input does not have",
        f"out.jsonl, line {first + 1}: torn, or no line of a batch",
        f"out.jsonl, line {first + 3}: torn, or no line of a batch",
    ]
    assert said == "4 lines: 2 answers, 3 errors, 1 missing, 1 doubled, 1 unknown, 2 unreadable\n"
    found = json.loads(check("--errors", errors, "--json")[1])
    assert (found["is_well"], found["missing"]) == (False, [{"file": "in.jsonl", "line": 2}])


def test_verify_tells_an_output_of_another_input(go: Go, check: Check) -> None:
    write_input(Path("in.jsonl"), "ab")
    go()
    write_input(Path("in.jsonl"), "ba")
    code, _, said = check()
    assert (code, len(said)) == (1, 1)
    assert "out.jsonl: belongs to another input, in.jsonl, or an earlier state of it" in said[0]


def test_verify_counts_what_is_too_much_to_tell_and_does_without_a_record(go: Go, check: Check) -> None:
    write_input(Path("in.jsonl"), map(str, range(30)))
    go("--only", "-")
    record_path(Path("out.jsonl")).write_text("{")
    code, _, said = check()
    assert (code, len(said), said[-1]) == (1, 21, "worker: 10 more lines are missing")


def test_verify_without_an_output_is_code_2(check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_input(Path("in.jsonl"), "a")
    assert check() == (2, "", ["worker: batch verify: --output: out.jsonl: is no file; give the one that was written"])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "patience_s", "is_shown"), [(Terminal(), 0, True), (io.StringIO(), 0, False), (Terminal(), 60, False)]
)
def test_progress_is_shown_on_a_terminal_for_what_takes_long(
    monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, patience_s: float, is_shown: bool
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "PATIENCE_S", patience_s)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with progress.Progress("[reading]", "lines") as bar:
        bar.update(1000, 5000)
        bar.update(2000, 5000, "3 failed")
    assert progress._shown == []
    assert (("[reading]" in stream.getvalue()), "2,000 of 5,000" in stream.getvalue()) == (is_shown, is_shown)


def log_error(text: str) -> None:
    log.get("process").error(text)


@pytest.mark.parametrize("prints", [command.note, command.say, log_error])
@pytest.mark.parametrize("is_piped", [False, True])
def test_a_line_that_is_printed_while_a_bar_is_shown_stands_above_it(
    monkeypatch: pytest.MonkeyPatch, prints: Callable[[str], None], is_piped: bool
) -> None:
    terminal, pipe = Terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "stdout", pipe if is_piped else terminal)
    monkeypatch.setattr(progress, "PATIENCE_S", 0)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(log, "prints", progress.print_above)
    log.configure(form="brief")
    text = "[bold] and longer than a terminal of 40 columns is wide"
    with progress.Progress("bar", "lines") as bar:
        bar.update(1000, 5000)
        prints(text)
    log.configure()
    line = {command.note: f"worker: {text}\n", command.say: f"{text}\n"}.get(prints, f"worker: {text}:\n")
    if is_piped and prints is command.say:
        assert pipe.getvalue() == line
    else:
        before, _, after = terminal.getvalue().partition(line)
        assert before.endswith("\x1b[2K")
        assert "1,000 of 5,000" in after


def test_the_first_of_lines_that_failed_is_told_with_its_reason(go: Go) -> None:
    write_input(Path("in.jsonl"), "abc")
    assert go("--fails", "b") == (
        1,
        [
            "worker: batch: 2 answers in out.jsonl, 1 errors in out.errors.jsonl",
            "worker: batch: line 2 failed first: model: m: too large",
        ],
    )
