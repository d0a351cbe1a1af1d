"""The file of options: its place among command line and environment, what it refuses, and what is printed as one."""

from pathlib import Path

import pytest

from worker import cli, command, process
from worker.settings import Settings


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """What `worker start` would run with; nothing is run."""
    seen: list[Settings] = []
    monkeypatch.setattr(process, "run", lambda settings: seen.append(settings) or 0)
    return seen


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "slotmill.toml"


def start(file: Path, *args: str) -> int:
    return command.run(cli.cli, ["start", "--config", str(file), "--cpu", *args])


def test_command_line_comes_before_environment_before_file_before_default(
    started: list[Settings], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text('queue = "file"\nredis-url = "redis://file"\n[start]\nlease-s = 7\nstall-s = 8\ndrain-s = 9\n')
    monkeypatch.setenv("SLOTMILL_LEASE_S", "17")
    monkeypatch.setenv("SLOTMILL_DRAIN_S", "19")
    assert start(file, "--drain-s", "29") == 0
    settings = started[0]
    assert (settings.queue, settings.redis_url, settings.partitions) == ("file", "redis://file", 1)
    assert (settings.stall_s, settings.lease_s, settings.drain_s) == (8, 17, 29)


def test_the_file_may_be_named_in_the_environment(started: list[Settings], file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text(
        '[start]\nqueue = "own"\ncpu = true\ntenant-weight = ["acme=2"]\nprefix-caching = false\nkv-memory = "60%"\n'
    )
    monkeypatch.setenv("SLOTMILL_CONFIG", str(file))
    assert command.run(cli.cli, ["start"]) == 0
    engine = started[0].engine
    assert (started[0].queue, started[0].tenant_weights) == ("own", {"acme": 2.0})
    assert (engine.prefix_caching, engine.kv_memory) == (False, 0.6)


def test_a_section_is_of_one_command_and_comes_before_what_all_share(started: list[Settings], file: Path) -> None:
    file.write_text('queue = "all"\n[start]\nqueue = "own"\n[queue-stats]\nqueue = "other"\n')
    assert start(file) == 0
    assert started[0].queue == "own"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("queu = 'a'", "queu: no such option; did you mean queue?"),
        ("[strat]\nqueue = 'a'", "[strat]: no such section; did you mean start?"),
        ("[queue-stat]\nwatch = true", "[queue-stat]: no such section; did you mean queue-stats?"),
        ("[web]\nqueue = 'a'", "[web]: no such section; one is a command, with a dash between its words"),
        ("[start]\nmax-slot = 3", "[start] max-slot: no such option; did you mean max-slots?"),
        ("[start]\nmax_slots = 3", "[start] max_slots: no such option; did you mean max-slots?"),
        ("[start]\nmax-slots = '3'", '[start] max-slots: "3" is not a whole number'),
        ("[start]\nmax-slots = true", "[start] max-slots: true is not a whole number"),
        ("[start]\ncpu = 1", "[start] cpu: 1 is not true or false"),
        ("[start]\ngpu = 0", "[start] gpu: 0 is not text; write it in quotes"),
        ("[start]\nengines = 65", "[start] engines: 65 is not in the range"),
        ("[start]\ndtype = 'int3'", "[start] dtype: 'int3' is not one of"),
        ("[start]\ntenant-weight = 'a=2'", '[start] tenant-weight: "a=2" is not a list; write [...]'),
        ("[enqueue]\nstop = ['x']", "[enqueue] stop: no such option"),
        ("[queue-stats]\nwatch = 3", "[queue-stats] watch: 3 is not true or false"),
        ("start = 3", "start is a section; write [start]"),
        ("model = 'm'", "model: no such option"),
        ("queue = ", 'write TOML, as in queue = "jobs"'),
        ("queue = " + 3000 * "[", "nested too deeply"),
        (f"[start]\nlease-s = {400 * '9'}", "is too large for a number"),
        (f"[start]\nkv-memory = {400 * '9'}", "is too large for a number or text"),
    ],
)
def test_a_file_that_is_not_well_is_refused_in_one_line_with_its_name(
    file: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(text)
    assert start(file) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert f"{file}: " in lines[0]
    assert message in lines[0]


def test_a_byte_order_mark_is_passed_over(started: list[Settings], file: Path) -> None:
    file.write_text('queue = "q"', encoding="utf-8-sig")
    assert start(file) == 0
    assert started[0].queue == "q"


@pytest.mark.parametrize("name", ["two\nlines.toml", "a\udcff.toml"])
def test_what_is_printed_can_be_read_whatever_the_file_is_called(
    started: list[Settings], tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    named, printed = tmp_path / name, tmp_path / "printed.toml"
    named.write_text("[start]\nmax-slots = 3")
    assert start(named, "--served-name", "a\udcff", "--print-config") == 0
    shown = capsys.readouterr().out
    assert "# served-name is not text that a file can hold, from --served-name; give SLOTMILL_SERVED_NAME" in shown
    printed.write_text(shown, encoding="utf-8")
    assert start(printed) == 0
    assert started[0].engine.max_slots == 3


def test_a_missing_file_is_refused(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert start(file) == 2
    assert f"--config: {file}: No such file" in capsys.readouterr().err


def test_what_is_printed_is_a_file_that_says_the_same(
    started: list[Settings], file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLOTMILL_QUEUE", "a-queue")
    options = ["--max-slots", "3", "--tenant-weight", "acme=2", "--no-prefix-caching", "--served-name", 'a"\\b\x7fé']
    assert command.run(cli.cli, ["start", "--cpu", *options, "--print-config"]) == 0
    shown = capsys.readouterr().out
    assert 'queue = "a-queue"  # from SLOTMILL_QUEUE' in shown
    assert "max-slots = 3  # from --max-slots" in shown
    assert "block-size = 16  # default" in shown
    assert "# kv-blocks is not set" in shown
    monkeypatch.delenv("SLOTMILL_QUEUE")
    file.write_text(shown)
    assert command.run(cli.cli, ["start", "--config", str(file)]) == 0
    assert command.run(cli.cli, ["start", "--cpu", "--queue", "a-queue", *options]) == 0
    assert started[0] == started[1]
    assert command.run(cli.cli, ["start", "--config", str(file), "--print-config"]) == 0
    assert f"max-slots = 3  # from {file}" in capsys.readouterr().out


def test_no_password_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["start", "--cpu", "--redis-url", "redis://me:secret@h/0", "--otlp-endpoint", "http://me:secret@h", "--print-config"]
    assert command.run(cli.cli, args) == 0
    shown = capsys.readouterr().out
    assert '# redis-url = "redis://me:***@h/0"  # from --redis-url; without its password' in shown
    assert "secret" not in shown


def test_a_check_starts_nothing(started: list[Settings], file: Path) -> None:
    file.write_text("[start]\nlease-s = 0\n")
    assert start(file, "--check") == 2
    assert start(file, "--check", "--lease-s", "3") == 0
    assert started == []
