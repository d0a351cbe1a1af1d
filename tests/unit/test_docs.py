"""What README and docs/ say exists does exist, and the other way round."""

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import click
import pytest
from prometheus_client import Metric

from worker import doctor_machine, doctor_queue, doctor_server, wire
from worker.cli import cli
from worker.doctor import SECTIONS
from worker.findings import name_of
from worker.metrics import Metrics

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "bench/README.md")] + sorted(
    (ROOT / "docs").rglob("*.md")
)
PLANNED = "*(planned"

each_page = pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])


def code_of(page: Path) -> list[str]:
    """Inline code and lines of code blocks, without lines that are marked as planned."""
    found: list[str] = []
    for line in page.read_text().splitlines():
        if line.startswith("    "):
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


def options() -> Iterator[click.Option]:
    for command in COMMANDS.values():
        yield from (parameter for parameter in command.params if isinstance(parameter, click.Option))


@each_page
def test_links_lead_to_files_that_exist(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


@each_page
def test_files_named_exist(page: Path) -> None:
    pattern = re.compile(r"(?:worker|engine|kernels|docs|ops|tests|bench)/[\w./*-]+\.(?:py|lua|md|conf)")
    named = {name for code in code_of(page) for name in pattern.findall(code)}
    assert [name for name in sorted(named) if not list(ROOT.glob(name))] == []


@each_page
def test_make_targets_named_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {target for code in code_of(page) for target in re.findall(r"\bmake ([a-z-]+)", code)}
    assert named <= targets


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
    named = [re.findall(r"`([a-z_]+[.]py)`", row[0]) for row in table("docs/architecture.md", "The files of worker")]
    files = sorted(path.name for path in (ROOT / "worker").glob("*.py") if path.name != "__init__.py")
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
    modules = (doctor_server, doctor_queue, doctor_machine)
    parts = zip(SECTIONS, modules, strict=True)
    assert documented == [(section, name_of(check)) for section, module in parts for check in module.CHECKS]


def test_the_metrics_table_and_the_registry_agree() -> None:
    measured = {_full_name(family): (family.type, _label_values(family)) for family in Metrics().registry.collect()}
    rows = [row for row in table("docs/operations.md", "Metrics") if PLANNED not in row[3]]
    documented = {names_in(row[0])[0]: (row[1], _described_values(row[2])) for row in rows}
    assert documented == measured


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
