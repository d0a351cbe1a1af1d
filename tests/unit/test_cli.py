"""The command line: options, environment, exit codes, one-line errors."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
import redis

from engine.errors import ConfigError, ModelUnsupported
from worker import cli, command, engine_options, process
from worker.broker import Broker, EnqueueReply
from worker.claims import Finish
from worker.client import Client
from worker.connection import connect
from worker.errors import EngineUnavailable, InvalidJob, InvalidOption, ServerUnavailable, UnknownJob, WaitTimeout
from worker.frames import Choice, ControlFrame, FinalState, Result, Usage, encode_frame, encode_result
from worker.keys import Keys
from worker.queue_commands import queue_group
from worker.settings import Settings

UNREACHABLE = "redis://:secret@127.0.0.1:1/0"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """What `worker start` would run with; nothing is run."""
    seen: list[Settings] = []
    monkeypatch.setattr(process, "run", lambda settings: seen.append(settings) or 0)
    return seen


def all_commands(group: click.Group) -> list[click.Command]:
    found = []
    for item in group.commands.values():
        found += all_commands(item) if isinstance(item, click.Group) else [item]
    return found


def failing(error: BaseException) -> click.Group:
    """A command line whose one command raises."""

    @click.group(cls=command.Group)
    def group() -> None: ...

    @group.command()
    def go() -> None:
        raise error

    return group


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidJob("max_tokens", -3, "0..8"), 2),
        (InvalidOption("--x: 1 is wrong"), 2),
        (ConfigError("kv_blocks: 0 is below 1"), 2),
        (UnknownJob("job a: not here"), 2),
        (KeyboardInterrupt(), 3),
        (WaitTimeout("job a: not ended in 1 s"), 4),
        (ServerUnavailable("server: gone"), 5),
        (EngineUnavailable("no engine"), 6),
        (ModelUnsupported("model: odd"), 6),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_an_error_is_one_line_and_its_exit_code(error: BaseException, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(failing(error), ["go"]) == code
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("worker: ")


def test_verbose_adds_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    command.run(failing(ServerUnavailable("server: gone")), ["go", "--verbose"])
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert shown.splitlines()[-1] == "worker: server: gone"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["strat"], "strat"),
        (["start", "--lease-s", "often"], "often"),
        (["start", "--cpu", "--gpu", "0"], "--cpu and --gpu 0 exclude each other"),
        (["start", "--gpu", "0,x"], "--gpu: 0,x is not a list of different GPUs"),
        (["start", "--gpu", "1,1"], "--gpu: 1,1 is not a list of different GPUs"),
        (["start", "--gpu", "0,2", "--tensor-parallel", "2"], "--gpu: 0,2: --tensor-parallel 2 needs 2 GPUs in a row"),
        (["start", "--gpu", "0,1", "--engines", "2"], "--engines: 2: on GPUs there is one for each that --gpu names"),
        (["start", "--cpu", "--lease-s", "0"], "worker: start: --lease-s: 0 is outside"),
        (["start", "--cpu", "--kv-blocks", "5", "--kv-memory", "0.5"], "exclude each other"),
        (["start", "--cpu", "--block-size", "17"], "worker: start: block_size: 17"),
        (["start", "--cpu", "--redis-url", "localhost"], "redis URL"),
        (["start", "--cpu", "--redis-url", "redis://h:port/0"], "redis URL"),
        (["demo", "--redis-url", "localhost"], "redis URL"),
        (["job", "show", "a", "--redis-url", "localhost"], "redis URL"),
        (["job", "show", "a", "--queue", "a b"], "queue: 'a b'"),
        (["enqueue"], "worker: enqueue: no prompt; give one as an argument, or a file with -f, or standard input with -f -"),
        (["job", "cancel"], "worker: job cancel: Missing argument 'ID...'"),
        (["enqueue", "--nope"], "worker: enqueue: No such option"),
        (["enqueue", "a", "b", "--id", "x"], "--id: x: 2 prompts"),
        (["enqueue", "a", "--temperature", "-1"], "worker: enqueue: temperature: -1.0: a number"),
        (["enqueue", "a", "--deadline-s", "nan"], "--deadline-s"),
        (["enqueue", "a", "--deadline-s", "inf"], "--deadline-s"),
        (["enqueue", "a", "--deadline-s", "1e308"], "--deadline-s"),
        (["job", "result", "a", "--timeout-s", "nan"], "--timeout-s"),
        (["enqueue", "a", "b", "--idempotency-key", "k"], "--idempotency-key: 2 prompts"),
        (["enqueue", "a", "--idempotency-key", ""], "idempotency_key: text of 0"),
        (["enqueue", "a", "--max-queued", "-1"], "--max-queued"),
        (["enqueue", "a", "--delay-s", "nan"], "--delay-s"),
        (["enqueue", "a", "--delay-s", "-1"], "delay_s: -1.0: 0 to 2592000"),
        (["enqueue", "a", "--delay-s", "2592001"], "delay_s: 2592001.0: 0 to 2592000, which is 30 days"),
        (["queue", "limit"], "worker: queue limit: Missing argument 'N|none'"),
        (["queue", "limit", "1e3"], "worker: queue limit: '1e3': a number of jobs from 0 to 9007199254740992, or none"),
        (["queue", "limit", "9" * 16], "a number of jobs from 0"),
        (["queue", "limit", "²"], "a number of jobs from 0"),
        (["queue", "purge", "--lane", "urgent"], "--lane"),
        (["queue", "drain", "--timeout-s", "nan"], "--timeout-s"),
        (["queue", "stats", "--queue", "a b"], "queue: 'a b'"),
        (["dead", "list", "--limit", "0"], "--limit"),
        (["dead", "show"], "worker: dead show: Missing argument 'ID'"),
        (["dead", "replay"], "worker: dead replay: give ids, or --all for all of them"),
        (["dead", "replay", "a", "--all"], "give ids, or --all for all of them"),
        (["dead", "drop", "--yes"], "give ids, or --all for all of them"),
        (["start", "--cpu", "--kv-memory", "3x"], "'3x' is no memory; write 0.6 or 60%"),
        (["start", "--cpu", "--kv-memory", "101%"], "'101%' is no memory"),
        (["start", "--cpu", "--kv-memory", "0%"], "kv_memory: 0.0"),
        (["start", "--cpu", "--kv-memory", "inf"], "kv_memory: inf"),
        (["start", "--cpu", "--kv-memory", "nan"], "kv_memory: nan"),
        (["start", "--cpu", "--threads", "100000000"], "num_threads: 100000000 is outside 1..1024"),
        (["start", "--cpu", "--max-slots", "9" * 20], "max_slots"),
        (["start", "--cpu", "--queue", "a\udcff"], "queue: 'a\\udcff'"),
        (["demo", "--cpu", "--gpu", "0"], "--cpu and --gpu 0 exclude each other"),
        (["redis", "--port", "0", "--data", "/proc/x"], "data: /proc/x"),
        (["doctor", "--only", "server,moon"], "--only: 'moon' is none of server, queue, machine"),
        (["doctor", "--queue", "a b"], "queue: 'a b'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_code_2_in_one_line(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(cli.cli, args) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "device_chosen" not in line]
    assert len(lines) == 1
    assert lines[0].startswith("worker: ")
    assert message in lines[0]


def test_all_options_that_cannot_work_are_told_at_once(started: list[Settings], capsys: pytest.CaptureFixture[str]) -> None:
    options = "--cpu --gpu 0 --block-size 17 --max-slots 0 --lease-s 0 --stall-s 0 --partitions 65 --metrics-port 70000"
    weights = ["--tenant-weight", "acme=x", "--tenant-weight", "acme=0"]
    assert command.run(cli.cli, ["start", *options.split(), *weights]) == 2
    named = [
        "--cpu and --gpu 0", "block_size: 17", "max_slots: 0", "--tenant-weight: acme=x", "--lease-s: 0", "--stall-s: 0",
        "--metrics-port: 70000", "--tenant-weight: acme=0", "--partitions: 65",
    ]  # fmt: skip
    for line, name in zip(capsys.readouterr().err.splitlines(), named, strict=True):
        assert line.startswith(f"worker: start: {name}")
    assert not started


@pytest.mark.parametrize("url", ["http://x", "", "redis://u:secret@h:99999999/0"])
def test_a_check_of_the_options_reads_the_url_and_the_model_too(
    started: list[Settings], capsys: pytest.CaptureFixture[str], url: str
) -> None:
    assert command.run(cli.cli, ["start", "--cpu", "--check", "--model", "", "--redis-url", url]) == 2
    model, server = capsys.readouterr().err.splitlines()
    assert model.startswith("worker: start: --model: is empty")
    assert "redis URL: cannot be read" in server
    assert "secret" not in server
    assert not started


@pytest.mark.parametrize(
    "args",
    [
        ["enqueue", "a"],
        ["job", "show", "a"],
        ["job", "cancel", "a"],
        ["job", "result", "a"],
        ["demo", "--cpu", "--plain"],
        ["queue", "stats"],
        ["queue", "pause"],
        ["queue", "resume"],
        ["queue", "drain"],
        ["queue", "purge", "--yes"],
        ["queue", "limit", "3"],
        ["dead", "list"],
        ["dead", "show", "a"],
        ["dead", "replay", "a"],
        ["dead", "drop", "--all", "--yes"],
        ["doctor"],
        ["doctor", "--only", "queue"],
    ],
    ids=" ".join,
)
def test_no_server_is_code_5_in_one_line_without_the_password(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(cli.cli, [*args, "--redis-url", UNREACHABLE]) == 5
    shown = capsys.readouterr().err
    assert len(shown.splitlines()) == 1
    assert "refused; start one with `worker redis`" in shown
    assert "secret" not in shown


def test_a_file_that_is_not_utf_8_is_refused_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"one\ntwo \xff\n")
    assert command.run(cli.cli, ["enqueue", "-f", str(file)]) == 2
    assert f"{file}, line 2: not UTF-8" in capsys.readouterr().err


def test_nothing_is_added_when_one_of_the_prompts_is_refused(
    redis_url: str, queue: str, redis_client: redis.Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["enqueue", "--redis-url", redis_url, "--queue", queue]
    assert command.run(cli.cli, [*args, "a", "b\udcff"]) == 2
    assert redis_client.xlen(Keys(queue).lane("normal")) == 0
    assert capsys.readouterr().out == ""


def test_ids_are_printed_as_their_jobs_are_added(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = iter(["first", ServerUnavailable("server: gone")])

    def enqueue(_client: Client, **_body: object) -> str:
        if isinstance(answer := next(answers), Exception):
            raise answer
        return answer

    monkeypatch.setattr(Client, "enqueue", enqueue)
    assert command.run(cli.cli, ["enqueue", "a", "b", "--redis-url", redis_url, "--queue", queue]) == 5
    assert capsys.readouterr().out == "first\n"


def test_options_reach_the_settings(started: list[Settings]) -> None:
    sizes = ["--max-slots", "3", "--token-budget", "64", "--kv-blocks", "9", "--block-size", "32", "--max-model-len", "100"]
    rest = ["--model", "m", "--queue", "q", "--lease-s", "2", "--burst", "--dtype", "float32", "--threads", "1", "--gpu", "1"]
    assert command.run(cli.cli, ["start", *sizes, *rest]) == 0
    engine = started[0].engine
    assert (engine.max_slots, engine.token_budget, engine.kv_blocks, engine.block_size) == (3, 64, 9, 32)
    assert (engine.max_model_len, engine.dtype, engine.num_threads, engine.device) == (100, "float32", 1, "cuda:1")
    assert (started[0].queue, started[0].lease_s, started[0].burst, started[0].model_name) == ("q", 2, True, "m")


@pytest.mark.parametrize(("flags", "expected"), [([], None), (["--graphs"], True), (["--no-graphs"], False)])
def test_graphs_are_the_devices_choice_unless_said(started: list[Settings], flags: list[str], expected: bool | None) -> None:
    assert command.run(cli.cli, ["start", "--gpu", "0", *flags, *[flag.replace("graphs", "run-ahead") for flag in flags]]) == 0
    assert (started[0].engine.graphs, started[0].engine.run_ahead) == (expected, expected)


def test_options_are_read_from_the_environment(started: list[Settings], monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"SLOTMILL_REDIS_URL": "redis://elsewhere", "SLOTMILL_CPU": "1", "SLOTMILL_LEASE_S": "12"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    command.run(cli.cli, ["start"])
    assert (started[0].redis_url, started[0].engine.device, started[0].lease_s) == ("redis://elsewhere", "cpu", 12)


@pytest.mark.parametrize(
    ("options", "devices"),
    [
        (["--gpu", "0,1"], "cuda:0,cuda:1"),
        (["--gpu", "0,1,2,3", "--tensor-parallel", "2"], "cuda:0,cuda:2"),
        (["--cpu", "--engines", "2"], "cpu,cpu"),
    ],
)
def test_each_device_has_an_engine(started: list[Settings], options: list[str], devices: str) -> None:
    assert command.run(cli.cli, ["start", *options]) == 0
    assert started[0].device_names == devices


@pytest.mark.parametrize(("gpus", "device"), [(0, "cpu"), (2, "cuda:0")])
def test_without_a_choice_the_first_gpu_is_taken_where_there_is_one(
    started: list[Settings], monkeypatch: pytest.MonkeyPatch, gpus: int, device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine_options, "visible_gpus", lambda: gpus)
    command.run(cli.cli, ["start"])
    assert started[0].engine.device == device
    assert "device_chosen" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "memory"),
    [("0.6", 0.6), ("60%", 0.6), ("4GiB", 4 * 2**30), ("1.5 gib", 1.5 * 2**30), ("512MB", 512e6), ("2e9", 2e9)],
)
def test_memory_is_a_part_a_size_or_bytes(started: list[Settings], given: str, memory: float) -> None:
    assert command.run(cli.cli, ["start", "--cpu", "--kv-memory", given]) == 0
    assert started[0].engine.kv_memory == memory


@pytest.mark.parametrize(("shell", "word"), [("bash", "1"), ("zsh", "1"), ("fish", "st")])
def test_a_shell_completes_commands(
    shell: str, word: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command.run(cli.cli, ["completion", shell]) == 0
    assert f"_WORKER_COMPLETE={shell}_complete" in capsys.readouterr().out
    for name, value in {"_WORKER_COMPLETE": f"{shell}_complete", "COMP_WORDS": "worker st", "COMP_CWORD": word}.items():
        monkeypatch.setenv(name, value)
    assert command.run(cli.cli, []) == 0
    assert "start" in capsys.readouterr().out


def test_no_bound_of_a_clock_stands_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    command.run(cli.cli, ["enqueue", "--help"])
    assert "3000000000" not in capsys.readouterr().out


def test_every_command_and_option_says_what_it_does() -> None:
    commands = all_commands(cli.cli)
    assert len(commands) >= 8
    assert all(item.help for item in commands)
    options = [param for item in commands for param in item.params if isinstance(param, click.Option)]
    assert [option.name for option in options if not option.help] == []


@pytest.mark.parametrize(("options", "shown"), [((), "/models/m\n"), (("--json",), '{"name": "m", "path": "/models/m"}\n')])
def test_a_model_s_directory_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], shown: str
) -> None:
    monkeypatch.setattr("engine.model.resolve", lambda name: Path("/models") / name)
    assert command.run(cli.cli, ["model", "path", "m", *options]) == 0
    assert capsys.readouterr().out == shown


WITHOUT_JSON = {
    "demo": "is looked at",
    "start": "prints its log, which --log-format makes JSON",
    "redis": "prints one URL",
    "completion": "prints a script",
}


def test_every_command_prints_json_but_those_that_have_nothing_to_say_in_it() -> None:
    without = [item.name for item in all_commands(cli.cli) if not any("--json" in param.opts for param in item.params)]
    assert without == list(WITHOUT_JSON)


@pytest.mark.parametrize("one", all_commands(cli.cli), ids=lambda one: one.name)
def test_every_command_shows_examples_that_it_understands(
    one: command.Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("prompts.txt").touch()
    assert 1 <= len(one.examples) <= 3
    for example in one.examples:
        assert f"  {example}" in one.get_help(click.Context(one)).splitlines()
        found, words = cli.cli, shlex.split(example.removeprefix("worker "))
        while isinstance(found, click.Group):
            found = found.commands[words.pop(0)]
        assert found is one
        found.make_context(found.name, words, parent=click.Context(cli.cli, info_name="worker")).close()


def test_the_options_of_worker_start_stand_under_headings() -> None:
    start = cli.cli.commands["start"]
    bare = [param.opts[0] for param in start.params if not hasattr(param, "heading")]
    assert bare == ["--print-config", "--check", "--config", "--verbose"]
    shown = start.get_help(click.Context(start))
    headings = ["Queue:", "Model:", "Device:", "Batch and memory:", "Scheduling:", "Logs and metrics:", "Options:", "Examples:"]
    assert [line for line in shown.splitlines() if line in headings] == headings


def test_the_entry_point_knows_its_version() -> None:
    shown = subprocess.run([sys.executable, "-m", "worker.cli", "--version"], capture_output=True, text=True, check=True)
    assert shown.stdout.startswith("worker, version ")


INTERRUPTED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs are without
module, number = sys.argv[1], int(sys.argv[2])
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            os.kill(os.getpid(), number)
sys.meta_path.insert(0, Finder())
from worker.cli import main
sys.argv[1:] = ["start", "--cpu"]
main()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 3), (signal.SIGTERM, -signal.SIGTERM)])
@pytest.mark.parametrize("module", ["click", "redis", "worker.job_commands", "worker.process", "prometheus_client"])
def test_a_signal_while_modules_load_leaves_no_traceback(module: str, number: int, code: int) -> None:
    arguments = [sys.executable, "-c", INTERRUPTED, module, str(int(number))]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr in ("", "worker: cancelled\n")


def test_worker_redis_prints_its_url_and_leaves_at_sigterm(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "worker.cli", "redis", "--port", "0", "--data", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        assert server.stdout.readline().startswith("redis://127.0.0.1:")
        server.terminate()
        assert server.wait(10) == 0


def test_worker_redis_tells_a_killed_server_from_one_that_gave_up(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "worker.cli", "redis", "--port", "0", "--data", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        with connect(parent.stdout.readline().strip()) as server:
            os.kill(server.info("server")["process_id"], signal.SIGKILL)
        assert (
            parent.communicate(timeout=10)[1]
            == "worker: server: killed by signal 9; started with --data it goes on from there\n"
        )
        assert parent.returncode == 5


@pytest.fixture
def on_queue(redis_url: str, queue: str) -> list[str]:
    return ["--redis-url", redis_url, "--queue", queue]


def interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C as soon as an answer is waited for."""

    def waits(*_args: object, **_options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Client, "result", waits)
    monkeypatch.setattr(Client, "stream", waits)


