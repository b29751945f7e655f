"""What no file of the repository may hold."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tidy import tree

# Written in two parts, so that this file keeps its own rules.
UNFINISHED = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
HOME = re.compile(r"/(?:home|root|Users)" + r"/\w")
REQUIREMENT = re.compile(r"\b(?:LOOP|TOOL|FE|HITL|ASYNC|FLOW|EVT|NOTE|OPS|RES|DOOR|TEST)-\d+\b")
QUESTION = re.compile(r"(?:What|Whether|Who|Whose|Whom|How|Which|Where|When|Why)\b")
LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)")


def lines_that_match(pattern: re.Pattern[str]) -> list[str]:
    return [
        f"{tree.name(path)}:{number}: {line.strip()}"
        for path in tree.files()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]


def test_nothing_is_left_unfinished_in_a_comment() -> None:
    assert lines_that_match(UNFINISHED) == []


def test_no_file_names_a_folder_of_somebody_s_machine() -> None:
    assert lines_that_match(HOME) == []


def test_every_id_of_a_requirement_leads_to_a_page() -> None:
    page = (tree.ROOT / "docs/requirements.md").read_text(encoding="utf-8")
    named = {found for path in tree.files() for found in REQUIREMENT.findall(path.read_text(encoding="utf-8"))}
    assert {name for name in named if f"**{name}**" not in page} == set()


def test_every_file_ends_its_lines_and_itself_the_same_way() -> None:
    wrong = [
        tree.name(path)
        for path in tree.files()
        if (text := path.read_bytes()) and (b"\r\n" in text or not text.endswith(b"\n") or text.endswith(b"\n\n"))
    ]
    assert wrong == []


def test_docstrings_begin_with_a_noun_or_a_verb() -> None:
    """Of modules, classes, functions and attributes: "Return the run" or "The lease of a worker"."""
    wrong = [
        f"{tree.name(path)}:{line}: {text.splitlines()[0]}"
        for path in tree.python("services")
        for line, text in docstrings(path)
        if QUESTION.match(text)
    ]
    assert wrong == []


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """The lines and texts of all strings that stand alone as a statement."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text.strip()


@pytest.mark.parametrize("page", list(tree.files(".md")), ids=tree.name)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    broken = [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert broken == []
