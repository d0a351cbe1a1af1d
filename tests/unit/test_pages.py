"""The pages are built as `make docs` builds them: a warning of Sphinx is a page, an anchor or a picture that does not exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs import generate
from docs.pictures import slots
from worker import wire
from worker.errors import InvalidJob

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("html")
    checks = ["--quiet", "--fail-on-warning", "--nitpicky", "--keep-going"]
    built = subprocess.run(
        [sys.executable, "-m", "sphinx", "-c", "docs", *checks, "-b", "html", "-d", str(out / "doctrees"), ".", str(out)],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (built.returncode, built.stderr) == (0, "")
    return out


def test_every_page_is_built_without_a_warning(html: Path) -> None:
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "ops" / "runbook.md", ROOT / "bench" / "README.md"]
    assert [page for page in pages if not (html / page.relative_to(ROOT)).with_suffix(".html").exists()] == []


@pytest.mark.parametrize("flag", ["--max-slots", "--redis-url", "SLOTMILL_QUEUE"])
def test_the_page_of_commands_has_their_options(html: Path, flag: str) -> None:
    assert flag in (html / "docs" / "commands.html").read_text()


@pytest.mark.parametrize("page", generate.TABLES)
def test_the_tables_are_those_of_the_code(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    assert text.count(generate.BEGIN) == text.count(generate.END) == 1
    assert generate.filled(text, generate.TABLES[page]()) == text, "run `make docs-reference`"


def test_a_refusal_names_the_limit_of_the_table() -> None:
    with pytest.raises(InvalidJob, match=re.escape(wire.FIELDS["top_p"].limit)):
        wire.parse_body({"prompt": "a", "top_p": 0})


@pytest.mark.parametrize("policy", slots.POLICIES)
def test_the_timeline_is_what_the_page_says(policy: str) -> None:
    timeline = slots.run(policy)
    (reason, num_idle), *others = timeline.idle.items()
    told = " ".join((ROOT / "docs" / "how-it-works.md").read_text().partition(f"(`{policy}`")[2].split())

    steps, slot_steps, idle = re.findall(r"(\d+) steps, and of (\d+) slot-steps (\d+) are idle", told)[0]
    assert (int(steps), int(slot_steps)) == (len(timeline.cells), sum(map(len, timeline.cells)))
    assert (int(idle), re.findall(r"idle: `(\w+)`", told)[0], others) == (num_idle, reason, [])


def test_each_request_has_as_many_cells_as_tokens() -> None:
    for policy in slots.POLICIES:
        flat = [cell for step in slots.run(policy).cells for cell in step]
        assert {name: flat.count(name) for name in slots.OUTPUTS} == slots.OUTPUTS


def test_the_picture_is_that_of_the_scheduler() -> None:
    drawn = slots.svg({policy: slots.run(policy) for policy in slots.POLICIES})
    assert (ROOT / "docs" / "pictures" / "slots.svg").read_text() == drawn, "run `python -m docs.pictures.slots`"
