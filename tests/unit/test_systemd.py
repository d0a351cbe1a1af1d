"""The systemd unit, as far as that can be checked without booting: systemd's own checks, and what it promises the worker."""

import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import click
import pytest

from worker import notify, process
from worker.cli import cli
from worker.settings import Settings

DIRECTORY = Path(__file__).parents[2] / "ops/systemd"
UNIT = (DIRECTORY / "slotmill-worker@.service").read_text()
START = cli.commands["start"]


def settings_of(unit: str) -> dict[str, list[str]]:
    """Every value of each name, in order; no name stands in two sections."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for line in unit.splitlines():
        if "=" in line and not line.startswith("#"):
            name, value = line.split("=", 1)
            found[name].append(value)
    return found


SETTINGS = settings_of(UNIT)


def seconds(name: str) -> float:
    number, unit = re.fullmatch(r"(\d+)(s|min|)", SETTINGS[name][0]).groups()  # type: ignore[union-attr]
    return float(number) * (60 if unit == "min" else 1)


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The unit as an instance, with a program that is on this machine."""
    program = str(Path(sys.executable).with_name("worker"))
    path = tmp_path / "slotmill-worker@default.service"
    path.write_text(UNIT.replace("/opt/slotmill/bin/worker", program))
    return path


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("systemd-analyze")
    assert program, "systemd-analyze is not on PATH; Debian's package systemd has it"
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_systemd_finds_nothing_amiss(installed: Path) -> None:
    done = analyze("verify", "--man=no", str(installed))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_systemd_calls_the_exposure_low(installed: Path) -> None:
    done = analyze("security", "--no-pager", "--offline=true", "--threshold=25", str(installed))
    assert done.returncode == 0, done.stdout[-200:] + done.stderr


def test_what_a_gpu_or_a_compiler_at_run_time_needs_is_not_taken_away() -> None:
    hiding = {
        "PrivateDevices",
        "ProtectClock",
        "DeviceAllow",
        "DevicePolicy",
        "MemoryDenyWriteExecute",
        "ProcSubset",
        "NoExecPaths",
    }
    assert not hiding & set(SETTINGS)


def test_a_start_and_a_drain_are_told_by_the_worker_itself() -> None:
    assert (SETTINGS["Type"], SETTINGS["NotifyAccess"]) == (["notify"], ["main"])
    assert seconds("TimeoutStartSec") > 30  # the first message comes when Python has started


def test_the_worker_alone_is_asked_to_leave_and_has_time_to() -> None:
    assert SETTINGS["KillMode"] == ["mixed"]
    default = next(field for field in Settings.__dataclass_fields__.values() if field.name == "drain_s").default
    assert seconds("TimeoutStopSec") > default + process.RELEASE_S + process.LEAVE_S  # type: ignore[operator]


def test_the_watchdog_waits_for_more_than_one_message() -> None:
    assert seconds("WatchdogSec") >= 3 * notify.MAX_PAUSE_S


def test_an_option_that_cannot_work_is_not_tried_again() -> None:
    assert SETTINGS["Restart"] == ["on-failure"]
    assert SETTINGS["RestartPreventExitStatus"] == ["2"]


def test_the_program_is_started_by_a_command_that_exists() -> None:
    assert SETTINGS["ExecStart"] == ["/opt/slotmill/bin/worker start"]


def test_the_example_s_variables_are_options_with_values_that_they_take() -> None:
    options = {option.envvar: option for option in START.params if isinstance(option, click.Option)}
    given = dict(re.findall(r"^#?(SLOTMILL_[A-Z_]+)=(.*)$", (DIRECTORY / "example.env").read_text(), re.MULTILINE))
    assert given
    for name, value in given.items():
        assert name in options, f"{name} is no option of worker start"
        options[name].type_cast_value(click.Context(START), value)


@pytest.mark.parametrize("name", ["HOME", "XDG_CACHE_HOME"])
def test_caches_are_where_the_unit_may_write(name: str) -> None:
    variables = dict(word.split("=", 1) for line in SETTINGS["Environment"] for word in line.split())
    assert variables[name] == f"/var/cache/{SETTINGS['CacheDirectory'][0]}"
