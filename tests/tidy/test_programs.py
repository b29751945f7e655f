"""Only the programs know which program a run has: the loop asks all of them the same."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.tidy import tree

LOOP = tree.PAWL / "agent_loop"
PROGRAMS = {"agent_program", "job_program", "undo_program"}
CHOOSES = {"program"}
# What an undo is made of, and what users ask of it; wire and views only translate the field.
OF_UNDO = {"undo", "undo_program", "undoing", "undo_planning", "wire", "views", "public_ledger"}


def found(condition: str) -> set[str]:
    """The modules of the loop in which something is true of an import or of an attribute."""
    return {path.stem for path in LOOP.rglob("*.py") for seen in _seen(path) if condition == seen}


def _seen(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            names = {name.name for name in node.names} | {(node.module or "").rpartition(".")[2]}
            yield from ("imports a program" for _ in names & PROGRAMS)
        if isinstance(node, ast.Attribute):
            value = node.value
            owner = value.id if isinstance(value, ast.Name) else value.attr if isinstance(value, ast.Attribute) else ""
            if node.attr == "undo":
                yield "asks whether a run is an undo"
            if node.attr == "cursor" and owner != "fact":
                yield "looks into a cursor"


def test_only_one_module_chooses_the_program_of_a_run() -> None:
    assert found("imports a program") == CHOOSES


def test_nothing_outside_of_the_programs_asks_which_one_a_run_has() -> None:
    assert found("asks whether a run is an undo") <= CHOOSES | OF_UNDO


def test_only_its_program_looks_into_a_cursor() -> None:
    assert found("looks into a cursor") == {"job_program", "undo_program"}
