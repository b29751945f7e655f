from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

from tests.tidy import tree

PYPROJECT = tree.ROOT / "pyproject.toml"
PROJECT = tomllib.loads(PYPROJECT.read_text())["project"]
# Data that the standard library finds automatically.
NOT_IMPORTED = {"tzdata"}


def normal(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[<>=!~\[;]", distribution)[0]).strip().lower()


def imported(folder: str) -> set[str]:
    """Return the modules that the files of a folder import, and the names that they import from modules."""
    modules = set()
    for path in tree.python(folder):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                modules |= {f"{node.module}.{alias.name}" for alias in node.names}
    return modules


def distributions(modules: set[str]) -> set[str]:
    found = packages_distributions()
    names: set[str] = set()
    for module in modules:
        top = module.split(".")[0]
        if module.startswith(("google.rpc", "google.api")):
            names.add("googleapis-common-protos")
        elif module.startswith("google.protobuf"):
            names.add("protobuf")
        elif module.startswith("pawl.") and (tree.ROOT / "gen/pawl" / module.split(".")[1]).is_dir():
            names.add("pawl-proto")
        elif top not in sys.stdlib_module_names and top not in {"pawl", "tests"}:
            names |= {normal(name) for name in found.get(top, [top])}
    return names


def test_services_import_exactly_the_declared_dependencies() -> None:
    declared = {normal(line) for line in PROJECT["dependencies"]}
    optional = {normal(line) for line in PROJECT["optional-dependencies"]["embedded"]}
    used = distributions(imported("services"))
    assert used - optional == declared - NOT_IMPORTED
    # These provide programs, which are run and not imported.
    launcher = "".join(path.read_text() for path in tree.python("services/pawl/launcher"))
    assert [name for name in optional if name.removesuffix("-bin") not in launcher.replace("_", "-")] == []


def test_lock_files_agree_and_pin_every_dependency_with_hashes() -> None:
    dev = locked(tree.ROOT / "requirements/dev.txt")
    extras: dict[str, list[str]] = {"runtime": [], "embedded": ["embedded"], "dev": ["embedded", "dev"]}
    for lock, names in extras.items():
        optional = (line for extra in names for line in PROJECT["optional-dependencies"][extra])
        pins = locked(tree.ROOT / "requirements" / f"{lock}.txt")
        assert {normal(line) for line in (*PROJECT["dependencies"], *optional)} - {"pawl-proto"} <= set(pins), lock
        assert pins.items() <= dev.items(), lock


def locked(path: Path) -> dict[str, str]:
    """Return the pinned version of each distribution in a lock file, and fail if a hash is missing."""
    pins = {}
    for entry in re.findall(r"^[^\s#].*(?:\n .*)*", path.read_text(), re.MULTILINE):
        pin = re.match(r"([\w.-]+)==(\S+)", entry)
        assert pin is not None, entry
        assert "--hash=sha256:" in entry, entry
        pins[normal(pin[1])] = pin[2]
    return pins


def test_every_dependency_has_a_reason() -> None:
    lines = [line for line in PYPROJECT.read_text().splitlines() if re.match(r'  "[a-z-]+[a-zA-Z0-9-]*[<>=]', line)]
    assert [line for line in lines if not re.search(r"# \S", line)] == []
