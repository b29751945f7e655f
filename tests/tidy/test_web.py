"""The TypeScript in web/ stays small, and the console uses the client like any other package."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

from tests.tidy import tree

EXAMPLE_LINES_MAX = 150
SUFFIXES = {".ts", ".tsx"}


def typescript(folder: Path) -> list[Path]:
    return [path for path in tree.files(*SUFFIXES) if path.is_relative_to(folder)]


def lines(folder: Path) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in typescript(folder))


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
    assert imported == {"@pawl/client", "react", "react-dom/client", "vite"}
