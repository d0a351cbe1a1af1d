"""The compose file, the image and the server's configuration, as far as they can be checked without a container engine."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from check_jsonschema.parsers import ParserSet

from worker.cli import cli

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = ParserSet().parse_file(ROOT / "docker-compose.yml", "yaml")
WORKERS = {name: service for name, service in COMPOSE["services"].items() if name.startswith("worker")}
DOCKERFILE = (ROOT / "ops/docker/Dockerfile").read_text()


def seconds(duration: str) -> float:
    return float(duration.removesuffix("s"))


def instructions(name: str) -> list[str]:
    joined = re.sub(r"\\\n\s*", " ", DOCKERFILE)
    return [line.removeprefix(name).strip() for line in joined.splitlines() if line.startswith(name + " ")]


def test_the_compose_file_follows_the_compose_schema() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", "docker-compose.yml"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_is_a_worker_for_each_profile() -> None:
    assert {name: service["profiles"] for name, service in WORKERS.items()} == {"worker-cpu": ["cpu"], "worker-gpu": ["gpu"]}


@pytest.mark.parametrize("worker", WORKERS.values(), ids=WORKERS)
def test_a_worker_has_time_to_drain_before_it_is_killed(worker: dict[str, Any]) -> None:
    assert worker["init"] is True
    assert seconds(worker["stop_grace_period"]) > float(worker["environment"]["SLOTMILL_DRAIN_S"])


@pytest.mark.parametrize("service", COMPOSE["services"].values(), ids=COMPOSE["services"])
def test_every_service_has_a_healthcheck_with_a_start_period(service: dict[str, Any]) -> None:
    check = service["healthcheck"]
    assert seconds(check["start_period"]) > 0
    assert check["test"][0] == "CMD"


def test_only_the_gpu_worker_reserves_a_device() -> None:
    assert "deploy" not in WORKERS["worker-cpu"]
    (device,) = WORKERS["worker-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]


def test_published_ports_are_reachable_from_this_machine_alone() -> None:
    ports = [port for service in COMPOSE["services"].values() for port in service.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


@pytest.mark.parametrize("worker", WORKERS.values(), ids=WORKERS)
def test_environment_and_arguments_of_a_worker_are_options_that_exist(worker: dict[str, Any]) -> None:
    start = cli.commands["start"]
    names = {variable for option in start.params for variable in _as_list(option.envvar)}
    assert set(worker["environment"]) <= names
    command, *arguments = worker["command"]
    assert command == "start"
    assert {word for word in arguments if word.startswith("--")} <= {flag for option in start.params for flag in option.opts}


def _as_list(value: str | list[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else list(value or [])


def test_bind_mounts_and_build_files_exist() -> None:
    volumes = [volume for service in COMPOSE["services"].values() for volume in service.get("volumes", [])]
    mounted = [volume.split(":")[0] for volume in volumes if volume.startswith("./")]
    built = [service["build"]["dockerfile"] for service in COMPOSE["services"].values() if "build" in service]
    assert mounted
    assert all((ROOT / path).is_file() for path in [*mounted, *built])


def test_the_image_runs_the_worker_itself_and_not_as_root() -> None:
    last = DOCKERFILE[DOCKERFILE.rindex("FROM ") :]
    assert re.search(r"^USER slotmill$", last, re.MULTILINE)
    assert re.search(r'^ENTRYPOINT \["worker"\]$', last, re.MULTILINE)


def test_the_image_copies_what_exists_and_what_the_context_lets_through() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    sources = {word for copy in instructions("COPY") if not copy.startswith("--from") for word in copy.split()[:-1]}
    assert sources == allowed
    assert all((ROOT / source).exists() for source in sources)


def test_the_image_pins_the_torch_that_the_makefile_pins() -> None:
    pinned = re.search(r"^TORCH\s*\?=\s*(\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert pinned
    assert f"TORCH={pinned[1]}" in instructions("ARG")
