"""Installed modules are all under `pawl`, and each distribution is installed and removed on its own."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.tidy import tree

pytestmark = pytest.mark.long

PROJECTS = (tree.ROOT / "gen", tree.ROOT / "services/pawl-client", tree.ROOT)
CLIENT_BYTES_MAX = 60_000_000
CLIENT_DISTRIBUTIONS_MAX = 12
# A package of each distribution.
PACKAGES = {"pawl-proto": "pawl.agent", "pawl-client": "pawl.client", "pawl-runtime": "pawl.cli"}
FIND = """
import sys
from importlib.machinery import PathFinder
pawl = PathFinder.find_spec("pawl")
folders = list(pawl.submodule_search_locations) if pawl else []
print(*(name for name in sys.argv[1:] if (found := PathFinder.find_spec(name, folders)) and found.origin))
"""
ALONE = """
import importlib, pkgutil
from importlib.metadata import distributions
import pawl
for module in pkgutil.walk_packages(pawl.__path__, "pawl."):
    importlib.import_module(module.name)
print(*sorted({found.name for found in distributions()} - {"pip", "setuptools"}))
"""
PROGRAM = """
import asyncio
import services
from services.billing import charge
from pawl.agent.v1 import agent_pb2
from pawl.tools import Tool
from pawl.worker import Worker
assert isinstance(charge, Tool)
assert services.OURS
print(asyncio.__name__, Worker.__name__, agent_pb2.__name__)
"""
TOOL = """
from pawl.tools import Category, EffectClass, tool


@tool(category=Category.SAFE, effect=EffectClass.READ_ONLY)
async def charge(amount: int) -> int:
    "Charge an amount."
    return amount
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("wheels")
    for project in PROJECTS:
        pip(sys.executable, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(project))
    return sorted(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment in which the install command of the quickstart was run."""
    project = tmp_path_factory.mktemp("project")
    environment(project / "environment")
    (project / "pawl").symlink_to(tree.ROOT)
    (command,) = re.findall(r"^pip (install .*)$", (tree.ROOT / "docs/start/quickstart.md").read_text(), re.MULTILINE)
    pip(project / "environment/bin/python", *shlex.split(command), cwd=project)
    return project / "environment/bin/python"


def environment(folder: Path) -> Path:
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    return folder / "bin/python"


def run(python: Path, program: str, *arguments: str) -> list[str]:
    command = [str(python), "-c", program, *arguments]
    done = subprocess.run(command, cwd=python.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def pip(python: str | Path, *arguments: str, cwd: Path = tree.ROOT) -> None:
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_wheels_contain_only_typed_packages_and_the_licensed_console(
    wheels: list[Path],
) -> None:
    static = set()
    for wheel in wheels:
        names = set(zipfile.ZipFile(wheel).namelist())
        tops = {name.split("/")[0] for name in names}
        assert {top for top in tops if not top.endswith(".dist-info")} == {"pawl"}, wheel
        packages = {name.split("/")[1] for name in names if name.startswith("pawl/") and name.count("/") > 1}
        assert [package for package in sorted(packages) if f"pawl/{package}/py.typed" not in names] == []
        static |= {
            name.removeprefix("pawl/gateway/static/") for name in names if name.startswith("pawl/gateway/static/")
        }
    assert static == {path.name for path in (tree.ROOT / "services/pawl/gateway/static").iterdir()}
    assert {"index.html", "app.js", "licenses.md"} <= static


def test_wheels_work_in_a_project_with_the_same_package_names(python: Path, tmp_path: Path) -> None:
    ours = tmp_path / "services"
    ours.mkdir()
    (ours / "__init__.py").write_text("OURS = True\n")
    (ours / "billing.py").write_text(TOOL)
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run([str(python), "program.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    command = [str(python.parent / "pawl"), "tools", "check", "services.billing"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "charge" in done.stdout


def test_client_alone_is_complete_and_small(wheels: list[Path], tmp_path: Path) -> None:
    """No module of pawl-client needs a package that it does not declare."""
    python = environment(tmp_path)
    pip(python, "install", *(str(wheel) for wheel in wheels if "runtime" not in wheel.name))
    installed = run(python, ALONE)
    assert {"pawl-client", "pawl-proto"} <= set(installed)
    assert len(installed) <= CLIENT_DISTRIBUTIONS_MAX, installed
    (packages,) = tmp_path.glob("lib/python*/site-packages")
    theirs = ("pip", "setuptools", "pkg_resources")
    files = (path for path in packages.rglob("*") if not path.relative_to(packages).parts[0].startswith(theirs))
    assert sum(path.stat().st_size for path in files if path.is_file()) <= CLIENT_BYTES_MAX
    pip(python, "install", "--no-deps", *(f"--editable={project}" for project in PROJECTS[:2]))
    assert run(python, ALONE) == installed


def test_distributions_are_uninstalled_in_any_order(wheels: list[Path], tmp_path: Path) -> None:
    python = environment(tmp_path)
    pip(python, "install", "hatchling")
    built = [next(str(wheel) for wheel in wheels if name.replace("-", "_") in wheel.name) for name in PACKAGES]
    editable = [f"--editable={project}" for project in PROJECTS]
    for of, first in ((built, "pawl-client"), (built, "pawl-runtime"), (editable, "pawl-client")):
        pip(python, "install", "--no-deps", "--no-build-isolation", *of)
        assert run(python, FIND, *PACKAGES.values()) == [*PACKAGES.values()]
        pip(python, "uninstall", "--yes", first)
        left = [name for name in PACKAGES if name != first]
        assert run(python, FIND, *PACKAGES.values()) == [PACKAGES[name] for name in left]
        pip(python, "uninstall", "--yes", *left)
        assert run(python, FIND, *PACKAGES.values()) == []
