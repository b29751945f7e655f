"""The import rules of pyproject.toml work: in a copy of the source tree, each rule is violated on purpose.

SQL belongs in the `store` module of a feature and in schema.sql (docs/design/decisions).
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tidy import tree

MODULE_DEPTH_MAX = 3

LINT_IMPORTS = """
import sys
sys.path[:0] = sys.argv[1:]
from importlinter.cli import lint_imports
sys.exit(lint_imports(no_cache=True))
"""
# Run without the site module, which would merge the `pawl` of this checkout with the copy's.
STUBS = ("agent", "batch", "error", "event", "identity", "job", "notify", "tool")
EXCEPTIONS = re.compile(r"^ignore_imports = \[.*?\]\n", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages of the source tree without content, and the rules without their exceptions."""
    root = tmp_path_factory.mktemp("model")
    rules = (tree.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (root / "pyproject.toml").write_text(EXCEPTIONS.sub("", rules), encoding="utf-8")
    source = tree.ROOT / "services/pawl"
    packages = {module.parent.relative_to(source) for module in source.rglob("*.py")} - {Path()}
    for package in [*packages, *map(Path, STUBS), *(Path(stub) / "v1" for stub in STUBS)]:
        folder = root / "services/pawl" / package
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").touch()
    for module in source.rglob("*.py"):  # layers may be modules
        if len(module.relative_to(source).parts) <= MODULE_DEPTH_MAX:
            (root / "services/pawl" / module.relative_to(source)).touch()
    return root


def lint(root: Path) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-S", "-c", LINT_IMPORTS, str(root / "services"), sysconfig.get_path("purelib")]
    return subprocess.run(program, cwd=root, capture_output=True, text=True, check=False)


def test_valid_source_tree_passes(model: Path) -> None:
    assert lint(model).returncode == 0, lint(model).stdout


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("job_store/ledger/rules/rows", "import asyncpg"),
        ("job_store/ledger/journal", "import pawl.job_store.schedules.rpc"),
        ("job_store/schedules/rules", "import pawl.job_store.keys.store\nimport asyncio"),
        ("agent_loop/loop/rules/run", "import grpc"),
        ("agent_loop/loop/rules/batch", "from pawl.event.v1 import event_pb2"),
        ("agent_loop/loop/drive", "import pawl.agent_loop.api"),
        ("tool_registry/policy/check", "import pawl.tool_registry.execution"),
        ("tool_registry/sources/http/tools", "import pawl.tool_registry.sources.mcp"),
        ("agent_loop/loop/ledger", "import pawl.job_store.ledger"),
        ("chassis/rpc/server", "import pawl.notifier"),
        ("values/run", "import grpc"),
        ("errors", "import pawl.chassis"),
        ("cli/run", "import pawl.agent_loop.api"),
        ("stray", ""),
    ],
)
def test_broken_import_rule_is_reported(model: Path, module: str, code: str) -> None:
    path = model / f"services/pawl/{module}.py"
    existed = path.exists()
    path.write_text(f"{code}\n")
    try:
        assert lint(model).returncode == 1
    finally:
        path.write_text("")
        if not existed:
            path.unlink()


STATEMENT = re.compile(r"\s*(?:SELECT|INSERT INTO|UPDATE|DELETE FROM|WITH|CREATE|ALTER|DROP|TRUNCATE|LOCK|VALUES)\s")
# Modules that open databases, create and check schemas; and the embedded PostgreSQL.
BESIDE_STORES = ("chassis/db/", "launcher/postgres.py")


def test_sql_is_only_in_store_modules() -> None:
    modules = (path for path in tree.python("services") if not _may_hold_statements(path))
    assert [f"{tree.name(path)}:{line}" for path in modules for line in _statements(path)] == []


def _may_hold_statements(path: Path) -> bool:
    inside = path.relative_to(tree.PAWL)
    return "store" in inside.with_suffix("").parts or inside.as_posix().startswith(BESIDE_STORES)


def _statements(path: Path) -> Iterator[int]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Constant(value=str(text)) if STATEMENT.match(text):
                yield node.lineno
