"""The compose file, as far as it can be checked without a container engine."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from worker import process
from worker.cli import cli

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
WORKERS = {name: service for name, service in SERVICES.items() if name.startswith("worker")}

each_service = pytest.mark.parametrize("service", SERVICES.values(), ids=SERVICES)
each_worker = pytest.mark.parametrize("worker", WORKERS.values(), ids=WORKERS)


def seconds(duration: str) -> float:
    return float(duration.removesuffix("s"))


def mounts(service: dict[str, Any]) -> list[list[str]]:
    """Source, target and, for those that may not be written, `ro`."""
    return [volume.split(":") for volume in service.get("volumes", [])]


def test_the_compose_file_follows_the_compose_schema() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", "docker-compose.yml"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_server_always_and_the_rest_by_profile() -> None:
    profiles = {name: service.get("profiles", []) for name, service in SERVICES.items()}
    assert profiles == {
        "redis": [],
        "worker-cpu": ["cpu"],
        "worker-gpu": ["gpu"],
        "prometheus": ["monitoring"],
        "grafana": ["monitoring"],
    }


@each_worker
def test_a_worker_has_time_to_drain_before_it_is_killed(worker: dict[str, Any]) -> None:
    drain_s = float(worker["environment"]["SLOTMILL_DRAIN_S"])
    assert seconds(worker["stop_grace_period"]) > drain_s + process.RELEASE_S + process.LEAVE_S


@each_service
def test_every_service_has_a_healthcheck_with_a_start_period(service: dict[str, Any]) -> None:
    check = service["healthcheck"]
    assert seconds(check["start_period"]) > 0
    assert check["test"][0] == "CMD"


@each_service
def test_every_service_is_restarted_and_has_no_rights_to_spare(service: dict[str, Any]) -> None:
    assert (service["restart"], service["init"]) == ("unless-stopped", True)
    assert (service["cap_drop"], service["security_opt"]) == (["ALL"], ["no-new-privileges:true"])


def test_the_server_is_not_started_by_a_root_without_the_right_to_become_another() -> None:
    assert SERVICES["redis"]["user"] == "valkey"


@pytest.mark.parametrize("name", ["redis", "prometheus", "grafana"])
def test_images_of_others_are_pinned_to_a_release(name: str) -> None:
    assert re.fullmatch(r"[a-z/]+:v?\d+\.\d+\.\d+(-alpine)?", SERVICES[name]["image"])


def test_only_the_gpu_worker_reserves_devices() -> None:
    assert [name for name, service in SERVICES.items() if "deploy" in service] == ["worker-gpu"]
    (device,) = WORKERS["worker-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])


@each_service
def test_published_ports_are_reachable_from_this_machine_alone_and_can_be_moved(service: dict[str, Any]) -> None:
    assert all(re.fullmatch(r"127\.0\.0\.1:\$\{SLOTMILL_[A-Z]+_PORT:-\d+\}:\d+", port) for port in service.get("ports", []))


@pytest.mark.parametrize("name", ["redis", "prometheus", "grafana"])
def test_what_one_looks_at_from_outside_is_published(name: str) -> None:
    assert SERVICES[name]["ports"]


@each_worker
def test_environment_and_arguments_of_a_worker_are_options_that_exist(worker: dict[str, Any]) -> None:
    start = cli.commands["start"]
    names = {variable for option in start.params for variable in _as_list(option.envvar)}
    assert set(worker["environment"]) <= names
    command, *arguments = worker["command"]
    assert command == "start"
    assert {word for word in arguments if word.startswith("--")} <= {flag for option in start.params for flag in option.opts}


def _as_list(value: str | list[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else list(value or [])


@each_service
def test_what_is_mounted_exists_and_cannot_be_written_or_is_a_declared_volume(service: dict[str, Any]) -> None:
    for source, _, *mode in mounts(service):
        if source.startswith("./"):
            assert (ROOT / source).exists(), f"{source} is mounted and does not exist"
            assert mode == ["ro"]
        else:
            assert source in COMPOSE["volumes"]


@pytest.mark.parametrize(
    ("name", "directory"), [("redis", "/data"), ("prometheus", "/prometheus"), ("grafana", "/var/lib/grafana")]
)
def test_what_should_outlive_a_container_is_on_a_volume(name: str, directory: str) -> None:
    assert directory in [target for source, target, *_ in mounts(SERVICES[name]) if source in COMPOSE["volumes"]]


def test_prometheus_reads_a_configuration_whose_rules_are_there() -> None:
    targets = {target: ROOT / source for source, target, *_ in mounts(SERVICES["prometheus"])}
    config = yaml.safe_load(targets["/etc/prometheus/prometheus.yml"].read_text())
    assert "--config.file=/etc/prometheus/prometheus.yml" in SERVICES["prometheus"]["command"]
    assert {f"/etc/prometheus/{name}" for name in config["rule_files"]} <= set(targets)


def test_grafana_finds_prometheus_and_its_dashboards() -> None:
    folders = {target: ROOT / source for source, target, *_ in mounts(SERVICES["grafana"])}
    provisioned = [yaml.safe_load(path.read_text()) for path in folders["/etc/grafana/provisioning"].rglob("*.y*ml")]
    sources = [source["url"] for file in provisioned for source in file.get("datasources", [])]
    boards = [provider["options"]["path"] for file in provisioned for provider in file.get("providers", [])]
    home = Path(SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (sources, boards) == (["http://prometheus:9090"], ["/var/lib/grafana/dashboards"])
    assert (folders[str(home.parent)] / home.name).is_file()


def test_grafana_has_no_well_known_password_and_shows_without_one() -> None:
    service = SERVICES["grafana"]
    environment = service["environment"]
    assert "cfg:default.security.disable_initial_admin_creation=true" in service["command"]
    assert environment["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "${SLOTMILL_GRAFANA_PASSWORD:+false}"
    assert environment["GF_SECURITY_ADMIN_PASSWORD"] == "${SLOTMILL_GRAFANA_PASSWORD:-}"
    assert environment["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"


def test_every_variable_is_in_the_table_of_the_documentation() -> None:
    used = set(re.findall(r"\$\{(SLOTMILL_\w+)", (ROOT / "docker-compose.yml").read_text()))
    rows = re.findall(r"^\|(.*?)\|", (ROOT / "docs/operations.md").read_text(), re.MULTILINE)
    assert used <= {name for row in rows for name in re.findall(r"`(SLOTMILL_\w+)`", row)}
