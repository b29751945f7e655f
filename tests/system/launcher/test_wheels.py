"""The installed modules are all under `pawl`, so they do not clash with modules of a project."""

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
    for project in (tree.ROOT / "gen", tree.ROOT / "services/pawl-client", tree.ROOT):
        pip(sys.executable, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(project))
    return sorted(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment in which the install command of the quickstart was run."""
    project = tmp_path_factory.mktemp("project")
    subprocess.run([sys.executable, "-m", "venv", str(project / "environment")], check=True)
    (project / "pawl").symlink_to(tree.ROOT)
    (command,) = re.findall(r"^pip (install .*)$", (tree.ROOT / "docs/start/quickstart.md").read_text(), re.MULTILINE)
    pip(project / "environment/bin/python", *shlex.split(command), cwd=project)
    return project / "environment/bin/python"


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
