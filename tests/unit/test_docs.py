"""What README and docs/ say exists does exist, and the other way round."""

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from textwrap import dedent

import click
import pytest
from prometheus_client import Metric

from worker import errors, wire
from worker.cli import cli
from worker.client import AsyncClient, Client
from worker.doctor import machine_checks, queue_checks, server_checks
from worker.doctor.command import SECTIONS
from worker.doctor.findings import name_of
from worker.metrics import Metrics
from worker.partitions import PartitionedClient

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / name
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "bench/README.md", "examples/README.md", "ops/runbook.md")
] + sorted((ROOT / "docs").rglob("*.md"))
PLANNED = "*(planned"

each_page = pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])


def code_of(page: Path) -> list[str]:
    """Inline code and lines of code blocks, without lines that are marked as planned."""
    found: list[str] = []
    is_fenced = False
    for line in page.read_text().splitlines():
        is_fenced ^= line.startswith("```")
        if is_fenced or line.startswith("    "):
            found.append(line.strip())
        elif PLANNED not in line:
            found += re.findall(r"`([^`]+)`", line)
    return found


def table(page: str, heading: str) -> list[list[str]]:
    """The rows of the first table below a heading."""
    text = (ROOT / page).read_text().split(f"\n## {heading}\n")[1]
    lines = text[text.index("\n|") + 1 :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def names_in(cell: str) -> list[str]:
    return re.findall(r"`([a-z_]+)`", cell)


def all_commands(group: click.Group, prefix: str = "worker") -> Iterator[tuple[str, click.Command]]:
    yield prefix, group
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from all_commands(command, f"{prefix} {name}")
        else:
            yield f"{prefix} {name}", command


COMMANDS = dict(all_commands(cli))


def anchors(page: Path) -> set[str]:
    """What GitHub calls the headings of a page, all of them different."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def options() -> Iterator[click.Option]:
    for command in COMMANDS.values():
        yield from (parameter for parameter in command.params if isinstance(parameter, click.Option))


@each_page
def test_links_lead_to_files_that_exist(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


@each_page
def test_links_into_a_page_lead_to_one_of_its_headings(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text())
    assert [(name, anchor) for name, anchor in links if anchor not in anchors(page.parent / name if name else page)] == []


@each_page
def test_files_named_exist(page: Path) -> None:
    pattern = re.compile(r"(?:worker|engine|kernels|docs|ops|tests|bench|examples)/[\w./*-]+\.(?:py|lua|md|conf|sh|mjs|go|acl)")
    named = {name for code in code_of(page) for name in pattern.findall(code)}
    assert [name for name in sorted(named) if not list(ROOT.glob(name))] == []


@each_page
def test_make_targets_named_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {target for code in code_of(page) for target in re.findall(r"\bmake ([a-z-]+)", code)}
    assert named <= targets


def test_make_tells_what_each_of_its_targets_does() -> None:
    lines = re.findall(r"^[a-z-]+:.*", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert [line for line in lines if " ## " not in line] == ["help:"]


@each_page
def test_commands_named_exist(page: Path) -> None:
    lines = [code for code in code_of(page) if re.match(r"(\$ )?(\S*/)?worker [a-z]", code)]
    words = [re.sub(r"^(\$ )?\S*worker", "worker", line).split() for line in lines]
    unknown = [" ".join(line) for line in words if " ".join(line[:2]) not in COMMANDS]
    assert unknown == []


@each_page
def test_options_named_exist(page: Path) -> None:
    known = {flag for option in options() for flag in (*option.opts, *option.secondary_opts)} | {"--help"}
    lines = [code for code in code_of(page) if code.startswith("--") or re.match(r"(\$ )?(\S*/)?worker ", code)]
    named = {flag for line in lines for flag in re.findall(r"(?<!\S)--[a-z][a-z-]*", line)}
    assert named <= known


@each_page
def test_environment_variables_named_exist(page: Path) -> None:
    known = {
        name for option in options() for name in ([option.envvar] if isinstance(option.envvar, str) else option.envvar or [])
    }
    named = {name for code in code_of(page) for name in re.findall(r"SLOTMILL_[A-Z_]*[A-Z]", code)}
    of_compose = set(re.findall(r"SLOTMILL_[A-Z_]*[A-Z]", (ROOT / "docker-compose.yml").read_text()))
    assert named <= known | of_compose | {"SLOTMILL_CACHE_DIR", "SLOTMILL_CHAOS_SEED"}


def test_the_readme_names_the_test_command() -> None:
    assert any(line.split("#")[0].strip() == "make test" for line in code_of(ROOT / "README.md"))


def test_the_table_of_the_queue_side_has_a_line_for_every_file() -> None:
    named = [re.findall(r"`([a-z_/]+[.]py)`", row[0]) for row in table("docs/architecture.md", "The files of worker")]
    paths = [path for path in (ROOT / "worker").rglob("*.py") if path.name != "__init__.py"]
    files = sorted(str(path.relative_to(ROOT / "worker")) for path in paths)
    assert sorted(named) == [[name] for name in files]


def test_the_commands_table_names_every_command() -> None:
    named = {name for row in table("docs/operations.md", "Commands") for name in re.findall(r"`(worker [^`]+)`", row[0])}
    assert set(COMMANDS) - named == {name for name, command in COMMANDS.items() if isinstance(command, click.Group)}


def test_the_options_table_is_that_of_worker_start() -> None:
    named = {
        flag for row in table("docs/operations.md", "Options of worker start") for flag in re.findall(r"`(--[a-z-]+)", row[0])
    }
    shown = [option for option in COMMANDS["worker start"].params if isinstance(option, click.Option) and not option.hidden]
    assert named == {option.opts[0] for option in shown}


def test_the_table_of_checks_is_that_of_the_doctor() -> None:
    documented = [(row[0], re.sub("`", "", row[1])) for row in table("docs/operations.md", "Doctor")]
    modules = (server_checks, queue_checks, machine_checks)
    parts = zip(SECTIONS, modules, strict=True)
    assert documented == [(section, name_of(check)) for section, module in parts for check in module.CHECKS]


def test_the_metrics_table_and_the_registry_agree() -> None:
    measured = {_full_name(family): (family.type, _label_values(family)) for family in Metrics().registry.collect()}
    rows = table("docs/metrics.md", "Reference")
    documented = {names_in(row[0])[0]: (row[1], _described_values(row[2])) for row in rows}
    assert documented == measured


@pytest.mark.parametrize("heading", ["Coming from vLLM", "Coming from SGLang", "Kubernetes inference extension"])
def test_what_stands_for_the_metrics_of_others_exists(heading: str) -> None:
    known = {_full_name(family) for family in Metrics().registry.collect()}
    ours = [row[1] for row in table("docs/metrics.md", heading)]
    assert [cell for cell in ours if (cell != "none" and not set(names_in(cell))) or not set(names_in(cell)) <= known] == []


def test_metrics_that_the_page_speaks_of_exist() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    parts = text.split("\n## ")
    own = [part for part in parts if not part.startswith("Coming from")]
    known = {_full_name(family) for family in Metrics().registry.collect()}
    endings = ("_total", "_seconds", "_ratio", "_bytes", "_info")
    spoken_of = {name for part in own for name in names_in(part) if name.endswith(endings)}
    spoken_of |= {re.sub("_(bucket|sum|count)$", "", name) for name in re.findall(r"slotmill_([a-z_]+[a-z])", text)}
    assert spoken_of - known == set()


def _full_name(family: Metric) -> str:
    return family.name.removeprefix("slotmill_") + {"counter": "_total", "info": "_info"}.get(family.type, "")


def _label_values(family: Metric) -> dict[str, set[str]]:
    values: dict[str, set[str]] = {}
    for sample in family.samples if family.type != "info" else []:
        for label, value in sample.labels.items():
            if label != "le":
                values.setdefault(label, set()).add(value)
    return values


def _described_values(cell: str) -> dict[str, set[str]]:
    parts = [part.split("=") for part in cell.split(";") if "=" in part]
    return {label.strip(): {value.strip() for value in values.split(",")} for label, values in parts}


def test_the_fields_of_a_job_are_those_of_the_protocol() -> None:
    rows = table("docs/protocol.md", "Job body")
    documented = {name for row in rows for name in names_in(row[0])}
    assert documented | set(wire.PROMPTS) | {"id"} == {field.name for field in fields(wire.Job)}
    assert not [row for row in rows if PLANNED in "".join(row)]


def test_the_calls_of_the_clients_are_those_of_the_client_page() -> None:
    documented = {name for row in table("docs/client.md", "Calls") for name in re.findall(r"`(\w+)", row[0])}
    for kind, more in ((Client, {"from_env"}), (AsyncClient, {"from_env"}), (PartitionedClient, {"of"})):
        assert {name for name in vars(kind) if not name.startswith("_")} == documented | more


def test_the_errors_of_the_client_page_are_those_of_the_clients() -> None:
    documented = {name for row in table("docs/client.md", "What is raised") for name in re.findall(r"`(\w+)", row[0])}
    not_raised = {"UnknownVersion", "InvalidOption", "EngineUnavailable", "SlotmillError"}
    assert (
        documented
        == {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.SlotmillError)}
        - not_raised
    )


def test_the_python_of_the_client_page_can_be_compiled() -> None:
    blocks = re.findall(r"(?:^(?:    .*)?\n)+", (ROOT / "docs/client.md").read_text(), re.MULTILINE)
    for block in filter(str.strip, blocks):
        compile(dedent(block), "docs/client.md", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_the_table_of_events_is_that_of_the_log() -> None:
    rows = table("docs/operations.md", "Logs")
    documented = {names_in(row[0])[0]: row[1] for row in rows}
    logged = {event: level for event, level, _ in logged_events()}
    assert documented.keys() == logged.keys()
    assert {event: level for event, level in logged.items() if level and documented[event] != level} == {}


def test_the_table_of_events_names_their_fields() -> None:
    documented = {names_in(row[0])[0]: set(re.findall(r"[a-z_0-9]+", row[3])) for row in table("docs/operations.md", "Logs")}
    assert [(event, fields - documented[event]) for event, _, fields in logged_events() if fields - documented[event]] == []


def logged_events() -> Iterator[tuple[str, str, set[str]]]:
    """Every event that worker/ logs, with its level where the call says it, and the fields that it names."""
    for path in sorted((ROOT / "worker").rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call):
                continue
            is_throttled = bool(re.search(r"_(throttle|faults|lines)\.write$", ast.unparse(call.func)))
            said, *args = call.args if is_throttled else [call.func, *call.args]
            if re.match(r"(_log|log\.get\(.*\))\.[a-z]+$", ast.unparse(said)):
                method = ast.unparse(said).rpartition(".")[2]
                event = args[method == "log"]
                names = {"exception" if keyword.arg == "exc_info" else keyword.arg for keyword in call.keywords if keyword.arg}
                names |= {"held_back"} if is_throttled else set()
                for name in (part.value for part in ast.walk(event) if isinstance(part, ast.Constant)):
                    yield str(name), "" if method == "log" else method, names
