"""What the installed packages look like from outside: to transformers, to the importer and to a wheel."""

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest
from setuptools import Distribution
from setuptools.config.pyprojecttoml import apply_configuration

ROOT = Path(__file__).parents[2]
PACKAGES = ("worker", "engine", "kernels")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def run_python(code: str, cwd: Path = ROOT) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("init", [path for name in PACKAGES for path in sorted((ROOT / name).rglob("__init__.py"))], ids=str)
def test_package_inits_are_a_docstring_and_nothing_else(init: Path) -> None:
    body = ast.parse(init.read_text()).body
    assert len(body) == 1
    assert isinstance(body[0], ast.Expr)
    assert isinstance(body[0].value, ast.Constant)


@pytest.mark.parametrize("cwd", [ROOT, ROOT.parent], ids=["checkout", "installed"])
def test_transformers_does_not_take_our_kernels_for_the_library_of_that_name(cwd: Path) -> None:
    code = "from transformers.utils import import_utils as u; import kernels; print(u.is_kernels_available(), kernels.__file__)"
    available, where = run_python(code, cwd).split(maxsplit=1)
    assert Path(where) == ROOT / "kernels" / "__init__.py"
    assert available == "False"


def test_transformers_does_not_take_a_checkout_without_metadata_for_it_either(tmp_path: Path) -> None:
    code = """
import importlib.metadata as m
from transformers.utils import import_utils as u
def unknown(name): raise m.PackageNotFoundError(name)
m.version, m.packages_distributions = unknown, dict
print(u.is_kernels_available())
"""
    assert run_python(code) == "False"


@pytest.mark.parametrize("module", ["worker.client", "worker.cli", "worker.process", "worker.demo"])
def test_the_queue_side_loads_no_tensor_library(module: str) -> None:
    heavy = ["torch", "transformers", "triton", "accelerate", "safetensors", "numpy"]
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    assert run_python(code) == "[]"


def test_the_client_loads_nothing_beyond_redis_and_msgpack_that_is_not_ours_or_pythons() -> None:
    code = """
import sys, redis
before = set(sys.modules)
from worker.client import AsyncClient, Client
loaded = {name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
print(sorted(name for name in loaded if getattr(sys.modules[name], "__file__", None)))  # others have no file: Cython's own
"""
    assert run_python(code) == "['engine', 'msgpack', 'worker']"


def test_what_the_page_of_the_client_installs_is_what_the_package_would() -> None:
    installed = re.findall(r"'((?:redis|msgpack)[<>=][^']*)'", (ROOT / "docs" / "client.md").read_text())
    assert len(installed) == 2
    assert set(installed) <= set(PROJECT["project"]["dependencies"])


def test_the_command_line_loads_the_work_of_no_command_before_it_runs() -> None:
    work = ["worker.process", "worker.demo", "worker.top.watch", "worker.top.view", "worker.doctor.server_checks"]
    code = f"import sys, worker.cli; print([name for name in {work} if name in sys.modules])"
    assert run_python(code) == "[]"


def test_a_wheel_carries_every_package_and_the_scripts_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    distribution = Distribution({"script_name": "setup.py"})
    apply_configuration(distribution, "pyproject.toml")
    distribution.include_package_data = False  # or setuptools would write an egg-info into the checkout
    build = distribution.get_command_obj("build_py")
    build.ensure_finalized()
    packed = {Path(path).relative_to(build.build_lib) for path in build.get_outputs(include_bytecode=False)}
    wanted = {path for name in PACKAGES for kind in ("*.py", "*.lua", "py.typed") for path in Path(name).rglob(kind)}
    assert {path.suffix for path in wanted} == {".py", ".lua", ".typed"}
    assert wanted == packed


def test_the_command_is_called_worker() -> None:
    scripts = importlib.metadata.distribution("slotmill").entry_points.select(group="console_scripts")
    assert {script.name: script.value for script in scripts} == {"worker": "worker.cli:main"}


def test_every_dependency_has_its_reason_in_contributing() -> None:
    section = (ROOT / "CONTRIBUTING.md").read_text().split("\n## Dependencies\n")[1].split("\n## ")[0]
    explained = [name for name in re.findall(r"^\| ([a-z][\w-]*) \| ", section, re.MULTILINE) if name != "package"]
    named = [*PROJECT["project"]["dependencies"], *chain.from_iterable(PROJECT["project"]["optional-dependencies"].values())]
    names = {re.split(r"[<>=\[]", requirement)[0] for requirement in named}
    assert sorted(explained) == sorted(names - {"slotmill"})
