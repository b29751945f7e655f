"""The import rules of pyproject.toml bite: each is broken on purpose in a model of the source tree."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.tidy import tree

LINT_IMPORTS = """
import sys
sys.path[:0] = sys.argv[1:]
from importlinter.cli import lint_imports
sys.exit(lint_imports(no_cache=True))
"""
# Run without the site module, for the `pawl` of this checkout would be merged with the model's.
STUBS = ("agent", "batch", "error", "event", "identity", "job", "notify", "tool")
SERVICES = ("agent_loop", "gateway", "job_store", "notifier", "tool_registry")
LAYERS = ("adapters", "app", "domain", "rpc")
ADAPTERS = ("files", "http", "ledger", "mail", "mcp", "metrics", "postgres", "process", "python", "secret_file")
USE_CASES = ("catalog", "execution", "policy", "sources", "workers")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source tree with every package that the rules name and nothing in it."""
    root = tmp_path_factory.mktemp("model")
    shutil.copy(tree.ROOT / "pyproject.toml", root)
    packages = [
        *STUBS,
        *(f"{stub}/v1" for stub in STUBS),
        "chassis",
        "cli",
        "client",
        "launcher",
        "mailbox",
        "model_server",
        "tools",
        "values",
        "worker",
        *SERVICES,
    ]
    packages += [f"{service}/{layer}" for service in SERVICES for layer in LAYERS]
    packages += [f"tool_registry/adapters/{adapter}" for adapter in ADAPTERS]
    packages += [f"tool_registry/app/{part}" for part in USE_CASES]
    for package in packages:
        folder = root / "services/pawl" / package
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").touch()
    for module in ["errors", "chassis/logs", *(f"{service}/__main__" for service in SERVICES)]:
        (root / f"services/pawl/{module}.py").touch()
    # The imports that rules let pass must be there.
    (root / "services/pawl/tools/__init__.py").write_text("import pawl.tool_registry.domain\n")
    (root / "services/pawl/client/front_end.py").write_text("import pawl.tool_registry.domain\n")
    return root


def lint(root: Path) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-S", "-c", LINT_IMPORTS, str(root / "services"), sysconfig.get_path("purelib")]
    return subprocess.run(program, cwd=root, capture_output=True, text=True, check=False)


def test_a_tree_that_keeps_the_rules_passes(model: Path) -> None:
    assert lint(model).returncode == 0, lint(model).stdout


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("job_store/domain/rows", "import asyncpg"),
        ("agent_loop/app/start", "import asyncpg"),
        ("agent_loop/domain/run", "import grpc"),
        ("values/run", "import google.protobuf"),
        ("values/run", "import pawl.agent_loop.domain"),
        ("agent_loop/domain/batch", "import pawl.agent_loop.app"),
        ("tool_registry/app/policy/check", "import pawl.tool_registry.app.execution"),
        ("tool_registry/adapters/http/tools", "import pawl.tool_registry.adapters.mcp"),
        ("tool_registry/adapters/http/tools", "import pawl.tool_registry.rpc"),
        ("agent_loop/adapters/ledger", "import pawl.job_store.domain"),
        ("chassis/server", "import pawl.notifier"),
        ("errors", "import pawl.chassis"),
        ("cli/run", "import pawl.agent_loop.app"),
        ("stray", ""),
    ],
)
def test_a_broken_rule_is_found(model: Path, module: str, code: str) -> None:
    path = model / f"services/pawl/{module}.py"
    existed = path.exists()
    path.write_text(f"{code}\n")
    try:
        assert lint(model).returncode == 1
    finally:
        path.write_text("")
        if not existed:
            path.unlink()
