"""The pages are built as `make docs` builds them: a warning of Sphinx is a page, an anchor or a picture that does not exist."""

import subprocess
import sys
from pathlib import Path

import pytest

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
