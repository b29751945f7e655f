"""Modules and functions stay small enough to be read in one go."""

from __future__ import annotations

import ast

from tests.tidy import tree

MODULE_LINES_MAX = 500
FUNCTION_LINES_MAX = 70


def test_no_module_is_longer_than_500_lines() -> None:
    lengths = {tree.name(path): len(path.read_text().splitlines()) for path in tree.python("services", "tests")}
    assert {module: lines for module, lines in lengths.items() if lines > MODULE_LINES_MAX} == {}


def test_no_function_is_longer_than_70_lines() -> None:
    too_long = {
        f"{tree.name(path)}:{node.lineno} {node.name}": length
        for path in tree.python("services", "tests", "bench")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (length := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES_MAX
    }
    assert too_long == {}
