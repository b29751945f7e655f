"""The import rules of pyproject.toml work, dependencies are declared, and web/ stays small.

In a copy of the source tree, each import rule is violated on purpose. SQL belongs in the `store` module of a feature
and in schema.sql (docs/design/decisions).
"""

from __future__ import annotations

import ast
import gzip
import json
import re
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest

from tests.tidy import tree

MODULE_DEPTH_MAX = 3
CLIENT_DISTRIBUTIONS_MAX = 12

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
    modules = [path.relative_to(source) for source in (tree.PAWL, tree.CLIENT) for path in source.rglob("*.py")]
    packages = {module.parent for module in modules} - {Path()}
    for package in [*packages, *map(Path, STUBS), *(Path(stub) / "v1" for stub in STUBS)]:
        folder = root / "services/pawl" / package
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").touch()
    for module in modules:  # layers may be modules
        if len(module.parts) <= MODULE_DEPTH_MAX:
            (root / "services/pawl" / module).touch()
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
        ("server/rpc/server", "import pawl.notifier"),
        ("chassis/rpc/client", "import pawl.server"),
        ("tools/sdk/tool", "import pawl.tool_registry"),
        ("client/target", "import pawl.cli"),
        ("worker/worker", "import pawl.job_store"),
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
BESIDE_STORES = ("server/db/", "launcher/postgres.py")


def test_sql_is_only_in_store_modules() -> None:
    modules = (path for path in tree.python("services") if not _may_hold_statements(path))
    assert [f"{tree.name(path)}:{line}" for path in modules for line in _statements(path)] == []


def _may_hold_statements(path: Path) -> bool:
    inside = path.relative_to(tree.CLIENT if path.is_relative_to(tree.CLIENT) else tree.PAWL)
    return "store" in inside.with_suffix("").parts or inside.as_posix().startswith(BESIDE_STORES)


def _statements(path: Path) -> Iterator[int]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Constant(value=str(text)) if STATEMENT.match(text):
                yield node.lineno


PYPROJECT = tree.ROOT / "pyproject.toml"
PROJECT = tomllib.loads(PYPROJECT.read_text())["project"]
# The folder `pawl` of each distribution.
ROOTS = {"pawl-proto": tree.ROOT / "gen/pawl", "pawl-client": tree.CLIENT, "pawl-runtime": tree.PAWL}
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
        elif top == "opentelemetry":
            named = (normal(name) for name in found[top] if module.startswith(normal(name).replace("-", ".")))
            names.add(max(named, key=len, default="opentelemetry-api"))
        elif module.startswith("pawl."):
            names.add(next(name for name, root in ROOTS.items() if list(root.glob(f"{module.split('.')[1]}*"))))
        elif top not in sys.stdlib_module_names and top not in {"pawl", "tests"}:
            names |= {normal(name) for name in found.get(top, [top])}
    return names


def test_services_import_exactly_the_declared_dependencies() -> None:
    declared = {normal(line) for line in PROJECT["dependencies"]}
    optional = {normal(line) for line in PROJECT["optional-dependencies"]["embedded"]}
    assert distributions(imported("services/pawl")) - optional - {"pawl-runtime"} == declared - NOT_IMPORTED
    # These provide programs, which are run and not imported.
    launcher = "".join(path.read_text() for path in tree.python("services/pawl/launcher"))
    assert [name for name in optional if name.removesuffix("-bin") not in launcher.replace("_", "-")] == []


def test_client_imports_exactly_its_dependencies_and_needs_at_most_12_distributions() -> None:
    project = tomllib.loads((tree.CLIENT.parent / "pyproject.toml").read_text())["project"]
    declared = {normal(line) for line in project["dependencies"]}
    assert distributions(imported("services/pawl-client")) - {"pawl-client"} == declared
    needed, new = {"pawl-client"}, declared
    while new:
        needed |= new
        lines = {line for name in new for line in requires(name) or () if "extra ==" not in line}
        new = {normal(line) for line in lines} - needed
    assert len(needed) <= CLIENT_DISTRIBUTIONS_MAX, sorted(needed)


def test_each_folder_belongs_to_one_distribution() -> None:
    folders = [path.name for root in ROOTS.values() for path in root.iterdir() if path.name != "__pycache__"]
    assert sorted(set(folders)) == sorted(folders)


def test_lock_files_agree_and_pin_every_dependency_with_hashes() -> None:
    dev = locked(tree.ROOT / "requirements/dev.txt")
    extras: dict[str, list[str]] = {"runtime": [], "embedded": ["embedded"], "dev": ["embedded", "dev"]}
    for lock, names in extras.items():
        optional = (line for extra in names for line in PROJECT["optional-dependencies"][extra])
        pins = locked(tree.ROOT / "requirements" / f"{lock}.txt")
        assert {normal(line) for line in (*PROJECT["dependencies"], *optional)} - set(ROOTS) <= set(pins), lock
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


EXAMPLE_LINES_MAX = 150
WEB_LINES_MAX = 9000
FIRST_LOAD_BYTES_MAX = 75_000
SUFFIXES = {".ts", ".tsx"}


def typescript(folder: Path) -> list[Path]:
    return [path for path in tree.files(*SUFFIXES) if path.is_relative_to(folder)]


def lines(folder: Path) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in typescript(folder))


def test_console_and_client_stay_small() -> None:
    assert lines(tree.ROOT / "web/console/src") + lines(tree.ROOT / "web/client/src") <= WEB_LINES_MAX
    # The files that every page loads first, compressed as the gateway compresses them.
    static = tree.ROOT / "services/pawl/gateway/static"
    index = (static / "index.html").read_text(encoding="utf-8")
    first = ["index.html", *re.findall(r'(?:src|href)="/([\w.-]+)"', index)]
    assert sum(len(gzip.compress((static / name).read_bytes(), mtime=0)) for name in first) <= FIRST_LOAD_BYTES_MAX


def test_console_imports_the_client_as_a_package() -> None:
    """The client has no special features for the console, so any other page can do the same."""
    imported = re.compile(r'from "[^"]*client/(?:gen|src|dist)')
    console = typescript(tree.ROOT / "web/console")
    assert console
    assert [tree.name(path) for path in console if imported.search(path.read_text(encoding="utf-8"))] == []


def test_client_has_the_same_version_as_pawl() -> None:
    package = json.loads((tree.ROOT / "web/client/package.json").read_text(encoding="utf-8"))
    project = tomllib.loads((tree.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert package["version"] == project["version"]
    readme = (tree.ROOT / "web/client/README.md").read_text(encoding="utf-8")
    assert f"pawl-client-{package['version']}.tgz" in readme


def test_chat_example_is_under_150_lines_and_needs_only_client_and_react() -> None:
    example = tree.ROOT / "docs/examples/chat"
    assert 0 < lines(example) < EXAMPLE_LINES_MAX
    texts = [path.read_text(encoding="utf-8") for path in typescript(example)]
    imported = {name for text in texts for name in re.findall(r' from "([^"]+)";', text)}
    assert imported == {"@pawl/client", "@pawl/client/react", "react", "react-dom/client", "vite"}