def finish(broker: Broker, state: FinalState, text: str = "") -> None:
    """A worker's part: the queue's next job ends."""
    [job] = broker.fetch(1)
    choices = (Choice(0, text, (), "stop"),) if state == "succeeded" else ()
    result = Result(
        id=job.job_id, state=state, code="invalid", error="for a reason", choices=choices, usage=Usage(1, 0), worker="me"
    )
    end = ControlFrame(job.attempt, "end", state, "", result.usage)
    broker.finish([Finish(job, state, "", encode_result(result), encode_frame(end))])


@pytest.mark.parametrize("how", ["--follow", "--wait"])
def test_ctrl_c_tells_what_ends_the_jobs_that_are_still_open(
    on_queue: list[str], broker: Broker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    with Client(on_queue[1], on_queue[3]) as client:
        client.enqueue("a", id="ended", priority="high")
    finish(broker, "succeeded")
    interrupt(monkeypatch)
    assert command.run(cli.cli, ["enqueue", how, "a", "b", *on_queue]) == 3
    out, err = capsys.readouterr()
    *ids, last = err.splitlines()
    assert out == ""
    line = shlex.split(last.split("`")[1])
    assert [f"worker: job {job_id}" for job_id in line[3:5]] == ids
    assert command.run(cli.cli, line[1:]) == 0
    assert capsys.readouterr().out == "queued\nqueued\n"
    assert [job.ending for job in broker.fetch(2)] == ["cancelled"] * 2


def test_ctrl_c_names_no_job_that_has_ended_and_counts_those_that_are_many(
    on_queue: list[str], broker: Broker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupt(monkeypatch)
    enqueue = Client.enqueue

    def ends_the_first(client: Client, **body: object) -> str:
        job_id = enqueue(client, **body)  # type: ignore[arg-type]
        if body["prompt"] == "0":
            finish(broker, "succeeded")
        return job_id

    monkeypatch.setattr(Client, "enqueue", ends_the_first)
    assert command.run(cli.cli, ["enqueue", "--wait", *"012345", *on_queue]) == 3
    *ids, last = [line.split()[-1] if "left" not in line else line for line in capsys.readouterr().err.splitlines()]
    assert f"cancel {' '.join(ids[1:4])} --queue" in last
    assert last.endswith("`, and 2 more like it")


def test_what_a_producer_wrote_cannot_steer_the_terminal(
    redis_client: redis.Redis, on_queue: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Client(redis_client, on_queue[3]).enqueue("Hi", id="a", tenant="\x1b[2J")
    assert command.run(cli.cli, ["job", "show", "a", *on_queue]) == 0
    assert "\ufffd[2J" in capsys.readouterr().out


def test_an_ended_job_is_shown_with_its_error_and_times_for_people(
    on_queue: list[str], broker: Broker, capsys: pytest.CaptureFixture[str]
) -> None:
    with Client(on_queue[1], on_queue[3]) as client:
        client.enqueue("a", id="k")
    finish(broker, "failed")
    assert command.run(cli.cli, ["job", "show", "k", *on_queue]) == 0
    lines = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert (lines["state"], lines["error"], lines["lane"]) == ("failed", "for a reason", "normal")
    assert lines["enqueued"].endswith(" s ago)")
    assert command.run(cli.cli, ["job", "show", "k", "--json", *on_queue]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["error"], data["attempt"], type(data["finished_ms"])) == ("for a reason", 1, int)


def test_a_hint_holds_no_password(
    redis_client: redis.Redis, on_queue: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    redis_client.acl_setuser("hinted", enabled=True, passwords=["+s3cret"], keys=["*"], commands=["+@all"], channels=["*"])
    interrupt(monkeypatch)
    try:
        url = on_queue[1].replace("redis://", "redis://hinted:s3cret@")
        command.run(cli.cli, ["enqueue", "--wait", "a", "--redis-url", url, *on_queue[2:]])
    finally:
        redis_client.acl_deluser("hinted")
    shown = capsys.readouterr().err
    assert "s3cret" not in shown
    assert f"--queue {on_queue[3]}` and the server's URL in SLOTMILL_REDIS_URL" in shown


def test_a_hint_holds_no_password_that_is_not_the_server_s_own() -> None:
    url = "redis+sentinel://a/m?sentinel_password=s3cret"
    with queue_group.commands["pause"].make_context("pause", ["--redis-url", url]):
        assert command.command_line("worker", "start") == "`worker start` and the server's URL in SLOTMILL_REDIS_URL"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.client.CHECK_S", 0.02)
    monkeypatch.setattr("worker.job_commands.UNSERVED_S", 0.05)


@pytest.mark.usefixtures("impatient")
def test_a_delayed_job_that_nobody_serves_is_told_too(
    on_queue: list[str], redis_client: redis.Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    Broker(redis_client, on_queue[3], "producer").enqueue("k", "normal", b"", delay_s=60)
    assert command.run(cli.cli, ["job", "tail", "k", "--timeout-s", "0.5", *on_queue]) == 4
    assert "no worker serves queue" in capsys.readouterr().err


def test_a_full_queue_is_code_1_in_one_line(on_queue: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(cli.cli, ["enqueue", "a", "b", "--max-queued", "1", *on_queue]) == 1
    [told] = capsys.readouterr().err.splitlines()
    assert "full: the jobs that have not ended reach max_queued, 1, or the queue's own limit; come again in" in told


def test_room_in_a_full_queue_is_waited_for_and_told_once(
    on_queue: list[str], broker: Broker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pauses: list[float] = []

    def until_the_third_pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            finish(broker, "succeeded")

    monkeypatch.setattr("worker.job_commands.time", SimpleNamespace(sleep=until_the_third_pause, monotonic=time.monotonic))
    assert command.run(cli.cli, ["enqueue", "a", "b", "--max-queued", "1", "--wait-for-room", *on_queue]) == 0
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 2
    assert shown.err == f"worker: queue {on_queue[3]} is full; waiting for room\n"
    assert all(1.0 <= seconds <= 1.5 for seconds in pauses)


def test_a_closed_queue_is_not_waited_for(
    on_queue: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Broker, "enqueue", lambda *_args, **_how: EnqueueReply("closed", "k"))
    assert command.run(cli.cli, ["enqueue", "a", "--wait-for-room", *on_queue]) == 1
    told = f"closed: it takes no jobs while it is drained; `worker queue resume --queue {on_queue[3]}` reopens it"
    assert told in capsys.readouterr().err


def test_the_wait_for_room_has_a_limit_where_one_is_given(
    redis_url: str, queue: str, broker: Broker, capsys: pytest.CaptureFixture[str]
) -> None:
    broker.enqueue("only", "normal", b"")
    args = ["enqueue", "a", "--max-queued", "1", "--wait-for-room", "--timeout-s", "0.1"]
    assert command.run(cli.cli, [*args, "--redis-url", redis_url, "--queue", queue]) == 4
    assert "full" in capsys.readouterr().err


def test_delay_bound_and_key_reach_the_client(
    on_queue: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[dict[str, object]] = []
    monkeypatch.setattr(Client, "enqueue", lambda _client, **how: given.append(how) or "k")
    assert (
        command.run(cli.cli, ["enqueue", "a", "--delay-s", "1.5", "--max-queued", "9", "--idempotency-key", "once", *on_queue])
        == 0
    )
    assert {name: given[0][name] for name in ("delay_s", "max_queued", "idempotency_key")} == {
        "delay_s": 1.5,
        "max_queued": 9,
        "idempotency_key": "once",
    }


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("how", ["--follow", "--wait"])
def test_a_queue_that_nobody_serves_is_told_once(on_queue: list[str], how: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(cli.cli, ["enqueue", how, "a", "--timeout-s", "0.5", *on_queue]) == 4
    told, _timeout = capsys.readouterr().err.splitlines()
    queue = on_queue[3]
    assert told.startswith(
        f"worker: no worker serves queue {queue} yet; waiting; start one with `worker start --queue {queue} --"
    )


@pytest.mark.usefixtures("impatient")
def test_a_paused_queue_is_told_with_what_resumes_it(
    on_queue: list[str], broker: Broker, capsys: pytest.CaptureFixture[str]
) -> None:
    broker.heartbeat({"state": "serving"})
    assert command.run(cli.cli, ["queue", "pause", *on_queue]) == 0
    assert command.run(cli.cli, ["enqueue", "--wait", "a", "--timeout-s", "0.5", *on_queue]) == 4
    told, _timeout = capsys.readouterr().err.splitlines()
    assert told.startswith(f"worker: queue {on_queue[3]} is paused; waiting; `worker queue resume --queue {on_queue[3]} --")


def test_an_unknown_job_does_not_keep_others_from_being_cancelled(
    on_queue: list[str], broker: Broker, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.run(cli.cli, ["enqueue", "a", "--id", "known", *on_queue]) == 0
    assert command.run(cli.cli, ["job", "cancel", "unknown", "known", *on_queue]) == 2
    assert [job.ending for job in broker.fetch(1)] == ["cancelled"]
    assert "job unknown: not on queue" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "shown"),
    [
        (["a"], "queued\n"),
        (["a", "b"], "queued\nqueued\n"),
        (["a", "b", "--json"], '{"id": "a", "state": "queued"}\n{"id": "b", "state": "queued"}\n'),
    ],
)
def test_cancelled_jobs_are_told_by_their_states_and_as_json_with_their_ids(
    on_queue: list[str], capsys: pytest.CaptureFixture[str], args: list[str], shown: str
) -> None:
    for job_id in ("a", "b"):
        command.run(cli.cli, ["enqueue", "p", "--id", job_id, *on_queue])
    capsys.readouterr()
    assert command.run(cli.cli, ["job", "cancel", *args, *on_queue]) == 0
    assert capsys.readouterr().out == shown


@pytest.mark.usefixtures("impatient")
def test_a_queue_whose_worker_is_busy_is_waited_for_in_silence(
    on_queue: list[str], broker: Broker, capsys: pytest.CaptureFixture[str]
) -> None:
    broker.heartbeat({"state": "serving"})
    assert command.run(cli.cli, ["enqueue", "--wait", "a", "--timeout-s", "0.5", *on_queue]) == 4
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("how", [["job", "result"], ["job", "tail"]], ids=lambda how: how[1])
@pytest.mark.parametrize(("state", "out"), [("failed", ""), ("expired", ""), ("cancelled", ""), ("succeeded", "\n")])
def test_a_job_that_failed_without_text_prints_its_reason_alone(
    on_queue: list[str], broker: Broker, capsys: pytest.CaptureFixture[str], how: list[str], state: FinalState, out: str
) -> None:
    with Client(on_queue[1], on_queue[3]) as client:
        client.enqueue("a", id="k")
    finish(broker, state)
    assert command.run(cli.cli, [*how, "k", *on_queue]) == (state != "succeeded")
    shown = capsys.readouterr()
    assert shown.out == out
    assert shown.err == ("" if state == "succeeded" else f"worker: job k: {state}: invalid: for a reason\n")


@pytest.fixture
def buffered(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a shell: what could not be written is tried again when the process ends."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)


@pytest.mark.usefixtures("buffered")
def test_nobody_reading_ends_in_silence(on_queue: list[str], broker: Broker) -> None:
    with Client(on_queue[1], on_queue[3]) as client:
        client.enqueue("a", id="k")
    finish(broker, "succeeded", "text")
    line = [sys.executable, "-m", "worker.cli", "job", "result", "k", *on_queue]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as shown:
        assert shown.stdout
        assert shown.stderr
        shown.stdout.close()
        assert (shown.stderr.read(), shown.wait(30)) == (b"", 141)


@pytest.mark.usefixtures("buffered")
def test_all_jobs_are_added_whether_or_not_their_ids_are_read(on_queue: list[str], broker: Broker) -> None:
    line = [sys.executable, "-m", "worker.cli", "enqueue", "-f", "-", *on_queue]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as shown:
        assert shown.stdout
        shown.stdout.close()
        shown.stdout = None
        assert (shown.communicate(b"prompt\n" * 20, 30), shown.returncode) == ((None, b""), 141)
    assert broker.queue_counts()["normal"].waiting == 20


@pytest.mark.usefixtures("buffered")
@pytest.mark.parametrize("args", [["enqueue", "a"], ["enqueue", "--help"]], ids=lambda args: args[1])
def test_an_output_that_cannot_be_written_is_one_line(on_queue: list[str], args: list[str]) -> None:
    line = [sys.executable, "-m", "worker.cli", *args, *on_queue]
    with Path("/dev/full").open("w") as full:
        shown = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (shown.stderr, shown.returncode) == ("worker: output: No space left on device; write it elsewhere\n", 1)


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        (lambda url: url.removesuffix("/0") + "/99999", "out of range; mend the database number at the end of its URL"),
        (lambda url: url.replace("//", "//nobody:wrong@"), "disabled; mend user name and password in its URL"),
    ],
    ids=["database", "password"],
)
def test_a_server_that_refuses_is_not_started_again(
    on_queue: list[str], change: Callable[[str], str], remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.run(cli.cli, ["enqueue", "a", "--redis-url", change(on_queue[1])]) == 5
    shown = capsys.readouterr().err
    assert remedy in shown
    assert "worker redis" not in shown


def test_several_answers_are_printed_one_after_the_other(
    on_queue: list[str], broker: Broker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    enqueue = Client.enqueue

    def ends_at_once(client: Client, **body: object) -> str:
        job_id = enqueue(client, **body)  # type: ignore[arg-type]
        [job] = broker.fetch(1)
        choices = tuple(Choice(k, f"answer {k}", (k,), "stop") for k in range(int(str(body["n"]))))
        result = Result(id=job_id, state="succeeded", choices=choices)
        end = ControlFrame(job.attempt, "end", "succeeded")
        broker.finish([Finish(job, "succeeded", "", encode_result(result), encode_frame(end))])
        return job_id

    monkeypatch.setattr(Client, "enqueue", ends_at_once)
    for how in ("--follow", "--wait"):
        assert command.run(cli.cli, ["enqueue", how, "--n", "3", "a", *on_queue]) == 0
        shown = capsys.readouterr()
        assert shown.out == "answer 0\nanswer 1\nanswer 2\n"
        numbered = [line.partition(": choice ")[2] for line in shown.err.splitlines() if ": choice " in line]
        assert numbered == [f"{number} of 3: stop" for number in (1, 2, 3)[how == "--follow" :]]


@pytest.mark.parametrize("given", ["acme", "acme=", "acme=x", "=2", "acme=0"])
def test_a_tenant_weight_that_is_none_is_one_line(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(cli.cli, ["start", "--cpu", "--tenant-weight", given]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert "--tenant-weight" in err


def test_tenants_of_the_command_line_reach_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Settings] = []
    monkeypatch.setattr("worker.process.run", lambda settings: seen.append(settings) or 0)
    options = ["--tenant-weight", "acme=2", "--tenant-weight", "a=b=0.5", "--isolate-tenants"]
    assert command.run(cli.cli, ["start", "--cpu", *options]) == 0
    assert (seen[0].tenant_weights, seen[0].isolate_tenants) == ({"acme": 2.0, "a=b": 0.5}, True)
