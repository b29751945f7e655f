"""Text that no file of the repository may contain, and checks of its pages."""

from __future__ import annotations

import ast
import importlib
import re

import pytest

from tests.chaos.faults import SHORT
from tests.simulation.test_simulation import LONG_SEEDS, SHORT_SEEDS
from tests.tidy import tree

# In two parts, so that this file does not break its own rule.
UNFINISHED = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
HOME = re.compile(r"/(?:home|root|Users)" + r"/\w")
REQUIREMENT = re.compile(r"\b(?:LOOP|TOOL|FE|HITL|ASYNC|FLOW|EVT|NOTE|OPS|RES|DOOR|TEST)-\d+\b")
LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)")


def lines_that_match(pattern: re.Pattern[str]) -> list[str]:
    return [
        f"{tree.name(path)}:{number}: {line.strip()}"
        for path in tree.files()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]


def test_comments_contain_no_todo() -> None:
    assert lines_that_match(UNFINISHED) == []


def test_no_file_contains_a_path_in_a_home_folder() -> None:
    assert lines_that_match(HOME) == []


def test_every_requirement_id_has_a_page() -> None:
    page = (tree.ROOT / "tests/requirements.md").read_text(encoding="utf-8")
    named = {found for path in tree.files() for found in REQUIREMENT.findall(path.read_text(encoding="utf-8"))}
    assert {name for name in named if f"**{name}**" not in page} == set()


def test_links_of_every_page_resolve() -> None:
    links = ((page, link) for page in tree.files(".md") for link in LINK.findall(page.read_text(encoding="utf-8")))
    assert [f"{tree.name(page)}: {link}" for page, link in links if not (page.parent / link).exists()] == []


def test_documents_do_not_link_to_source_files() -> None:
    """Such links are dead on the site, and `make docs` refuses them."""
    pages = [page for page in tree.files(".md") if page.is_relative_to(tree.ROOT / "docs")]
    links = [(page, link) for page in pages for link in LINK.findall(page.read_text(encoding="utf-8"))]
    assert [f"{tree.name(page)}: {link}" for page, link in links if link.endswith(".py")] == []


STEP = re.compile(r"^\d+\. `([\w/]+)\.py` `([\w.]+)`", re.MULTILINE)


def test_steps_of_the_documented_paths_exist() -> None:
    steps = STEP.findall((tree.ROOT / "docs/design/architecture.md").read_text(encoding="utf-8"))
    assert len(steps) > 30
    for module, name in steps:
        found: object = importlib.import_module(f"pawl.{module.replace('/', '.')}")
        for part in name.split("."):
            found = getattr(found, part)


MODULE_LINES_MAX = 500
FUNCTION_LINES_MAX = 70


def test_modules_are_at_most_500_lines_long() -> None:
    lengths = {tree.name(path): len(path.read_text().splitlines()) for path in tree.python("services", "tests")}
    assert {module: lines for module, lines in lengths.items() if lines > MODULE_LINES_MAX} == {}


def test_functions_are_at_most_70_lines_long() -> None:
    too_long = {
        f"{tree.name(path)}:{node.lineno} {node.name}": length
        for path in tree.python("services", "tests", "bench")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (length := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES_MAX
    }
    assert too_long == {}


@pytest.mark.parametrize(
    ("machine", "short", "long"),
    [
        (
            "simulation",
            f"{sum(count for _, count in SHORT_SEEDS)} seeds",
            f"{sum(count for _, count in LONG_SEEDS)} seeds",
        ),
        ("nemesis", "", f"{len(SHORT)} phases"),
    ],
)
def test_reliability_table_states_the_actual_counts(machine: str, short: str, long: str) -> None:
    """The counts are those of `make test` and `make test-long`."""
    page = (tree.ROOT / "docs/design/reliability.md").read_text(encoding="utf-8")
    (row,) = (line for line in page.splitlines() if line.startswith(f"| {machine} |"))
    assert [cell.strip() for cell in row.split("|")[-3:-1]] == [short, long]
